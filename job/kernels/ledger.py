"""A file that a stage appends its results to, one JSON object per line: what is in it is not done again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Ledger:
    """<workdir>/stages/NAME.jsonl. A last line that was not written to its end is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def append(self, entry: Mapping[str, Any]) -> None:
        """On the disk when this returns."""
        with self.path.open("ab") as file:
            file.write((json.dumps(entry, sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(dict(entry))
