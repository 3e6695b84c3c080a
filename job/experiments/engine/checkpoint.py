"""Checkpoints on the local disk: written beside training, committed last.

A save copies the tensors to host memory (training waits for that alone), then one thread writes a
torch.distributed.checkpoint folder, syncs it and commits it (committed.py). Uploading is somebody else's work.

With several ranks each one's thread writes its own part (replicated tensors: one of them does), they meet on a gloo
group of their own, and rank 0 writes the commit when all are done. What N ranks saved, M can read. Of several nodes
the first alone has checkpoints: its ranks write them, read them, and hand on to the others'.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from gpufleet.job.contract.commit import Commit, Reason
from gpufleet.job.experiments.engine.committed import Committed, Found
from gpufleet.job.experiments.engine.parallel import World, hand_on, local, on_host

State = Mapping[str, Mapping[str, Tensor]]  # kind (model, exp_avg, exp_avg_sq) -> parameter name -> tensor
FREE_FACTOR = 1.2  # free space before a save, in sizes of the save
KEEP = 2  # newest ones, beside the best


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """One save that ended. `problem` None: committed."""

    step: int
    reason: Reason
    blocking_s: float
    seconds: float
    bytes: int
    problem: str | None = None


class CheckpointDamagedError(Exception):
    """A committed checkpoint whose files cannot be read, although they have their sizes."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(problem)
        self.step = step


