"""Reads a command's progress: from lines to steps, and from steps to metrics.jsonl.

Not every line with a step belongs to the training. The reader ignores three kinds of lines: lines of another progress
bar (recognised by its words or its total), lines whose step goes back or jumps ahead, and all lines after the steps
have passed the declared last step. If no lines are left, the steps are taken from the names of complete checkpoints.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from gpufleet.job import atomic
from gpufleet.job.command.lines import Counting, OutputLine, Patterns, Position
from gpufleet.job.contract import metrics
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.metrics import Save
from gpufleet.job.gpus import Sampler
from gpufleet.job.kind.command import PHASE, CommandConfig
from gpufleet.job.measured import WARM_UP

FLUSH_S = 1.0  # seconds between two writes to metrics.jsonl
MOST_READ = 4 * 1024 * 1024  # most bytes of the progress file that are read at once; a longer line is ignored
JUMP = 100  # a step that is more than this many logging intervals ahead is used only after it is confirmed
REMEMBERED = 2000
SLACK = 0.02  # totals and last steps may differ from the declared ones by this share


class Metrics:
    """metrics.jsonl, as a ready-made job writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def resume(self, step: int) -> int | None:
        """Removes the lines after `step`. Returns the usual number of steps between two lines; None if unknown."""
        with suppress(FileNotFoundError):
            lines = self._path.read_bytes().splitlines(keepends=True)
            kept_lines = [(line, record) for line in lines if (record := metrics.line(line)) and record["step"] <= step]
            if len(kept_lines) < len(lines):
                self._path.write_bytes(b"".join(line for line, _ in kept_lines))
            steps = [entry["step"] for _, entry in kept_lines]
            gaps = [after - before for before, after in pairwise(steps) if after > before]
            return round(median(gaps)) if gaps else None
        return None

    def append(self, record: dict[str, Any]) -> None:
        """Appends a line; ignores a full disk."""
        with suppress(OSError), self._path.open("ab") as file:
            file.write(metrics.write(record))


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldProgress:
    """The progress that lines had shown at some moment. `step` is a step of the run; None if no line has given one."""

    step: int | None
    counting: Counting


