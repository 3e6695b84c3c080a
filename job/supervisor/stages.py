"""What the stages within and after training have finished so far: <workdir>/stages/*.jsonl, mirrored to <run>/stages/.

A stage appends one JSON object per line and never changes a line, so a line that is in the store is work that no later
attempt repeats. S3 cannot append: a file that grew is sent anew as a whole, up to its last whole line.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from job import atomic
from job.contract import bucket
from job.contract.workdir import STAGES
from job.supervisor.store import Store, StoreError


class Mirror:
    """One per attempt: `restore` first, then sends what grew."""

    def __init__(self, store: Store, workdir: Path) -> None:
        self._store, self._folder = store, workdir / STAGES
        self._sent: dict[str, int] = {}  # bytes
        self._sending = threading.Lock()
        self.added = 0  # lines of this attempt that are in the store

    def restore(self) -> int:
        """Replaces <workdir>/stages by what earlier attempts left. The number of lines. Raises StoreError."""
        lines = 0
        with self._sending:
            shutil.rmtree(self._folder, ignore_errors=True)
            for entry in self._store.entries(bucket.STAGES):
                name = entry.key.removeprefix(bucket.STAGES)
                if "/" in name or not name.endswith(".jsonl"):
                    continue
                content = whole_lines(self._store.get_bytes(entry.key) or b"")
                atomic.write_bytes(self._folder / name, content)
                self._sent[name] = len(content)
                lines += content.count(b"\n")
        return lines

    def send(self) -> None:
        """Every file that grew since the last call. From any thread: an older reading is never put last. Raises
        StoreError, also where the disk does not give a file: it is tried again.
        """
        with self._sending:
            for path in sorted(self._folder.glob("*.jsonl")):
                try:
                    content = whole_lines(path.read_bytes())
                except OSError as error:
                    raise StoreError(f"{path.name} cannot be read: {error}") from error
                sent = self._sent.get(path.name, 0)
                if len(content) != sent:
                    self._store.put_bytes(content, f"{bucket.STAGES}{path.name}")
                    self._sent[path.name] = len(content)
                    self.added += content[sent:].count(b"\n")


def whole_lines(content: bytes) -> bytes:
    """Without a last line that was not written to its end."""
    return content[: content.rfind(b"\n") + 1]
