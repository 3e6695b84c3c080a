"""`gpufleet status`: shows the state of a run."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from gpufleet.infra.account import aws, stages
from gpufleet.infra.account.status import headline, short
from gpufleet.infra.commands import stack
from gpufleet.infra.envelope import tell


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--all", action="store_true", help="every attempt, and everything that the run has reported")


def run(args: argparse.Namespace) -> int:
    definition = stack.definition_of(args, staged=True)
    region = definition.fleet.region
    ec2, s3, scheduler = (aws.client(name, region) for name in ("ec2", "s3", "scheduler"))
    lines = list(stages.report(definition, ec2, s3, datetime.now(UTC), scheduler))
    tell([{"of": line[:12].strip(), "text": line[12:]} for line in lines[1:]])
    print(headline(lines))
    print("\n".join(lines[1:] if args.all else short(lines[1:], f"gpufleet status {definition.run_argument}")))
    return 0
