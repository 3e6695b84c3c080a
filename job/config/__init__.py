"""Run configs: what an experiment trains, as frozen dataclasses. Pure: no torch, no AWS, nothing of infra.

One module per experiment; what they share is in `common`. User mistakes raise ValueError with the choice to make.
"""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from job.config.common import Checkpoint, Log, bounded
from job.config.growth import AdamW, Batch, Eval, GrowthConfig, GrowthModel, Precision, TextData
from job.config.kernel import KernelConfig
from job.config.pretrain import PretrainConfig
from job.config.sft import SftConfig
from job.config.two_tower import TwoTowerConfig

__all__ = [
    "EXPERIMENTS",
    "KEEPS_BEST",
    "AdamW",
    "Batch",
    "Checkpoint",
    "Eval",
    "GrowthConfig",
    "GrowthModel",
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

JobConfig = GrowthConfig | SftConfig | PretrainConfig | KernelConfig | TwoTowerConfig

KEEPS_BEST: tuple[type[JobConfig], ...] = (PretrainConfig,)  # what it exports is its best checkpoint, not its last

EXPERIMENTS: dict[str, type[JobConfig]] = {
    "tinystories-growth": GrowthConfig,
    "sft-h100": SftConfig,
    "pretrain-d64": PretrainConfig,
    "kernel-sft": KernelConfig,
    "two-tower": TwoTowerConfig,
}


def from_json(experiment: str, tree: dict[str, Any]) -> JobConfig:
    """The typed config of `run.json`'s job.parameters. Raises ValueError naming an unknown key or experiment."""
    if experiment not in EXPERIMENTS:
        raise ValueError(f"job.experiment: {experiment!r} is not one of {', '.join(sorted(EXPERIMENTS))}")
    config: JobConfig = _build(EXPERIMENTS[experiment], tree, "job.parameters")
    return config


def _build(cls: type[Any], tree: dict[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(tree) - {f.name for f in fields(cls)})
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}")
    return cls(**{key: _value(hints[key], value, f"{path}.{key}") for key, value in tree.items()})


def _value(hint: Any, value: Any, path: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, path)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    if hint is float and isinstance(value, int):
        return float(value)
    if isinstance(hint, types.UnionType) and value is None:
        return None
    return value
