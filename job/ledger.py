"""JSON Lines: a file that a stage appends its results to, so that what is in it is not done again; and any file."""

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
    """The value of every line. Only a line feed ends one: str.splitlines would also end it at U+0085, U+2028 and
    U+2029, which JSON allows inside texts. Raises OSError and ValueError.
    """
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


class Ledger:
    """<workdir>/stages/NAME.jsonl. A last line that was not written to its end is cut off when it is opened; another
    that is no JSON object, left by a lost power supply, is passed over: its result is made again.
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
        """The entries as `read` gives them. One that it doubts is passed over too."""
        found = []
        for entry in self.entries:
            with suppress(DoubtError):
                found.append(read(entry))
        return found

    def append(self, entry: Mapping[str, Any]) -> None:
        """On the disk when this returns."""
        with self.path.open("ab") as file:
            file.write((json.dumps(entry, sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(dict(entry))
