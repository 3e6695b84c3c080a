"""Compiled graphs in a file, so that a later start need not compile them again: <workdir>/compile_cache/.

There is one file for each phase, rung, rank and kind of device. The file contains what
`torch.compiler.save_cache_artifacts` returns (Inductor's graphs with their Triton kernels, AOTAutograd's, autotuning's
choices) after its sha256. The supervisor downloads such files before the trainer starts, and uploads new files.

torch looks a graph up by a hash of the graph itself, torch, Triton, settings and device: a file with other graphs is
useless, but never wrong. The hash includes the device's number, as in cuda:3, so each rank needs a file of its own
(torch 2.13's source, read 2026-11-21: `FxGraphCachePickler` reduces a tensor to its metadata, device index included).

torch unpickles these files, and a pickle can run any code. So only files that this trainer has written, or that come
from the run's own bucket, may be in the folder.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter

import torch
from torch.compiler._cache import CacheArtifactManager, CacheInfo

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import COMPILED, GRAPHS
from gpufleet.job.experiments.engine.experiment import Phase, Session
from gpufleet.job.kind.common import Rung

SHA256_BYTES = 32
HIT, MISS, UNCACHEABLE = "fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"


class CompileCache:
    """The compiled graphs of one phase. Make this object before the first step: it loads an earlier start's graphs."""

    def __init__(self, session: Session, phase: Phase, rung: Rung) -> None:
        self._session, self._phase = session, phase
        self._path = session.workdir / GRAPHS / name(session, phase, rung)
        self._held: set[tuple[str, str]] = set()  # what the file contains, as torch's kinds and keys
        self._graphs, self._cached, self._total_s = 0, 0, 0.0
        CacheArtifactManager.clear()  # removes graphs of other phases; torch has no public function for that
        # The check of a growth sets this to "highest", and a start does not set it. Both settings give the same
        # products, but torch hashes them differently.
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
        began = time.perf_counter()
        self._load()
        self._counts, self._compiled_s = _counts(), _compiled_s() - (time.perf_counter() - began)

    def keep(self) -> str | None:
        """A line about graphs that were compiled since the last call; None if there were none. Writes new graphs into
        the file; if the disk is full, only the file is lost. The call takes so little time that it can be made at every
        step.
        """
        new = _counts() - self._counts
        if not new:
            return None
        seconds = _compiled_s() - self._compiled_s
        self._counts, self._compiled_s = self._counts + new, self._compiled_s + seconds
        hits, graphs = new[HIT], new[HIT] + new[MISS] + new[UNCACHEABLE]
        self._graphs, self._cached, self._total_s = self._graphs + graphs, self._cached + hits, self._total_s + seconds
        try:
            self._write()
            self._record()
        except OSError as error:
            self._session.say(f"compiled graphs are not kept: {error}")
        source = {0: "", graphs: ", from the cache"}.get(hits, f", {hits} of {graphs} graphs from the cache")
        return f"compiled in {seconds:.1f} s{source}"

    def _load(self) -> None:
        """Loads the file; if the file is damaged or does not fit, only prints a message."""
        try:
            content = self._path.read_bytes()
        except OSError:
            return
        digest, graphs = content[:SHA256_BYTES], content[SHA256_BYTES:]
        problem = None if hashlib.sha256(graphs).digest() == digest else "it is damaged"
        if problem is None:
            try:
                cache_info = torch.compiler.load_cache_artifacts(graphs)
                problem = "torch does not know its format" if cache_info is None else None
                self._held = set() if cache_info is None else _keys(cache_info)
            except Exception as error:  # noqa: BLE001 - unpickling raises anything
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            self._session.say(f"{self._path.name} cannot be used, graphs are compiled again: {problem}")

    def _write(self) -> None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        graphs, cache_info = saved
        if _keys(cache_info) <= self._held:
            return
        atomic.write_bytes(self._path, hashlib.sha256(graphs).digest() + graphs)
        self._held = _keys(cache_info)

    def _record(self) -> None:
        """Writes compiled.json: for each phase of this start, the time of compilation, and the number of graphs that
        the cache had.
        """
        if not self._session.world.first_here:
            return
        path = self._session.workdir / COMPILED
        own = {"seconds": round(self._total_s, 3), "graphs": self._graphs, "cached": self._cached}
        atomic.write_json(path, {**(atomic.read_object(path) or {}), self._phase.name: own})


def name(session: Session, phase: Phase, rung: Rung) -> str:
    """The file's name: a hash of everything on which the graphs depend, except the settings, which are part of the name
    of the supervisor's folder.
    """
    world = session.world
    checkpointing = "-recompute" if rung.products_too else "-checkpointing" if rung.checkpointing else ""
    parts = (
        f"{phase.name}-micro{rung.micro}{checkpointing}",
        f"rank{world.local_rank}of{world.size}",
        session.device.name,
        f"torch{torch.__version__}",
    )
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part) for part in parts) + ".bin"


def _keys(cache_info: CacheInfo) -> set[tuple[str, str]]:
    return {(kind, key) for kind, keys in cache_info.artifacts.items() for key in keys}


def _counts() -> Counter[str]:
    """The numbers of this process's graphs so far that the cache had, and that it did not have."""
    from torch._dynamo.utils import counters

    return Counter({key: counters["inductor"][key] for key in (HIT, MISS, UNCACHEABLE)})


def _compiled_s() -> float:
    """Seconds in the compiler since torch.compiler.reset, which ends each phase."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent()["total_wall_time"])
