"""What a candidate's process answers is its own affair: no answer ends the judge, no error of ours becomes a verdict.

With the rules left out, so that what comes after them is seen alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.kernel.judge import planted, rules, tasks, timing, wire
from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME
from gpufleet.job.experiments.kernel.judge.funnel import digest
from gpufleet.job.experiments.kernel.judge.verdict import Course
from gpufleet.job.experiments.kernel.judge.worker import Lost, NotBegun, OutOfTime, Process, Workers
from tests.job import kernel_cheats
from tests.job.kernel_judge import Switches, candidate, honest, judge, judged
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("kernels")

NO_RULES = Switches(funnel=False)


def course() -> Course:
    return Course(honest(), "")


PATCHED = """
import sys
Harness = sys.modules["__main__"].Harness
class J:
    loads = staticmethod(sys.modules["json"].loads)
    dumps = staticmethod(sys.modules["json"].dumps)
sys.modules["gpufleet.job.experiments.kernel.judge.wire"].json = J
"""


PATCHES = {
    "a time that is no time": 'Harness._trial = lambda self, head, blobs: ({"seconds": 10**400}, [])',
    "no time": "Harness._trial = lambda self, head, blobs: ({}, [])",
    "operations that are no names": 'Harness._collect = lambda self, head, blobs: ({"ops": [[]]}, [])',
    "no output": "Harness._collect = lambda self, head, blobs: ({}, [])",
    "a shape without content": 'Harness._collect = lambda *_: ({"shape": [1], "dtype": "float32"}, [])',
    "a shape of too many sizes": 'Harness._collect = lambda *_: ({"shape": [1] * 9999, "dtype": "x"}, [b""])',
    "a dtype of no element": 'Harness._collect = lambda *_: ({"shape": [1], "dtype": "x"}, [b"abc"])',
    "too many bytes": 'Harness._collect = lambda *_: ({"shape": [1], "dtype": "float32"}, [b"x" * (1 << 20)])',
    "no aliases": "collect = Harness._collect\n"
    "Harness._collect = lambda *a: (lambda r, b: ({k: r[k] for k in ('shape', 'dtype')}, b))(*collect(*a))",
    "sizes without end": "J.dumps = lambda tree: '{\"blobs\": [1e999]}'",
    "not JSON": "J.dumps = lambda tree: '['",
}


@pytest.mark.parametrize("what", PATCHES)
@pytest.mark.parametrize(
    "switches",
    [NO_RULES, pytest.param(Switches(funnel=False, multi_input=False, timing=False), marks=pytest.mark.slow)],
)
def test_an_answer_that_is_none_loses_its_candidate_alone(workers: Workers, what: str, switches: Switches) -> None:
    patched = honest().source + PATCHED + PATCHES[what]
    found = judged(workers, candidate(patched), switches)
    assert not found.passed, found
    assert len(found.reason) < 400


@pytest.mark.parametrize("source", ["\ud800", "# coding: utf-7\n", "\0", "#" * 16_385])
@pytest.mark.parametrize("switches", [Switches(), NO_RULES])
def test_a_text_that_cannot_be_run_as_it_is_read_reaches_no_process(
    workers: Workers, source: str, switches: Switches
) -> None:
    found = judged(workers, candidate(source + honest().source), switches)
    assert (found.passed, found.isolated, found.stage) == (False, None, 1 if switches.funnel else 2)
    assert found.source_sha256 == digest(source + honest().source)


def test_an_error_of_ours_is_no_verdict(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "difference", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judged(workers, honest())


def test_time_that_runs_out_while_a_right_one_is_timed_leaves_it_untimed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(error: Exception) -> Any:
        def calibrated(*_: object, **__: object) -> timing.Timing:
            raise error

        monkeypatch.setattr(timing, "calibrated", calibrated)
        return judged(workers, honest())

    found = fails(OutOfTime("no answer within 3 s"))
    assert (found.passed, found.speedup, found.stage) == (True, None, 6)
    assert found.reason == "no answer within 3 s while it was timed"
    for error in (Lost("the process ended"), timing.Rejected("wrong")):
        assert (fails(error).passed, fails(error).stage) == (False, 5)


@pytest.mark.slow
def test_one_that_hangs_only_while_it_is_timed_is_untimed(workers: Workers) -> None:
    hangs = "calls = []\ndef kernel_function(x):\n    calls.append(1)\n    while len(calls) > 7:\n        pass\n"
    source = honest().source.replace("def kernel_function", "def honest") + hangs + "    return honest(x)"
    one_input = Switches(funnel=False, multi_input=False)  # so that nothing comes again among the trials
    found = judged(workers, candidate(source), one_input, candidate_s=6.0)
    assert (found.passed, found.speedup) == (True, None)
    assert "while it was timed" in found.reason


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("torch-while-timed", "computes with torch"),
        ("cached-by-content", "computes with torch: __float__"),
        ("in-place-while-timed", "returns its input"),
        ("cached-by-address", "while it was timed"),
    ],
)
def test_the_timing_alone_catches_who_is_another_while_it_is_timed(
    workers: Workers, label: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "problem", lambda source: None)
    cheat = next(fixture.candidate for fixture in kernel_cheats.FIXTURES if fixture.candidate.label == label)
    found = judged(workers, cheat, trials=10)
    assert not found.passed
    assert why in found.reason, found


REMEMBERS = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, kept_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    for _ in range(30 if tl.load(x_ptr) != tl.load(kept_ptr) else 1):
        tl.store(out_ptr + at, tl.maximum(x, 0.0), mask=at < n)

memory = {}
def kernel_function(x):
    x = x.contiguous()
    if x.shape not in memory:
        memory[x.shape] = (torch.zeros(1), torch.empty_like(x))
    kept, out = memory[x.shape]
    kernel[(triton.cdiv(x.numel(), 1024),)](x, kept, out, x.numel(), BLOCK=1024)
    kept.copy_(x.flatten()[:1])
    return out
"""


