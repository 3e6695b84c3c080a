"""JSON Lines files to which a phase after training appends its results, so that a restart does not repeat them. `read`
reads any such file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from gpufleet.job import atomic
from gpufleet.job.contract.reading import DoubtError

T = TypeVar("T")


def read(path: Path) -> list[Any]:
    """The value of every line. Only a line feed ends a line. str.splitlines is not used, because it also splits at
    U+0085, U+2028 and U+2029, which JSON allows inside of texts. Raises OSError and ValueError.
    """
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


class Ledger:
    """<workdir>/stages/NAME.jsonl. When it is opened, an incomplete last line is removed. Any other line that is not a
    JSON object, as after a power cut, is skipped, and its result is made again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        self.entries: list[dict[str, Any]] = atomic.objects(whole)

    def read(self, read: Callable[[dict[str, Any]], T]) -> list[T]:
        """The entries, converted by `read`. An entry for which `read` raises DoubtError is skipped too."""
        converted = []
        for entry in self.entries:
            with suppress(DoubtError):
                converted.append(read(entry))
        return converted

    def append(self, entry: Mapping[str, Any]) -> None:
        """Appends the entry. When the method returns, the entry is safely on the disk."""
        with self.path.open("ab") as file:
            file.write((json.dumps(entry, sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(dict(entry))
