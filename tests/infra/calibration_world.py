"""A measurement of tinystories-growth, as a calibration of a project holds it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import calibration
from gpufleet.job import measured
from gpufleet.job.experiments.growth.spec import GrowthConfig
from tests.infra.cost_definitions import definition

PHASES = ("dense", "moe", "grown")


def measurement(config: GrowthConfig | None = None, **changes: Any) -> dict[str, Any]:
    """A probe of tinystories-growth on an A10G; `changes` replace whole keys."""
    phases = [
        {
            "name": name,
            "steps": 60,
            "step_ms": {"median": 50.0 * (index + 1), "q1": 49.0 * (index + 1), "q3": 51.0 * (index + 1)},
            "memory_gb": 6.0,
            "evaluation_s": 0.5,
            "save": {"bytes": 1_200_000_000, "blocks_s": 0.2, "write_s": 2.0},
            "boundary_s": 30.0 if index else None,
        }
        for index, name in enumerate(PHASES)
    ]
    tree = measured.document(
        experiment=changes.get("experiment", "tinystories-growth"),
        parameters=asdict(config or GrowthConfig()),
        device={"kind": "cuda", "name": "NVIDIA A10G", "count": 1, "ranks": 1, "memory_gb": 24.1},
        versions={"torch": "2.13.0"},
        source="probe of 200 steps",
        at="2026-11-21T18:00:00Z",
        measured=phases,
        start_s=40.0,
        finish_s=12.0,
    )
    return {**tree, **changes}


def place(root: Path, tree: Any, name: str = "nvidia-a10g", folder: str = "calibrations") -> Path:
    path = root / folder / "tinystories-growth" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def find(root: Path, wanted: StackDefinition | None = None, type_: str = "g5.2xlarge") -> Any:
    return calibration.find(wanted or definition(), load_catalog().instances[type_], root)