class StepReader:
    """Reads the command's steps from its output or from its file. `first` is the first position of this start; `at` is
    the time of the newest line with a step.
    """

    def __init__(
        self,
        metrics: Metrics,
        config: CommandConfig,
        note: Callable[[str], None],
        alarm: Callable[[str, str], None],
        gpus: Sampler | None = None,
        *,
        opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`note` is called with sentences about ignored lines, and `alarm` with a name and a sentence if a loss is not
        a number. Each sentence is passed only once. `opened` opens the progress file, and raises OSError.
        """
        self._opened, self._clock = opened, clock
        self._metrics, self._config, self._note, self._alarm, self._gpus = metrics, config, note, alarm, gpus
        self._patterns = Patterns(config.patterns)
        self._longest = 0  # the largest total of the bars, used if the definition declares none
        self._lock = threading.Lock()
        self.step = self._began = self._offset = self._saved = 0
        self.first: Position | None = None
        self.val: dict[int, float] = {}  # validation losses by step
        self.at = 0.0
        self.counting = Counting(unit=config.unit)
        self._is_fresh, self._is_begun, self._counts_else = True, False, False
        self._is_told = False  # whether a line of this start reported a step
        self._history: deque[tuple[float, int | None, Counting]] = deque(maxlen=REMEMBERED)
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        self._gaps: deque[int] = deque(maxlen=50)
        self._pending: dict[str, Any] = {}
        self._flushed = 0.0
        self._events: list[str] = []
        self._saves: list[tuple[Save, float]] = []  # each save with the time of its last file
        self._blocked_s: float | None = None  # how long the newest save with a known duration has blocked the training
        self._timed: tuple[float, int] | None = None  # time and step up to which metrics.jsonl has step times
        self._told_at: tuple[float, int] | None = None  # time and step of the newest line
        self._doubted: int | None = None
        self._beyond: set[int] = set()
        self._told: set[str] = set()
        self._interval: int | None = None
        self._file: Path | None = None
        self._offset_of_file = 0

    def begin(self, restored: Commit | None, file: Path) -> None:
        """Begins a start from the restored checkpoint. `file` contains lines of JSON, including those of earlier
        starts.
        """
        step = 0 if restored is None else restored.step
        with self._lock:
            self._flush(self._clock())
            interval = self._metrics.resume(step)
            stored = {} if restored is None else restored.lines
            self.counting = Counting.from_json(stored, self._config.unit, self._config.work.steps_per_epoch)
            self._interval = self.counting.interval or interval or self._interval
            self._is_fresh, self._is_begun, self._counts_else, self._is_told = restored is None, False, False, False
            self.step, self._began, self._saved, self._offset = step, step, step, 0
            self.first, self._doubted = None, None
            self._pending = {"resumed": step} if step else {}
            self._seen.clear()
            self._history.clear()
            self._beyond.clear()
            self._timed = None
            self._file, self._offset_of_file = file, 0
            with suppress(OSError), self._opened(file) as there:
                self._offset_of_file = there.seek(0, os.SEEK_END)

    @property
    def interval(self) -> int | None:
        """The usual number of steps between two records; None if unknown."""
        return round(median(self._gaps)) if len(self._gaps) >= 3 else self._interval

    @property
    def spread(self) -> int:
        """The number of steps that may have been done after the newest line."""
        told_in_epochs = self.counting.unit == "step" and "step" not in self._config.groups
        return max(1, self.interval or 0, (self.counting.batches or 0) if told_in_epochs else 0)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step in this start; None if unknown."""
        with self._lock:
            if len(self._seen) < 2:
                return None
            (began, low), (at, high) = self._seen[0], self._seen[-1]
            return (at - began) / (high - low)

    @property
    def is_believed(self) -> bool:
        """Whether a line of this start gave a step, and no line has shown that lines count something else."""
        return self._is_told and not self._counts_else

    def told_by(self, moment: float) -> ToldProgress:
        """The progress that the lines had shown at that moment."""
        with self._lock:
            for at, step, counting in reversed(self._history):
                if at <= moment and not self._counts_else:
                    return ToldProgress(step=step, counting=replace(counting, interval=self.interval))
            return ToldProgress(step=None, counting=replace(self.counting, newest=None))

    def event(self, text: str) -> None:
        """Adds the event to the next line of metrics.jsonl."""
        with self._lock:
            self._events.append(text)

    def saved(self, save: Save, written: float, *, is_counted: bool) -> None:
        """Adds a save to a later line of metrics.jsonl. That line is written only after a step has come after
        `written`, because only then is it known how long the save has blocked the training. If no lines give steps, a
        save with a number in its name (`is_counted`) is used as a step.
        """
        with self._lock:
            self._saves.append((save, written))
            self._is_begun = True
            self._saved = save.step if is_counted else self._saved
            if is_counted and not self.is_believed and save.step > self.step:
                self._move(save.step, written)
                self._pending = {**self._pending, "step": save.step}

    def line(self, text: str, at: float) -> bool:
        """Reads a printed line. Returns whether the line reports a step of the training."""
        line = self._patterns.read(text)
        return line is not None and self._take(line, at)

    def poll(self) -> None:
        """Reads new lines of the progress file, and writes the records that are due."""
        if self._file is not None:
            with suppress(OSError), self._opened(self._file) as file:
                if file.seek(0, os.SEEK_END) < self._offset_of_file:  # the command has begun the file again
                    self._offset_of_file = 0
                file.seek(self._offset_of_file)
                new = file.read(MOST_READ)
                whole = new[: new.rfind(b"\n") + 1] if len(new) < MOST_READ or b"\n" in new else new
                self._offset_of_file += len(whole)
                for record in atomic.objects(whole):
                    if (line := OutputLine.from_groups(record)).place is not None:
                        self._take(line, self._clock())
        with self._lock:
            now = self._clock()
            if now >= self._flushed + FLUSH_S:
                self._flush(now)

    def flush(self) -> None:
        """Writes the records that have not been written yet."""
        with self._lock:
            self._flush(self._clock(), last=True)

    def _take(self, line: OutputLine, at: float) -> bool:
        """Processes a line. Returns whether the line reports a step of the training."""
        with self._lock:
            accepted = line.place is not None and self._accept(line, line.place, at)
            if line.place is not None and not accepted:
                return False
            if self.step == 0 and line.place is None:
                return False
            figures = dict(line.figures)
            for name in ("loss", "val"):
                if name in figures and not math.isfinite(figures[name]):
                    text = f"{name} is {figures[name]} from {self._config.unit} {self.step:,} on"
                    self._say_once(name, text, partial(self._alarm, name))
            record = {key: value for key, value in figures.items() if key != "val" and math.isfinite(value)}
            if self.step - self._began <= WARM_UP:
                record.pop("step_ms", None)
            if math.isfinite(val := figures.get("val", math.nan)):
                record["val_loss"] = self.val[self.step] = val
            self._pending = {**self._pending, **record, "step": self.step}
            return accepted

    def _accept(self, line: OutputLine, place: Position, at: float) -> bool:
        """Decides whether the line reports a step of the training. If so, this step becomes the newest."""
        if self._counts_else or not self._is_of_training(line):
            return False
        if self._is_fresh and self.counting.base is None and place.epoch in (0, 1):
            self.counting = replace(self.counting, base=place.epoch)
        if not self._config.work.steps_per_epoch and (place.batches or 0) > (self.counting.batches or 0):
            self.counting = replace(self.counting, batches=place.batches)  # the last epoch may be shorter
        position = self.counting.position(place)
        if place.is_beginning and (position or 0) <= 0:
            return False
        if position is None:  # only later lines can show whether this step is right
            self._remember(place, at, is_newest=True)
            return False
        if self._config.resume.check == "none" and self.first is None and position < self._began - self.spread:
            # with `resume.check: none`, the command begins to number its steps anew after a resume
            self._offset = self._began
        position += self._offset
        if self._is_beyond(line, position):
            return False
        is_next = self._follows(position)
        if is_next:
            self._move(position, at)
            self._is_told = True
        self._remember(place, at, is_newest=is_next)
        return is_next

    def _remember(self, place: Position, at: float, *, is_newest: bool) -> None:
        """Keeps the first and the newest position of this start with their times, for `told_by`."""
        if self.first is None:
            self.first, self._is_begun = place, True
            if self._is_fresh:
                self.counting = replace(self.counting, first=place)
        if is_newest:
            self.counting = replace(self.counting, newest=place)
            self._history.append((at, self.step if self._is_told else None, self.counting))

    def _is_of_training(self, line: OutputLine) -> bool:
        """Whether the bar belongs to the training: its words must fit, and its total must be the declared one or, if
        none is declared, the largest.
        """
        if line.is_other:
            return False
        tells_steps = line.place is not None and line.place.step is not None
        declared = self._config.steps if tells_steps else self._config.work.epochs
        if line.total is not None and declared is not None:
            if abs(line.total - declared) > max(1, SLACK * declared):
                if self.first is None:
                    self._say_once(
                        "total",
                        f"a line shows a total of {line.total:,}, but job.work has {declared:,}, so the line does not"
                        f" count as the training's: {line.text.strip()[:160]}",
                        self._note,
                    )
                return False
            return True
        if line.is_doubtful and not self._is_begun:
            return False
        self._longest = max(self._longest, line.total or 0)
        return line.total is None or line.total == self._longest

    def _is_beyond(self, line: OutputLine, position: int) -> bool:
        """Whether the step is beyond the declared last step. After the second such step, lines are not used any more,
        because their numbers are not the run's steps.
        """
        total = self._config.total
        if total is None or position <= total * (1 + SLACK) + self.spread:
            return False
        self._beyond.add(position)
        self._say_once(
            "beyond",
            f"a line shows {self._config.unit} {position:,} of {total:,}, so job.progress.stdout reads another number;"
            f" only checkpoints count as progress: {line.text.strip()[:160]}",
            self._note,
        )
        if len(self._beyond) > 1:
            self._counts_else = True
            self.step = self._saved
            self._pending.pop("step", None)
        return True

    def _follows(self, step: int) -> bool:
        """Whether the step comes after the newest one and is not too far from it."""
        ahead = step - self.step
        if ahead < 0:
            if self._history and -ahead > (self.interval or 1):
                self._say_once(
                    "back", f"steps go back without a restart, from {self.step:,} to {step:,}: ignored", self._note
                )
            return False
        far = JUMP * (self.interval or 0)
        if len(self._gaps) >= 3 and ahead > far and not 0 <= step - (self._doubted or step + 1) <= far:
            self._say_once(
                "jump", f"steps jump from {self.step:,} to {step:,}: ignored unless more steps follow", self._note
            )
            self._doubted = step
            return False
        return True

    def _move(self, step: int, at: float) -> None:
        """Makes this the newest step."""
        ahead = step - self.step
        if ahead:
            if self._seen:
                self._gaps.append(ahead)
            self._seen.append((at, step))
            if self._timed is None and step - self._began >= WARM_UP:
                self._timed = at, step
            self.step, self.at, self._doubted = step, at, None

    def _say_once(self, kind: str, text: str, say: Callable[[str], None]) -> None:
        if kind not in self._told:
            self._told.add(kind)
            say(text)
            self._events.append(text)

    def _flush(self, now: float, *, last: bool = False) -> None:
        """Writes the records that are due. With `last` it also writes those that wait for a later step."""
        saves = [self._told_save(save, at) for save, at in self._saves if last or at < self.at]
        if "step" not in self._pending and not (last and saves and self.step):
            return
        self._flushed = now
        is_new = bool(self._seen) and self._told_at != self._seen[-1]
        self._told_at = self._seen[-1] if self._seen else None
        record = {"ts": round(self.at if is_new else now, 3), "phase": PHASE, "step": self.step}
        record |= self._step_time() | self._pending | ({} if self._gpus is None else self._gpus.figures())
        if self._events:
            record["event"] = "; ".join(self._events)
        if saves:
            record["saves"] = saves
            self._saves = [] if last else [save for save in self._saves if save[1] >= self.at]
        self._metrics.append(record)
        self._pending, self._events = {}, []

    def _step_time(self) -> dict[str, float]:
        """The entry step_ms, computed from the times of the lines since the last line of metrics.jsonl. Empty during
        the warm-up, and if the command has evaluated since that line.
        """
        if self._timed is None or not self._seen or self._seen[-1][1] <= self._timed[1]:
            return {}
        (since, known), (at, step) = self._timed, self._seen[-1]
        self._timed = at, step
        return {} if "val_loss" in self._pending else {"step_ms": round((at - since) * 1000 / (step - known), 3)}

    def _told_save(self, save: Save, written: float) -> dict[str, Any]:
        """The save in the form of metrics.jsonl. The save has blocked the training for the time between the step before
        it and the step after it, minus the time that these steps usually take. The last save before a stop is assumed
        to take as long as an earlier one.
        """
        blocked_s, pace = save.blocked_s if self._blocked_s is None else self._blocked_s, self._pace()
        around = next(((a, b) for a, b in pairwise(self._seen) if a[0] <= written < b[0]), None)
        if around is not None and pace is not None:
            (since, known), (at, step) = around
            blocked_s = self._blocked_s = max(0.0, at - since - (step - known) * pace)
        return asdict(replace(save, blocked_s=round(blocked_s, 3)))

    def _pace(self) -> float | None:
        """The median seconds of a step; None if unknown."""
        paces = [(at - since) / (step - known) for (since, known), (at, step) in pairwise(self._seen)]
        return median(paces) if len(paces) >= 3 else None
