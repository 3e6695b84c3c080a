"""What a run was given, told apart without reading all of it: a checkpoint names it, a resume compares."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

ENDS = 1 << 20  # bytes read at either end of a file


def of_weights(folder: Path) -> str:
    """sha256 over each file's name, size, first and last MiB: tens of gigabytes are not read for it. Two fine-tunings
    of one model differ in it, as their first and last tensors do.
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
