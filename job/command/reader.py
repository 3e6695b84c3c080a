"""What a command prints, and what it says of its progress: bytes of output to lines, lines to steps."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from gpufleet.job import atomic
from gpufleet.job.contract import metrics
from gpufleet.job.contract.metrics import Save
from gpufleet.job.gpus import Sampler
from gpufleet.job.measured import WARM_UP
from gpufleet.job.spec.command import PHASE

LAST = 20  # lines that an ending tells
LONGEST = 32 * 1024  # a line is cut there
FINISH_S = 10.0  # at most, to read what is there
BAR_S = 10.0  # between two states of a progress bar in the log
FLUSH_S = 1.0  # between two lines of metrics.jsonl
MOST_READ = 4 * 1024 * 1024  # of its progress file at once; a line that long is none
JUMP = 100  # logging intervals: a step further away is not believed at once
NUMBERS = ("loss", "val", "step_ms")
REMEMBERED = 2000

EXCEPTION = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt)(:|$)")
LAUNCHERS_OWN = "ChildFailedError"  # torchrun's, which hides the one that matters


class Output:
    """The command's output, read in a thread of its own until `close`: each byte is a sign of life, a line ends at a
    line feed or at a carriage return, and what a bar draws over itself is shown now and then.
    """

    def __init__(
        self,
        pipe: int,
        line: Callable[[str, float], None],
        show: Callable[[bytes], None],
        blank: Callable[[bytes], bytes],
        clock: Callable[[], float] = time.time,
        *,
        overlap: int = 0,
    ) -> None:
        """`overlap`: bytes of the longest text that `blank` replaces, which must not be cut in two."""
        self.at, self._overlap = clock(), overlap
        self.last: deque[str] = deque(maxlen=LAST)
        self.error = ""  # the last line that names an exception, of the command's own
        self._pipe, self._line, self._show, self._blank, self._clock = pipe, line, show, blank, clock
        self._rest, self._bar_at = b"", 0.0
        self._ended, self._read_all = threading.Event(), threading.Event()
        self._read_all.set()
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Returns when all that is there is read, a last line without an end too."""
        self._read_all.clear()
        self._read_all.wait(FINISH_S)

    def close(self) -> None:
        """Stops reading, after what is there has been read."""
        self._ended.set()
        self._thread.join()

    def take(self, content: bytes) -> None:
        """More bytes."""
        self.at = self._clock()
        *lines, self._rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self._rest + content)
        if len(self._rest) > LONGEST + self._overlap:
            self._rest = self._blank(self._rest)
        if (cut := len(self._rest) - self._overlap) > LONGEST:  # what is left may be the beginning of a secret
            lines, self._rest = [*lines, self._rest[:cut]], self._rest[cut:]
        for each in lines:
            self._take_line(each)

    def _take_line(self, line: bytes) -> None:
        text, bar = self._blank(line.rstrip(b"\r\n"))[:LONGEST], not line.endswith(b"\n")
        if not text.strip():
            return
        said = text.decode("utf-8", "replace")
        self._line(said, self.at)
        if bar and self.at < self._bar_at + BAR_S:
            return
        self._bar_at = self.at if bar else self._bar_at
        self.last.append(said.rstrip()[:500])
        if EXCEPTION.match(said) and LAUNCHERS_OWN not in said:
            self.error = said.strip()[:300]
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


