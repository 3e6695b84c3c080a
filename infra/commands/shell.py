"""`gpufleet shell STACK`: a shell in the container that trains, by Session Manager."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from gpufleet.infra.account import aws
from gpufleet.infra.account.shell import open_shell
from gpufleet.infra.commands import stack


def arguments(parser: argparse.ArgumentParser) -> None:
    """STACK and where."""
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--node", action="store_true", help="on the node itself, beside the container")


def run(args: argparse.Namespace) -> int:
    """The shell's exit code."""
    definition = stack.definition_of(args)
    ec2, ssm = (aws.client(service, definition.fleet.region) for service in ("ec2", "ssm"))
    return open_shell(definition, ec2, ssm, on_node=args.node, start=_start)


def _start(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """The program on this terminal; Ctrl-C is the shell's there."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.run(words, env={**os.environ, **environment}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
