"""Measures what a candidate's processes use: memory, and space in the scratch folder. The use is measured from outside
of these processes, on Linux only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BLOCK_BYTES = 512  # the unit of st_blocks, on every file system
MOST_ENTRIES = 10_000


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory, and the unnamed files that the processes hold open: memory from memfd_create belongs to no
    process, and the space of unlinked files is not in any listing.
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
    """The bytes that the folder takes on the disk. The sum ends soon after it has exceeded `most`. The result is also
    above `most` if the folder has more than MOST_ENTRIES entries, or contains a folder that cannot be read or is too
    deep.
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
