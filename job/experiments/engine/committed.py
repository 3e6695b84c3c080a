"""Checkpoints in a folder of the local disk: which of them are complete, which one is the best, which ones are removed.

`commit.json` is written last, by an atomic rename. A folder without this file, or with files of other sizes, is not a
checkpoint.
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
    """A committed checkpoint all of whose files have the right sizes. `progress` is the experiment's own state."""

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
    """The complete checkpoints of one config, the oldest first. A checkpoint of another config stays until a checkpoint
    of this config has the same step.
    """

    def __init__(self, folder: Path, config_sha256: str) -> None:
        self._folder, self._config_sha256 = folder, config_sha256

    def __iter__(self) -> Iterator[Found]:
        for path in sorted(self._folder.glob(STEPS)):
            commit = commits.read(path)
            if commit is not None and commit.config_sha256 == self._config_sha256 and _is_complete(path, commit.files):
                yield Found(path=path, commit=commit, progress=atomic.read_object(path / PROGRESS) or {})

    def newest(self) -> Found | None:
        """The checkpoint with the highest step."""
        return max(self, key=lambda checkpoint: checkpoint.step, default=None)

    def best(self, phase: str) -> Found | None:
        """The checkpoint with the lowest validation loss of a phase; if several are equal, the oldest of them. None if
        no step was evaluated.
        """
        return _best(self, phase)

    def add(self, path: Path, commit: Commit, progress: dict[str, Any]) -> None:
        """Commits a checkpoint whose tensors are on the disk. From here on the checkpoint exists."""
        atomic.write_json(path / PROGRESS, progress)
        files = tuple((file.name, file.stat().st_size) for file in sorted(path.iterdir()))
        atomic.write_json(path / COMMIT, replace(commit, files=files).to_json())
        atomic.sync_folder(self._folder)  # needed because a run on the user's own machine resumes from this disk

    def evaluated(self, step: int, val_loss: float) -> None:
        """Adds to the checkpoint of `step` a validation loss that became known after the save. Raises OSError."""
        for checkpoint in self:
            if checkpoint.step == step:
                atomic.write_json(checkpoint.path / COMMIT, replace(checkpoint.commit, val_loss=val_loss).to_json())

    def set_aside(self, checkpoint: Found) -> None:
        """Rejects a checkpoint that is damaged or whose training has diverged, unless there is no other checkpoint."""
        if len(list(self)) > 1:
            (checkpoint.path / COMMIT).replace(checkpoint.path / DAMAGED)

    def go_back(self, step: int, lost_at: int, reason: str) -> Found | None:
        """Makes the newest checkpoint that is not after `step` the newest of all, and writes the retry into its commit.
        None if there is no such checkpoint. Raises OSError. In that case do not resume, because the retries would not
        be recorded.
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
        being uploaded. A folder in which a file is missing is not a checkpoint any more. Checkpoints that cannot be
        removed stay.
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


ENDS = 1 << 20  # number of bytes that are read at each end of a file


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
