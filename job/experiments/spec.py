"""What the specs of ready-made jobs share: the ladder of a batch, the learning rate, and the words of messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from gpufleet.job.contract.inputs import Checks
from gpufleet.job.experiments.dataset.facts import FACTS
from gpufleet.job.kind.batch import total_steps
from gpufleet.job.kind.common import (
    EVALUATIONS_PROBED,
    LINES_PROBED,
    Checkpoint,
    Compute,
    Deliver,
    Guard,
    Rung,
    bounded,
)
from gpufleet.job.kind.dataset import Dataset
from gpufleet.job.kind.job import JobConfig, Probed, changed, named
from gpufleet.job.text import counted

# the largest share of the old value that a moving average may keep, because with 1 it would never change
BELOW_ONE = 0.99999
# folders of job/ whose code all ready-made jobs share
SHARED = ("experiments/engine", "experiments/models", "kind", "experiments")


class ExperimentConfig(JobConfig):
    """A ready-made job, which the engine trains as `trainer` says."""

    __slots__ = ()

    seed: int
    data: Any
    optim: Any
    eval: Any = None  # None if the experiment evaluates in its own way
    precision: Compute
    checkpoint: Checkpoint
    guard: Guard
    deliver: Deliver = "last"  # which weights are written into final/

    module: ClassVar[str] = "gpufleet.job.experiments.engine"
    trainer: ClassVar[str]  # module:class, imported when a run asks for it
    dataset_class: ClassVar[str]  # module:class of the experiment's data
    dataset_checks: ClassVar[Checks] = FACTS

    @classmethod
    def code_folders(cls) -> tuple[str, ...]:
        """The folders of code that all ready-made jobs share, and the experiment's own."""
        return (*SHARED, "/".join(cls.__module__.split(".")[2:-1]))

    @property
    def dataset(self) -> Dataset[Any]:
        dataset: Dataset[Any] = named(self.dataset_class)(self)
        return dataset

    def products(self) -> str:
        return self.precision.compute

    def save_interval_s(self, step_s: float) -> float:
        return self.checkpoint.interval_s

    @property
    def delivers_best(self) -> bool:
        return self.deliver == "best"

    def shortened(self, steps: int) -> Self | None:
        """The job with about `steps` optimizer steps of the same work; None if its length depends on the data."""
        return None

    def probed(self, steps: int) -> Probed:
        short = self.shortened(steps)
        config, stop_at = (self, min(steps, total_steps(self))) if short is None else (short, None)
        length = min([steps, *(size.steps for size in config.phases() if size.steps)])
        every = max(1, min(config.log.every, length // LINES_PROBED))
        sections: dict[str, Any] = {"log": replace(config.log, every=every, tensorboard=False)}
        if config.eval is not None:
            sections["eval"] = replace(config.eval, every=max(1, min(config.eval.every, length // EVALUATIONS_PROBED)))
        checkpoint = replace(config.checkpoint, interval_s=86400.0)
        return Probed(changed(config, checkpoint=checkpoint, **sections), stop_at)

    def state_dtype(self, phase_index: int) -> str:
        """fp32 or bf16: weights, gradients and moments alike."""
        return "fp32"

    def state_in_words(self) -> str:
        return "fp32; loss and norms in fp32"

    def waits_for_saves(self) -> bool:
        """Whether training waits until a save is written."""
        return False

    def compiles(self) -> bool:
        """Whether blocks and loss are compiled on a GPU."""
        return True

    def records(self) -> bool:
        """Whether the passes of a step are one CUDA graph on a GPU. This needs a single process, and passes without
        random numbers.
        """
        return False

    def runs_compiled(self) -> bool:
        """Whether the job's steps run compiled: on a GPU, unless the parameters switch it off."""
        return self.device == "cuda" and self.compiles()


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineAdamW:
    """AdamW with linear warm-up and a cosine to `floor` x lr at the last step."""

    lr: float = bounded(2e-4, 1e-9, 1.0)
    warmup: int = bounded(100, 0, 1_000_000)  # steps
    floor: float = bounded(0.0, 0.0, 1.0)
    weight_decay: float = bounded(0.0, 0.0, 1.0)
    betas: tuple[float, ...] = bounded((0.9, 0.95), 0.0, BELOW_ONE)
    eps: float = bounded(1e-8, 1e-16, 1e-2)  # with 0, the update of a row without gradient would be 0 / 0
    clip: float = bounded(1.0, 0.0, 1e6)


def cuts(whole: int, start: int | None, plain: list[int]) -> tuple[Rung, ...]:
    """The rungs of a ladder. First come the micro-batches of `plain` that are not above `start` (`whole`, if it is
    None), without activation checkpointing; `start` itself comes before them if it is not among them. Then come rungs
    with checkpointing, which begin at the last of these micro-batches and are halved down to one.
    """
    first = min(start or whole, whole)
    micros = list(dict.fromkeys(m for m in plain if 1 <= m <= first))
    if first not in micros:
        micros.insert(0, first)
    checkpointed, micro = [], micros[-1]
    while micro >= 1:
        checkpointed.append(micro)
        micro //= 2
    return tuple([Rung(micro=m) for m in micros] + [Rung(micro=m, checkpointing=True) for m in checkpointed])


def halves(whole: int) -> list[int]:
    """`whole` rows, half of them, and so on down to one."""
    return [whole >> times for times in range(whole.bit_length())]


def warmup_doubts(key: str, length: int, steps: int, rate: float, whole: str, instead: str) -> Iterator[str]:
    """A warning if the warm-up optim.`key`, `length` steps, is longer than the training, which has `steps` steps.
    `whole`: the name of the training in the sentence.
    """
    if length > steps > 0:
        yield (
            f"optim.{key} is {counted(length, 'step')}, {whole} {steps}: the learning rate never reaches"
            f" {rate_in_words(rate)}. Lower optim.{key}, or {instead}"
        )


def rate_in_words(value: float) -> str:
    """The rate in the form of a definition file: 2e-4, 0.02."""
    return f"{value:g}" if value >= 1e-3 else re.sub(r"e-0?", "e-", re.sub(r"\.?0+e", "e", f"{value:.3e}"))


def too_short(
    counts: Mapping[str, int | None], unit: str, least: int, sequence: int, notes: Mapping[str, str] | None = None
) -> str:
    """A sentence about a split of a dataset that has fewer than the `least` units which data.sequence needs; empty if
    there is none.
    """
    for split in ("train", "validation"):
        count = counts.get(split)
        if count is not None and count < least:
            note = (notes or {}).get(split, "")
            return f"has {count} {unit} for {split}{note}, data.sequence {sequence} needs at least {least}"
    return ""
