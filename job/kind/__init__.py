"""The kinds of jobs, as far as they are known before a run. The package imports no torch, AWS or infra, so that the
bill can use it. The module `job` has the questions that each kind answers, `common` the parts that kinds share, and
`command` the kind for a user's own script. The ready-made jobs are in job/experiments/, which has its own table of
their names; everything else works without that folder. A user's mistake raises ValueError, whose text says what is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.job.kind import convert
from gpufleet.job.kind.common import Checkpoint, Guard, Log, bounded
from gpufleet.job.kind.job import JobConfig, named

__all__ = ["COMMAND", "EXPERIMENTS", "KINDS", "Checkpoint", "Guard", "JobConfig", "Log", "bounded", "from_json"]

COMMAND = "command"  # the kind's name in run.json, where a ready-made job has the name of its experiment
_READY_MADE = "gpufleet.job.experiments:CONFIGS"  # only here does gpufleet refer to the ready-made jobs


class Kinds(Mapping[str, type[JobConfig]]):
    """The config of each kind, by its name. A config is imported only when it is used, because a bill is about one kind
    only.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> type[JobConfig]:
        config: type[JobConfig] = named(self.places[name])
        return config

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _ready_made() -> Mapping[str, str]:
    """The place (`module:Class`) of each ready-made job's config, by its name; empty without job/experiments/."""
    try:
        places: Mapping[str, str] = named(_READY_MADE)
    except ModuleNotFoundError as error:
        if error.name != _READY_MADE.partition(":")[0]:
            raise
        return {}
    return places


EXPERIMENTS = Kinds(_ready_made())
KINDS = Kinds(
    {**EXPERIMENTS.places, COMMAND: "gpufleet.job.kind.command:CommandConfig"}
)  # where configs are defined, by the names of their kinds in run.json


def from_json(experiment: str, tree: dict[str, Any]) -> JobConfig:
    """The typed config of `run.json`'s job.parameters. Raises ValueError that names an unknown experiment, or every
    unknown key and every value that has a wrong type or is outside of its field's bounds. The loader makes the same
    checks.
    """
    if experiment not in KINDS:
        raise ValueError(f"job.experiment: {experiment!r:.80} is not one of {', '.join(sorted(KINDS))}")
    kind = KINDS[experiment]
    return convert.from_json(kind, tree, kind.path, kind())
