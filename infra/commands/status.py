"""`gpufleet status`: where a run stands."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from gpufleet.infra.account import aws
from gpufleet.infra.account.status import report
from gpufleet.infra.commands import stack


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)


def run(args: argparse.Namespace) -> int:
    definition = stack.definition_of(args)
    region = definition.fleet.region
    ec2, s3, scheduler = (aws.client(name, region) for name in ("ec2", "s3", "scheduler"))
    for line in report(definition, ec2, s3, datetime.now(UTC), scheduler):
        print(line)
    return 0
