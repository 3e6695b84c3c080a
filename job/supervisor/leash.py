"""Starts a Python module in a process that dies with its parent: `python -m gpufleet.job.supervisor.leash PARENT -m
MODULE ARG...`.

The trainer is in a process group of its own, so it would survive a SIGKILL of the supervisor; and torchrun gives each
rank its own session, which a kill of the group does not reach. So torchrun is started in this way, and so is each rank,
with torchrun as its parent. A PARENT of `-` means the process that was started in this way before, or the shell with
which a container begins. This works only on Linux; on other systems the module just starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h; the setting is kept across execve
ABOVE = "-"
HOLDER = "GPUFLEET_LEASH"  # process id of the program that this leash starts, for leashes below it


def main(words: list[str]) -> None:
    parent, *rest = words
    if parent == ABOVE:
        parent = os.environ[HOLDER]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the supervisor is gone")
    os.environ[HOLDER] = str(os.getpid())
    os.execv(sys.executable, [sys.executable, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
