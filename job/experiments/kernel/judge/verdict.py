"""Holds the facts about a candidate, during the judgement and afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.timing import Timing
from gpufleet.job.experiments.kernel.judge.worker import Process

STAGES = ("rules", "compile", "tiny", "full", "timing")
PASSED = len(STAGES) + 1
FULL = "full"  # the name of the row with the verdicts of the whole funnel; files of version 0.1.0 have more rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`stage`: where the candidate stopped, 1 to 5, or 6 if it passed all stages. Seconds are wall-clock. The seconds
    of stage 2 are those of the source's first compilation, which later verdicts reuse. `suspicious`: the candidate
    seemed so fast that it was run again.
    """

    row: str
    candidate: str
    task: str
    origin: str
    label: str
    source_sha256: str
    passed: bool
    stage: int
    reason: str
    seconds: dict[str, float]
    cpu_s: float  # CPU seconds of the candidate's and of the reference's process
    isolated: bool | None  # whether namespaces were allowed; None if no process was needed
    speedup: float | None = None
    suspicious: bool = False
    kernel_s: tuple[float, float, float] | None = None  # quartiles of the kernel's seconds
    reference_s: tuple[float, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON, with quartiles as lists."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Verdict:
        """Reads the object; raises DoubtError if it is not a verdict."""
        fields, quartiles = Fields(tree), reading.listed(reading.number)
        kernel_s, reference_s = (fields.take(key, quartiles, None) for key in ("kernel_s", "reference_s"))
        if any(pair is not None and len(pair) != 3 for pair in (kernel_s, reference_s)):
            raise DoubtError("quartiles are three")
        return reading.filled(
            cls,
            fields,
            stage=fields.need("stage", reading.choice(*range(1, PASSED + 1))),
            isolated=fields.take("isolated", reading.flag, None),
            kernel_s=kernel_s,
            reference_s=reference_s,
        )


@dataclass(slots=True)
class Course:
    """A candidate during its judgement."""

    candidate: Candidate
    sha256: str
    built: Path | None = None  # the folder with the result of stage 2
    seconds: dict[str, float] = field(default_factory=dict)
    stage: int = 1
    cpu_s: float = 0.0
    isolated: bool | None = None
    timing: Timing | None = None

    @contextmanager
    def timed_stage(self, stage: str) -> Iterator[None]:
        self.stage = STAGES.index(stage) + 1
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def note(self, process: Process) -> None:
        """Adds the facts about a process that has ended."""
        self.isolated = process.isolated
        self.cpu_s += process.cpu_s

    def verdict(self, reason: str | None) -> Verdict:
        """The verdict; if `reason` is None, the candidate has passed."""
        timing = self.timing
        return Verdict(
            row=FULL,
            candidate=self.candidate.name,
            task=self.candidate.task,
            origin=self.candidate.origin,
            label=self.candidate.label,
            source_sha256=self.sha256,
            passed=reason is None,
            stage=PASSED if reason is None else self.stage,
            reason=reason or (timing.why if timing else ""),
            seconds={name: round(value, 6) for name, value in self.seconds.items()},
            cpu_s=round(self.cpu_s, 6),
            isolated=self.isolated,
            speedup=timing.speedup if timing else None,
            suspicious=timing is not None and timing.suspicious,
            kernel_s=timing.kernel.quartiles if timing and timing.kernel else None,
            reference_s=timing.reference.quartiles if timing and timing.reference else None,
        )
