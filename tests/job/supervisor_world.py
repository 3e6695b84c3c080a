"""The supervisor's outside, made by hand: a clock that sleeping moves, a trainer without a process, faulty stores."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract.attempt import Node
from gpufleet.job.contract.commit import Published
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import config_digest, load
from gpufleet.job.contract.spent import History
from gpufleet.job.gpus import Sampler
from gpufleet.job.kind import Checkpoint
from gpufleet.job.supervisor.attempt import Supervisor
from gpufleet.job.supervisor.child import JobLog
from gpufleet.job.supervisor.metadata import Metadata
from gpufleet.job.supervisor.publish import Publisher, commits
from gpufleet.job.supervisor.store import ANY, FolderStore, Store, StoreError
from gpufleet.job.supervisor.world import Outside
from tests.job import runs

STEPS = 12  # of runs.TINY


class FakeClock:
    """Stands still until somebody sleeps."""

    def __init__(self, now: float = runs.LAUNCHED + 120) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Inline(Executor):
    """Does it at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a future holds whatever happened; a Death passes
            future.set_exception(error)
        return future


class Queue(Executor):
    """Does nothing until it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], partial[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((Future(), partial(fn, *args, **kwargs)))
        return self.waiting[-1][0]

    def run(self, error: Exception | None = None) -> None:
        """The one thing that waits, or its end with `error`."""
        ((future, work),) = self.waiting
        self.waiting.clear()
        if error is None:
            future.set_result(work())
        else:
            future.set_exception(error)


class NodeDeath(BaseException):
    """The process is gone in the middle of something."""


def trained(weights: bytes, step: int) -> bytes:
    """The weights after one more step, which is this one: what they were shows in all that come after."""
    return hashlib.sha256(weights + f" step {step}".encode()).hexdigest().encode()


@functools.cache
def state(step: int) -> bytes:
    """The weights of a run that nobody has disturbed, after this step."""
    return b"begin" if step == 0 else trained(state(step - 1), step)


@dataclass
class FakeTrainer:
    """Speaks the work folder's protocol, one step per poll. `script`: step -> what happens there instead, 0 before the
    first.
    """

    workdir: Path
    config_sha256: str
    clock: FakeClock
    rung: int = 0
    commit_every: int = 3
    script: dict[int, Callable[[FakeTrainer], int | None]] = field(default_factory=dict)
    output_at: float = 0.0
    killed: bool = False
    hangs: bool = False

    def __post_init__(self) -> None:
        found = commits(self.workdir)
        self.step = found[-1].step if found else 0
        folder = self.workdir / "ckpt" / found[-1].folder if found else None
        self.weights = (folder / "w.bin").read_bytes() if folder else state(0)
        self.began_at = self.step
        self.output_at = self.clock.now

    def poll(self) -> int | None:
        if self.killed:
            return -9
        if self.hangs:
            return None
        stop = atomic.read_object(self.workdir / "stop.json")
        if stop is not None:
            if stop["save"]:
                self.commit("stop")
            return 75
        if self.step == STEPS:
            (self.workdir / "final").mkdir(exist_ok=True)
            (self.workdir / "final" / "model.safetensors").write_bytes(self.weights)
            atomic.write_json(self.workdir / "results.json", {"schema": 1, "steps": self.step})
            return 0
        if self.step == self.began_at and 0 in self.script and (code := self.script[0](self)) is not None:
            return code
        self.step += 1
        self.weights = trained(self.weights, self.step)
        self.output_at = self.clock.now
        with (self.workdir / "metrics.jsonl").open("a") as file:
            seen = {"ts": self.clock.now, "step": self.step, "phase": "dense", "loss": 1 / self.step}
            record = {**seen, "tok_s": 640.0, "step_ms": 100.0}
            file.write(json.dumps(record) + "\n")
        happens = self.script.get(self.step)
        if happens is not None and (code := happens(self)) is not None:
            return code
        if self.step % self.commit_every == 0:
            self.commit("final" if self.step == STEPS else "timed")
        return None

    def kill(self) -> None:
        self.killed = True

    def commit(self, reason: str, val_loss: float | None = None, requires: tuple[str, ...] = ()) -> None:
        commit(self.workdir, self.step, self.config_sha256, reason, val_loss, requires, self.weights)


def commit(
    workdir: Path,
    step: int,
    config_sha256: str,
    reason: str = "timed",
    val_loss: float | None = None,
    requires: tuple[str, ...] = (),
    weights: bytes | None = None,
) -> Path:
    """A complete checkpoint on disk, of weights that nobody has disturbed unless they are named."""
    path = workdir / "ckpt" / f"step_{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "w.bin").write_bytes(state(step) if weights is None else weights)
    (path / ".metadata").write_bytes(b"shapes")
    files = [{"name": name, "bytes": (path / name).stat().st_size} for name in (".metadata", "w.bin")]
    tree = {"schema": 1, "step": step, "config_sha256": config_sha256, "val_loss": val_loss, "reason": reason}
    atomic.write_json(path / "commit.json", {**tree, "files": files, "requires": list(requires)})
    return path


class FaultyStore:
    """A store that fails or dies on the puts that `fault` picks (called with the number of the put and its key)."""

    def __init__(self, inner: Store, fault: Callable[[int, str], BaseException | None]) -> None:
        self.inner, self.uri, self.puts = inner, inner.uri, 0
        self._fault = fault

    def _count(self, key: str) -> None:
        self.puts += 1
        error = self._fault(self.puts, key)
        if error is not None:
            raise error

    def put_file(self, path: Path, key: str, over: str = ANY) -> None:
        self._count(key)
        self.inner.put_file(path, key, over)

    def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None:
        self._count(key)
        self.inner.put_bytes(content, key, over)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def outage(first: int, last: int) -> Callable[[int, str], BaseException | None]:
    """Puts `first` to `last` are refused."""
    return lambda put, key: StoreError("503 slow down") if first <= put <= last else None


class Bench:
    """One bucket, any number of attempts on it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.bucket = folder, folder / "bucket"
        config = replace(runs.TINY, checkpoint=Checkpoint(interval_s=300, heartbeat_s=60))
        self.tree = runs.with_files(
            runs.tree(config, **changes), self.bucket, {"dataset.json": b'{"schema": 1, "files": []}'}
        )
        self.config_sha256 = config_digest("tinystories-growth", self.tree["job"]["parameters"])
        self.store: Store = FolderStore(self.bucket / "r1")
        self.clock = FakeClock()
        self.output = BytesIO()
        self.trainers: list[FakeTrainer] = []
        self.terminated: float | None = None
        self.sampler: Sampler | None = None  # of GPUs
        self.spot_price: Decimal | None = Decimal("0.36")
        self.history: History | None = History()  # of the fleet
        self.answers: dict[str, bytes] = {}  # of the metadata service, by the end of the path

    def attempt(
        self,
        instance: str = "i-1",
        store: Any = None,
        launched_at: float | None = None,
        capacity: str = "",
        **trainer: Any,
    ) -> Supervisor:
        """A supervisor on a fresh node, ready to run."""
        workdir = self.folder / instance
        run = load(runs.place(workdir, self.tree))
        log = JobLog(workdir / "job.log", self.output)
        self.metadata = Metadata(fetch=self._answer, clock=self.clock, say=log.say)

        def start(rung: int) -> FakeTrainer:
            made = FakeTrainer(workdir, self.config_sha256, self.clock, rung=rung, **trainer)
            self.trainers.append(made)
            return made

        world = Outside(
            store=store or self.store,
            metadata=self.metadata,
            start=start,
            terminated=lambda: self.terminated,
            uploads=Inline(),
            pulse=Inline(),
            log=log,
            spot_price=lambda at: self.spot_price,
            gpus=lambda: (),
            sampler=self.sampler,
            fleet_history=lambda since: self.history,
            clock=self.clock,
            sleep=self._sleep,
        )
        launched = self.clock.now - 120 if launched_at is None else launched_at
        node = Node(instance=instance, type="g5.2xlarge", zone="us-east-2a", launched_at=launched, capacity=capacity)
        return Supervisor(run, node, workdir, world)

    def notice(self, seconds: float) -> None:
        """EC2 says that it ends the machine in so many."""
        end = {"action": "terminate", "time": iso(self.clock.now + seconds)}
        self.answers["spot/instance-action"] = json.dumps(end).encode()
        self.metadata.poll()

    def json(self, key: str) -> dict[str, Any]:
        """An object of the run."""
        found = atomic.parse_object(self.store.get_bytes(key))
        assert found is not None, f"{key} is not there"
        return found

    def manifests(self) -> list[int]:
        """Steps of published checkpoints."""
        keys = [entry.key for entry in self.store.entries("ckpt/") if entry.key.endswith("/manifest.json")]
        return sorted(int(key.split("/")[1].removeprefix("step_")) for key in keys)

    @property
    def said(self) -> str:
        """Everything on the supervisors' standard output."""
        return self.output.getvalue().decode()

    def _sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.metadata.poll()

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if method == "PUT":
            return 200, b"token"
        for end, body in self.answers.items():
            if path.endswith(end):
                return 200, body
        return 404, b""


def publisher(bench: Bench, store: object = None, node: str = "w") -> Publisher:
    """Of this node's work folder."""
    published = Published(
        code_sha256=None, attempt=1, instance="i-1", spent_usd="0", spent_s="0", published_at="2027-01-15T08:00:00Z"
    )
    return Publisher(
        run="r1",
        store=store or bench.store,  # type: ignore[arg-type]
        workdir=bench.folder / node,
        published=lambda: published,
        say=lambda text: None,
    )


def notice_at(bench: Bench, seconds: float) -> Any:
    """A script entry: EC2 gives notice, `seconds` before the end."""
    return lambda _: bench.notice(seconds)


def interrupted(tmp_path: Path, **changes: Any) -> Bench:
    """A run of which step 5 is published: there its first node was taken away."""
    bench = Bench(tmp_path, **changes)
    assert bench.attempt(script={5: notice_at(bench, 120)}).run() == 75
    bench.answers.clear()
    return bench
