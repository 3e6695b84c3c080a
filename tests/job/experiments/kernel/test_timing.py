"""Stage 5: how fast, whether that can be believed, and that nobody foresees what is checked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import catalog, child, figures, tasks, timing, wire
from gpufleet.job.experiments.kernel.judge.verdict import Course, Verdict
from gpufleet.job.experiments.kernel.judge.worker import Workers
from tests.job.kernel_judge import SEED, honest, judged, scratch

RELU = catalog.BY_NAME["relu"]


def drawn(task: catalog.KernelTask, name: str) -> tasks.Case:
    return tasks.case(task, SEED, name)


def steady() -> timing.Ask:
    """A program that is right and always takes a second."""
    given: list[torch.Tensor] = []
    shifts: list[int] = []

    def ask(head: dict[str, Any], blobs: Any = None, *, most_bytes: int = 0) -> wire.Message:
        if head["do"] == "give":
            given[:] = [wire.unpack(spec, blob) for spec, blob in zip(head["inputs"], blobs or [], strict=True)]
        if head["do"] == "ready":
            shifts[:] = head.get("shifts", shifts)
        if head["do"] == "collect":
            moved = tuple(tensor.roll(shift) for tensor, shift in zip(given, shifts, strict=True))
            right = tasks.expected(RELU, moved)
            said = {"shape": list(right.shape), "dtype": "float32", "alias": False, "changed": False, "ops": []}
            return said, [wire.raw(right)]
        return ({"seconds": 0.0 if head.get("empty") else 1.0} if head["do"] == "trial" else {}), []

    return ask


def calibrated(ask: timing.Ask, reference: timing.Ask, **how: Any) -> timing.Timing:
    return timing.calibrated(RELU, SEED, ask, reference, drawn, **how)


class CallClock:
    """The judge's: it moves when a program says that it works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("gpufleet.job.experiments.kernel.judge.timing.time.perf_counter", lambda: self.now)

    def taking(self, ask: timing.Ask, *, says: float, takes: float) -> timing.Ask:
        def answer(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
            reply, blobs = ask(head, *more, **rest)
            if head["do"] == "trial" and not head["empty"]:
                self.now += takes
                reply = {"seconds": says}
            return reply, blobs

        return answer


def test_calls_among_the_trials_are_made_once_and_nobody_foresees_when() -> None:
    def places(secret: str) -> list[int]:
        right, trials, found = steady(), [0], list[int]()

        def ask(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
            trials[0] += head["do"] == "trial" and not head.get("empty")
            return right(head, *more, **rest)

        others = [lambda: found.append(trials[0])] * 8
        calibrated(ask, steady(), trials=20, suspicious=9.0, secret=secret, others=others)
        return found

    first = places("a")
    assert len(first) == 8
    assert len(set(first)) > 3
    assert first != places("b")


@pytest.mark.parametrize("grows", [1.5, 1 / 1.5])
def test_a_reference_that_does_not_repeat_gives_no_speedup(grows: float) -> None:
    times = (grows**number for number in itertools.count())

    def reference(head: dict[str, Any], blobs: Any = None) -> wire.Message:
        return ({"seconds": 0.0 if head.get("empty") else float(next(times))} if head["do"] == "trial" else {}), []

    found = calibrated(steady(), reference, trials=3, suspicious=1e9)
    assert found.speedup is None
    assert "the reference's own repeat differs by" in found.why


def test_a_reference_as_quick_as_an_empty_operation_gives_no_speedup() -> None:
    def reference(head: dict[str, Any], blobs: Any = None) -> wire.Message:
        return ({"seconds": 1e-6} if head["do"] == "trial" else {}), []

    found = calibrated(steady(), reference, trials=3, suspicious=1e9)
    assert (found.speedup, found.why) == (None, "the reference takes no longer than an empty operation")


@pytest.mark.parametrize("interpreted", [True, False], ids=["CPU", "GPU"])
def test_a_trial_is_what_it_took_and_on_a_cpu_less_an_empty_launch(
    interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = CallClock(monkeypatch)
    own, way = iter([9.0, 9.0, 1.0, 2.0, 3.0, 5.0]), iter([9.0, 9.0, 0.2, 0.4, 0.4, 0.8])  # two of each warm up

    def ask(head: dict[str, Any], *_: Any, **__: Any) -> wire.Message:
        if head["do"] != "trial":
            return {}, []
        says = 0.5 if head["empty"] else next(own)
        clock.now += next(way) if head["empty"] else 2 * says
        return {"seconds": says}, []

    case = tasks.Case(name="", tensors=(torch.ones(3),))
    program = timing.Program(ask=ask, task=RELU, given=case, random=random.Random(1), empty="kernel")
    found = replace(program, interpreted=interpreted).trials(4)
    launch = 0.0 if interpreted else 0.5
    assert found.quartiles == pytest.approx((1.25 + launch, 2.0 + launch, 3.0 + launch))  # of 0.5, 1.5, 2.5, 4.5
    assert (found.judged, found.blur) == pytest.approx((4.6, 0.15))  # of 1.6, 3.6, 5.6, 9.6; from 0.35 to 0.5
    assert (found.quickest, found.slowest) == pytest.approx((1.6, 4.5 + launch))


def took(median: float, *, lies: bool = False) -> timing.Trials:
    quickest = 2 * median + (1.1e-3 if lies else 0.9e-3)
    return timing.Trials(quartiles=(median,) * 3, judged=median, blur=0.0, quickest=quickest, slowest=median)


@pytest.mark.parametrize(
    ("reference", "lies", "found"),
    [
        ([1.0, 1.04], [False], 2.04),  # the mean of before and after
        ([1.0, 1.0, 1.0], [True, False], 2.0),
        ([1.0, 2.0, 2.0, 2.0], [False, True, True], "did not agree in the last try"),
        ([1.0, 1.0, 1.0, 1.0], [True, True, True], "it reports at most"),
    ],
)
def test_a_try_counts_when_it_repeats_and_is_believed_and_one_that_is_never_believed_is_a_lie(
    reference: list[float], lies: list[bool], found: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"operation": map(took, reference), "kernel": iter([took(0.5, lies=lie) for lie in lies])}
    also = list[int]()

    def trials(self: timing.Program, count: int, others: Sequence[Callable[[], object]] = ()) -> timing.Trials:
        also.extend([len(others)] if self.empty == "kernel" else [])
        return next(made[self.empty])

    monkeypatch.setattr(timing.Program, "trials", trials)
    asked: dict[str, Any] = {"trials": 3, "suspicious": 1e9, "others": [list]}
    if all(lies):
        with pytest.raises(timing.Rejected, match=str(found)):
            calibrated(steady(), steady(), **asked)
    else:
        timed = calibrated(steady(), steady(), **asked)
        assert (timed.why if isinstance(found, str) else timed.speedup) == (
            pytest.approx(found) if isinstance(found, float) else f"its clock and the judge's {found}"
        )
        assert (timed.speedup is None) == isinstance(found, str)
    assert also == [1, 0, 0][: len(lies)]


def test_who_is_quick_on_the_inputs_of_the_trials_alone_is_as_fast_as_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, given, right = CallClock(monkeypatch), [0], steady()

    def knows(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
        given[0] += head["do"] == "give"
        reply, blobs = right(head, *more, **rest)
        if head["do"] == "trial" and not head["empty"]:
            clock.now += 0.4 * given[0]
            reply = {"seconds": 0.4}
        return reply, blobs

    reference = clock.taking(steady(), says=1.0, takes=1.0)
    found = calibrated(knows, reference, trials=3, suspicious=2.0)
    assert found.suspicious
    assert found.speedup == pytest.approx(1 / 0.8)


@pytest.mark.parametrize(
    ("said", "blobs"),
    [({"alias": None}, 1), ({"changed": None}, 1), ({"ops": None}, 1), ({"alias": True}, 1), ({}, 0), ({}, 2)],
)
def test_an_answer_that_leaves_out_what_it_must_say_is_no_result(said: dict[str, Any], blobs: int) -> None:
    case = drawn(RELU, "random-0")
    right = tasks.expected(RELU, case.tensors)
    whole = {"shape": list(right.shape), "dtype": "float32", "alias": False, "changed": False, "ops": []}
    timing.check(RELU, case, whole, [wire.raw(right)], ops=True)
    reply = {key: value for key, value in {**whole, **said}.items() if value is not None}
    with pytest.raises(timing.Rejected):
        timing.check(RELU, case, reply, [wire.raw(right)] * blobs, ops=True)


def test_a_claim_far_below_the_judges_clock_is_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CallClock(monkeypatch)
    liar = clock.taking(steady(), says=1e-6, takes=1.0)
    with pytest.raises(timing.Rejected, match="the judge's clock shows at least 1000"):
        calibrated(liar, steady(), trials=3, suspicious=2.0)


@pytest.mark.parametrize(("says", "takes"), [(0.4, 0.79), (0.6, 0.9)])  # above what is suspicious, and below
def test_no_speedup_is_above_what_the_judges_clock_saw(
    says: float, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = CallClock(monkeypatch)
    reference = clock.taking(steady(), says=1.0, takes=1.0)
    boasts = clock.taking(steady(), says=says, takes=takes)
    found = calibrated(boasts, reference, trials=3, suspicious=2.0)
    assert found.speedup == pytest.approx(1 / takes)
    modest = clock.taking(steady(), says=takes, takes=takes)
    assert calibrated(modest, reference, trials=3, suspicious=2.0).speedup == pytest.approx(1 / takes)


@pytest.mark.parametrize(("says", "flagged"), [(0.4, True), (0.6, False)])
def test_a_suspicious_one_is_run_again_on_other_inputs_and_keeps_the_flag(says: float, flagged: bool) -> None:
    right, given = steady(), list[bytes]()

    def quick(head: dict[str, Any], blobs: Any = None, **rest: Any) -> wire.Message:
        if head["do"] == "give":
            given.extend(blobs)
        reply, found = right(head, blobs, **rest)
        return ({"seconds": says} if reply.get("seconds") else reply), found

    found = calibrated(quick, steady(), trials=3, suspicious=2.0)
    assert found.suspicious is flagged
    assert len(given) == len(set(given)) == 1 + flagged


def test_a_flag_is_in_the_verdict_and_counted() -> None:
    course = Course(honest(), "", timing=timing.Timing(speedup=3.0, suspicious=True))
    verdict = Verdict.from_json(course.verdict(None).to_json())
    assert verdict.suspicious
    assert figures.figures("full", [verdict])["suspicious"] == 1


def test_a_candidates_empty_launch_is_a_kernels_and_the_references_an_operations() -> None:
    def watched(kinds: set[str]) -> timing.Ask:
        right = steady()

        def ask(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
            if head.get("empty"):
                kinds.add(head["empty"])
            return right(head, *more, **rest)

        return ask

    asked: tuple[set[str], set[str]] = set(), set()
    calibrated(watched(asked[0]), watched(asked[1]), trials=3, suspicious=2.0)
    assert asked == ({"kernel"}, {"operation"})


def test_the_time_of_a_stage_is_of_its_answers_and_not_of_the_judges_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [0.0], list[float]()
    monkeypatch.setattr("gpufleet.job.experiments.kernel.judge.timing.time.monotonic", lambda: now[0])

    class Slow:
        def ask(self, *asked: Any, limit_s: float, most_bytes: int) -> wire.Message:
            limits.append(limit_s)
            now[0] += 4.0
            return {}, []

    ask = timing.bound(Slow(), 10.0)  # type: ignore[arg-type]
    for _ in range(4):
        ask({"do": "trial"})
        now[0] += 100.0  # the judge compares
    assert limits == [10.0, 6.0, 2.0, 0.001]


def test_a_slow_program_gets_fewer_trials_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], [0]
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"gpufleet.job.experiments.kernel.judge.timing.time.{clock}", lambda: now[0])
    right = steady()

    def slow(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
        if head["do"] == "trial" and not head["empty"]:
            now[0], calls[0] = now[0] + 0.25, calls[0] + 1
        return right(head, *more, **rest)

    found = calibrated(slow, slow, trials=100, suspicious=9.0, limit_s=60.0)
    assert found.speedup == pytest.approx(1.0)
    assert now[0] < 60.0
    assert calls[0] > 20
    now[0] = 0.0

    def drifting(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
        reply, blobs = slow(head, *more, **rest)
        return ({"seconds": 1.0 + now[0]} if reply.get("seconds") else reply), blobs

    never = calibrated(slow, drifting, trials=100, suspicious=9.0, limit_s=60.0)
    assert never.speedup is None
    assert 30.0 < now[0] < 60.0  # all tries


def test_every_call_that_is_timed_gets_other_inputs_and_which_are_checked_is_not_to_be_foreseen() -> None:
    def course(secret: str) -> tuple[list[tuple[int, ...]], list[str]]:
        right, shifts, checked = steady(), [], []

        def ask(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
            if head["do"] == "ready" and "shifts" in head:
                shifts.append(tuple(head["shifts"]))
            if head["do"] in ("trial", "collect") and not head.get("empty"):
                checked.append(head["do"] + str(head.get("ops")))
            return right(head, *more, **rest)

        calibrated(ask, steady(), trials=30, suspicious=9.0, ops=True, secret=secret)
        return shifts, checked

    shifts, checked = course("a")
    assert len(set(shifts)) > 0.9 * len(shifts)  # drawn from about 1500
    assert checked.count("trialTrue") == timing.LISTED
    assert checked.count("collectNone") == timing.LISTED + timing.LOOKED_AT
    assert course("a") == (shifts, checked)
    assert course("b")[0] != shifts
    assert course("b")[1] != checked


def test_a_gpu_is_held_until_the_call_has_launched_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...

        def record(self) -> None:
            acts.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    monkeypatch.setattr(child, "_Event", Event)
    monkeypatch.setattr(child, "_hold", lambda cycles: acts.append("hold"))
    monkeypatch.setattr(child.Harness, "_sync", lambda harness: acts.append("wait"))
    harness = child.Harness(torch.device("cuda"))
    harness.entry = lambda: acts.append("call")
    assert harness._trial({"do": "trial"}, [])[0] == {"seconds": 0.002}
    assert acts == ["hold", "event", "call", "event", "wait"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are fast on a GPU alone")
def test_a_right_kernel_gets_its_speed_up_on_a_gpu(tmp_path: Path) -> None:
    with Workers(scratch(tmp_path), gpus=True) as workers:
        found = judged(workers, honest("relu"), memory_gb=8.0, trials=20)
    assert found.passed
    assert found.speedup is not None, found.reason
