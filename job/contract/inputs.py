"""Files that a run takes in, as dataset.json, weights.json, run.json and a checkpoint's manifest name them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpufleet.job import atomic, progress
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields

DATASET, WEIGHTS = "dataset.json", "weights.json"  # the list of the files, beside them


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file, its name relative to the place of them all."""

    name: str
    bytes: int
    sha256: str  # empty: nobody has hashed it, as of what lies in a bucket of the user's

    @classmethod
    def from_file(cls, path: Path, folder: Path, advance: progress.Advance = lambda count: None) -> InputFile:
        """Name, size and hash of a file below `folder`, hashed now."""
        name = path.relative_to(folder).as_posix()
        return cls(name=name, bytes=path.stat().st_size, sha256=atomic.sha256(path, advance))


def hashed(paths: Sequence[Path], folder: Path) -> list[InputFile]:
    """Files below `folder`, hashed now."""
    with progress.shown(f"hashing {folder}", sum(path.stat().st_size for path in paths)) as advance:
        return [InputFile.from_file(path, folder, advance) for path in paths]


def digest(files: Iterable[tuple[str, int, str]]) -> str:
    """One name for files as (name, bytes, what tells their content: a sha256, or S3's ETag), in whatever order they
    come.
    """
    text = json.dumps(sorted(files), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_file(key: str) -> bool:
    """Whether an object is a file, not the mark of a folder as S3's console leaves one."""
    return not key.endswith("/") and key != ""


def files(fields: Fields) -> tuple[InputFile, ...]:
    """The `files` of a document. Raises DoubtError, also where a name would lead out of their folder or is there twice:
    whoever wrote it may be a stranger.
    """
    found = tuple(
        InputFile(
            name=each.need("name", reading.name),
            bytes=each.need("bytes", reading.whole_number),
            sha256=each.need("sha256", reading.text),
        )
        for each in fields.sections("files")
    )
    if len({file.name for file in found}) < len(found):
        raise DoubtError("files names one of them twice")
    return found
