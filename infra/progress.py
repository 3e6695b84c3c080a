"""Shows the progress of long work: on a terminal as a bar with the rate and the remaining time, in a log as a plain
line from time to time, and with `--quiet` not at all. tqdm draws the bars, and is imported for the first one.
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

BAR_S = 0.5  # seconds; work that takes less time has no bar
LINES_S = (10.0, 30.0)  # seconds until the first line in a log, and between later lines


class Screen:
    """The command line's standard error. `quiet` is set once the arguments are read."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = False
        self._stream = stream
        self._clock = clock
        self._bar: _Bar | None = None

    def show(self, label: str, total: int | None, unit: str) -> Gauge | None:
        """Makes a bar, or lines; see job.progress.Show."""
        if self.quiet:
            return None
        if not self._stream.isatty() or os.environ.get("TERM") == "dumb":
            return Lines(label, total, unit, self._say, self._clock)
        self._bar = _Bar(printable(label), total, unit, self._stream)
        return self._bar

    def write(self, stream: TextIO, text: str) -> int:
        """Writes `text`: removes the bar first, and draws it again below."""
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
    """A bar drawn by tqdm. Several threads may advance it, as in a download."""

    def __init__(self, label: str, total: int | None, unit: str, stream: TextIO) -> None:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # tqdm starts no thread that redraws bars, because Screen.write redraws them
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
    """Prints a line from time to time: `data/a: 1.20G/3.00G, 110MB/s, 00:16 left`."""

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
        """Does nothing, because the command itself prints a last line."""

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
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress: only the answer, warnings and errors")


def say(args: argparse.Namespace, to: Callable[[str], None] = print) -> Callable[[str], None]:
    """A function that passes a command's progress lines to `to`; with --quiet, only its warnings."""
    if not args.quiet:
        return to
    return lambda line: to(line) if line.lower().startswith("warning") else None


def _nothing() -> None:
    """Does nothing. This function replaces those that clear and draw a bar, after the bar is closed."""
