"""A run's input files, as dataset.json, weights.json, run.json and a checkpoint's manifest list them.

dataset.json   schema, kind, source, facts, files [{name, bytes, sha256}], train [file..], validation [file..]
    weights.json   schema, name, files [{name, bytes, sha256}]

Each manifest is in the folder of its files, and lists all of them except itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gpufleet.job import atomic, progress
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields, Name

DATASET, WEIGHTS = "dataset.json", "weights.json"
# known keys of dataset.json; all other keys are facts
_HEAD = ("schema", "kind", "source", "files", "train", "validation")
M = TypeVar("M", bound="InputManifest")
# for each kind of dataset, a function that reads the facts of this kind, or raises DoubtError
Checks = Mapping[str, Callable[[Fields], object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file, with its name relative to the folder of all files."""

    name: Name
    bytes: int
    sha256: str  # empty if the file is not hashed, because it is in a user's bucket

    @classmethod
    def from_file(cls, path: Path, folder: Path, advance: progress.Advance = lambda count: None) -> InputFile:
        """Name, size and hash of a file below `folder`. Hashes the file."""
        name = path.relative_to(folder).as_posix()
        return cls(name=name, bytes=path.stat().st_size, sha256=atomic.sha256(path, advance))


def hashed(paths: Sequence[Path], folder: Path) -> list[InputFile]:
    """The files below `folder`, with their hashes. Hashes each file."""
    with progress.shown(f"hashing {folder}", sum(path.stat().st_size for path in paths)) as advance:
        return [InputFile.from_file(path, folder, advance) for path in paths]


def digest(files: Iterable[tuple[str, int, str]]) -> str:
    """One hash for files as (name, bytes, hash of the content: a sha256, or S3's ETag), in any order."""
    text = json.dumps(sorted(files), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_file(key: str) -> bool:
    """Whether an object is a file, not the marker of a folder that S3's console makes."""
    return not key.endswith("/") and key != ""


def files(fields: Fields) -> tuple[InputFile, ...]:
    """The `files` of a document. Raises DoubtError if a value is invalid, or if a name leads out of the folder or
    occurs twice, because a stranger may have written the document.
    """
    listed = tuple(reading.filled(InputFile, section) for section in fields.sections("files"))
    if len({file.name for file in listed}) < len(listed):
        raise DoubtError("files names one of them twice")
    return listed


@dataclass(frozen=True, kw_only=True, slots=True)
class InputManifest:
    """`files` are all files that a node needs, including the manifest; `sha256` is the hash of the manifest, which
    lists the hashes of the other files.
    """

    sha256: str
    files: tuple[InputFile, ...]

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsManifest(InputManifest):
    """Base weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest(InputManifest):
    """A prepared dataset. `facts`: numbers and texts of its kind; in a file without the key `facts`, all other keys."""

    source: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()


def read_dataset(folder: Path, checks: Checks) -> DatasetManifest:
    """The content of dataset.json in `folder`; Its kind must be in `checks`; if the file names no kind, it is of the
    first kind. Raises ValueError if dataset.json is missing or damaged. Hashes only dataset.json.
    """

    def manifest(fields: Fields, listed: tuple[InputFile, ...], own: InputFile) -> DatasetManifest:
        kind = fields.take("kind", reading.choice(*checks), next(iter(checks)))
        besides = {key: value for key, value in fields.tree.items() if key not in _HEAD}
        facts = fields.section("facts") if "facts" in fields.tree else Fields(besides)
        checks[kind](facts)
        shards = reading.listed(reading.choice(*(file.name for file in listed)))
        return DatasetManifest(
            sha256=own.sha256,
            files=(*listed, own),
            source=fields.need("source", reading.text),
            kind=kind,
            facts=facts.tree,
            train=fields.take("train", shards, ()),
            validation=fields.take("validation", shards, ()),
        )

    absent = f"not a prepared dataset, because {DATASET} is missing"
    return _read(folder / DATASET, manifest, absent, "prepare the dataset again")


def read_weights(folder: Path) -> WeightsManifest:
    """The content of weights.json in `folder`. Raises ValueError if weights.json is missing or damaged, or if the size
    of a file differs.
    """

    def manifest(fields: Fields, listed: tuple[InputFile, ...], own: InputFile) -> WeightsManifest:
        return WeightsManifest(sha256=own.sha256, files=(*listed, own))

    absent = f"no {WEIGHTS}; `gpufleet prepare` writes it"
    weights = _read(folder / WEIGHTS, manifest, absent, "delete it and prepare again")
    if (other := other_size(folder, weights)) is not None:
        raise ValueError(f"{folder / other}: not the file that {WEIGHTS} names; run `gpufleet prepare` again")
    return weights


def other_size(folder: Path, manifest: InputManifest) -> str | None:
    """The first file that is missing or whose size differs from that in the manifest; None if there is none. No file is
    hashed.
    """
    for file in manifest.files:
        place = folder / file.name
        if not place.is_file() or place.stat().st_size != file.bytes:
            return file.name
    return None


def verify(folder: Path, manifest: DatasetManifest) -> None:
    """Reads and hashes every file. Raises ValueError that names the first one that differs."""
    with progress.shown(f"checking {folder}", manifest.bytes) as advance:
        for file in manifest.files:
            path = folder / file.name
            if not path.is_file():
                raise ValueError(f"{path}: missing; prepare the dataset again")
            if path.stat().st_size != file.bytes or atomic.sha256(path, advance) != file.sha256:
                raise ValueError(f"{path}: not the file that {DATASET} names; prepare the dataset again")


def _read(path: Path, manifest: Callable[[Fields, tuple[InputFile, ...], InputFile], M], absent: str, remedy: str) -> M:
    """What `manifest` returns for the document, its listed files, and the document itself as a file.

    Raises ValueError.
    """
    try:
        content = path.read_bytes()
    except PermissionError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except OSError as error:
        raise ValueError(f"{path.parent}: {absent}") from error
    own = InputFile(name=path.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    try:
        fields = Fields(reading.parse(content))
        fields.schema(1)
        return manifest(fields, files(fields), own)
    except DoubtError as error:
        raise ValueError(f"{path}: damaged, {error}; {remedy}") from error
