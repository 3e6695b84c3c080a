"""A work folder for pretrain-d64, with a model small enough for hundreds of steps a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpufleet.job.experiments.pretrain.characters import prepare_characters
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.kind import from_json

PARAMETERS: dict[str, Any] = {
    "steps": 12,
    "device": "cpu",
    "model": {"layers": 2, "width": 32, "head_dim": 16},
    "data": {"source": "generated-sums", "characters": 20_000, "sequence": 32},
    "batch": {"rows": 8, "micro": 2},
    "precision": {"compute": "fp32"},
    "checkpoint": {"interval_s": 3600.0},
    "eval": {"every": 4, "windows": 10, "sample_tokens": 4, "prompts": ["1+2"]},
    "log": {"every": 1},
}


def look_after(step: int, *, begun: int = 0) -> int:
    """The look at the stop request that follows a step, of a start at `begun`: one before the first step, one after
    each, and in each evaluation four, between five micro-batches.
    """
    every: int = PARAMETERS["eval"]["every"]
    return step - begun + 4 * (step // every - begun // every)


def parameters(**changed: Any) -> dict[str, Any]:
    """PARAMETERS with sections laid over it."""
    return {
        key: {**value, **changed.pop(key, {})} if isinstance(value, dict) else changed.pop(key, value)
        for key, value in PARAMETERS.items()
    } | changed


def config(**changed: Any) -> PretrainConfig:
    """The typed config."""
    found = from_json("pretrain-d64", json.loads(json.dumps(parameters(**changed))))
    assert isinstance(found, PretrainConfig)
    return found


def make(workdir: Path, **changed: Any) -> Path:
    """A fresh work folder with a prepared dataset."""
    workdir.mkdir(parents=True, exist_ok=True)
    found = config(**changed)
    prepare_characters(workdir / "data", found.data, seed=found.seed)
    job = {"experiment": "pretrain-d64", "parameters": parameters(**changed)}
    (workdir / "run.json").write_text(json.dumps({"schema": 1, "job": job, "predicted": []}))
    return workdir
