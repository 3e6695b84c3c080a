"""What a candidate's processes hold: memory, and room in the scratch folder. Read from outside. Linux only."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are
MOST_ENTRIES = 10_000


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory, and the files without a name that the processes hold open: those of memfd_create are memory that
    belongs to no process, and those of a folder take room that no look into it would find.
    """
    pids, nameless = list(pids), {}
    for pid in pids:
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with suppress(OSError):
                    found = entry.stat()
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        nameless[found.st_dev, found.st_ino] = found.st_blocks * BLOCK_BYTES
    return sum(map(_resident, pids)) + sum(nameless.values())


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def folder_bytes(folder: Path, most: int) -> int:
    """Room that it takes on the disk, not much more than `most` looked at; more than `most` where it holds more than
    MOST_ENTRIES or a folder that cannot be looked into, closed or too deep.
    """
    used, seen, left = 0, set(), [os.fspath(folder)]
    while left and used <= most:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if (key := (found.st_dev, found.st_ino)) not in seen:
                            seen.add(key)
                            used += found.st_blocks * BLOCK_BYTES
                            left += [entry.path] if stat.S_ISDIR(found.st_mode) else []
                    if len(seen) > MOST_ENTRIES:
                        return most + 1
        except (FileNotFoundError, NotADirectoryError):
            pass  # it has gone meanwhile
        except OSError:
            return most + 1
    return used
