"""What a kind of job is before it runs. Pure: no torch, no AWS, nothing of infra, so that the bill can import it.

One module per kind; what they share is in `common` and `decoder`, and `job` has the questions that each kind answers.
A new kind needs its module, its line in EXPERIMENTS, and the trainer that it names. User mistakes raise ValueError with
the choice to make.
"""

from __future__ import annotations

from typing import Any

from gpufleet.job.spec import command, convert
from gpufleet.job.spec.command import CommandConfig
from gpufleet.job.spec.common import Checkpoint, Guard, Log, bounded
from gpufleet.job.spec.growth import AdamW, Batch, Eval, GrowthConfig, GrowthModel, Precision, TextData
from gpufleet.job.spec.job import JobConfig
from gpufleet.job.spec.kernel import KernelConfig
from gpufleet.job.spec.pretrain import PretrainConfig
from gpufleet.job.spec.sft import SftConfig
from gpufleet.job.spec.two_tower import TwoTowerConfig

__all__ = [
    "EXPERIMENTS",
    "AdamW",
    "Batch",
    "Checkpoint",
    "CommandConfig",
    "Eval",
    "GrowthConfig",
    "GrowthModel",
    "Guard",
    "JobConfig",
    "KernelConfig",
    "Log",
    "Precision",
    "PretrainConfig",
    "SftConfig",
    "TextData",
    "TwoTowerConfig",
    "bounded",
    "from_json",
]

EXPERIMENTS: dict[str, type[JobConfig]] = {
    "tinystories-growth": GrowthConfig,
    "sft-h100": SftConfig,
    "pretrain-d64": PretrainConfig,
    "kernel-sft": KernelConfig,
    "two-tower": TwoTowerConfig,
}


KINDS: dict[str, type[JobConfig]] = {**EXPERIMENTS, command.NAME: CommandConfig}  # as run.json names them


def from_json(experiment: str, tree: dict[str, Any]) -> JobConfig:
    """The typed config of `run.json`'s job.parameters. Raises ValueError naming an unknown experiment, or every unknown
    key and every value of another type or beyond its field's bounds, which are those that the loader checks.
    """
    if experiment not in KINDS:
        raise ValueError(f"job.experiment: {experiment!r:.80} is not one of {', '.join(sorted(KINDS))}")
    kind = KINDS[experiment]
    return convert.from_json(kind, tree, kind.path, kind())
