"""What the supervisor asks of a trainer, in small files of the work folder: to begin, and then, looked at once per
optimizer step, to save or to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from gpufleet.job.contract.messages import Start, Stop
from gpufleet.job.contract.workdir import SAVE, STOP

LOOK_S = 0.05  # between two looks for start.json


def await_start(workdir: Path) -> int:
    """The rung of start.json, once it is there. Raises SystemExit when whoever started this process is gone."""
    parent = os.getppid()
    while (start := Start.read(workdir)) is None:
        if os.getppid() != parent:
            sys.exit("nobody is left to say when to begin")
        time.sleep(LOOK_S)
    return start.rung


class Requests:
    """stop.json and save.json of a work folder, and SIGTERM or Ctrl-C for a trainer that somebody started by hand."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._signal: str | None = None

    def heed_signals(self) -> None:
        """SIGTERM and SIGINT become a stop request with a save. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def stop(self) -> Stop | None:
        """The stop request, if there is one."""
        if (self._workdir / STOP).exists():
            return Stop.read(self._workdir) or Stop()  # whatever it says, somebody wants a stop
        return None if self._signal is None else Stop(reason=self._signal, save=True)

    def save(self) -> bool:
        """Whether an asynchronous save was asked for since the last look."""
        if not (self._workdir / SAVE).exists():
            return False
        (self._workdir / SAVE).unlink(missing_ok=True)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
