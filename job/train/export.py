"""Weights for others: model.safetensors and meta.json in a folder of their own, complete or not there."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from job import atomic

WEIGHTS, META = "model.safetensors", "meta.json"


def export(folder: Path, module: nn.Module, meta: dict[str, Any]) -> None:
    """Writes the module's weights in their own dtype, then the meta file. Replaces what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}"
    save_file({name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}, temporary)
    temporary.replace(folder / WEIGHTS)
    describe(folder, meta)


def describe(folder: Path, meta: dict[str, Any]) -> None:
    """meta.json beside weights that are there already, with their size and hash."""
    path = folder / WEIGHTS
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    entry = {"name": WEIGHTS, "bytes": path.stat().st_size, "sha256": digest}
    atomic.write_json(folder / META, {"schema": 1, **meta, "files": [entry]})


def copy(source: Path, folder: Path) -> None:
    """An export once more under another name; a hard link where the disk can."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, META):
        (folder / name).unlink(missing_ok=True)
        try:
            os.link(source / name, folder / name)
        except OSError:
            shutil.copyfile(source / name, folder / name)
