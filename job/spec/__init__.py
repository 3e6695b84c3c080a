"""What a kind of job is before it runs. Pure: no torch, no AWS, nothing of infra, so that the bill can import it.

`job` has the questions that each kind answers, `common` what kinds share, `command` the kind that is the user's own.
The ready-made jobs lie in job/experiments/, which nothing here imports. User mistakes raise ValueError with the choice
to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from gpufleet.job.spec import convert
from gpufleet.job.spec.common import Checkpoint, Guard, Log, bounded
from gpufleet.job.spec.job import JobConfig

__all__ = ["COMMAND", "EXPERIMENTS", "KINDS", "Checkpoint", "Guard", "JobConfig", "Log", "bounded", "from_json"]

COMMAND = "command"  # in run.json, where ready-made jobs have the name of their experiment
_EXPERIMENTS = {  # module and config
    "tinystories-growth": "gpufleet.job.experiments.growth.spec:GrowthConfig",
    "sft-h100": "gpufleet.job.experiments.sft.spec:SftConfig",
    "pretrain-d64": "gpufleet.job.experiments.pretrain.spec:PretrainConfig",
    "kernel-sft": "gpufleet.job.experiments.kernel.spec:KernelConfig",
    "two-tower": "gpufleet.job.experiments.two_tower.spec:TwoTowerConfig",
}
_KINDS = {**_EXPERIMENTS, COMMAND: "gpufleet.job.spec.command:CommandConfig"}


class Kinds(Mapping[str, type[JobConfig]]):
    """The config of each kind, by its name. Imported when it is asked for: a bill is of one kind."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> type[JobConfig]:
        module, _, config = self._places[name].partition(":")
        found: type[JobConfig] = getattr(import_module(module), config)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


EXPERIMENTS = Kinds(_EXPERIMENTS)
KINDS = Kinds(_KINDS)  # as run.json names them


def from_json(experiment: str, tree: dict[str, Any]) -> JobConfig:
    """The typed config of `run.json`'s job.parameters. Raises ValueError naming an unknown experiment, or every unknown
    key and every value of another type or beyond its field's bounds, which are those that the loader checks.
    """
    if experiment not in KINDS:
        raise ValueError(f"job.experiment: {experiment!r:.80} is not one of {', '.join(sorted(KINDS))}")
    kind = KINDS[experiment]
    return convert.from_json(kind, tree, kind.path, kind())
