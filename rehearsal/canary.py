"""Flies a canary on the embedded AWS: with the same code, but rehearsed nodes instead of EC2's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from gpufleet.infra.canary import stacks
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.canary.stacks import EMBEDDED, Scale
from gpufleet.rehearsal import environment, scratch
from gpufleet.rehearsal import fis as fis  # adds interruption notices to moto's FIS
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import NodeRunner

HABITS = Habits(relaunch_s=1.0)  # a notice comes 120 s ahead, as on AWS; tests of other behaviour use shorter times


def flight(
    project: Path,
    cloud: Cloud,
    *,
    say: Callable[[str], None],
    real: bool | None = None,
    by_notice: bool = True,
    scale: Scale = EMBEDDED,
) -> Flight:
    """A flight in a new scratch project on this cloud. `real`: see Engine.open."""
    scratch.make(project, {})
    settings = cloud.environment()

    def engine(name: str) -> AbstractContextManager[Any]:
        with suppress(FileNotFoundError):
            (project / "in-process.json").unlink()  # files of the earlier stack, which was destroyed
        return Engine.open(project, settings, name, real=real)

    stacks.choose(project, "r1", cloud.region, cloud.client, scale, notice=by_notice)
    return Flight(
        project=project,
        scale=scale,
        client=cloud.client,
        engine=engine,
        environment=environment.scratch(settings),
        by_notice=by_notice,
        say=say,
    )


def nodes(cloud: Cloud, folder: Path) -> NodeRunner:
    return NodeRunner(cloud, folder, lambda root: Path(sys.executable).parent)
