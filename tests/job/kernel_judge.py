"""Judges and candidates for tests, with little memory and few trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gpufleet.job.experiments.kernel.judge import planted, wire
from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Switches, Verdict
from gpufleet.job.experiments.kernel.judge.worker import Process, Workers
from gpufleet.job.experiments.kernel.spec import Funnel
from tests.waiting import HANG_S

LIMITS = Funnel(candidate_s=HANG_S, trials=2, memory_gb=2.0, workers=2)
SEED = 1337


def judge(workers: Workers, **changes: float) -> Judge:
    return Judge(replace(LIMITS, **changes), SEED, workers)  # type: ignore[arg-type]


def verdicts(
    made: Judge, candidates: Sequence[Candidate], switches: Switches | None = None, row: str = "full"
) -> dict[str, Verdict]:
    """By the candidate's label."""
    found: list[Verdict] = []
    made.all(candidates, switches or Switches(), row, found.append)
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
