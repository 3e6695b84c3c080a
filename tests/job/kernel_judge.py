"""Judges and candidates for tests, with little memory and few trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gpufleet.job.experiments.kernel.judge import planted, rules, tasks, timing, wire
from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME, KernelTask
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Verdict
from gpufleet.job.experiments.kernel.judge.worker import Process, Workers
from gpufleet.job.experiments.kernel.spec import Funnel
from tests.waiting import HANG_S

LIMITS = Funnel(candidate_s=HANG_S, trials=2, memory_gb=2.0, workers=2)
SEED = 1337


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """The funnel's extensions, left out one by one to see which of them catches what. Isolation and limits stay."""

    funnel: bool = True  # rules and the list of operations; a checked call that nobody can tell from a timed one
    multi_input: bool = True  # several random inputs and the adversarial ones; otherwise one random input
    timing: bool = True  # calibrated; otherwise one call by the wall clock

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The judge of this process has no others."""
        with pytest.MonkeyPatch.context() as patch:
            if not self.funnel:
                patch.setattr(rules, "problem", lambda source: None)
                patch.setattr(timing, "load_problem", partial(_load_unwatched, timing.load_problem))
                patch.setattr(timing, "run", partial(_run_unwatched, timing.run))
                patch.setattr(timing, "check", lambda *asked, own=timing.check, ops: own(*asked, ops=False))
                patch.setattr(timing, "calibrated", partial(_time_unwatched, timing.calibrated))
            if not self.multi_input:
                patch.setattr(tasks, "ADVERSARIAL", ())
                patch.setattr(Judge, "_check", partialmethod(_check_one, Judge._check))
            if not self.timing:
                patch.setattr(timing, "calibrated", stopwatch)
            yield


def _load_unwatched(load_problem: Any, ask: timing.Ask, source: str, *_: object, **__: object) -> str | None:
    problem: str | None = load_problem(ask, source)
    return problem


def _time_unwatched(calibrated: Any, *asked: Any, **how: Any) -> timing.Timing:
    found: timing.Timing = calibrated(*asked, **{**how, "ops": False})
    return found


def _run_unwatched(run: Any, ask: timing.Ask, task: KernelTask, given: tasks.Case, *, as_timed: bool = False) -> None:
    if given.name != "timing":
        run(lambda head, *more, **rest: ask({**head, "ops": False}, *more, **rest), task, given, as_timed=as_timed)


def _check_one(made: Judge, check: Any, task: KernelTask, ask: timing.Ask, names: Sequence[str], **how: Any) -> None:
    check(made, task, ask, names[:1], **how)


def stopwatch(
    task: KernelTask, seed: int, ask: timing.Ask, reference: timing.Ask, draw: timing.Draw, **_: Any
) -> timing.Timing:
    """The timing that many would take: one call by the process's own clock."""
    seconds = []
    for program in (ask, reference):
        timing.give(program, draw(task, "random-0"))
        seconds.append(timing._trial(program)[0])
    return timing.Timing(speedup=seconds[1] / seconds[0])


def judge(workers: Workers, **changes: float) -> Judge:
    return Judge(replace(LIMITS, **changes), SEED, workers)  # type: ignore[arg-type]


def verdicts(made: Judge, candidates: Sequence[Candidate], switches: Switches | None = None) -> dict[str, Verdict]:
    """By the candidate's label."""
    found: list[Verdict] = []
    with (switches or Switches()).applied():
        made.all(candidates, found.append)
    return {verdict.label: verdict for verdict in found}


def judged(workers: Workers, one: Candidate, switches: Switches | None = None, **limits: float) -> Verdict:
    return verdicts(judge(workers, **limits), [one], switches)[one.label]


def candidate(source: str, task: str = "relu", label: str = "x") -> Candidate:
    return Candidate(name=f"c-{label}", task=task, source=source, origin="planted", label=label)


def honest(task: str = "relu", change: Callable[[str], str] = lambda text: text, label: str = "x") -> Candidate:
    """A correct candidate, changed."""
    return candidate(change(planted.source(BY_NAME[task])), task, label)


def run(process: Process, source: str, *tensors: Tensor) -> wire.Message:
    """A source's answer to one watched call."""
    process.ask({"do": "load"}, [source.encode()], limit_s=HANG_S)
    packed = [wire.pack(tensor) for tensor in tensors]
    head = {"do": "run", "inputs": [spec for spec, _ in packed], "ops": True}
    return process.ask(head, [blob for _, blob in packed], limit_s=HANG_S, most_bytes=1 << 20)


def never_misses_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for a GPU serves on a machine without one, as far as it computes nothing there."""
    receive = Process._receive

    def greeted(process: Process, *limits: Any) -> Any:
        head, blobs = receive(process, *limits)
        if "isolated" in head:
            head.pop("error", None)
        return head, blobs

    monkeypatch.setattr(Process, "_receive", greeted)


def scratch(folder: Path) -> Path:
    return folder / "scratch"
