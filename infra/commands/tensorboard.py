"""`gpufleet tensorboard STACK`: a run's figures in TensorBoard on this machine, as they come."""

from __future__ import annotations

import argparse

from gpufleet.infra.account import aws, tensorboard
from gpufleet.infra.commands import stack


def arguments(parser: argparse.ArgumentParser) -> None:
    """STACK and where it listens."""
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--port", type=int, default=6006, help="of localhost (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C."""
    definition = stack.definition_of(args)
    return tensorboard.serve(definition, aws.client("s3", definition.fleet.region), port=args.port)
