"""A run's console line and JSON line per logged step, and the clocks that measure the times in these lines."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpufleet.job import atomic
from gpufleet.job.contract import metrics as lines_of
from gpufleet.job.measured import WARM_UP, step_times


class StepClock:
    """Seconds per optimizer step since the last reading, without evaluations, saves and the first WARM_UP steps.

    `synchronize` waits for the device. The wait happens only at the end of the warm-up. Before each later reading, the
    caller has copied a result of the step from the device, which also waits for it.
    """

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._warm = 0
        self._seconds = 0.0
        self.steps = 0  # number of steps over which the next reading takes the mean
        self.full = 0.0  # the same number, but a step with fewer rows is only a fraction of a step
        self._began = 0.0

    def restart(self) -> None:
        """Begins a new warm-up, after a reading."""
        self._warm = 0

    def start(self) -> None:
        """Notes that a step begins."""
        if self._warm == WARM_UP:
            self._synchronize()
            self._warm += 1
        self._began = self._clock()

    def stop(self, full: float = 1.0) -> None:
        """Notes that the step has ended. For a logged step, it is called after the step's values were copied from the
        device. `full`: see Work.
        """
        if self._warm < WARM_UP:
            self._warm += 1
            return
        self._seconds += self._clock() - self._began
        self.steps += 1
        self.full += full

    def settle(self) -> None:
        """Waits for the device before something else does, so that the time of unfinished work is part of the steps'
        time.
        """
        began = self._clock()
        self._synchronize()
        if self.steps:
            self._seconds += self._clock() - began

    def read(self) -> float | None:
        """Seconds per step since the last reading; None during the warm-up."""
        seconds, steps = self._seconds, self.steps
        self._seconds, self.steps, self.full = 0.0, 0, 0.0
        return seconds / steps if steps else None


class OwnTime:
    """Measures how long a node works on a step before it needs the other nodes. This shows which node is slow. The time
    is that from the step's batch to the last backward pass, in which gradients are sent over the network. On a GPU, the
    time is known when the GPU has reached that pass; the host does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began, self._open = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._begun: torch.cuda.Event | None = None
        self.seconds = 0.0  # the newest step's seconds, if known; 0 if none is known

    def begin(self) -> None:
        """Notes that a step begins."""
        if self._is_cuda:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        self._began = time.perf_counter()

    def end(self) -> None:
        """Notes that all work of this step that needs no other node has been launched on the device."""
        if self._begun is None:
            self.seconds = time.perf_counter() - self._began
            return
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._open.append((self._begun, ended))
        while self._open and self._open[0][1].query():
            began, last = self._open.pop(0)
            self.seconds = began.elapsed_time(last) / 1e3


class MetricsFile:
    """metrics.jsonl: whole lines only, flushed at once. A resume cuts off the lines of steps that it will repeat."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int) -> None:
        """Drops lines after `step`, and a line that was cut off by a kill."""
        if not self.path.exists():
            return
        lines = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        records = [(lines_of.line(line), line) for line in lines]
        kept_lines = [line for record, line in records if record is not None and record["step"] <= step]
        atomic.write_bytes(self.path, b"".join(kept_lines))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a line with every key of KEYS, then the experiment's figures. Raises OSError; the file then has no
        incomplete line.
        """
        content = lines_of.write(record)
        with self.path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if file.write(content) < len(content):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def evaluated(self, step: int, val_loss: float) -> None:
        """Adds the loss to the line of `step`, if there is one, after an interrupted evaluation was repeated. Raises
        OSError.
        """
        records = self.records()
        for record in records:
            # another start may have written the loss already
            if record["step"] == step and record["val_loss"] != val_loss:
                record.update(val_loss=val_loss, resumed=step)
        atomic.write_bytes(self.path, b"".join(map(lines_of.write, records)))

    def records(self, phase: str | None = None) -> list[dict[str, Any]]:
        """Every line, or the lines of one phase. A line that was cut off by a kill, and that `resume` could not remove
        from a full disk, is skipped, so that the run does not fail because of it at the end of a phase.
        """
        if not self.path.exists():
            return []
        records = lines_of.records(self.path.read_bytes().split(b"\n"))
        return [record for record in records if phase in (None, record["phase"])]


def measured(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The figures of one phase's lines of metrics.jsonl, by the bill's names: medians, and the peak of memory. A value
    is None if it was not measured. The time of a step with fewer rows is not corrected.
    """

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    return {
        "step_ms": middle(step_ms for step_ms, _ in step_times(records)),
        "tokens_per_s": middle(record["tok_s"] for record in records),
        "mfu": middle(record["mfu"] for record in records),
        "memory_gb": max((record["mem_gb"] for record in records), default=None),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsoleLine:
    """The console line. A value that does not exist (yet) is None, and is printed as a dash."""

    step: int
    steps: int
    loss: float
    val_loss: float | None
    lr: float
    step_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    memory_gb: float
    memory_total_gb: float
    gpu_util: float | None
    spent_usd: float | None
    eta_s: float | None
    validation: str = "val"  # the name of val_loss

    def __str__(self) -> str:
        return " | ".join(
            (
                f"step {self.step:06d}/{self.steps:06d}",
                f"loss {self.loss:.4f}",
                f"{self.validation} {shown(self.val_loss, '.4f')}",
                f"lr {self.lr:.2e}",
                f"{shown(None if self.step_s is None else self.step_s * 1000, '.1f')} ms",
                f"{shown(self.tokens_per_s, ',.0f')} tok/s",
                f"mfu {shown(self.mfu, '.1%')}",
                f"mem {self.memory_gb:.1f}/{self.memory_total_gb:.1f} GB",
                f"gpu {shown(None if self.gpu_util is None else self.gpu_util / 100, '.0%')}",
                f"${shown(self.spent_usd, '.3f')}",
                f"eta {_clock(self.eta_s)}",
            )
        )


def shown(value: float | None, form: str) -> str:
    """The value as text; a dash if there is none."""
    return "-" if value is None else format(value, form)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
