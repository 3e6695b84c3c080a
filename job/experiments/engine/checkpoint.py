"""Writes checkpoints to the local disk while training goes on, and commits them last.

A save first copies the tensors to host memory; training waits only for this. Then a thread writes a
torch.distributed.checkpoint folder, syncs it and commits it (committed.py). The supervisor uploads it.

With several ranks each rank's thread writes its own part (one rank writes a replicated tensor); these threads
communicate over a gloo group of their own, and rank 0 writes the commit when all are done. A checkpoint can be read by
any number of ranks. If there are several nodes, only the first has checkpoints: its ranks write and read them, and send
the tensors to the ranks of the other nodes.
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
FREE_FACTOR = 1.2  # free space that is required before a save, as a multiple of its size
KEEP = 2  # number of newest checkpoints to keep, in addition to the best one


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A save that ended. `problem` is None if the save was committed."""

    step: int
    reason: Reason
    blocking_s: float
    seconds: float
    bytes: int
    problem: str | None = None


class CheckpointDamagedError(Exception):
    """The files of a committed checkpoint have the right sizes, but cannot be read."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(problem)
        self.step = step


class Checkpoints:
    """The checkpoints of one config in a work folder. At most one is being written at any time."""

    def __init__(self, folder: Path, *, config_sha256: str, world: World | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.committed = Committed(folder, config_sha256)
        self.saved_step = -1  # the newest step that is committed or being saved
        self._folder, self._world = folder, world or World()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[Saved] | None = None
        # host memory, which is kept between saves because pinning memory is slow
        self._host: dict[str, dict[str, Tensor]] = {}
        self._room: Future[None] | None = None  # the thread that prepares this memory

    def newest(self) -> Found | None:
        """The complete checkpoint with the highest step. Must be called by every rank."""
        checkpoint = self._agreed(self.committed.newest() if self._world.is_saving else None)
        if checkpoint is not None:
            self.saved_step = checkpoint.step
        return checkpoint

    def of_step(self, step: int) -> Found:
        """The checkpoint of a step for which rank 0 has a complete checkpoint. Must be called by every rank."""
        there = self.committed if self._world.is_saving else ()
        checkpoint = self._agreed(next((candidate for candidate in there if candidate.step == step), None))
        assert checkpoint is not None
        return checkpoint

    def _agreed(self, checkpoint: Found | None) -> Found | None:
        """The checkpoint that rank 0 has found, because other nodes have none."""
        if not self._world.spans_nodes:
            return checkpoint
        agreed = self._world.agree(
            None if checkpoint is None else {"commit": checkpoint.commit.to_json(), "own": checkpoint.progress}
        )
        if agreed is None:
            return None
        commit = Commit.from_json(agreed["commit"])
        return Found(path=self._folder / commit.folder, commit=commit, progress=agreed["own"])

    def load(self, checkpoint: Found, state: State) -> None:
        """Reads this rank's part of every tensor into `state`. Any number of ranks may have written it.

        Raises CheckpointDamagedError on every rank if one of them cannot read its part; `newest` then returns the
        previous checkpoint, if there is one. Errors of this node (memory, disk, GPU) are raised unchanged.
        """
        problem: str | None = None
        if self._world.is_saving and (cause := _failure(checkpoint.path, state)) is not None:
            own = isinstance(cause, OSError | MemoryError | torch.AcceleratorError | torch.OutOfMemoryError)
            if own and not isinstance(cause, FileNotFoundError):
                raise cause  # an error of this node, which does not mean that the checkpoint is damaged
            problem = f"{type(cause).__name__}: {' '.join(str(cause).split())[:100]}"
        problems = [text for text in self._world.every(problem) if text is not None]
        if problems:
            if self._world.first:
                self.committed.set_aside(checkpoint)
            self._world.barrier()
            raise CheckpointDamagedError(checkpoint.step, f"{checkpoint.path.name} cannot be read, {problems[0]}")
        hand_on((tensor for tensors in state.values() for tensor in tensors.values()), self._world)

    def prepare(self, state: State) -> None:
        """Allocates host memory for saves of `state` while training goes on, so that the first save need not wait for
        it.
        """
        if self._world.is_saving:
            self._room = self._thread.submit(self._make_copies, state)

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._future is not None and not self._future.done()

    def save(self, state: State, commit: Commit, progress: dict[str, Any]) -> list[Saved]:
        """Starts a save, after the previous save has ended. Returns the saves that have ended meanwhile, and this save
        if it cannot begin. Training may continue as soon as the method returns. Must be called by every rank at the
        same step.
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
        """The save that has ended since the last call; None if there is none."""
        return [] if self._future is None or self.busy else self.wait()

    def wait(self) -> list[Saved]:
        """Waits until no save is being written; returns the saves that have ended."""
        if self._future is None:
            return []
        future, self._future = self._future, None
        saved = future.result()
        if saved.problem is not None:
            newest = self.committed.newest()
            self.saved_step = -1 if newest is None else newest.step
        return [saved]

    def release(self) -> None:
        """Frees the host copies, because the next phase has other shapes."""
        self._roomy()
        self._host = {}

    def close(self) -> None:
        """Ends the saving thread once its write is done."""
        self._thread.shutdown(wait=True)

    def _stage(self, state: State) -> None:
        """Copies the tensors to host memory; returns when the copy has exactly this step."""
        self._roomy()
        self._make_copies(state)
        for kind, tensors in state.items():
            for name, tensor in tensors.items():
                local(self._host[kind][name]).copy_(local(tensor).detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _roomy(self) -> None:
        """Waits until `prepare` has allocated its memory."""
        if self._room is not None:
            room, self._room = self._room, None
            room.result()

    def _make_copies(self, state: State) -> None:
        """Allocates the missing host memory, and touches all of its pages."""
        for kind, tensors in state.items():
            copies = self._host.setdefault(kind, {})
            for name, tensor in tensors.items():
                if name not in copies:
                    copies[name] = on_host(tensor, _host_copy(local(tensor)).zero_(), self._world)

    def _write(
        self, path: Path, host: State, commit: Commit, progress: dict[str, Any], size: int, blocking_s: float
    ) -> Saved:
        began = time.perf_counter()
        problem: str | None = None
        try:
            with _without_crc32():
                save(
                    dict(host),
                    # Without this the writer would wait for a CUDA stream, although all tensors are in host memory. On
                    # a single GPU, this is the stream of training itself. On other ranks, it is a stream of the first
                    # GPU, on which each rank would make a context.
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
        """Why there is no room for a save of `size` bytes; None if there is room, perhaps after older checkpoints were
        removed. An incomplete folder of an earlier attempt at `path` is removed at this point, because later other
        ranks may already be writing there.
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
    """Whether all numbers of this rank's part are finite: a scalar bool on the device. This function does not wait for
    it.
    """
    parts = [local(tensor) for tensors in state.values() for tensor in tensors.values()]
    ends = [end for part in parts if part.is_floating_point() and part.numel() for end in part.aminmax()]
    # if there is a NaN, it is both the minimum and the maximum
    return torch.stack([end.float() for end in ends]).isfinite().all()


@contextmanager
def _without_crc32() -> Iterator[None]:
    """A context in which torch.save computes no checksums, which take a third of its CPU time (300 MB: 0.29 s with,
    0.19 s without, 2 cores, 2026-11-21). Uploads are hashed, and sizes are compared before a checkpoint is used.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _host_copy(tensor: Tensor) -> Tensor:
    """Host memory for `tensor`: pinned, so that the copy is fast; plain if no more memory can be pinned."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def _failure(path: Path, state: State) -> BaseException | None:
    """Reads a checkpoint's tensors into `state`. Returns the error, if any."""
    reader = FileSystemReader(path)
    try:
        reader.read_metadata()  # called first, because `load` would report any error of this call as a missing file
    except Exception as error:  # noqa: BLE001 - unpickling raises anything
        return error
    try:
        load({kind: dict(tensors) for kind, tensors in state.items()}, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        return _cause(error)
    return None


def _cause(error: CheckpointException) -> BaseException:
    """The error of one rank; `error` has the tracebacks of all ranks."""
    (cause, _), *_ = error.failures.values()
    return cause
