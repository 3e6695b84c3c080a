"""Exports weights: chooses the weights that a run leaves, and writes model.safetensors and meta.json into a folder.

An export is complete once meta.json exists.
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
    """Writes the module's weights in their own dtype, then the meta file. Replaces an earlier export."""
    begin(folder)
    temporary = folder / f".{WEIGHTS}"
    save_file({name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}, temporary)
    temporary.replace(folder / WEIGHTS)
    describe(folder, meta)


def begin(folder: Path) -> None:
    """Makes room for an export. Removes meta.json first: new weights must never be beside an old meta.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).unlink(missing_ok=True)


def describe(folder: Path, meta: dict[str, Any]) -> None:
    """Writes meta.json, with the weights' size and hash, for weights that exist already."""
    atomic.write_json(folder / META, {"schema": 1, **meta, "files": [entry(folder, WEIGHTS)]})


def entry(folder: Path, name: str) -> dict[str, Any]:
    """The entry of a file in meta.json. After the call, the file is safely on the disk."""
    with (folder / name).open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": name, "bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def copy(source: Path, folder: Path) -> None:
    """Copies an export to another name, by a hard link if the disk supports it."""
    begin(folder)
    for name in (WEIGHTS, META):
        (folder / name).unlink(missing_ok=True)
        try:
            os.link(source / name, folder / name)
        except OSError:
            shutil.copyfile(source / name, folder / name)


def deliver(experiment: Experiment, phase: Phase, module: nn.Module, last: Weights, lowest: Weights | None) -> Weights:
    """Puts the weights to export into the module and returns them. These are the `last` weights, or the weights of the
    best evaluation with a checkpoint on this disk. The log, and `delivered` in the experiment's `outcome`, say which
    weights they are. `lowest`: the best evaluation, whether it has a checkpoint or not.
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
        why = "has no checkpoint on this disk" if asked else "is better, but `deliver` does not ask for it"
        session.say(f"the best evaluation, {lowest.val_loss:.4f} at step {lowest.step}, {why}")
    candidates = {"last": last._asdict(), "best": None if lowest is None else lowest._asdict()}
    experiment.outcome = {"delivered": {"choice": "best" if asked else "last", **weights._asdict(), **candidates}}
    return weights


def val_loss(weights: Weights) -> float:
    """The validation loss for comparisons: infinite if not evaluated."""
    return math.inf if weights.val_loss is None else weights.val_loss


def _said(weights: Weights) -> str:
    evaluated = "not evaluated" if weights.val_loss is None else f"validation {weights.val_loss:.4f}"
    return f"step {weights.step} ({evaluated})"
