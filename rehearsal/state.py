"""What the steps of a rehearsal, its checks and its report share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.definition.model import StackDefinition
from rehearsal.cloud import Cloud
from rehearsal.engine import Engine
from rehearsal.node import NodeRunner
from rehearsal.timeline import Timeline
from rehearsal.watch import Watch


@dataclass(kw_only=True, slots=True)
class Rehearsal:
    """One rehearsal: where it works, what it works on, and what it has seen."""

    definition: StackDefinition  # the rehearsal's form
    folder: Path  # rehearsals/<stack>/<run>.unfinished
    project: Path  # the scratch project
    root: Path  # the user's project
    timeline: Timeline
    cloud: Cloud
    engine: Engine
    runner: NodeRunner
    watch: Watch | None = None
    torch_s: float = 0.0  # importing torch in a new process, on this machine

    @property
    def name(self) -> str:
        return self.definition.name
