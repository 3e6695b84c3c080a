"""Stage 2: loads and compiles each source once, and keeps the result in a folder.

    <folder>/<sha256 of the source>-<arguments>-<target>-<Triton's version>/
        outcome.json    {"problem": why the source does not load or compile, or null, "seconds": how long that took}
        cache/ holds Triton's cache as the candidate's own process left it

Files come from a candidate's process and go only to processes of the same source. Only plain files are copied, into
their own folder, after the process has ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpufleet.job import atomic
from gpufleet.job.experiments.kernel.judge import tasks, timing
from gpufleet.job.experiments.kernel.judge.catalog import KernelTask
from gpufleet.job.experiments.kernel.judge.compiler import CACHE
from gpufleet.job.experiments.kernel.judge.worker import Process, Workers
from gpufleet.job.experiments.kernel.spec import Funnel as Limits

MOST_BYTES, MOST_FILES = 1 << 26, 1000  # limits for each source; the files of a kernel take about 50 kB
OUTCOME = "outcome.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOutcome:
    """The outcome of a compilation. If `problem` is None, the source compiles, and `built` has the result."""

    problem: str | None
    built: Path
    seconds: float  # wall-clock, of the first compilation


class Compilation:
    """Stage 2 of one judge. Safe for threads."""

    def __init__(self, workers: Workers, limits: Limits, seed: int) -> None:
        self._workers, self._limits, self._seed = workers, limits, seed
        self._folder = workers.folder / "compiled"
        self._folder.mkdir(exist_ok=True)
        self._under_way: dict[str, threading.Lock] = {}

    @property
    def words(self) -> str:
        """A line that says what stage 2 does on this machine."""
        if self._workers.lacks is not None:
            return f"loads candidates and compiles nothing ({self._workers.lacks})"
        return f"compiles for sm_{self._workers.capability}"

    @property
    def _target(self) -> str:
        compiles = f"sm_{self._workers.capability}-{self._workers.triton}"
        return f"{compiles}-{self._workers.device}" if self._workers.lacks is None else "loaded"

    def compile(self, source: str, sha256: str, task: KernelTask, note: Callable[[Process], None]) -> CompileOutcome:
        """The outcome for a source with the task's arguments. `note` is called with the process after it has ended, if
        one was needed. Raises Lost; such an outcome is not kept.
        """
        arguments = hashlib.sha256(json.dumps(tasks.layouts(task, self._seed)).encode()).hexdigest()[:16]
        name = f"{sha256}-{arguments}-{self._target}"
        # of two threads at the same time, the second waits for the first
        with self._under_way.setdefault(name, threading.Lock()):
            return self._known(name) or self._compile(name, source, task, note)

    def _known(self, name: str) -> CompileOutcome | None:
        folder = self._folder / name
        tree = atomic.read_object(folder / OUTCOME)
        if tree is None:  # also if a power cut has left an incomplete folder, whose files cannot be trusted
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return CompileOutcome(problem=tree["problem"], built=folder / CACHE, seconds=tree["seconds"])

    def _compile(self, name: str, source: str, task: KernelTask, note: Callable[[Process], None]) -> CompileOutcome:
        started = time.perf_counter()
        with self._workers.start(memory_bytes=self._limits.memory_gb * 1e9, compiles=True) as process:
            try:
                ask = timing.bound(process, self._limits.candidate_s)
                problem = timing.load_problem(ask, source)
                if problem is None and self._workers.lacks is None:
                    calls, device = tasks.layouts(task, self._seed), self._workers.device
                    error = ask({"do": "compile", "calls": calls, "device": device})[0].get("problem")
                    problem = None if error is None else f"does not compile: {str(error)[:400]}"
            finally:
                process.end()
                note(process)
            return self._keep(name, problem, process.scratch, time.perf_counter() - started)

    def _keep(self, name: str, problem: str | None, scratch: Path, seconds: float) -> CompileOutcome:
        """Keeps the outcome. The outcome is kept completely or not at all, even if this process dies."""
        made = Path(tempfile.mkdtemp(dir=self._folder, prefix="."))
        (made / CACHE).mkdir()
        with suppress(OSError):  # a candidate may have made the files unreadable
            paths = list(_plain(scratch / CACHE))
            if len(paths) <= MOST_FILES and sum(path.stat().st_size for path in paths) <= MOST_BYTES:
                for path in paths:
                    (made / CACHE / path.parent.name).mkdir(exist_ok=True)
                    shutil.copyfile(path, made / CACHE / path.parent.name / path.name)
        (made / OUTCOME).write_text(json.dumps({"problem": problem, "seconds": seconds}))
        made.rename(self._folder / name)
        return CompileOutcome(problem=problem, built=self._folder / name / CACHE, seconds=seconds)


def _plain(cache: Path) -> Iterator[Path]:
    """The regular files of cache/*/: without links, which could lead anywhere, and without pipes."""
    if not cache.is_dir() or cache.is_symlink():
        return
    for folder in os.scandir(cache):
        if folder.is_dir(follow_symlinks=False):
            for entry in os.scandir(folder.path):
                if entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
