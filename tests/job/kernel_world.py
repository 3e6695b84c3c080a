"""A work folder of kernel-sft: one layer, generated pairs, two tasks, few planted candidates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpufleet.job.experiments.kernel.pairs import prepare_kernels
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.kind import from_json

PARAMETERS: dict[str, Any] = {
    "epochs": 1,
    "device": "cpu",
    "model": {
        "family": "qwen3",
        "vocab": 300,
        "layers": 1,
        "width": 32,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "ffn": 64,
        "rope_scaling": "none",
    },
    "data": {"source": "generated-kernels", "samples": 12, "row": 1024},
    "batch": {"tokens": 3072, "micro_tokens": 1024},
    "optim": {"lr": 3e-3, "warmup": 1},
    "precision": {"compute": "fp32"},
    "checkpoint": {"interval_s": 3600.0},
    "generate": {"tasks": 2, "candidates": 2, "max_tokens": 6},
    "funnel": {"planted": 4, "workers": 2, "candidate_s": 30.0, "memory_gb": 2.0, "trials": 3},
    "log": {"every": 1},
}


def config(**changed: Any) -> dict[str, Any]:
    """PARAMETERS with sections laid over them."""
    parameters: dict[str, Any] = json.loads(json.dumps(PARAMETERS))
    for key, value in changed.items():
        if isinstance(value, dict):
            parameters.setdefault(key, {}).update(value)
        else:
            parameters[key] = value
    return parameters


def typed(**changed: Any) -> KernelConfig:
    found = from_json("kernel-sft", config(**changed))
    assert isinstance(found, KernelConfig)
    return found


def make(workdir: Path, **changed: Any) -> Path:
    """A fresh work folder with its dataset."""
    workdir.mkdir(parents=True, exist_ok=True)
    prepare_kernels(workdir / "data", typed(**changed))
    tree = {"schema": 1, "job": {"experiment": "kernel-sft", "parameters": config(**changed)}, "predicted": []}
    (workdir / "run.json").write_text(json.dumps(tree))
    return workdir


def read(workdir: Path, name: str) -> Any:
    """A JSON file of the work folder."""
    return json.loads((workdir / name).read_text())


def results(workdir: Path) -> Any:
    return read(workdir, "results.json")


def lines(workdir: Path, stage: str) -> list[dict[str, Any]]:
    """What a stage has appended."""
    path = workdir / "stages" / f"{stage}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
