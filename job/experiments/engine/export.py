"""Weights for others: which ones a run leaves, and model.safetensors with meta.json in a folder of their own.

An export is complete where meta.json is.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from gpufleet.job import atomic
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Weights

WEIGHTS, META = "model.safetensors", "meta.json"


def export(folder: Path, module: nn.Module, meta: dict[str, Any]) -> None:
    """Writes the module's weights in their own dtype, then the meta file. Replaces what is there."""
    begin(folder)
    temporary = folder / f".{WEIGHTS}"
    save_file({name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}, temporary)
    temporary.replace(folder / WEIGHTS)
    describe(folder, meta)


def begin(folder: Path) -> None:
    """Makes room for an export. What is there counts no more: never new weights beside the meta file of old ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).unlink(missing_ok=True)


def describe(folder: Path, meta: dict[str, Any]) -> None:
    """meta.json beside weights that are there already, with their size and hash."""
    atomic.write_json(folder / META, {"schema": 1, **meta, "files": [entry(folder, WEIGHTS)]})


def entry(folder: Path, name: str) -> dict[str, Any]:
    """What meta.json says of a file, which is on the disk from then on."""
    with (folder / name).open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": name, "bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def copy(source: Path, folder: Path) -> None:
    """An export once more under another name; a hard link where the disk can."""
    begin(folder)
    for name in (WEIGHTS, META):
        (folder / name).unlink(missing_ok=True)
        try:
            os.link(source / name, folder / name)
        except OSError:
            shutil.copyfile(source / name, folder / name)


def deliver(experiment: Experiment, phase: Phase, module: nn.Module, last: Weights, lowest: Weights | None) -> Weights:
    """The weights to leave, which the module holds then. They are its `last`, or those of the best evaluation that has
    a checkpoint on this disk. Said in the log and, under `delivered`, in the experiment's `outcome`. `lowest`: the best
    evaluation, with a checkpoint or without.
    """
    session = experiment.session
    checkpoints, asked = session.checkpoints, session.config.delivers_best
    saved = checkpoints.committed.best(phase.name) if asked and session.world.first else None
    best = session.world.agree(None if saved is None else (saved.step, saved.val_loss))
    weights = last if best is None else min(last, Weights(*best), key=val_loss)
    if weights.step != last.step:
        checkpoints.load(checkpoints.of_step(weights.step), {"model": experiment.weights(module)})
    which = "the last" if weights.step == last.step else f"the best evaluated; the last: {_said(last)}"
    session.say(f"delivered: {_said(weights)}, {which}")
    if lowest is not None and val_loss(lowest) < val_loss(weights):
        why = "has no checkpoint on this disk" if asked else "is better and not asked for (deliver)"
        session.say(f"the best evaluation, {lowest.val_loss:.4f} at step {lowest.step}, {why}")
    told = {"last": last._asdict(), "best": None if lowest is None else lowest._asdict()}
    experiment.outcome = {"delivered": {"choice": "best" if asked else "last", **weights._asdict(), **told}}
    return weights


def val_loss(weights: Weights) -> float:
    """For comparisons: of weights that were not evaluated infinite."""
    return math.inf if weights.val_loss is None else weights.val_loss


def _said(weights: Weights) -> str:
    evaluated = "not evaluated" if weights.val_loss is None else f"validation {weights.val_loss:.4f}"
    return f"step {weights.step} ({evaluated})"
