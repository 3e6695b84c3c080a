"""A scratch project: it stands for a user's checkout, in a folder that exists as long as one embedded AWS.

The program is the same. The scratch project has its own definitions, engine state and settings, and a copy of the
prices of the user's project. Variables of the user's environment that concern AWS or Pulumi are not passed to it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpufleet.infra.catalog import files, project_prices
from gpufleet.infra.errors import GpufleetError
from gpufleet.rehearsal.engine import write_project

FULL_BYTES = 100_000_000  # a rehearsal writes 10 to 60 MB, and its bucket is among the temporary files


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks `folder`. Raises GpufleetError if another process rehearses there, or if it cannot be written."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+", encoding="ascii")
    except OSError as error:
        raise GpufleetError(
            f"{folder}: a rehearsal must write there but cannot ({error.strerror}: {error.filename}); correct that,"
            " or rehearse in another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GpufleetError(
                f"{folder.name} is being rehearsed already, by process {path.read_text(encoding='ascii').strip()}; "
                "wait for it or end it, or rehearse in another folder"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def make(folder: Path, definitions: Mapping[str, str]) -> Path:
    """Makes a project in a new `folder` with these definition files (texts by stack name)."""
    (folder / "stacks").mkdir(parents=True)
    for name, text in definitions.items():
        (folder / "stacks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    for newest in files.folders(project_prices(Path.cwd()))[-1:]:
        shutil.copytree(newest, folder / "prices" / newest.name)
    write_project(folder)
    return folder


def full_disks(*folders: Path) -> Iterator[str]:
    """Sentences about full disks, which may be the cause of a failure that does not mention them, such as an incomplete
    file.
    """
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < FULL_BYTES:
            yield (
                f"The disk of {folder} has {free / 1e6:.0f} MB left, which may be the cause: free some space and try"
                " again."
            )
