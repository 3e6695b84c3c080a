"""What the loop and an experiment say to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from job.config import JobConfig
from job.train.checkpoint import Checkpoints
from job.train.data import Dataset
from job.train.device import Device
from job.train.metrics import MetricsFile
from job.train.requests import Requests


class Stopped(Exception):
    """A stop request was heeded."""


class LossNotFiniteError(ValueError):
    """Loss or gradients became NaN or infinite. The last committed checkpoint is older and good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """`steps` optimizer steps with one model. `first` is the number of steps before it."""

    index: int
    name: str
    first: int
    steps: int
    lr: float
    warmup: int
    flops_per_token: int

    @property
    def last(self) -> int:
        """The number of steps after it."""
        return self.first + self.steps

    def lr_at(self, step: int) -> float:
        """For the step that follows `step` steps of the run: linear warm-up, then constant."""
        return self.lr * min(1.0, (step - self.first + 1) / self.warmup) if self.warmup else self.lr


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of the trainer: what it was given and what it found."""

    workdir: Path
    config: JobConfig
    config_sha256: str
    device: Device
    dataset: Dataset
    checkpoints: Checkpoints
    metrics: MetricsFile
    requests: Requests
    rung: int  # of the micro-batch ladder, at least; the predicted memory may choose a lower one
    predicted: Sequence[dict[str, Any]]  # the bill's figures per phase; may be empty
    say: Callable[[str], None]

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch.sequences * self.config.data.sequence


class Experiment(Protocol):
    """What the loop asks. `progress` is JSON that travels in every checkpoint."""

    @property
    def phases(self) -> Sequence[Phase]:
        """In order."""

    progress: dict[str, Any]

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """A phase's model at its first step."""

    def blank(self, phase: Phase) -> nn.Module:
        """The same, for a checkpoint to be read into."""

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups with their weight decay."""

    def requires(self, phase: Phase) -> tuple[str, ...]:
        """What a resume from a checkpoint of this phase will not make again."""

    def end(self, phase: Phase, module: nn.Module, *, val_loss: float | None) -> None:
        """Exports and samples. Repeated when a run resumes from the end of a phase."""

    def finish(self) -> None:
        """The files a finished run leaves."""
