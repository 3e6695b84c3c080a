"""`gpufleet cloud`: serves the embedded AWS without a rehearsal, for your own pulumi, boto3 or aws in another shell."""

from __future__ import annotations

import argparse
import math
import os
import select
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path

from gpufleet.infra.catalog import check_region
from gpufleet.infra.definition.loader import names_of, project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import proofs
from gpufleet.job.kind import EXPERIMENTS
from gpufleet.rehearsal import environment

LOOK_S = 1.0  # seconds between two checks whether it should end


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--region", default="us-east-2", help="the region that the printed lines name (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="loopback port of the endpoint (default: any free one)")
    parser.add_argument(
        "--as", dest="proof", metavar="FILE", type=Path, help="use the times and refusals that a proof measured"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end after this time")


def run(args: argparse.Namespace) -> int:
    """Prints the lines to paste, and serves until Ctrl-C, the end of a piped standard input, or --timeout."""
    _check(args)
    environment.forget_account()
    try:
        from gpufleet.rehearsal import engine, habits, provider, scratch
        from gpufleet.rehearsal.cloud import Cloud
    except ImportError as error:
        raise GpufleetError(f"the embedded AWS is missing ({error}): pip install 'gpufleet[rehearsal]'") from error

    root = project_root(Path.cwd())
    like = habits.recorded(proofs.read(args.proof)) if args.proof else habits.Habits()
    try:
        with tempfile.TemporaryDirectory(prefix="gpufleet-cloud-") as folder:
            project = scratch.make(Path(folder) / "project", {})
            names = names_of(root)
            # definitions are not checked here, because each command checks the file that it reads
            for name in names:
                shutil.copy(root / "stacks" / f"{name}.yaml", project / "stacks")
            if (root / "data").is_dir():
                (project / "data").symlink_to(root / "data", target_is_directory=True)
            with (
                Cloud(Path(folder), region=args.region, port=args.port, habits=like) as cloud,
                provider.serve(cloud.environment()) as port,
            ):
                print("# The embedded AWS answers on this machine only. Paste into another shell:")
                if args.proof:
                    print(*(f"# As in {args.proof}: {sentence}." for sentence in like.sentences()), sep="\n")
                print("unset AWS_PROFILE AWS_SESSION_TOKEN")
                for name, value in {**cloud.environment(), **engine.settings(project, port)}.items():
                    print(f"export {name}={shlex.quote(value)}")
                print(f"cd {shlex.quote(str(project))}")
                print(f"# {example(names)}")
                print("# Ctrl-C here ends it and removes the folder.", flush=True)
                _wait_for_end(args.timeout)
    except KeyboardInterrupt:  # raised for Ctrl-C, and by infra.cli for SIGTERM and a closed terminal
        print("\n# The embedded AWS is gone.")
    return 0


def example(names: list[str]) -> str:
    """Example commands for the other shell, with one of the project's stacks."""
    if not names:
        return "There is no stack: run this inside a project, or put definition files into the folder's stacks/."
    first = next((name for name in EXPERIMENTS if name in names), names[0])
    return f"For example: pulumi stack init {first} && pulumi preview"


def _check(args: argparse.Namespace) -> None:
    """Raises GpufleetError if the embedded AWS cannot start with these arguments."""
    check_region(args.region)
    if args.timeout is not None and not (0 < args.timeout < math.inf):
        raise GpufleetError(
            f"--timeout {args.timeout:g}: allowed are seconds above 0; without --timeout it runs to Ctrl-C"
        )
    if not (0 <= args.port <= 65535):
        raise GpufleetError(f"--port {args.port}: allowed are 1 to 65535, or 0 for any free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", args.port))
        except OSError as error:
            raise GpufleetError(
                f"--port {args.port} on 127.0.0.1: {error.strerror}; give another port, or 0 for any free one"
            ) from None


def _wait_for_end(timeout_s: float | None) -> None:
    """Returns when a piped standard input ends or after `timeout_s`. A terminal and /dev/null never end."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    piped = _is_pipe()
    while deadline is None or time.monotonic() < deadline:
        # Python acts on a signal between two instructions. A signal that comes right before a wait would be seen only
        # after this wait, so each wait is short.
        wait_s = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
        readable, _, _ = select.select([sys.stdin] if piped else [], [], [], wait_s)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return


def _is_pipe() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # standard input is closed, or a test has replaced it
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
