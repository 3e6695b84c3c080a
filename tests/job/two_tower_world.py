"""A work folder for two-tower: 5 folds of toy towers on generated relevance, or the rehearsal's own size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpufleet.job.experiments.two_tower.folds import Indices
from gpufleet.job.experiments.two_tower.ranking import Tables, generate, prepare_ranking
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind import from_json

REHEARSAL: dict[str, Any] = {
    "epochs": 15,
    "steps_per_epoch": 10,
    "first_stop": 5,
    "device": "cpu",
    "towers": {
        "sentence": 64,
        "heads": 4,
        "head": 24,
        "fusion": 96,
        "query": [64, 48, 32],
        "embedding": 64,
        "model": [96, 64, 48, 32],
    },
    "data": {"source": "generated-relevance", "queries": 60, "models": 120, "folds": 5},
    "weak": {"queries": 40},
    "checkpoint": {"interval_s": 3600.0},
    "log": {"every": 10},
}
TOY: dict[str, Any] = {
    **REHEARSAL,
    "epochs": 4,
    "steps_per_epoch": 3,
    "patience": 2,
    "first_stop": 2,
    "towers": {
        "sentence": 16,
        "heads": 2,
        "head": 6,
        "fusion": 10,
        "query": [9, 8],
        "embedding": 7,
        "model": [12, 8],
    },
    "data": {"source": "generated-relevance", "queries": 23, "models": 31, "folds": 5},
    "weak": {"queries": 12, "similarity": 0.2, "confidence": 0.2, "neighbours": 5},
}
TABLES = generate(23, 31, 12, 16, seed=3)  # of TOY's sizes


def flipped(queries: Indices | int) -> Tables:
    """TABLES, but of these queries every judgement is another."""
    labels = TABLES.labels.copy()
    labels[queries] = (labels[queries] + 1) % 3
    return replace(TABLES, labels=labels)


def config(tree: dict[str, Any] = TOY, **changed: Any) -> TwoTowerConfig:
    """`changed` replaces whole sections."""
    found = from_json("two-tower", {**tree, **changed})
    assert isinstance(found, TwoTowerConfig)
    return found


def make(workdir: Path, tree: dict[str, Any] = TOY, **changed: Any) -> Path:
    """A fresh work folder with run.json and a prepared dataset."""
    workdir.mkdir(parents=True, exist_ok=True)
    parameters = {**tree, **changed}
    run = {"schema": 1, "job": {"experiment": "two-tower", "parameters": parameters}, "predicted": []}
    (workdir / "run.json").write_text(json.dumps(run))
    prepare_ranking(workdir / "data", config(tree, **changed))
    return workdir


def read(workdir: Path, name: str) -> Any:
    """A JSON file of the work folder."""
    return json.loads((workdir / name).read_text())