class Checkpoints:
    """The checkpoints of one config in one work folder. At most one is being written at any time."""

    def __init__(self, folder: Path, *, config_sha256: str, world: World | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.committed = Committed(folder, config_sha256)
        self.saved_step = -1  # newest that is committed or on its way
        self._folder, self._world = folder, world or World()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[Saved] | None = None
        self._host: dict[str, dict[str, Tensor]] = {}  # kept from save to save: pinning memory is slow
        self._room: Future[None] | None = None  # that memory, on its way

    def newest(self) -> Found | None:
        """The highest step that is whole. Every rank calls it."""
        found = self._agreed(self.committed.newest() if self._world.is_saving else None)
        if found is not None:
            self.saved_step = found.step
        return found

    def of_step(self, step: int) -> Found:
        """That of a step which rank 0 knows to be whole. Every rank calls it."""
        there = self.committed if self._world.is_saving else ()
        found = self._agreed(next((each for each in there if each.step == step), None))
        assert found is not None
        return found

    def _agreed(self, found: Found | None) -> Found | None:
        """Rank 0's, where other nodes have none of their own."""
        if not self._world.spans_nodes:
            return found
        told = self._world.agree(None if found is None else {"commit": found.commit.to_json(), "own": found.progress})
        if told is None:
            return None
        commit = Commit.from_json(told["commit"])
        return Found(path=self._folder / commit.folder, commit=commit, progress=told["own"])

    def load(self, found: Found, state: State) -> None:
        """Reads the tensors into `state`'s own: of each, this rank's part. However many ranks wrote them.

        Raises CheckpointDamagedError on every rank where one of them cannot, after which `newest` gives the one before
        it, if there is one. What is this node's fault (memory, disk, GPU) is raised as it is.
        """
        problem: str | None = None
        if self._world.is_saving and (cause := _failure(found.path, state)) is not None:
            own = isinstance(cause, OSError | MemoryError | torch.AcceleratorError | torch.OutOfMemoryError)
            if own and not isinstance(cause, FileNotFoundError):
                raise cause  # of this node, and says nothing of the checkpoint
            problem = f"{type(cause).__name__}: {' '.join(str(cause).split())[:100]}"
        problems = [text for text in self._world.every(problem) if text is not None]
        if problems:
            if self._world.first:
                self.committed.set_aside(found)
            self._world.barrier()
            raise CheckpointDamagedError(found.step, f"{found.path.name} cannot be read, {problems[0]}")
        hand_on((tensor for tensors in state.values() for tensor in tensors.values()), self._world)

    def prepare(self, state: State) -> None:
        """Takes host memory for saves of `state`, beside training: the first save does not stop for it."""
        if self._world.is_saving:
            self._room = self._thread.submit(self._make_copies, state)

    @property
    def busy(self) -> bool:
        """A save is on its way."""
        return self._future is not None and not self._future.done()

    def save(self, state: State, commit: Commit, progress: dict[str, Any]) -> list[Saved]:
        """Starts a save, after the one on its way. Gives the saves that ended meanwhile, this one too if it cannot
        even begin. The caller may go on training once this returns. Every rank calls it at the same step.
        """
        ended = self.wait()
        began = time.perf_counter()
        size = sum(t.numel() * t.element_size() for tensors in state.values() for t in tensors.values())
        path = self._folder / commit.folder
        problem = self._world.agree(self._make_way(path, size) if self._world.first else None)
        if problem is not None:
            return [
                *ended,
                Saved(step=commit.step, reason=commit.reason, blocking_s=0, seconds=0, bytes=size, problem=problem),
            ]
        if not self._world.is_saving:
            self.saved_step = commit.step
            return ended
        self._stage(state)
        self.saved_step = commit.step
        blocking = time.perf_counter() - began
        host = {kind: self._host[kind] for kind in state}
        self._future = self._thread.submit(self._write, path, host, commit, progress, size, blocking)
        return ended

    def poll(self) -> list[Saved]:
        """The save that ended since the last look, if one did."""
        return [] if self._future is None or self.busy else self.wait()

    def wait(self) -> list[Saved]:
        """Until nothing is on its way."""
        if self._future is None:
            return []
        future, self._future = self._future, None
        saved = future.result()
        if saved.problem is not None:
            newest = self.committed.newest()
            self.saved_step = -1 if newest is None else newest.step
        return [saved]

    def release(self) -> None:
        """Gives back the host copies: the next phase has other shapes."""
        self._roomy()
        self._host = {}

    def close(self) -> None:
        """Ends the thread, after what it is writing."""
        self._thread.shutdown(wait=True)

    def _stage(self, state: State) -> None:
        """Copies to host memory; returns when it holds exactly this step."""
        self._roomy()
        self._make_copies(state)
        for kind, tensors in state.items():
            for name, tensor in tensors.items():
                local(self._host[kind][name]).copy_(local(tensor).detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _roomy(self) -> None:
        """Waits for the memory that is on its way."""
        if self._room is not None:
            room, self._room = self._room, None
            room.result()

    def _make_copies(self, state: State) -> None:
        """Those that are not there yet, with all their pages."""
        for kind, tensors in state.items():
            kept = self._host.setdefault(kind, {})
            for name, tensor in tensors.items():
                if name not in kept:
                    kept[name] = on_host(tensor, _host_copy(local(tensor)).zero_(), self._world)

    def _write(
        self, path: Path, host: State, commit: Commit, progress: dict[str, Any], size: int, blocking_s: float
    ) -> Saved:
        began = time.perf_counter()
        problem: str | None = None
        try:
            with _without_crc32():
                save(
                    dict(host),
                    # Otherwise a CUDA stream is waited for, although all of this is in host memory: training's own on
                    # one GPU; on other ranks the first GPU's, with a context there for each of them.
                    storage_writer=FileSystemWriter(path, per_thread_copy_ahead=0),
                    process_group=self._world.saves,
                    no_dist=self._world.size == 1,
                )
            if self._world.first:
                self.committed.add(path, commit, progress)
                self.committed.prune(KEEP)
        except (OSError, CheckpointException) as error:
            shutil.rmtree(path, ignore_errors=True)
            cause = _cause(error) if isinstance(error, CheckpointException) else error
            problem = f"{type(cause).__name__}: {cause}"
        return Saved(
            step=commit.step,
            reason=commit.reason,
            blocking_s=blocking_s,
            seconds=time.perf_counter() - began,
            bytes=size,
            problem=problem,
        )

    def _make_way(self, path: Path, size: int) -> str | None:
        """Why there is no room for a save of `size` bytes; None when there is, after pruning if need be. What an
        earlier attempt left torn at `path` goes now: later it would go under the feet of ranks that write.
        """
        shutil.rmtree(path, ignore_errors=True)
        for keep in (KEEP, 1):
            free = shutil.disk_usage(self._folder).free
            if free >= FREE_FACTOR * size:
                return None
            self.committed.prune(keep)
        free = shutil.disk_usage(self._folder).free
        if free >= FREE_FACTOR * size:
            return None
        return f"{free:,} bytes free in {self._folder}, {FREE_FACTOR * size:,.0f} needed"


def all_finite(state: State) -> Tensor:
    """Whether every number of this rank's part is finite: a scalar bool on its device, which nothing waits for."""
    parts = [local(tensor) for tensors in state.values() for tensor in tensors.values()]
    ends = [end for part in parts if part.is_floating_point() and part.numel() for end in part.aminmax()]
    return torch.stack([end.float() for end in ends]).isfinite().all()  # a NaN is both ends of what holds it


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save spends a third of its CPU time on checksums of its own (300 MB: 0.29 s with, 0.19 s without, 2 cores,
    2026-11-21). What is uploaded is hashed, and sizes are compared before a checkpoint is believed.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _host_copy(tensor: Tensor) -> Tensor:
    """Room for `tensor` in host memory: pinned, so that the copy is quick, or where there is no more of that, plain."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def _failure(path: Path, state: State) -> BaseException | None:
    """Reads a checkpoint's tensors into `state`'s own. Why it could not, if so."""
    reader = FileSystemReader(path)
    try:
        reader.read_metadata()  # `load` takes whatever goes wrong there for a file that is not there
    except Exception as error:  # noqa: BLE001 - unpickling raises anything
        return error
    try:
        load({kind: dict(tensors) for kind, tensors in state.items()}, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        return _cause(error)
    return None


def _cause(error: CheckpointException) -> BaseException:
    """What one rank met; `error` itself is all ranks' tracebacks."""
    (cause, _), *_ = error.failures.values()
    return cause
