"""Compiled graphs that outlive node and run: <workdir>/compile_cache/*.bin, mirrored to <bucket>/compile_cache/.

They lie beside the runs, in a folder per experiment and settings, so that a later run of the stack starts with them
too. No stop waits for them: one file at a time goes out while nothing else does, and none once a stop is under way.
Whatever fails is said and left, because without these files training is only slower to start.

The trainer unpickles them, and a pickle can run anything: they come from the run's own bucket and from nowhere else.
Nodes of this stack, and whoever may write to its bucket, can therefore run code on its later nodes.
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
from gpufleet.job.supervisor.store import GivenUpError, Store, open_store, parent

MOST_BYTES = 512 * 1024 * 1024  # of one node, in and out: a damaged or foreign folder must not cost minutes


def place(run: RunFile, uri: str) -> str:
    """Where the graphs of this run are, `uri` being the run's: by all settings that can change a step's time, which are
    more than shape a graph. torch itself tells one graph from another.
    """
    shapes = json.dumps([run.experiment, measured.settings(run.experiment, run.parameters)], sort_keys=True)
    return f"{parent(uri)}/{bucket.GRAPHS}/{hashlib.sha256(shapes.encode()).hexdigest()[:16]}"


class GraphMirror:
    """One attempt's mirror. Nothing in here raises."""

    def __init__(
        self,
        run: RunFile,
        store: Store,
        workdir: Path,
        say: Callable[[str], None],
        opened: Callable[[str], Store] = open_store,
    ) -> None:
        self._store, self._folder, self._say = opened(place(run, store.uri)), workdir / GRAPHS, say
        self._sent: dict[str, int] = {}  # names, with their time of writing
        self._running: Future[None] | None = None

    def restore(self, check: Callable[[], None]) -> None:
        """Replaces <workdir>/compile_cache by what is kept. `check` is called before each file and may raise."""
        shutil.rmtree(self._folder, ignore_errors=True)
        total = 0
        try:
            entries = [e for e in self._store.entries("") if e.key.endswith(".bin") and "/" not in e.key]
            for entry in entries:
                check()
                if total + entry.bytes > MOST_BYTES:
                    self._say(f"compiled graphs: {entry.key} is left out, {MOST_BYTES / 1e6:.0f} MB are enough")
                    continue
                total += entry.bytes
                self._store.get_file(entry.key, self._folder / entry.key)
                self._sent[entry.key] = (self._folder / entry.key).stat().st_mtime_ns
        except OSError as error:
            self._say(f"compiled graphs not restored, they are compiled again: {error}")
        if self._sent:
            self._say(f"compiled graphs: {len(self._sent)} files, {total / 1e6:.1f} MB from {self._store.uri}")

    def poll(self, executor: Executor) -> None:
        """Begins to send a file that is new, if there is one and none is on its way."""
        if self._running is not None and not self._running.done():
            return
        there = sorted(self._folder.glob("*.bin"))
        new = [path for path in there if self._sent.get(path.name) != path.stat().st_mtime_ns]
        self._running = executor.submit(self._send, new[0]) if new else None

    def cancel(self) -> None:
        """Gives up what is on its way."""
        self._store.cancel()

    def _send(self, path: Path) -> None:
        """Sends once, whatever comes of it."""
        try:
            self._sent[path.name] = path.stat().st_mtime_ns
            if sum(each.stat().st_size for each in self._folder.glob("*.bin")) > MOST_BYTES:
                self._say(f"compiled graphs: {path.name} is not kept, {MOST_BYTES / 1e6:.0f} MB are enough")
                return
            self._store.put_file(path, path.name)
        except GivenUpError:
            return
        except OSError as error:
            self._say(f"compiled graphs not kept: {error}")
