"""A command's output: splits its bytes into lines, and finds the cause of the command's end.

The cause is the command's first exception after which training did not continue. Later exceptions are not the cause:
that of a launcher only reports that a process has failed, and those of other ranks only report the lost rank.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gpufleet.job.command.lines import CONTROL

LAST = 20  # number of lines in the message about an end
LONGEST = 32 * 1024  # bytes; longer lines are cut
FINISH_S = 10.0  # seconds for reading the rest of the pipe
BAR_S = 10.0  # seconds between two states of a progress bar in the log
SAMPLES = 3  # number of unread lines with numbers that are kept as samples
SURVIVED = 3  # if there are this many steps after an exception, it did not end the command

EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?::|$)")
LAUNCHERS_OWN = re.compile(r"(ChildFailed|CalledProcess)Error|Process(Exited|Raised)Exception|SignalException")
# exceptions of a rank that only say that another rank is gone
OF_OTHERS = re.compile(
    r"Connection (closed|reset|refused)|remote (worker|process)|Rendezvous\w*Error|Dist(Store|Network)Error|Broken pipe"
)
CHAINED = re.compile(r"(During handling of|The above exception was the direct cause)")
NCCL = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\].*)?Watchdog caught collective operation timeout: \w+\((?:.*OpType=(?P<what>\w+))?.*"
    r" ran for (?P<ms>\d+) milliseconds"
)
PLAIN = re.compile(
    r"no space left on device|disk quota exceeded|uncorrectable ECC|out of memory"
    r"|^\S+: (?:line )?(?:\d+: )?[^:]+: (?:command )?not found$"  # a shell that lacks a program
    r"|^\S+: .*: (?:permission denied|no such file or directory)$|^\S+: can't open file "  # a shell or Python, a file
    r"|^\S+: error: (?:unrecognized|argument |the following arguments)",  # argparse
    re.IGNORECASE,
)


class CauseOfEnd:
    """The cause of a command's end, from its lines. `text` is empty as long as there is no possible cause."""

    def __init__(self) -> None:
        self.text = ""
        self._steps = self._weight = 0
        self._is_traced = self._is_chained = False

    def take(self, line: str, *, tells_step: bool) -> None:
        """Reads the next line. `tells_step`: whether the line reports a step, which shows that training continues."""
        self._steps += tells_step
        if self.text and self._steps >= SURVIVED:
            self.text, self._weight = "", 0
        self._is_traced = self._is_traced or "Traceback (most recent call last)" in line
        self._is_chained = self._is_chained or bool(CHAINED.search(line))
        text, weight = self._cause(line)
        if weight > self._weight or (weight and self._is_chained):
            self.text, self._weight, self._steps = text, weight, 0
        if weight:
            self._is_traced = self._is_chained = False

    def _cause(self, line: str) -> tuple[str, int]:
        """The possible cause of the end in this line, and how certain it is (0 if the line has none)."""
        if match := NCCL.search(line):
            whose = f"rank {match['rank']}'s" if match["rank"] else "a"
            return f"NCCL: {whose} {match['what'] or 'collective'} ran for {int(match['ms']) / 1000:.0f} s", 3
        if EXCEPTION.match(line) and not LAUNCHERS_OWN.search(line):
            return line.strip()[:300], 3 if self._is_traced else 2
        return (line.strip()[:300], 1) if PLAIN.search(line) else ("", 0)


class Output:
    """The command's output. A thread reads it until `close`. Each byte is a sign that the command still runs. A line
    ends at a line feed or a carriage return. Only some states of a progress bar are shown. `line` is called with each
    line, without control sequences, and returns whether the line reports a step.
    """

    def __init__(
        self,
        pipe: int,
        line: Callable[[str, float], bool],
        show: Callable[[bytes], None],
        blank: Callable[[bytes], bytes],
        clock: Callable[[], float] = time.time,
        *,
        overlap: int = 0,
    ) -> None:
        """`overlap`: number of bytes of the longest text that `blank` replaces, because such a text must not be cut in
        two.
        """
        self.at, self._overlap = clock(), overlap
        self.last: deque[str] = deque(maxlen=LAST)
        self.cause, self.unread, self.lines = CauseOfEnd(), deque[str](maxlen=SAMPLES), 0
        self._pipe, self._line, self._show, self._blank, self._clock = pipe, line, show, blank, clock
        self._rest, self._bar_at = b"", 0.0
        self._ended, self._read_all = threading.Event(), threading.Event()
        self._read_all.set()
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self) -> None:
        """Forgets the lines of an earlier start."""
        self.last.clear()
        self.unread.clear()
        self.cause, self.lines = CauseOfEnd(), 0

    def finish(self) -> None:
        """Waits until everything in the pipe has been read, including a last line without an end."""
        self._read_all.clear()
        self._read_all.wait(FINISH_S)

    def close(self) -> None:
        """Reads what is still in the pipe, and then stops reading."""
        self._ended.set()
        self._thread.join()

    def take(self, content: bytes) -> None:
        """Processes further bytes of output."""
        self.at = self._clock()
        *lines, self._rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self._rest + content)
        if len(self._rest) > LONGEST + self._overlap:
            self._rest = self._blank(self._rest)
        if (cut := len(self._rest) - self._overlap) > LONGEST:  # the remaining text may begin with a secret
            lines, self._rest = [*lines, self._rest[:cut]], self._rest[cut:]
        for line in lines:
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        text, is_bar = self._blank(line.rstrip(b"\r\n"))[:LONGEST], not line.endswith(b"\n")
        shown = CONTROL.sub("", text.decode("utf-8", "replace"))
        plain = self._blank(shown.encode()).decode()  # a secret can be recognised only in a whole line
        if not plain.strip():
            return
        tells_step = self._line(plain, self.at)
        self.lines += 1
        self.cause.take(plain, tells_step=tells_step)
        if not tells_step and any(map(str.isdigit, plain)):
            self.unread.append(plain.strip()[:200])
        if is_bar and self.at < self._bar_at + BAR_S:
            return
        self._bar_at = self.at if is_bar else self._bar_at
        self.last.append(plain.rstrip()[:500])
        self._show(text + b"\n")

    def _read(self) -> None:
        while True:
            ended, asked = self._ended.is_set(), not self._read_all.is_set()
            ready, _, _ = select.select([self._pipe], [], [], 0.05)
            if ready:
                with suppress(BlockingIOError):
                    self.take(os.read(self._pipe, 1 << 20))
                continue
            if (asked or ended) and self._rest:
                self.take(b"\n")
            if asked:
                self._read_all.set()
            if ended:
                return
