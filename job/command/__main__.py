"""`python -m job.command WORKDIR`: runs the command of WORKDIR/run.json, from WORKDIR/ckpt's newest checkpoint.

With --wait it begins when start.json is there. --rung is of the ready-made jobs, and changes nothing here. The command
runs in a container that the node starts where GPUFLEET_JOB_CONTAINER is set, else as processes of this machine.

Exit codes: 0 finished; 75 stopped on request; 65 cannot succeed, the reason in fatal.json; anything else is a crash,
the reason in left.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from job.contract.codes import TrainerExit
from job.contract.messages import Fatal
from job.contract.run import Task
from job.contract.workdir import START
from job.train.requests import await_start


def main(argv: Sequence[str] | None = None) -> int:
    """One start of the host."""
    parser = argparse.ArgumentParser(prog="python -m job.command", description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--rung", type=int, default=0, help="of no meaning here")
    parser.add_argument("--wait", action="store_true", help=f"for WORKDIR/{START}")
    args = parser.parse_args(argv)
    from job.command.host import Host, say

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
