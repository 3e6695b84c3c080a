"""Watches a running command, and notices if it is stuck, if its GPUs are idle, or if checkpoints are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.gpus import Sampler

ASK_S = 60.0  # seconds between two looks at GPUs and folders
# after this many seconds without output, the host reports to the supervisor that the command still works
ALIVE_S = 300.0
IDLE_S = 1800.0  # after this many seconds in which no GPU was used, a warning says what the idle GPUs have cost
LATE = 3  # a checkpoint is late after this multiple of its interval
# If the interval is in steps and the time of a step is unknown, a checkpoint is late after this many seconds.
FIRST_LATE_S = 1800.0


class StartWatch:
    """Watches one start. `spent` returns the dollars so far; None if unknown. `folders` are below `own`."""

    def __init__(
        self,
        *,
        silence_s: float,
        every_s: Callable[[], float | None],
        own: ForeignFolder,
        folders: Iterable[Path],
        gpus: Sampler | None,
        spent: Callable[[], float | None],
        say: Callable[[str], None],
        note: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._silence_s, self._every_s, self._own, self._folders = silence_s, every_s, own, tuple(folders)
        self._gpus, self._spent, self._say, self._note, self._clock = gpus, spent, say, note, clock
        self._began = self._said_at = self._looked_at = self._written_at = clock()
        self._files = self._look_at_files()
        self._idle_from: tuple[float, float | None] | None = None
        self._idle_told = self._late_told = False

    def stuck(self, output_at: float, step_at: float) -> str:
        """Why the command is taken to be stuck: for too long, it has written no output, step or file, and has used no
        GPU. Empty if it is not stuck.
        """
        now = self._clock()
        quiet = now - max(self._began, output_at, step_at)
        if quiet < ALIVE_S and quiet < self._silence_s / 2:
            self._said_at = now
            return ""
        if now >= self._looked_at + min(ASK_S, self._silence_s / 4):
            self._looked_at, files = now, self._look_at_files()
            if files != self._files:
                self._files, self._written_at = files, now
        used_at = self._gpus.used_at if self._busy() is not None and self._gpus is not None else 0.0
        quiet = min(quiet, now - max(self._written_at, used_at))
        if quiet >= self._silence_s:
            return f"no output, no step, no file for {quiet / 60:.0f} min" + (", and no GPU in use" if used_at else "")
        if now >= self._said_at + ALIVE_S:
            self._said_at = now
            busy = "" if (use := self._busy()) is None else f"; a GPU is {use:.0f} % busy"
            self._say(f"nothing printed for {(now - output_at) / 60:.0f} min{busy}")
        return ""

    def look(self, committed_at: float, step_at: float) -> None:
        """Warns of states that cost money but for which the command is not ended."""
        now, gpus = self._clock(), self._gpus
        if gpus is not None and self._busy() == 0:
            if self._idle_from is None or self._idle_from[0] != gpus.used_at:
                self._idle_from, self._idle_told = (gpus.used_at, self._spent()), False
            since, before = self._idle_from
            if now - since >= IDLE_S and not self._idle_told:
                self._idle_told, spent = True, self._spent()
                cost = f", which have cost ${spent - before:.2f}" if spent is not None and before is not None else ""
                self._warn(f"no GPU has been used for {(now - since) / 60:.0f} min{cost}")
        every = self._every_s() or FIRST_LATE_S / LATE
        late = now - max(committed_at, self._began) >= max(ASK_S, LATE * every) and step_at >= now - every
        if late and not self._late_told:
            minutes = (now - max(committed_at, self._began)) / 60
            self._warn(f"no complete checkpoint for {minutes:.0f} min, {LATE} times its interval")
        self._late_told = late

    def _busy(self) -> float | None:
        """How busy the busiest GPU is now, in percent; None if unknown."""
        return None if self._gpus is None or self._gpus.now is None else self._gpus.now.busiest

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")
        self._note(text)

    def _look_at_files(self) -> tuple[int, int]:
        """A value that changes when the command writes a file. The value does not depend on a clock, which may
        be set.
        """
        count = times = 0
        for folder in self._folders:
            for _, look in self._own.files(folder):
                with suppress(OSError):
                    times += look().st_mtime_ns
                    count += 1
        return count, times
