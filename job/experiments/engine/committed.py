"""Checkpoints in a folder of the local disk: which are whole, which is the best, which are removed.

`commit.json` is written last, by an atomic rename. A folder without this file, or with files of other sizes, does not
count.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract import commit as commits
from gpufleet.job.contract.commit import COMMIT, HELD, Commit, Retry
from gpufleet.job.contract.workdir import STEPS

PROGRESS = "progress.json"
DAMAGED = "damaged.json"  # the new name of commit.json if the tensors cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A committed checkpoint whose files all have their sizes. `progress` is the experiment's own state."""

    path: Path
    commit: Commit
    progress: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.commit.step

    @property
    def val_loss(self) -> float | None:
        """The validation loss of exactly this step; None if this step was not evaluated."""
        return self.commit.val_loss


class Committed:
    """The whole checkpoints of one config, oldest first. Another config's checkpoint stays until one of this config
    replaces it at the same step.
    """

    def __init__(self, folder: Path, config_sha256: str) -> None:
        self._folder, self._config_sha256 = folder, config_sha256

    def __iter__(self) -> Iterator[Found]:
        for path in sorted(self._folder.glob(STEPS)):
            commit = commits.read(path)
            if commit is not None and commit.config_sha256 == self._config_sha256 and _is_complete(path, commit.files):
                yield Found(path=path, commit=commit, progress=atomic.read_object(path / PROGRESS) or {})

    def newest(self) -> Found | None:
        """The highest step."""
        return max(self, key=lambda checkpoint: checkpoint.step, default=None)

    def best(self, phase: str) -> Found | None:
        """The lowest validation loss of a phase, the oldest of equals; None if nothing was evaluated."""
        return _best(self, phase)

    def add(self, path: Path, commit: Commit, progress: dict[str, Any]) -> None:
        """Commits a checkpoint whose tensors are on the disk. From here on the checkpoint exists."""
        atomic.write_json(path / PROGRESS, progress)
        files = tuple((file.name, file.stat().st_size) for file in sorted(path.iterdir()))
        atomic.write_json(path / COMMIT, replace(commit, files=files).to_json())
        atomic.sync_folder(self._folder)  # a run on the user's own machine resumes from its disk

    def evaluated(self, step: int, val_loss: float) -> None:
        """Adds to the checkpoint of `step` a validation loss that became known after the save. Raises OSError."""
        for checkpoint in self:
            if checkpoint.step == step:
                atomic.write_json(checkpoint.path / COMMIT, replace(checkpoint.commit, val_loss=val_loss).to_json())

    def set_aside(self, checkpoint: Found) -> None:
        """Rejects a checkpoint that is damaged or has diverged, unless there is no other."""
        if len(list(self)) > 1:
            (checkpoint.path / COMMIT).replace(checkpoint.path / DAMAGED)

    def go_back(self, step: int, lost_at: int, reason: str) -> Found | None:
        """Makes the newest checkpoint up to `step` the newest of all, with the retry in its commit. None if there is no
        such checkpoint. Raises OSError; then do not resume, because the retries would not be counted.
        """
        good = max(
            (checkpoint for checkpoint in self if checkpoint.step <= step),
            key=lambda checkpoint: checkpoint.step,
            default=None,
        )
        if good is not None:
            for later in [checkpoint for checkpoint in self if checkpoint.step > good.step]:
                self.set_aside(later)
            retry = Retry(lost_at=lost_at, from_step=good.step, reason=reason)
            changed = replace(good.commit, retries=(*good.commit.retries, retry))
            atomic.write_json(good.path / COMMIT, changed.to_json())
        return good

    def prune(self, keep: int) -> None:
        """Removes all checkpoints except the newest `keep`, the best of the newest checkpoint's phase, and one that is
        being uploaded. A checkpoint that has lost a file no longer counts; checkpoints that the disk cannot remove
        stay.
        """
        there = list(self)
        best = _best(there, there[-1].commit.phase) if there else None
        for checkpoint in there[:-keep]:
            if (best is not None and checkpoint.path == best.path) or (checkpoint.path / HELD).exists():
                continue
            shutil.rmtree(checkpoint.path, ignore_errors=True)


def _best(among: Iterable[Found], phase: str) -> Found | None:
    of_phase = [checkpoint for checkpoint in among if checkpoint.commit.phase == phase]
    evaluated = [(checkpoint.val_loss, checkpoint) for checkpoint in of_phase if checkpoint.val_loss is not None]
    return min(evaluated, key=lambda pair: pair[0], default=(None, None))[1]


def _is_complete(path: Path, files: Iterable[tuple[str, int]]) -> bool:
    try:
        return all((path / name).stat().st_size == size for name, size in files)
    except OSError:
        return False


ENDS = 1 << 20  # bytes read at either end of a file


def weights_identity(folder: Path) -> str:
    """One sha256 over each file's name, size, first and last MiB: reading tens of gigabytes would take too long.
    Fine-tunings of one model have different identities, because their first and last tensors differ.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("[!.]*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS), os.SEEK_SET)
            digest.update(file.read(ENDS))
    return digest.hexdigest()
