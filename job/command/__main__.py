"""`python -m gpufleet.job.command WORKDIR`: runs the command in WORKDIR/run.json, from the newest checkpoint in
WORKDIR/ckpt. With --wait it waits until start.json exists. --rung is for ready-made jobs and changes nothing here. If
GPUFLEET_JOB_CONTAINER is set, the command runs in a container that the node starts; otherwise it runs as processes of
this machine. Exit codes: 0 finished; 75 stopped on request; 65 cannot succeed, the reason in fatal.json; anything else
is a crash, the reason in left.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.messages import Fatal, await_start
from gpufleet.job.contract.run import Task
from gpufleet.job.contract.workdir import START


def main(argv: Sequence[str] | None = None) -> int:
    """One start of the host; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m gpufleet.job.command", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--rung", type=int, default=0, help="for ready-made jobs; changes nothing here")
    parser.add_argument("--wait", action="store_true", help=f"for WORKDIR/{START}")
    args = parser.parse_args(argv)
    from gpufleet.job.command.host import Host, say

    workdir: Path = args.workdir.resolve()
    if args.wait:
        await_start(workdir)
    try:
        return Host(workdir, Task.read(workdir)).run()
    except ValueError as error:
        say(f"fatal: {error}")
        Fatal(error=type(error).__name__, detail=str(error)).write(workdir)
        return TrainerExit.FATAL


if __name__ == "__main__":
    sys.exit(main())
