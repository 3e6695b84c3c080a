"""Eight GPUs judge eight candidates at once. The GPUs are made up: each candidate's process computes on the CPU, and is
counted on the GPU that the judge gives it.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from gpufleet.job.experiments.kernel.judge import planted, tasks
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import STOPS_AT, Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Course, Verdict
from gpufleet.job.experiments.kernel.judge.worker import Process, Workers
from tests.job.kernel_judge import LIMITS, SEED, Switches, honest
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("kernels")

GPUS = 8


class Eight(Judge):
    """A judge with eight GPUs. No candidate goes on before eight have a GPU each."""

    def __init__(self, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(replace(LIMITS, workers=None), SEED, workers, gpus=GPUS)
        self._case = tasks.Cases(SEED, "cpu").case
        self.all_here, self.held = threading.Barrier(GPUS), list[int]()
        self.asked: list[tuple[int, int]] = []  # for each process: the GPU that its thread holds, and the process's
        here, start = threading.local(), workers.start

        def started(*, gpu: int = 0, compiles: bool = False, built: Any = None, **how: Any) -> Process:
            if compiles:
                return start(gpu=gpu, compiles=True, built=built, **how)
            self.asked.append((here.gpu, gpu))
            return start(gpu=gpu, **how)  # the interpreter cannot use what was built

        def judged(made: Judge, course: Course, gpu: int, own: Any = Judge._judge) -> None:
            here.gpu = gpu
            self.held.append(gpu)
            self.all_here.wait(HANG_S)
            own(made, course, gpu)

        monkeypatch.setattr(workers, "start", started)
        monkeypatch.setattr(Judge, "_judge", judged)


def crowd() -> list[Candidate]:
    """Eight that all reach a GPU: four right ones, and four that stop at the two stages there."""
    wrong = [each for each in planted.candidates(200) if STOPS_AT[each.label] in (3, 4)]
    return [honest(task, label=f"right {task}") for task in ("relu", "leaky_relu", "hardtanh", "addcmul")] + [
        replace(each, label=f"wrong {place}") for place, each in enumerate(wrong[:4])
    ]


def found(made: Judge) -> dict[str, tuple[bool, int, str]]:
    verdicts: list[Verdict] = []
    with Switches(timing=False).applied():
        made.all(crowd(), verdicts.append)
    return {each.label: (each.passed, each.stage, each.reason) for each in verdicts}


def test_eight_gpus_judge_eight_candidates_at_once_as_one_after_the_other(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = found(Judge(replace(LIMITS, workers=1), SEED, workers))
    assert Counter(passed for passed, _, _ in one_by_one.values()) == {True: 4, False: 4}
    made = Eight(workers, monkeypatch)
    assert found(made) == one_by_one
    assert sorted(made.held) == list(range(GPUS))
    assert len(made.asked) >= GPUS  # references are processes too
    assert all(holds == given for holds, given in made.asked)
