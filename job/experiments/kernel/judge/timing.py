"""Stage 5: times a candidate against the reference, and decides whether to believe the result.

The timing is calibrated: warm-up, flushed caches before each trial, median and quartiles, on a CPU minus an empty
launch. The reference is timed before and after the candidate; if the reference's two medians differ by more than REPEAT
the machine is too busy, and after TRIES the candidate gets no speed-up rather than a wrong one. Slow programs get fewer
trials, so that the tries fit into the stage's time.

On a GPU the stream is held while a call launches its kernels, so that kernels are compared, not a launcher with a
dispatcher (when the stream was not held, 18 of 20 right kernels got no speed-up on an H100). Further Python time counts
as the program's. On a GPU the time of an empty kernel is part of every kernel's time, and is not subtracted, as in
triton's do_bench. On a CPU, where kernels are interpreted, the time of an empty launch is subtracted: for a candidate
that of a Triton kernel that does nothing, for the reference that of an eager operation on one element.

No call gets an earlier call's inputs: inputs are moved within the same memory by random numbers of the judge's, so a
remembered result is wrong, however it is remembered, and a program that detects the move spends time on that. Some
calls between the trials list their torch functions, and after some trials the judge asks for the output. The judge's
seed and the source's hash decide which calls and trials these are; the candidate's process learns that after the call,
or never.

A candidate's own process reads the clock, so the judge reads its own clock too. If trials took much longer by the
judge's clock than the process reports, the process lies, and no speed-up exceeds what the judge's clock can confirm. A
speed-up above `suspicious` is timed again by the judge's clock on fresh inputs, with every output checked, and the
verdict keeps the flag.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles
from typing import Any, Literal

from gpufleet.job.experiments.kernel.judge import rules, tasks, wire
from gpufleet.job.experiments.kernel.judge.catalog import KernelTask
from gpufleet.job.experiments.kernel.judge.tasks import Case
from gpufleet.job.experiments.kernel.judge.worker import Process

WARM_UP, REPEAT, TRIES, FRESH = 2, 0.05, 3, 3
# number of checked calls among the trials; a program that cheats in half of its calls passes all of these in one of 256
# cases
LISTED, LOOKED_AT = 5, 3
EMPTIES = 20  # the most empty launches
LEAST = 3  # number of trials of the slowest programs
# By the judge's clock, the quickest trial may take at most LIE times as long as the slowest reported trial, plus LIE_S
# seconds.
LIE, LIE_S = 2.0, 1e-3
SHORTEST_S = 1e-9


class Rejected(Exception):
    """The candidate fails; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """One program's quartiles (lower, median, upper) in seconds, and the judge's median, within `blur`."""

    quartiles: tuple[float, float, float]
    judged: float
    blur: float
    quickest: float  # seconds of the quickest trial by the judge's clock
    slowest: float  # seconds of the slowest trial as the process reports it

    @property
    def incredible(self) -> bool:
        """Whether the process reports wrong times: a busy machine delays only some trials, but a false report makes all
        of them shorter.
        """
        return self.quickest > LIE * self.slowest + LIE_S

    @property
    def median(self) -> float:
        return self.quartiles[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The result of the timing. If `speedup` is None, it is unknown, for the reason in `why`. `suspicious`: the program
    seemed so fast that it was run again.
    """

    speedup: float | None
    why: str = ""
    suspicious: bool = False
    kernel: Trials | None = None
    reference: Trials | None = None


Ask = Callable[..., wire.Message]  # Process.ask with the stage's limit
Draw = Callable[[KernelTask, str], Case]  # tasks.case with the judge's seed and device
# which empty launch is subtracted: that of a Triton kernel, or that of an eager operation
Empty = Literal["kernel", "operation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program whose calls are timed. `listed`, `looked_at`: the numbers of calls that are checked each time. `ops`:
    whether the torch functions that these calls use are checked too. `random`: the judge's generator. `interpreted`:
    whether the program runs on a CPU; if so, the time of an empty launch is subtracted from the seconds that its
    process reports. From the judge's own seconds, the time of an empty launch is always subtracted, because it is the
    time for the message to the process and back.
    """

    ask: Ask
    task: KernelTask
    given: Case
    random: random.Random
    empty: Empty
    interpreted: bool = True
    listed: int = 0
    looked_at: int = 0
    ops: bool = False

    def trials(self, count: int, others: Sequence[Callable[[], object]] = ()) -> Trials:
        """Times `count` trials, with the checked calls `others` among them.

        Raises Rejected if a checked call is wrong.
        """
        for _ in range(WARM_UP):
            self._call()
            self._nothing()
        empty = [self._nothing() for _ in range(min(count, EMPTIES))]
        timed = list[tuple[float, float]]()
        plan: list[Callable[[], object]] = [
            partial(lambda checked: timed.append(self._call(checked=checked)), number < self.looked_at)
            for number in range(count)
        ]
        plan += [partial(self._call, listed=True, checked=True)] * min(count, self.listed)
        plan += others
        self.random.shuffle(plan)
        for act in plan:
            act()
        nothing = median(own for own, _ in empty) if self.interpreted else 0.0
        way = [judged for _, judged in empty]
        own = [max(SHORTEST_S, seconds - nothing) for seconds, _ in timed]
        judged = [max(SHORTEST_S, seconds - median(way)) for _, seconds in timed]
        return Trials(
            quartiles=_quartiles(own),
            judged=median(judged),
            blur=_quartiles(way)[2] - _quartiles(way)[0],
            quickest=min(judged),
            slowest=max(own),
        )

    def remeasure(self) -> float:
        """Seconds by the judge's clock for FRESH calls, all of which are checked."""
        give(self.ask, self.given)
        way = median(self._nothing()[1] for _ in range(FRESH))
        return max(SHORTEST_S, median(self._call(checked=True)[1] for _ in range(FRESH)) - way)

    def pace_s(self) -> float:
        """Seconds per trial, including everything that is done around it."""
        self._call()
        started = time.monotonic()
        self._call()
        return time.monotonic() - started

    def _nothing(self) -> tuple[float, float]:
        """Like `_call`, but for an empty launch, before which the caches are not emptied."""
        self.ask({"do": "ready", "flush": False})
        return _trial(self.ask, empty=self.empty)

    def _call(self, *, listed: bool = False, checked: bool = False) -> tuple[float, float]:
        """Seconds that the program's process and the judge measured."""
        shifts = [self.random.randrange(tensor.numel()) for tensor in self.given.tensors]
        self.ask({"do": "ready", "flush": True, "shifts": shifts})
        took_s = _trial(self.ask, ops=listed and self.ops)
        if checked:
            moved = tuple(tensor.roll(shift) for tensor, shift in zip(self.given.tensors, shifts, strict=True))
            case = Case(name="while it was timed", tensors=moved)
            check(self.task, case, *self.ask({"do": "collect"}, most_bytes=room(case)), ops=listed and self.ops)
        return took_s


def calibrated(
    task: KernelTask,
    seed: int,
    ask: Ask,
    reference: Ask,
    draw: Draw,
    *,
    trials: int,
    suspicious: float,
    ops: bool = False,
    interpreted: bool = True,
    secret: str = "",
    limit_s: float = math.inf,
    others: Sequence[Callable[[], object]] = (),
) -> Timing:
    """Times the candidate and the reference. `secret`: a text that the candidate could not know when it was written,
    such as its own hash. `limit_s`: the limit for all tries. `others`: checked calls among the trials of the first try.
    Raises Rejected for a false report or a wrong output, and Lost if a process ends.
    """
    case, own = draw(task, "timing"), random.Random(f"{seed} {task.name} {secret}")
    ours = Program(
        ask=reference,
        task=task,
        given=case,
        random=random.Random(f"{seed} {task.name}"),
        empty="operation",
        interpreted=interpreted,
    )
    program = replace(ours, ask=ask, random=own, empty="kernel", listed=LISTED, looked_at=LOOKED_AT, ops=ops)
    for one in (program, ours):
        give(one.ask, case)
    pace = program.pace_s() + ours.pace_s()
    count = trials if pace * trials * 2 * TRIES <= limit_s else min(trials, max(LEAST, int(limit_s / pace / 2 / TRIES)))
    after, lies = ours.trials(count), True
    for number in range(TRIES):
        before, kernel, after = after, program.trials(count, () if number else others), ours.trials(count)
        shorter, longer = sorted((before.median, after.median))
        repeat = longer / shorter - 1
        lies &= kernel.incredible
        if repeat <= REPEAT and shorter > SHORTEST_S and not kernel.incredible:
            break
    if lies:
        claimed, seen = kernel.slowest * 1e3, kernel.quickest * 1e3
        raise Rejected(
            f"it reports at most {claimed:.3f} ms per call, but the judge's clock shows at least {seen:.3f} ms"
        )
    speedup = (before.median + after.median) / 2 / kernel.median
    took, flagged = kernel.judged, speedup > suspicious
    if flagged:
        took = max(took, replace(program, given=draw(task, "again-0")).remeasure())
    speedup = min(speedup, ((before.judged + after.judged) / 2 + kernel.blur) / max(SHORTEST_S, took - kernel.blur))
    why = ""
    if shorter <= SHORTEST_S:
        why = "the reference takes no longer than an empty operation"
    elif repeat > REPEAT:
        why = f"the reference's own repeat differs by {100 * repeat:.0f} %, more than {100 * REPEAT:.0f} %"
    elif kernel.incredible:
        why = "its clock and the judge's did not agree in the last try"
    return Timing(speedup=None if why else speedup, why=why, suspicious=flagged, kernel=kernel, reference=before)


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high


def _trial(ask: Ask, *, empty: Empty | None = None, ops: bool = False) -> tuple[float, float]:
    """Seconds that the program's process and the judge measured."""
    started = time.perf_counter()
    reply, _ = ask({"do": "trial", "empty": empty, "ops": ops})
    return _seconds(reply), time.perf_counter() - started


def load_problem(ask: Ask, source: str, turn: int = 0, *, ops: bool = False) -> str | None:
    """Why a program does not load; None if it loads. `turn`: the number of the first configuration of tuned kernels. If
    `ops`, no call of the program may compute with torch.
    """
    reply, _ = ask({"do": "load", "turn": turn, "refuses": ops}, [source.encode()])
    return f"does not load: {reply['error'][:300]}" if "error" in reply else None


def run(ask: Ask, task: KernelTask, case: Case, *, as_timed: bool = False) -> None:
    """Makes one checked call on inputs of its own, either watched or in the form of a timed call. Raises Rejected."""
    packed = [wire.pack(tensor) for tensor in case.tensors]
    head = {"do": "run", "inputs": [spec for spec, _ in packed], "ops": not as_timed, "as_timed": as_timed}
    answer = ask(head, [blob for _, blob in packed], most_bytes=room(case))
    check(task, case, *answer, ops=not as_timed)


def check(task: KernelTask, case: Case, reply: dict[str, Any], blobs: list[wire.Blob], *, ops: bool) -> None:
    """Raises Rejected unless a reply has the expected output in a new tensor, which, if `ops`, was computed without
    torch.
    """
    if "error" in reply:
        raise Rejected(f"{case.name}: {reply['error'][:300]}")
    if "shape" not in reply or "dtype" not in reply or len(blobs) != 1:
        raise Rejected(f"{case.name}: returns {reply.get('type', 'nothing')[:40]}, not a tensor")
    problem = tasks.difference(task, case, tuple(reply["shape"]), reply["dtype"], blobs[0])
    if problem is not None:
        raise Rejected(problem[:300])
    if reply.get("alias", True) or reply.get("changed", True):
        raise Rejected(f"{case.name}: returns its input, or changes it")
    if ops and (bad := rules.forbidden_ops(reply.get("ops", ["?"]))):
        raise Rejected(f"{case.name}: computes with torch: {', '.join(bad)[:200]}")


def room(case: Case) -> int:
    """The most bytes of an output, right or wrong: twice the expected width."""
    return 2 * case.tensors[0].numel() * case.tensors[0].element_size()


def give(ask: Ask, case: Case) -> None:
    """Gives the program its next inputs. Raises Rejected."""
    packed = [wire.pack(tensor) for tensor in case.tensors]
    reply, _ = ask({"do": "give", "inputs": [spec for spec, _ in packed]}, [blob for _, blob in packed])
    if "error" in reply:
        raise Rejected(reply["error"][:300])


def _seconds(reply: dict[str, Any]) -> float:
    """The reported seconds; raises Rejected if there are none."""
    if "seconds" not in reply:
        raise Rejected(reply.get("error", "it does not report how long a call takes")[:300])
    return max(SHORTEST_S, float(reply["seconds"]))


def bound(process: Process, limit_s: float) -> Ask:
    """`process.ask` with a limit of `limit_s` for all answers together. The time between two questions is not
    included.
    """
    left_s = limit_s

    def ask(head: dict[str, Any], blobs: list[wire.Blob] | None = None, *, most_bytes: int = 0) -> wire.Message:
        nonlocal left_s
        started = time.monotonic()
        try:
            return process.ask(head, blobs or [], limit_s=max(0.001, left_s), most_bytes=most_bytes)
        finally:
            left_s -= time.monotonic() - started

    return ask
