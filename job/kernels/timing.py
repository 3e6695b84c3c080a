"""Stage 5: how fast, against the reference, and whether that can be believed.

Calibrated: warm-up, caches flushed before each trial, minus an empty launch, median and quartiles. The reference is
timed before and after the candidate; where its two medians differ by more than REPEAT the machine is not quiet enough,
and after TRIES there is no speed-up rather than a wrong one. A candidate's own process reads the clock, so the judge
keeps its own beside it: trials that took the judge much longer than they are said to have taken are a lie. Afterwards
comes a fresh input in the same memory, and its output is checked: a result remembered by address is a wrong one. Above
`suspicious` it is several, every output checked, and the judge's clock decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from job.kernels import tasks, wire
from job.kernels.catalog import Task
from job.kernels.tasks import Case
from job.kernels.worker import Process

WARM_UP, REPEAT, TRIES, FRESH = 2, 0.05, 3, 3
EMPTIES = 20  # at most
LIE, LIE_S = 2.0, 1e-3  # the judge's quickest trial may show this many times the slowest claim, and so much more
SHORTEST_S = 1e-9


class Rejected(Exception):
    """The candidate does not pass, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Seconds of one program: (lower quartile, median, upper quartile), and the judge's own median."""

    quartiles: tuple[float, float, float]
    judged: float
    quickest: float  # of the judge's own
    slowest: float  # as it says

    @property
    def incredible(self) -> bool:
        """A busy machine delays some trials on their way to the judge; only a lie shows in all of them."""
        return self.quickest > LIE * self.slowest + LIE_S

    @property
    def median(self) -> float:
        return self.quartiles[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """`speedup` None: refused, `why` says so."""

    speedup: float | None
    why: str = ""
    kernel: Trials | None = None
    reference: Trials | None = None


Ask = Callable[..., tuple[dict[str, Any], list[bytes]]]  # Process.ask with the stage's limit filled in


def calibrated(
    task: Task, seed: int, ask: Ask, reference: Ask, *, trials: int, suspicious: float, device: str = "cpu"
) -> Timing:
    """Raises Rejected for a lie, Lost where a process ends."""
    given = tasks.case(task, seed, "timing", device)
    for program in (ask, reference):
        _give(program, given)
    repeat, after = math.inf, _trials(reference, trials)
    for _ in range(TRIES):
        before = after
        kernel = _believed(ask, trials)
        after = _trials(reference, trials)
        repeat = abs(after.median - before.median) / min(after.median, before.median)
        if repeat <= REPEAT:
            break
    speedup = (before.median + after.median) / 2 / kernel.median
    took = _again(task, seed, ask, device, times=FRESH if speedup > suspicious else 1)
    if speedup > suspicious:
        speedup = min(speedup, (before.judged + after.judged) / 2 / took)
    if repeat > REPEAT:
        why = f"the reference's own repeat differs by {100 * repeat:.0f} %, more than {100 * REPEAT:.0f} %"
        return Timing(speedup=None, why=why, kernel=kernel, reference=before)
    return Timing(speedup=speedup, kernel=kernel, reference=before)


def stopwatch(task: Task, seed: int, ask: Ask, reference: Ask, device: str = "cpu") -> Timing:
    """As many would do it: one call, wall clock."""
    given = tasks.case(task, seed, "random-0", device)
    seconds = []
    for program in (ask, reference):
        _give(program, given)
        seconds.append(_seconds(program({"do": "stopwatch"})[0]))
    return Timing(speedup=seconds[1] / seconds[0])


def _believed(ask: Ask, trials: int) -> Trials:
    """A candidate's trials. Raises Rejected where the two clocks never agree."""
    for _ in range(TRIES):
        found = _trials(ask, trials)
        if not found.incredible:
            return found
    claimed, seen = found.slowest * 1e3, found.quickest * 1e3
    raise Rejected(f"it says at most {claimed:.3f} ms per call, the judge's clock at least {seen:.3f} ms")


def _trials(ask: Ask, trials: int) -> Trials:
    for _ in range(WARM_UP):
        _trial(ask, flush=False)
    empty = [_trial(ask, empty=True) for _ in range(min(trials, EMPTIES))]
    timed = [_trial(ask) for _ in range(trials)]
    nothing, way = median(own for own, _ in empty), median(judged for _, judged in empty)
    own = [max(SHORTEST_S, seconds - nothing) for seconds, _ in timed]
    judged = [max(SHORTEST_S, seconds - way) for _, seconds in timed]
    low, middle, high = quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
    return Trials(quartiles=(low, middle, high), judged=median(judged), quickest=min(judged), slowest=max(own))


def _trial(ask: Ask, *, empty: bool = False, flush: bool = True) -> tuple[float, float]:
    """Seconds by the program's process and by the judge. Without a call there is nothing to flush for."""
    ask({"do": "ready", "flush": flush and not empty})
    started = time.perf_counter()
    reply, _ = ask({"do": "trial", "empty": empty})
    return _seconds(reply), time.perf_counter() - started


def _again(task: Task, seed: int, ask: Ask, device: str, *, times: int) -> float:
    """Seconds on fresh inputs by the judge's clock. Raises Rejected where an output is not the new input's."""
    took = []
    empty = median(_trial(ask, empty=True)[1] for _ in range(times))
    for index in range(times):
        given = tasks.case(task, seed, f"fresh-{index}", device)
        _give(ask, given, again=True)
        took.append(_trial(ask)[1])
        problem = output_problem(task, given, *ask({"do": "collect"}))
        if problem is not None:
            raise Rejected(f"wrong on fresh inputs in the same memory: {problem}")
    return max(SHORTEST_S, median(took) - empty)


def load_problem(ask: Ask, source: str) -> str | None:
    """Why a program does not load; None when it does."""
    reply, _ = ask({"do": "load"}, [source.encode()])
    return f"does not load: {str(reply['error'])[:300]}" if "error" in reply else None


def output_problem(task: Task, given: Case, reply: dict[str, Any], blobs: list[bytes]) -> str | None:
    """Why a reply does not hold the expected output; None when it does."""
    if "error" in reply:
        return f"{given.name}: {str(reply['error'])[:300]}"
    if "type" in reply or len(blobs) != 1:
        return f"{given.name}: gives {str(reply.get('type'))[:40]}, not a tensor"
    shape = reply.get("shape")
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        return f"{given.name}: gives no shape"
    return tasks.difference(task, given, tuple(shape), str(reply.get("dtype")), blobs[0])


def _give(ask: Ask, given: Case, *, again: bool = False) -> None:
    packed = [wire.pack(tensor) for tensor in given.tensors]
    reply, _ = ask({"do": "give", "inputs": [spec for spec, _ in packed], "again": again}, [blob for _, blob in packed])
    if "error" in reply:
        raise Rejected(str(reply["error"])[:300])


def _seconds(reply: dict[str, Any]) -> float:
    """Raises Rejected where the process gives no time."""
    if "error" in reply:
        raise Rejected(str(reply["error"])[:300])
    seconds = reply.get("seconds")
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
        raise Rejected(f"it says a call takes {str(seconds)[:40]} s")
    return max(SHORTEST_S, float(seconds))


def bound(process: Process, limit_s: float) -> Ask:
    """`process.ask` where all questions together may take `limit_s`."""
    until = time.monotonic() + limit_s

    def ask(head: dict[str, Any], blobs: list[bytes] | None = None) -> tuple[dict[str, Any], list[bytes]]:
        left = max(0.001, until - time.monotonic())
        return process.ask(head, blobs or [], limit_s=left, most_bytes=MOST_BYTES)

    return ask


MOST_BYTES = 1 << 30  # of one output
