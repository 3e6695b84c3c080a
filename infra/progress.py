"""Shows long work: a bar with rate and time left on a terminal, a plain line now and then in a log, nothing with
`--quiet`. tqdm draws, and is imported with the first bar.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from gpufleet.job.progress import Gauge
from gpufleet.job.text import printable

BAR_S = 0.5  # shorter work has no bar
LINES_S = (10.0, 30.0)  # seconds until the first line of a log, and between later ones


class Screen:
    """The command line's standard error. `quiet` is set once the arguments are read."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = False
        self._stream = stream
        self._clock = clock
        self._bar: _Bar | None = None

    def show(self, label: str, total: int | None, unit: str) -> Gauge | None:
        """A bar or lines; see job.progress.Show."""
        if self.quiet:
            return None
        if not self._stream.isatty() or os.environ.get("TERM") == "dumb":
            return Lines(label, total, unit, self._say, self._clock)
        self._bar = _Bar(printable(label), total, unit, self._stream)
        return self._bar

    def write(self, stream: TextIO, text: str) -> int:
        """Writes `text`, with the bar removed before it and drawn again below it."""
        if self._bar is None:
            return stream.write(text)
        self._bar.clear()
        count = stream.write(text)
        if text.endswith("\n"):
            stream.flush()
            self._bar.refresh()
        return count

    def _say(self, line: str) -> None:
        self._stream.write(f"{printable(line)}\n")
        self._stream.flush()


class _Bar:
    """A bar of tqdm's. Several threads may advance it, as in a download."""

    def __init__(self, label: str, total: int | None, unit: str, stream: TextIO) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # tqdm's thread would redraw bars that rarely advance; Screen.write does that
        many = {"unit_scale": True} if unit == "B" else {"unit": f" {unit}"}
        self._tqdm = tqdm(
            desc=label, total=total, file=stream, leave=False, delay=BAR_S, dynamic_ncols=True, **{"unit": unit, **many}
        )
        self._lock = threading.Lock()
        self.clear, self.refresh = self._tqdm.clear, self._tqdm.refresh

    def advance(self, amount: int) -> None:
        with self._lock:
            self._tqdm.update(amount)

    def close(self) -> None:
        self._tqdm.close()
        self.clear = self.refresh = _nothing


class Lines:
    """Prints a line now and then: `data/a: 1.20G/3.00G, 110MB/s, 00:16 left`."""

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._unit, self._say, self._clock = label, total, unit, say, clock
        self._done, self._began = 0, clock()
        self._next = self._began + LINES_S[0]
        self._lock = threading.Lock()

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            if (now := self._clock()) < self._next:
                return
            self._next = now + LINES_S[1]
            self._say(self._line(now - self._began))

    def close(self) -> None:
        """The command itself prints a last line."""

    def _line(self, seconds: float) -> str:
        from tqdm import tqdm

        remaining = ", {remaining} left" if self._total else ""
        line: str = tqdm.format_meter(
            self._done,
            self._total,
            seconds,
            unit=self._unit if self._unit == "B" else f" {self._unit}",
            unit_scale=self._unit == "B",
            bar_format=f"{{desc}}: {'{n_fmt}/{total_fmt}' if self._total else '{n_fmt}'}, {{rate_fmt}}{remaining}",
            prefix=self._what,
        )
        return line


def argument(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress: only the answer, warnings and errors")


def say(args: argparse.Namespace, to: Callable[[str], None] = print) -> Callable[[str], None]:
    """`to` for a command's progress lines; with --quiet only for its warnings."""
    if not args.quiet:
        return to
    return lambda line: to(line) if line.lower().startswith("warning") else None


def _nothing() -> None:
    """Replaces clearing and drawing of a closed bar."""
