"""Checkpoints that the trainer has completed on the disk (job/train/committed.py), as they are seen from outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from job.contract import commit
from job.contract.commit import HELD, Commit
from job.contract.workdir import CHECKPOINTS, STEPS
from job.supervisor.store import StoreError


def commits(workdir: Path) -> list[Commit]:
    """Complete checkpoints on disk, lowest step first. What has no valid commit.json is none."""
    found = [(path, commit.read(path)) for path in sorted((workdir / CHECKPOINTS).glob(STEPS))]
    return [each for path, each in found if each is not None and each.folder == path.name]


@contextmanager
def upload_mark(folder: Path) -> Iterator[None]:
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
