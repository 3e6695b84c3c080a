"""Checkpoints on the local disk: written beside training, committed last, verified before they are believed.

A save copies the tensors to host memory (training waits for that alone), then one thread writes a
torch.distributed.checkpoint folder, syncs it and writes `commit.json` by an atomic rename. A folder without it, or
whose files have other sizes than it names, does not exist. Uploading is somebody else's work.

With several ranks each one's thread writes its own part (replicated tensors: one of them does), they meet on a gloo
group of their own, and rank 0 writes the commit when all are done. What N ranks saved, M can read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from job import atomic
from job.train.parallel import World, local, on_host

Reason = Literal["timed", "best", "stop", "boundary", "final"]
State = Mapping[str, Mapping[str, Tensor]]  # kind (model, exp_avg, exp_avg_sq) -> parameter name -> tensor
COMMIT, PROGRESS = "commit.json", "progress.json"
DAMAGED = "damaged.json"  # what commit.json becomes where the tensors cannot be read
FREE_FACTOR = 1.2  # free space before a save, in sizes of the save
KEEP = 2  # newest ones, beside the best
HELD = ".uploading"  # the supervisor's mark in a checkpoint that it is sending


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """commit.json but for the list of files. `val_loss` only where exactly this step was evaluated."""

    step: int
    phase: str
    tokens: int
    val_loss: float | None
    config_sha256: str
    determinism: dict[str, Any]
    dataset: dict[str, Any]
    requires: tuple[str, ...]  # what must be uploaded before this counts
    reason: Reason
    base_weights: str | None = None  # job/train/identity.py
    torch: str = torch.__version__
    world_size: int = 1
    schema: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A committed checkpoint whose files all have their sizes. `progress` is what the experiment carries along."""

    path: Path
    commit: dict[str, Any]
    progress: dict[str, Any]

    @property
    def step(self) -> int:
        """After so many."""
        step: int = self.commit["step"]
        return step

    @property
    def val_loss(self) -> float | None:
        """Of exactly this step; None: it was not evaluated."""
        val_loss: float | None = self.commit["val_loss"]
        return val_loss


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
        self.folder = folder
        self.saved_step = -1  # newest that is committed or on its way
        self._config_sha256, self._world = config_sha256, world or World()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[Saved] | None = None
        self._host: dict[str, dict[str, Tensor]] = {}  # kept from save to save: pinning memory is slow
        self._room: Future[None] | None = None  # that memory, on its way

    def newest(self) -> Found | None:
        """The highest step that is whole."""
        found = list(self.committed())
        if not found:
            return None
        self.saved_step = found[-1].step
        return found[-1]

    def best(self) -> Found | None:
        """The whole one on this disk with the lowest validation loss, the oldest of equals; None: none has any."""
        evaluated = [found for found in self.committed() if found.val_loss is not None]
        return min(evaluated, key=lambda found: found.commit["val_loss"], default=None)

    def committed(self) -> Iterator[Found]:
        """Whole checkpoints of this config, oldest first. Another's are left alone, until one of this step replaces
        them.
        """
        for path in sorted(self.folder.glob("step_????????")):
            commit = atomic.read_object(path / COMMIT)
            if commit is None or commit.get("schema") != 1 or commit["config_sha256"] != self._config_sha256:
                continue
            if _whole(path, commit["files"]):
                yield Found(path=path, commit=commit, progress=atomic.read_object(path / PROGRESS) or {})

    def load(self, found: Found, state: State) -> None:
        """Reads the tensors into `state`'s own: of each, this rank's part. However many ranks wrote them.

        Raises CheckpointDamagedError on every rank where one of them cannot, after which `newest` gives the one before
        it, if there is one: what is alone stays, and no run begins again because of it. What is this node's fault
        (memory, disk, GPU) is raised as it is.
        """
        problem: str | None = None
        try:
            load(
                {kind: dict(tensors) for kind, tensors in state.items()},
                storage_reader=FileSystemReader(found.path),
                no_dist=True,
            )
        except CheckpointException as error:
            cause = _cause(error)
            own = isinstance(cause, OSError | MemoryError | torch.AcceleratorError | torch.OutOfMemoryError)
            if own and not isinstance(cause, FileNotFoundError):
                raise cause from error  # of this node, and says nothing of the checkpoint
            problem = f"{type(cause).__name__}: {' '.join(str(cause).split())[:100]}"
        problems = [text for text in self._world.every(problem) if text is not None]
        if problems:
            if self._world.first and len(list(self.committed())) > 1:
                (found.path / COMMIT).replace(found.path / DAMAGED)
            self._world.barrier()
            raise CheckpointDamagedError(found.step, f"{found.path.name} cannot be read, {problems[0]}")

    def prepare(self, state: State) -> None:
        """Takes host memory for saves of `state`, beside training: the first save does not stop for it."""
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
        path = self.folder / f"step_{commit.step:08d}"
        problem = self._world.agree(self._make_way(path, size) if self._world.first else None)
        if problem is not None:
            return [
                *ended,
                Saved(step=commit.step, reason=commit.reason, blocking_s=0, seconds=0, bytes=size, problem=problem),
            ]
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
            self.saved_step = max((found.step for found in self.committed()), default=-1)
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
                self._commit(path, commit, progress)
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

    def _commit(self, path: Path, commit: Commit, progress: dict[str, Any]) -> None:
        """From here on it exists."""
        atomic.write_json(path / PROGRESS, progress)
        files = [{"name": file.name, "bytes": file.stat().st_size} for file in sorted(path.iterdir())]
        atomic.write_json(path / COMMIT, {**asdict(commit), "files": files})
        atomic.sync_folder(self.folder)
        self._prune(KEEP)

    def _make_way(self, path: Path, size: int) -> str | None:
        """Why there is no room for a save of `size` bytes; None when there is, after pruning if need be. What an
        earlier attempt left torn at `path` goes now: later it would go under the feet of ranks that write.
        """
        shutil.rmtree(path, ignore_errors=True)
        for keep in (KEEP, 1):
            free = shutil.disk_usage(self.folder).free
            if free >= FREE_FACTOR * size:
                return None
            self._prune(keep)
        free = shutil.disk_usage(self.folder).free
        if free >= FREE_FACTOR * size:
            return None
        return f"{free:,} bytes free in {self.folder}, {FREE_FACTOR * size:,.0f} needed"

    def _prune(self, keep: int) -> None:
        """Removes all but the newest `keep`, the best and one being uploaded, commit.json first so that none looks
        whole on the way.
        """
        best = self.best()
        for found in list(self.committed())[:-keep]:
            if (best is None or found.path != best.path) and not (found.path / HELD).exists():
                with suppress(FileNotFoundError):
                    (found.path / COMMIT).unlink()
                shutil.rmtree(found.path, ignore_errors=True)


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


def _cause(error: CheckpointException) -> BaseException:
    """What one rank met; `error` itself is all ranks' tracebacks."""
    (cause, _), *_ = error.failures.values()
    return cause


def _whole(path: Path, files: list[dict[str, Any]]) -> bool:
    for file in files:
        try:
            if (path / file["name"]).stat().st_size != file["bytes"]:
                return False
        except OSError:
            return False
    return True
