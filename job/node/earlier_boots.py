"""Reads the records of earlier boots of the run, and counts those without progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from gpufleet.job.contract.attempt import SUPERSEDED, AttemptRecord, Beat, last_beat, record
from gpufleet.job.contract.bucket import MANIFEST_KEY
from gpufleet.job.contract.gathering import LET_GO

MOST_FUTILE = 3  # after this many boots in a row without progress, the run ends


def newest_manifest(keys: Iterable[str]) -> str | None:
    """The key of the newest published checkpoint's manifest; None if there is none."""
    return max((key for key in keys if MANIFEST_KEY.fullmatch(key)), default=None)


def read(folder: Path, aside: Callable[[str], None]) -> list[AttemptRecord]:
    """The records in a folder, one per file."""
    return [replace(record(path.read_bytes(), aside), instance=path.stem) for path in sorted(folder.glob("*.json"))]


def beat(folder: Path, instance: str, aside: Callable[[str], None]) -> Beat | None:
    """The node's last heartbeat in a folder; None if there is none."""
    path = folder / f"{instance}.jsonl"
    return last_beat(path.read_bytes(), aside) if path.exists() else None


def futile_boots(records: Iterable[AttemptRecord], manifest: str | None) -> int:
    """The number of the newest boots in a row that made no progress. Such a boot published no checkpoint that is newer
    than `manifest`, the newest one now, and left no results of a phase after training before the machine was taken or
    lost. Boots that AWS interrupted with a notice, or that ended because other nodes were missing, are not included.
    """
    count = 0
    for boot in sorted(records, key=lambda boot: boot.booted_at, reverse=True):
        noticed = boot.exit is not None and (boot.exit.notice or boot.exit.reason in (SUPERSEDED, LET_GO))
        if boot.manifest_at_boot != manifest or (boot.results and (noticed or boot.exit is None)):
            break
        count += not noticed
    return count
