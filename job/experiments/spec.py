"""What the specs of ready-made jobs share: the ladder of a batch, the rate, and the words for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpufleet.job.contract.inputs import Checks
from gpufleet.job.experiments.dataset.facts import FACTS
from gpufleet.job.kind.common import Rung, bounded
from gpufleet.job.kind.job import JobConfig
from gpufleet.job.text import counted

BELOW_ONE = 0.99999  # the largest that a share of what was before may be: at 1 it would never change
SHARED = ("experiments/engine", "experiments/models", "kind", "experiments")  # folders of job/


class ExperimentConfig(JobConfig):
    """A ready-made job: the engine trains it, and `trainer` says how."""

    __slots__ = ()

    module: ClassVar[str] = "gpufleet.job.experiments.engine"
    trainer: ClassVar[str]  # module:class, imported when a run asks for it
    dataset_checks: ClassVar[Checks] = FACTS

    @classmethod
    def code_folders(cls) -> tuple[str, ...]:
        """Those of all ready-made jobs, and its own."""
        return (*SHARED, "/".join(cls.__module__.split(".")[2:-1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineAdamW:
    """AdamW with linear warm-up and a cosine to `floor` x lr at the last step."""

    lr: float = bounded(2e-4, 1e-9, 1.0)
    warmup: int = bounded(100, 0, 1_000_000)  # steps
    floor: float = bounded(0.0, 0.0, 1.0)
    weight_decay: float = bounded(0.0, 0.0, 1.0)
    betas: tuple[float, ...] = bounded((0.9, 0.95), 0.0, BELOW_ONE)
    eps: float = bounded(1e-8, 1e-16, 1e-2)  # at 0 a row without gradient is 0 / 0
    clip: float = bounded(1.0, 0.0, 1e6)


def cuts(whole: int, start: int | None, plain: list[int]) -> tuple[Rung, ...]:
    """A ladder from its micro-batches without activation checkpointing, `start` first when it is not among them; then
    checkpointing from the last of these down to one, halving.
    """
    first = min(start or whole, whole)
    kept = list(dict.fromkeys(m for m in plain if 1 <= m <= first))
    if first not in kept:
        kept.insert(0, first)
    checkpointed, micro = [], kept[-1]
    while micro >= 1:
        checkpointed.append(micro)
        micro //= 2
    return tuple([Rung(micro=m) for m in kept] + [Rung(micro=m, checkpointing=True) for m in checkpointed])


def halves(whole: int) -> list[int]:
    """`whole` rows, half of them, and so on down to one."""
    return [whole >> times for times in range(whole.bit_length())]


def warmup_doubts(key: str, length: int, steps: int, rate: float, whole: str, instead: str) -> Iterator[str]:
    """That optim.`key`, a warm-up of `length` steps, is longer than the `steps` of `whole` for which it warms up."""
    if length > steps > 0:
        yield (
            f"optim.{key} is {counted(length, 'step')}, {whole} {steps}: the learning rate never reaches"
            f" {rate_in_words(rate)}. Lower optim.{key}, or {instead}"
        )


def rate_in_words(value: float) -> str:
    """The rate as a definition file writes it: 2e-4, 0.02."""
    return f"{value:g}" if value >= 1e-3 else re.sub(r"e-0?", "e-", re.sub(r"\.?0+e", "e", f"{value:.3e}"))


def too_short(
    counts: Mapping[str, int | None], unit: str, least: int, sequence: int, notes: Mapping[str, str] | None = None
) -> str:
    """Which split of a dataset has fewer than the `least` units that data.sequence needs, or nothing."""
    for split in ("train", "validation"):
        count = counts.get(split)
        if count is not None and count < least:
            note = (notes or {}).get(split, "")
            return f"has {count} {unit} for {split}{note}, data.sequence {sequence} needs at least {least}"
    return ""
