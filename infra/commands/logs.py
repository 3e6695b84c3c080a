"""`gpufleet logs`: prints the job's output, or its nodes' boot logs."""

from __future__ import annotations

import argparse

from gpufleet.infra.account import aws
from gpufleet.infra.account.logs import Reader
from gpufleet.infra.commands import stack


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--follow", "-f", action="store_true", help="print new lines until the run is done")
    group.add_argument(
        "--boot", action="store_true", help="print the output of the nodes' boot scripts, not of the job"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the logs; returns 1 if --follow finds that no node will continue the run."""
    definition = stack.definition_of(args)
    region = definition.fleet.region
    logs, s3, ec2 = (aws.client(service, region) for service in ("logs", "s3", "ec2"))
    reader = Reader(definition=definition, logs=logs, s3=s3, ec2=ec2)
    if args.boot:
        return reader.boot()
    return reader.follow() if args.follow else reader.print_all()
