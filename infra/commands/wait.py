"""`gpufleet wait`: waits for a node after `pulumi up`, and explains why there is none."""

from __future__ import annotations

import argparse
import math

from gpufleet.infra.account import aws, stages
from gpufleet.infra.account.wait import WaitLoop
from gpufleet.infra.commands import stack
from gpufleet.infra.errors import GpufleetError


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="give up after this long (default 1800)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0 if a node runs in time, else 1."""
    if not (0 <= args.timeout < math.inf):
        raise GpufleetError(f"--timeout {args.timeout:g}: allowed are seconds, 0 or more; with 0 it looks once")
    definition = stack.definition_of(args, staged=True)
    ec2, s3 = (aws.client(service, definition.fleet.region) for service in ("ec2", "s3"))
    watch = WaitLoop(definition=stages.begun(definition, s3)[-1].stage, ec2=ec2, s3=s3)
    return watch.until_node(args.timeout)
