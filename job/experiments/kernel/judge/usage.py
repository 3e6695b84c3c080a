"""What a candidate's processes use: memory, and room in the scratch folder. Read from outside. Linux only."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BLOCK_BYTES = 512  # of st_blocks, on every file system
MOST_ENTRIES = 10_000


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory, and the unnamed files that the processes hold open: memory from memfd_create belongs to no
    process, and unlinked files take room that no listing shows.
    """
    pids, nameless = list(pids), {}
    for pid in pids:
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        nameless[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES
    return sum(map(_resident, pids)) + sum(nameless.values())


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def folder_bytes(folder: Path, most: int) -> int:
    """The room that the folder takes on the disk, counted up to about `most`. It is more than `most` if the folder has
    more than MOST_ENTRIES, or contains a folder that is closed or too deep to read.
    """
    used, seen, folders = 0, set(), [os.fspath(folder)]
    while folders and used <= most:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if (key := (status.st_dev, status.st_ino)) not in seen:
                            seen.add(key)
                            used += status.st_blocks * BLOCK_BYTES
                            folders += [entry.path] if stat.S_ISDIR(status.st_mode) else []
                    if len(seen) > MOST_ENTRIES:
                        return most + 1
        except (FileNotFoundError, NotADirectoryError):
            pass  # the file was removed meanwhile
        except OSError:
            return most + 1
    return used
