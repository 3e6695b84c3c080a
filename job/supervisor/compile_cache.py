"""Keeps compiled graphs after the end of a node and of a run: <workdir>/compile_cache/*.bin, mirrored to
<bucket>/compile_cache/.

The graphs are in a folder beside the runs, one for each experiment and settings, so that a later run of the stack can
use them too. A stop does not wait for graphs: one file at a time is sent while nothing else is being sent, and no file
is sent after a stop has begun. A failure is logged and ignored, because without these files training only starts more
slowly.

The trainer unpickles the files, and a pickle can run any code. So the files come only from the run's own bucket: nodes
of this stack, and everybody who may write to its bucket, can run code on its later nodes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from gpufleet.job import measured
from gpufleet.job.contract import bucket
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.workdir import GRAPHS
from gpufleet.job.supervisor.store import GivenUpError, Store, bucket_uri, open_store

# The most bytes that a node sends or downloads, so that a damaged or foreign folder does not cost minutes.
MOST_BYTES = 512 * 1024 * 1024


def place(run: RunFile, uri: str) -> str:
    """The address of this run's graphs, from the run's `uri` and all settings that can change a step's time. (A graph
    depends on fewer settings, and torch itself distinguishes graphs.)
    """
    shapes = json.dumps([run.experiment, measured.settings(run.experiment, run.parameters)], sort_keys=True)
    return f"{bucket_uri(uri, run.run)}/{bucket.GRAPHS}/{hashlib.sha256(shapes.encode()).hexdigest()[:16]}"


class GraphMirror:
    """One attempt's mirror of the folder of compiled graphs. The methods raise no errors."""

    def __init__(
        self,
        run: RunFile,
        store: Store,
        workdir: Path,
        say: Callable[[str], None],
        opened: Callable[[str], Store] = open_store,
    ) -> None:
        self._store, self._folder, self._say = opened(place(run, store.uri)), workdir / GRAPHS, say
        self._sent: dict[str, int] = {}  # the time of writing of each file that was sent
        self._running: Future[None] | None = None

    def restore(self, check: Callable[[], None]) -> None:
        """Replaces <workdir>/compile_cache by the stored graphs. `check` is called before each file, and may raise an
        error.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        total = 0
        try:
            entries = [e for e in self._store.entries("") if e.key.endswith(".bin") and "/" not in e.key]
            for entry in entries:
                check()
                if total + entry.bytes > MOST_BYTES:
                    self._say(
                        f"compiled graphs: {entry.key} is not restored, because {MOST_BYTES / 1e6:.0f} MB are enough"
                    )
                    continue
                total += entry.bytes
                self._store.get_file(entry.key, self._folder / entry.key)
                self._sent[entry.key] = (self._folder / entry.key).stat().st_mtime_ns
        except OSError as error:
            self._say(f"compiled graphs not restored, they are compiled again: {error}")
        if self._sent:
            self._say(f"compiled graphs: {len(self._sent)} files, {total / 1e6:.1f} MB from {self._store.uri}")

    def poll(self, executor: Executor) -> None:
        """Begins to send one new file, unless another file is being sent."""
        if self._running is not None and not self._running.done():
            return
        there = sorted(self._folder.glob("*.bin"))
        new = [path for path in there if self._sent.get(path.name) != path.stat().st_mtime_ns]
        self._running = executor.submit(self._send, new[0]) if new else None

    def cancel(self) -> None:
        """Stops sending the file that is being sent."""
        self._store.cancel()

    def _send(self, path: Path) -> None:
        """Sends a file once, even if that fails."""
        try:
            self._sent[path.name] = path.stat().st_mtime_ns
            if sum(file.stat().st_size for file in self._folder.glob("*.bin")) > MOST_BYTES:
                self._say(f"compiled graphs: {path.name} is not kept, because {MOST_BYTES / 1e6:.0f} MB are enough")
                return
            self._store.put_file(path, path.name)
        except GivenUpError:
            return
        except OSError as error:
            self._say(f"compiled graphs not kept: {error}")