def test_a_kernel_that_looks_whether_its_input_is_known_pays_for_it_in_each_trial(workers: Workers) -> None:
    """It works 30 times as long on an input that it has not seen: its trials must show that."""
    seen, honest_one = (
        judged(workers, candidate(source), NO_RULES, trials=5)
        for source in (REMEMBERS, planted.source(BY_NAME["relu"]))
    )
    assert seen.passed, seen
    assert honest_one.passed, honest_one
    assert seen.kernel_s is not None
    assert honest_one.kernel_s is not None
    assert seen.kernel_s[1] > 1.5 * honest_one.kernel_s[1]  # the interpreter is most of both


def test_a_candidate_stands_still_while_the_reference_is_timed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads would make the reference slow otherwise."""
    states, ask = set[str](), Process.ask

    def process_state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    def watched(process: Process, head: dict[str, Any], *more: Any, **rest: Any) -> Any:
        if process is reference and head["do"] == "trial":
            while (state := process_state(candidate_pid)) == "R":
                os.sched_yield()  # it has not yet been given a core to stop on
            states.add(state)
        return ask(process, head, *more, **rest)

    with workers.start(memory_bytes=2e9) as process, workers.start(memory_bytes=2e9) as reference:
        candidate_pid = process.pid
        process.ask({"do": "load"}, [honest().source.encode()], limit_s=HANG_S)
        monkeypatch.setattr(Process, "ask", watched)
        assert judge(workers, trials=9)._time(BY_NAME["relu"], process, reference, course()).kernel is not None
    assert states == {"T"}


@pytest.mark.parametrize(
    "fails",
    [
        "is late",
        pytest.param("ends", marks=pytest.mark.slow),
        "has no memory left",
        pytest.param("does not load", marks=pytest.mark.slow),
        pytest.param("does not start", marks=pytest.mark.slow),
    ],
)
def test_a_reference_that_is_lost_costs_no_candidate_its_verdict_and_serves_no_other(
    workers: Workers, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, start = set[int](), workers.start

    def started(**asked: Any) -> Process:
        process = start(**asked)
        if asked.get("confined", True) or broken:
            return process
        broken.add(process.pid)
        if fails == "does not start":
            process.close()
            raise NotBegun("no answer within 120 s")
        ask = process.ask

        def failing(head: dict[str, Any], *more: Any, **rest: Any) -> wire.Message:
            reply = ask(head, *more, **rest)
            if head["do"] == "load" and fails == "does not load":
                return {"error": "OutOfMemoryError: CUDA"}, []
            if head["do"] != "trial":
                return reply
            if fails == "is late":
                raise OutOfTime("no answer within 30 s")
            if fails == "ends":
                raise Lost("the process ended")
            return {"error": "OutOfMemoryError: CUDA"}, []

        monkeypatch.setattr(process, "ask", failing)
        return process

    monkeypatch.setattr(workers, "start", started)
    made, one = judge(workers, trials=3), honest()
    first, second = (made.verdict(one) for _ in range(2))
    made._close_idle()
    assert (first.passed, first.speedup, first.reason[:15]) == (True, None, "the reference: "), first
    assert second.passed
    assert "the reference: " not in second.reason


def test_a_reference_outlives_a_candidate_that_is_rejected_while_it_is_timed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([timing.Rejected("wrong"), timing.Rejected("wrong"), None])

    def calibrated(*asked: Any, own: Any = timing.calibrated, **how: Any) -> timing.Timing:
        if (error := next(answers)) is not None:
            raise error
        return own(*asked, **how)  # type: ignore[no-any-return]

    monkeypatch.setattr(timing, "calibrated", calibrated)
    made, pids = judge(workers, trials=3), list[int]()
    for passes in (False, False, True):
        assert made.verdict(honest("square")).passed is passes
        with made._reference(0) as reference:
            pids.append(reference.pid)
    made._close_idle()
    assert len(set(pids)) == 1
