"""A command's inputs: local folders, which are hashed here and uploaded once, and s3:// prefixes, which are listed here
and read by the node. Hashes and listings are kept in the project's .gpufleet/; nothing is written into the inputs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic, progress
from gpufleet.job.contract import inputs as listing
from gpufleet.job.contract import reading
from gpufleet.job.contract.bucket import INPUTS
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.reading import DoubtError

FOLDER = ".gpufleet"  # a folder of the project that git ignores
MOST_FILES = 1000  # most files in a local folder, because each file is a resource of the stack and a billed request


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """The content of an input. If `folder` is None, the input is in a bucket, and only the number of its files is
    known.
    """

    uri: str | None
    folder: Path | None
    sha256: str
    count: int
    bytes: int
    files: tuple[InputFile, ...] = ()

    def input_entry(self) -> dict[str, Any]:
        """The input's entry in run.json."""
        return {"uri": self.uri, "sha256": self.sha256, "files": [asdict(file) for file in self.files]}


def read(definition: StackDefinition, root: Path) -> dict[str, Listed]:
    """The existing inputs, by name. Hashes the new and changed files of local folders; for an s3:// prefix, uses the
    list that `listed` kept. Leaves out inputs that do not exist, which `missing` reports.
    """
    inputs = {name: _hashed(folder, root) for name, folder in _local(definition, root) if not _unfit(folder)}
    for name, uri in _remote(definition):
        if (recorded := _recorded_listing(uri, root)) is not None:
            inputs[name] = recorded
    return {name: inputs[name] for name in definition.storage.inputs or {} if name in inputs}


def content(place: str, root: Path) -> Listed | None:
    """The present content of a folder, or the content of an s3:// prefix as `listed` kept it; None if there is none."""
    if place.startswith("s3://"):
        return _recorded_listing(place, root)
    return None if _unfit(root / place) else _hashed(root / place, root)


def missing(definition: StackDefinition, root: Path) -> Iterator[str]:
    """Yields a sentence for each input without which a run cannot begin."""
    for name, folder in _local(definition, root):
        if why := _unfit(folder):
            yield f"storage.inputs.{name}, {(definition.storage.inputs or {})[name]}, {why}."
    for name, uri in _remote(definition):
        if _recorded_listing(uri, root) is None:
            yield f"storage.inputs.{name}, {uri}, is not listed: run `gpufleet prepare {definition.argument}`."


def size(definition: StackDefinition, root: Path) -> int:
    """The bytes of existing local folders that the stack uploads. Nothing is hashed."""
    folders = [folder for _, folder in _local(definition, root) if folder.is_dir()]
    return sum(path.stat().st_size for folder in folders for path in files_of(folder).values())


def listed(uri: str, root: Path, client: Any) -> Listed:
    """Asks S3 for the objects at an s3:// prefix. Returns their list, and keeps it for `read`. Raises GpufleetError if
    there are none.
    """
    bucket, _, path = uri.removeprefix("s3://").partition("/")
    prefix = f"{path.strip('/')}/" if path.strip("/") else ""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    files = [
        (item["Key"].removeprefix(prefix), int(item["Size"]), item.get("ETag", "").strip('"'))
        for page in pages
        for item in page.get("Contents", ())
        if listing.is_file(item["Key"].removeprefix(prefix))
    ]
    if not files:
        raise GpufleetError(f"{uri} has no files: correct storage.inputs, or copy the data there")
    for name, _, _ in files:
        try:
            reading.name(name)
        except DoubtError as error:
            raise GpufleetError(f"{uri}: a name in it {error}: rename it") from None
    objects = Listed(
        uri=uri, folder=None, sha256=listing.digest(files), count=len(files), bytes=sum(file[1] for file in files)
    )
    record = {"uri": uri, "sha256": objects.sha256, "count": objects.count, "bytes": objects.bytes}
    atomic.write_json(_record(uri, root), record)
    return objects


def files_of(folder: Path) -> dict[str, Path]:
    """The files below a folder by name, in order. Links are followed, as in an upload."""
    files: dict[str, Path] = {}
    seen = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        at = Path(where)
        seen.add(at.resolve())
        folders[:] = [name for name in folders if (at / name).resolve() not in seen]  # a link may form a loop
        files |= {(at / name).relative_to(folder).as_posix(): at / name for name in names if (at / name).is_file()}
    return dict(sorted(files.items()))


def _unfit(folder: Path) -> str:
    """Why a folder cannot be uploaded, as a phrase after its name; empty if it can."""
    if not folder.is_dir():
        return f"is missing: there is no folder {folder.resolve()}"
    files = files_of(folder)
    if not files:
        return "has no files"
    if len(files) > MOST_FILES:
        return (
            f"has {len(files):,} files, but at most {MOST_FILES:,} are uploaded one by one: pack them, or copy them"
            " into a bucket and name s3://bucket/prefix"
        )
    for name in files:
        try:
            reading.name(name)
        except DoubtError as error:
            return f"has a file whose name {error}: rename it"
    return ""


def _hashed(folder: Path, root: Path) -> Listed:
    """The folder with hashes. A file with the same size and time as last time is taken to be unchanged."""
    record = _record(str(folder.resolve()), root)
    before = (atomic.read_object(record) or {}).get("files") or {}
    paths = files_of(folder)
    marks = {name: [(status := path.stat()).st_size, status.st_mtime_ns] for name, path in paths.items()}
    now = {name: before[name] for name in paths if (before.get(name) or ())[:2] == marks[name]}
    new = [name for name in paths if name not in now]
    with progress.shown(f"hashing {folder}", sum(marks[name][0] for name in new)) as advance:
        now |= {name: [*marks[name], atomic.sha256(paths[name], advance)] for name in new}
    now = {name: now[name] for name in paths}
    if now != before:
        atomic.write_json(record, {"folder": str(folder.resolve()), "files": now})
    files = tuple(InputFile(name=name, bytes=mark[0], sha256=mark[2]) for name, mark in now.items())
    return Listed(
        uri=None,
        folder=folder,
        sha256=listing.digest((file.name, file.bytes, file.sha256) for file in files),
        count=len(files),
        bytes=sum(file.bytes for file in files),
        files=files,
    )


def _recorded_listing(uri: str, root: Path) -> Listed | None:
    record = atomic.read_object(_record(uri, root))
    if record is None or record.get("uri") != uri:
        return None
    return Listed(uri=uri, folder=None, sha256=record["sha256"], count=record["count"], bytes=record["bytes"])


def _record(place: str, root: Path) -> Path:
    return root / FOLDER / INPUTS / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"


def _local(definition: StackDefinition, root: Path) -> list[tuple[str, Path]]:
    return list(definition.storage.input_folders(root).items())


def _remote(definition: StackDefinition) -> list[tuple[str, str]]:
    return [(name, place) for name, place in (definition.storage.inputs or {}).items() if place.startswith("s3://")]
