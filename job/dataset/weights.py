"""Base weights as inputs of a run: a folder somebody downloaded, and beside its files `weights.json` that names them.

    weights.json     schema, files [{name, bytes, sha256}] of every file below the folder, sorted by name

Written once by `gpufleet prepare`, since hashing 16 GB takes a quarter of a minute and previews are many; afterwards a
file is believed by its size, and hashed again by whoever uploads or downloads it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from job import atomic
from job.dataset.prepare import DatasetFile

MANIFEST = "weights.json"
_NEEDED = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsManifest:
    """`files` are all that a node must have, weights.json included; `sha256` is weights.json's."""

    sha256: str
    files: tuple[DatasetFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def paths(folder: Path) -> list[Path]:
    """Every file that counts. Raises ValueError for a folder that is missing or holds no weights."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; download the base weights into it")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path, folder))
    if not any(path.suffix == _NEEDED for path in found):
        raise ValueError(f"{folder}: no *{_NEEDED} file in it; download the base weights in that format")
    return found


def describe(folder: Path) -> WeightsManifest:
    """Hashes every file and writes weights.json. Raises ValueError like `paths`."""
    files = []
    for path in paths(folder):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(folder).as_posix()
        files.append(DatasetFile(name=name, bytes=path.stat().st_size, sha256=digest))
    atomic.write_json(folder / MANIFEST, {"schema": 1, "files": [asdict(file) for file in files]})
    return read(folder)


def read(folder: Path) -> WeightsManifest:
    """What weights.json says. Raises ValueError when there is none, it is damaged, or a file has another size."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{folder}: no {MANIFEST}; `gpufleet prepare` writes it") from error
    try:
        tree = json.loads(content)
        listed = tuple(DatasetFile(**file) for file in tree["files"])
        if tree["schema"] != 1:
            raise ValueError(f"{path}: schema {tree['schema']}, this code reads 1")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}); delete it and prepare again") from error
    for file in listed:
        place = folder / file.name
        if not place.is_file() or place.stat().st_size != file.bytes:
            raise ValueError(f"{place}: not the file that {MANIFEST} names; run `gpufleet prepare` again")
    digest = hashlib.sha256(content).hexdigest()
    return WeightsManifest(
        sha256=digest, files=(*listed, DatasetFile(name=MANIFEST, bytes=len(content), sha256=digest))
    )


def _hidden(path: Path, folder: Path) -> bool:
    """Caches of download tools, and our own list."""
    inside = path.relative_to(folder)
    return any(part.startswith(".") for part in inside.parts) or inside.as_posix() == MANIFEST
