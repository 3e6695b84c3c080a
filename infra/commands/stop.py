"""`gpufleet stop`: asks a run to end as a limit would end it, so that it saves its progress first."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from gpufleet.infra.account import aws
from gpufleet.infra.account.stop import ask
from gpufleet.infra.commands import stack


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)


def run(args: argparse.Namespace) -> int:
    definition = stack.definition_of(args, staged=True)
    region = definition.fleet.region
    for part in definition.parts:  # later stages must find the request too
        ask(part, aws.client("ec2", region), aws.client("s3", region), datetime.now(UTC))
    return 0