class Metrics:
    """metrics.jsonl, as a ready-made job writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def resume(self, step: int) -> int | None:
        """Cuts off what will be repeated. The usual distance between two lines before it; None: not known."""
        with suppress(FileNotFoundError):
            lines = self._path.read_bytes().splitlines(keepends=True)
            kept = [(each, found) for each in lines if (found := metrics.line(each)) and found["step"] <= step]
            if len(kept) < len(lines):
                self._path.write_bytes(b"".join(each for each, _ in kept))
            steps = [found["step"] for _, found in kept]
            gaps = [after - before for before, after in pairwise(steps) if after > before]
            return round(median(gaps)) if gaps else None
        return None

    def append(self, record: dict[str, Any]) -> None:
        """A full disk stops nothing."""
        with suppress(OSError), self._path.open("ab") as file:
            file.write(metrics.write(record))


class StepReader:
    """The command's steps, from its output or from its file. `first`: the first step that this start has told."""

    def __init__(
        self,
        metrics: Metrics,
        patterns: Iterable[str],
        note: Callable[[str], None],
        gpus: Sampler | None = None,
        *,
        opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`opened` opens its file of progress, and raises OSError."""
        self._metrics, self._note, self._gpus, self._opened, self._clock = metrics, note, gpus, opened, clock
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._total = 0.0  # the greatest; of a bar that has another one the steps are something else
        self._batches = 0  # of the longest epoch
        self._lock = threading.Lock()
        self.step = self._began = 0
        self.first: int | None = None
        self.val: dict[int, float] = {}  # by step
        self.at = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._gaps: deque[int] = deque(maxlen=50)
        self._pending: dict[str, Any] = {}
        self._flushed = 0.0
        self._events: list[str] = []
        self._saves: list[tuple[Save, float]] = []  # and when its last file was written
        self._blocked_s: float | None = None  # by the newest of which that is known
        self._timed: tuple[float, int] | None = None  # up to where lines of metrics.jsonl tell the time of steps
        self._told_at: tuple[float, int] | None = None  # the step of the last one
        self._doubted: int | None = None
        self._told: set[str] = set()
        self._interval: int | None = None
        self._file: Path | None = None
        self._offset = 0

    def begin(self, step: int, file: Path) -> None:
        """A start that goes on after `step`; `file`: of JSON lines, which holds earlier starts' as well."""
        with self._lock:
            self._flush(self._clock())
            interval = self._metrics.resume(step)
            self._interval = interval or self._interval
            self.step, self._began, self.first, self._doubted = step, step, None, None
            self._pending = {"resumed": step} if step else {}
            self._seen.clear()
            self._timed = None
            self._file, self._offset = file, 0
            with suppress(OSError), self._opened(file) as there:
                self._offset = there.seek(0, os.SEEK_END)

    @property
    def interval(self) -> int | None:
        """Steps between two records, usually; None: not known."""
        return round(median(self._gaps)) if len(self._gaps) >= 3 else self._interval

    @property
    def step_s(self) -> float | None:
        """Seconds of a step in this start; None: not known."""
        with self._lock:
            if len(self._seen) < 2:
                return None
            (began, low), (at, high) = self._seen[0], self._seen[-1]
            return (at - began) / (high - low)

    def at_time(self, moment: float) -> int:
        """The newest step that was told by then."""
        with self._lock:
            return next((step for at, step in reversed(self._seen) if at <= moment), self._began)

    def event(self, text: str) -> None:
        """Into the next line of metrics.jsonl."""
        with self._lock:
            self._events.append(text)

    def saved(self, save: Save, written: float) -> None:
        """Adds a save to those that a line of metrics tells: once a step has been told after `written`, which shows how
        long the command stood still for it. Where nothing has told its step, the save itself does.
        """
        with self._lock:
            self._saves.append((save, written))
        if self.first is None or save.step > self.step:
            self.take({"step": save.step}, written)

    def line(self, text: str, at: float) -> None:
        """One that the command has printed."""
        found: dict[str, Any] = {}
        for pattern in self._patterns:
            if (match := pattern.search(text)) is not None:
                found.update({name: value for name, value in match.groupdict().items() if value is not None})
        if {"epoch", "batch", "batches"} <= found.keys() and "step" not in found:
            found["step"] = self._step_of_batch(*(int(found[name]) for name in ("epoch", "batch", "batches")))
        if found:
            self.take(found, at)

    def _step_of_batch(self, epoch: int, batch: int, batches: int) -> int:
        """By the longest epoch: a last one is cut where the steps are over. A start in that sees no other, which then
        are as long as it takes to be where it goes on.
        """
        with self._lock:
            self._batches = max(self._batches, batches)
            if epoch and self.first is None:
                self._batches = max(self._batches, -((batch - self._began) // epoch))
            return epoch * self._batches + batch

    def poll(self) -> None:
        """What its file has got since, and what waits to be written."""
        if self._file is not None:
            with suppress(OSError), self._opened(self._file) as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # written anew
                    self._offset = 0
                file.seek(self._offset)
                new = file.read(MOST_READ)
                whole = new[: new.rfind(b"\n") + 1] if len(new) < MOST_READ or b"\n" in new else new
                self._offset += len(whole)
                for record in atomic.objects(whole):
                    if type(record.get("step")) in (int, float):
                        self.take(record, self._clock())
        with self._lock:
            now = self._clock()
            if now >= self._flushed + FLUSH_S:
                self._flush(now)

    def flush(self) -> None:
        """Writes what waits."""
        with self._lock:
            self._flush(self._clock(), last=True)

    def take(self, found: dict[str, Any], at: float) -> None:
        """A record: step and figures, as text or numbers."""
        figures = {name: value for name in found if (value := _number(found[name])) is not None}
        total, step = figures.pop("total", None), figures.pop("step", None)
        with self._lock:
            if step is not None and not self._belongs(total):
                return
            if step is not None and not self._accept(int(step), at):
                return
            if self.step == 0 and step is None:
                return
            record = {key: figures[key] for key in figures if key not in ("val", "epoch", "batch", "batches")}
            if self.step - self._began <= WARM_UP:
                record.pop("step_ms", None)
            if "val" in figures:
                record["val_loss"] = self.val[self.step] = figures["val"]
            self._pending = {**self._pending, **record, "step": self.step}

    def _belongs(self, total: float | None) -> bool:
        """Whether a bar of this total is the training's: of several the longest is."""
        self._total = max(self._total, total or 0)
        return total is None or total == self._total

    def _accept(self, step: int, at: float) -> bool:
        if step <= 0:  # a bar that stands at its beginning, also where the command will go on further up
            return False
        self.first = step if self.first is None else self.first
        ahead = step - self.step
        if ahead < 0:
            if -ahead > (self.interval or 1):
                self._name("back", f"steps go back without a restart, from {self.step:,} to {step:,}: kept out")
            return False
        far = JUMP * (self.interval or 0)
        if len(self._gaps) >= 3 and ahead > far and not 0 <= step - (self._doubted or step + 1) <= far:
            self._name("jump", f"steps jump from {self.step:,} to {step:,}: kept out unless they go on from there")
            self._doubted = step
            return False
        if ahead:
            if self._seen:
                self._gaps.append(ahead)
            self._seen.append((at, step))
            if self._timed is None and step - self._began >= WARM_UP:
                self._timed = at, step
            self.step, self.at, self._doubted = step, at, None
        return True

    def _name(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._note(text)
            self._events.append(text)

    def _flush(self, now: float, *, last: bool = False) -> None:
        """`last`: of what waits for a step to come nothing waits any longer."""
        told = [self._told_save(save, at) for save, at in self._saves if last or at < self.at]
        if "step" not in self._pending and not (last and told and self.step):
            return
        self._flushed = now
        is_new = bool(self._seen) and self._told_at != self._seen[-1]
        self._told_at = self._seen[-1] if self._seen else None
        record = {"ts": round(self.at if is_new else now, 3), "phase": PHASE, "step": self.step}
        record |= self._step_time() | self._pending | ({} if self._gpus is None else self._gpus.figures())
        if self._events:
            record["event"] = "; ".join(self._events)
        if told:
            record["saves"] = told
            self._saves = [] if last else [each for each in self._saves if each[1] >= self.at]
        self._metrics.append(record)
        self._pending, self._events = {}, []

    def _step_time(self) -> dict[str, float]:
        """step_ms, from the times of the lines since the last one of metrics.jsonl; nothing during the warm-up, and
        where the command has evaluated meanwhile.
        """
        if self._timed is None or not self._seen or self._seen[-1][1] <= self._timed[1]:
            return {}
        (since, known), (at, step) = self._timed, self._seen[-1]
        self._timed = at, step
        return {} if "val_loss" in self._pending else {"step_ms": round((at - since) * 1000 / (step - known), 3)}

    def _told_save(self, save: Save, written: float) -> dict[str, Any]:
        """As a line has it: it has kept the command waiting for what its steps do not explain of the time between the
        two that were told around it; the last one of a stop as long as one before.
        """
        blocked_s, pace = save.blocked_s if self._blocked_s is None else self._blocked_s, self._pace()
        around = next(((a, b) for a, b in pairwise(self._seen) if a[0] <= written < b[0]), None)
        if around is not None and pace is not None:
            (since, known), (at, step) = around
            blocked_s = self._blocked_s = max(0.0, at - since - (step - known) * pace)
        return asdict(replace(save, blocked_s=round(blocked_s, 3)))

    def _pace(self) -> float | None:
        """Seconds of a step, in the middle; None: not known."""
        paces = [(at - since) / (step - known) for (since, known), (at, step) in pairwise(self._seen)]
        return median(paces) if len(paces) >= 3 else None


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if not isinstance(value, bool) and abs(found) < 1e15 else None
