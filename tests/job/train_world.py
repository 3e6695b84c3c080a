"""A work folder as the supervisor hands it to the trainer, with a model small enough for hundreds of steps a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gpufleet.job import atomic
from gpufleet.job.contract.messages import Stop
from gpufleet.job.contract.run import Task
from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine.experiment import Experiment
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests

STEPS = 4  # per phase
PARAMETERS: dict[str, Any] = {
    "steps_per_phase": STEPS,
    "device": "cpu",
    "model": {"vocab": 160, "layers": 1, "width": 16, "heads": 2, "ffn": 32, "experts": 4, "new_layers": 1},
    "data": {"source": "generated-stories", "sequence": 16, "stories": 200},
    "batch": {"sequences": 4},
    "optim": {"lr": [1e-2, 3e-3, 3e-3], "warmup_after_growth": 2},
    "precision": {"compute": "fp32", "phase3_state": "fp32"},
    "checkpoint": {"interval_s": 3600.0},
    "eval": {"every": 2, "windows": 4, "sample_tokens": 3, "prompts": ["One day"]},
    "log": {"every": 1},
}


def make(workdir: Path, **changed: Any) -> Path:
    """A fresh work folder; `changed` lays sections over PARAMETERS."""
    parameters = {key: dict(value) if isinstance(value, dict) else value for key, value in PARAMETERS.items()}
    for key, value in changed.items():
        if isinstance(value, dict):
            parameters.setdefault(key, {}).update(value)
        else:
            parameters[key] = value
    workdir.mkdir(parents=True, exist_ok=True)
    prepare.prepare(workdir / "data", sources.Generated(count=200, seed=1), model_vocab=parameters["model"]["vocab"])
    tree = {"schema": 1, "job": {"experiment": "tinystories-growth", "parameters": parameters}, "predicted": []}
    (workdir / "run.json").write_text(json.dumps(tree))
    return workdir


class StopAt(Requests):
    """Asks for a stop at the `look`-th time that the trainer looks, and for saves where `saves` says so."""

    def __init__(
        self,
        workdir: Path,
        look: int | None = None,
        *,
        save: bool = True,
        saves: tuple[int, ...] = (),
        ends: bool = False,
    ) -> None:
        super().__init__(workdir)
        self._ends = ends
        self._left, self._saved, self._saves = look, save, set(saves)
        self._looks = 0

    def stop(self) -> Stop | None:
        if self._left is None:
            return None
        self._left -= 1
        return Stop(reason="test", save=self._saved, ends=self._ends) if self._left < 0 else None

    def save(self) -> bool:
        self._looks += 1
        return self._looks in self._saves


def train(workdir: Path, requests: Requests | None = None, *, rung: int = 0) -> int:
    """One start of the trainer in this process; its exit code."""
    return trainer.train(workdir, rung, requests or StopAt(workdir))


def experiment(workdir: Path) -> Experiment:
    """Opened, nothing trained."""
    opened, _ = trainer.start(Task.read(workdir), workdir, 0, StopAt(workdir), World())
    return opened


def final_hash(workdir: Path) -> str:
    """Of the final weights."""
    meta = atomic.read_object(workdir / "final" / "meta.json")
    assert meta is not None
    digest: str = meta["files"][0]["sha256"]
    return digest


def export_bytes(workdir: Path) -> tuple[int, int]:
    """Bytes of the weights that a run has left beside its checkpoints, headers apart; and what their sizing says."""
    paths = [path for name in ("exports", "final") for path in (workdir / name).rglob("*.safetensors")]
    found = sum(tensor.nbytes for path in paths for tensor in load_file(path).values())
    config = Task.read(workdir).config
    return found, sum((*config.sizes().exports.values(), *config.sizes().final.values()))


def committed(workdir: Path) -> list[int]:
    """Steps with a commit.json."""
    return sorted(int(path.parent.name[5:]) for path in (workdir / "ckpt").glob("step_*/commit.json"))


def records(workdir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
