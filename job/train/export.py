"""Weights for others: model.safetensors and meta.json in a folder of their own. It is complete where meta.json is."""

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
