"""Checkpoints that the trainer has completed on the disk (job/train/committed.py), as they are seen from outside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import atomic
from job.supervisor.store import StoreError

HELD = ".uploading"  # in a checkpoint's folder while it is sent; job/train/committed.py looks for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A checkpoint that the trainer has completed on disk. `tree` is its commit.json."""

    path: Path
    step: int
    reason: str
    val_loss: float | None
    files: tuple[tuple[str, int], ...]
    requires: tuple[str, ...]
    tree: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size in self.files)


def commits(workdir: Path) -> list[Commit]:
    """Complete checkpoints on disk, lowest step first. What has no valid commit.json is none."""
    found = []
    for path in sorted((workdir / "ckpt").glob("step_*")):
        tree = atomic.read_object(path / "commit.json")
        if tree is None or tree.get("step") != step_of(path.name) or not tree.get("files"):
            continue
        found.append(
            Commit(
                path=path,
                step=tree["step"],
                reason=str(tree.get("reason", "timed")),
                val_loss=finite(tree.get("val_loss")),
                files=tuple((entry["name"], entry["bytes"]) for entry in tree["files"]),
                requires=tuple(tree.get("requires") or ()),
                tree=tree,
            )
        )
    return found


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Marks a checkpoint as under way: the trainer, which prunes beside us, leaves it alone. Without the mark an upload
    slower than two saves would lose its files each time, and nothing would ever be published.
    """
    mark = folder / HELD
    try:
        mark.touch()
    except FileNotFoundError:
        raise StoreError(f"{folder.name} was pruned meanwhile") from None
    except OSError:
        pass  # a disk too full for a mark: as without one
    try:
        yield
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)


def finite(value: Any) -> float | None:
    """A validation loss that can be compared with others; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def step_of(name: str) -> int:
    """The step of a checkpoint's folder; of any other a later one than there is."""
    match = re.fullmatch(r"step_(\d{8})", name)
    return int(match[1]) if match else 10**9
