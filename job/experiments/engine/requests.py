"""The supervisor's requests to save or to stop, read once per optimizer step."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from gpufleet.job.contract.messages import Stop
from gpufleet.job.contract.workdir import SAVE, STOP


class Requests:
    """stop.json and save.json in a work folder; also SIGTERM or Ctrl-C, if somebody has started the trainer by hand."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._signal: str | None = None

    def heed_signals(self) -> None:
        """Turns SIGTERM and SIGINT into a stop request with a save. Call it in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def stop(self) -> Stop | None:
        if (self._workdir / STOP).exists():
            return Stop.read(self._workdir) or Stop()  # even if the request cannot be read, it is a request to stop
        return None if self._signal is None else Stop(reason=self._signal, save=True)

    def save(self) -> bool:
        """Whether a save was requested since the last call."""
        if not (self._workdir / SAVE).exists():
            return False
        (self._workdir / SAVE).unlink(missing_ok=True)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
