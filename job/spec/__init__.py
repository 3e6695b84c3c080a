"""What a kind of job is before it runs. Pure: no torch, no AWS, nothing of infra, so that the bill can import it.

One module per kind; what they share is in `common` and `decoder`, and `job` has the questions that each kind answers.
A new kind needs its module, its line in _EXPERIMENTS, and the trainer that it names. User mistakes raise ValueError
with the choice to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpufleet.job.spec import convert
from gpufleet.job.spec.common import Checkpoint, Guard, Log, bounded
from gpufleet.job.spec.job import JobConfig

if TYPE_CHECKING:
    from gpufleet.job.spec.command import CommandConfig
    from gpufleet.job.spec.growth import AdamW, Batch, Eval, GrowthConfig, GrowthModel, Precision, TextData
    from gpufleet.job.spec.kernel import KernelConfig
    from gpufleet.job.spec.pretrain import PretrainConfig
    from gpufleet.job.spec.sft import SftConfig
    from gpufleet.job.spec.two_tower import TwoTowerConfig

__all__ = [
    "COMMAND",
    "EXPERIMENTS",
    "KINDS",
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

COMMAND = "command"  # in run.json, where ready-made jobs have the name of their experiment
_EXPERIMENTS = {  # module and config
    "tinystories-growth": "growth:GrowthConfig",
    "sft-h100": "sft:SftConfig",
    "pretrain-d64": "pretrain:PretrainConfig",
    "kernel-sft": "kernel:KernelConfig",
    "two-tower": "two_tower:TwoTowerConfig",
}
_KINDS = {**_EXPERIMENTS, COMMAND: "command:CommandConfig"}


class Kinds(Mapping[str, type[JobConfig]]):
    """The config of each kind, by its name. Imported when it is asked for: a bill is of one kind."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[JobConfig]:
        module, _, config = self._places[name].partition(":")
        found: type[JobConfig] = getattr(import_module(f"{__name__}.{module}"), config)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


EXPERIMENTS = Kinds(_EXPERIMENTS)
KINDS = Kinds(_KINDS)  # as run.json names them


def __getattr__(name: str) -> Any:
    """The config of a kind or a section of growth's, both in `__all__`, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {config: module for module, _, config in (place.partition(":") for place in _KINDS.values())}
    return getattr(import_module(f"{__name__}.{modules.get(name, 'growth')}"), name)


def from_json(experiment: str, tree: dict[str, Any]) -> JobConfig:
    """The typed config of `run.json`'s job.parameters. Raises ValueError naming an unknown experiment, or every unknown
    key and every value of another type or beyond its field's bounds, which are those that the loader checks.
    """
    if experiment not in KINDS:
        raise ValueError(f"job.experiment: {experiment!r:.80} is not one of {', '.join(sorted(KINDS))}")
    kind = KINDS[experiment]
    return convert.from_json(kind, tree, kind.path, kind())
