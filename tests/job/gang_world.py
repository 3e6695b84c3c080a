"""Several nodes of one run in one process, in virtual time. Each has a real supervisor; store, clock and trainers are
simulated. A script says what happens to the nodes.

A node has a thread each for its supervisor, its lookout, its uploads and its pulse. One thread of all nodes runs at a
time, and others run while it sleeps or waits for the store. So a node can freeze or die amid any call, calls of several
nodes interleave, and the same script gives the same run.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

from gpufleet.job import atomic
from gpufleet.job.command.checkpoints import LEADER_S
from gpufleet.job.contract import bucket
from gpufleet.job.contract.attempt import Node
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.commit import Manifest
from gpufleet.job.contract.gang import Presence
from gpufleet.job.contract.messages import AskAgain, LeaderSaved, Observed
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import config_digest, load
from gpufleet.job.contract.spent import History
from gpufleet.job.kind import Checkpoint
from gpufleet.job.supervisor import publish, staging
from gpufleet.job.supervisor.child import JobLog
from gpufleet.job.supervisor.member import GangMember
from gpufleet.job.supervisor.presence import Lookout
from gpufleet.job.supervisor.publish import commits
from gpufleet.job.supervisor.rendezvous import Rendezvous
from gpufleet.job.supervisor.store import ABSENT, ANY, Entry, MissingError, RefusedError, StoreError, TakenError
from gpufleet.job.supervisor.world import Outside
from tests.dates import skip_where_the_clock_is_moved
from tests.job import command_world, runs
from tests.job.supervisor_world import NodeDeath

START = runs.LAUNCHED
STEP_S = 2.0
TORN_S = 1e5  # a part that is whole only after that is never
LOOK_S = 0.25  # between two looks of a thread that waits for another one of its node
OWN = (bucket.GANG, bucket.ATTEMPTS, bucket.HEARTBEATS, "log/")  # objects that one node writes, by its name


class TownThread:
    """A thread of a node, which runs while the town lets it. `ticket` tells which of its entries in the town's queue
    counts.
    """

    def __init__(self, machine: TownNode, name: str, work: Callable[[], object]) -> None:
        self.machine, self.ticket, self.go = machine, 0, threading.Event()
        self._work = work
        self.thread = threading.Thread(target=self._run, name=f"{machine.name} {name}", daemon=True)
        self.thread.start()
        machine.town.resume(self, 0.0)

    def _run(self) -> None:
        self.go.wait()
        try:
            self._work()
        except NodeDeath:
            self.machine.is_dead = True
        finally:
            self.machine.town.back.set()


class TownLock:
    """A lock that virtual time passes at."""

    def __init__(self, machine: TownNode) -> None:
        self._machine, self._is_held = machine, False

    def acquire(self, timeout: float = -1) -> bool:
        until = self._machine.town.now + timeout
        while self._is_held:
            if timeout >= 0 and self._machine.town.now >= until:
                return False
            self._machine.spend(LOOK_S)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TownFuture(Future[Any]):
    """Waited for in virtual time."""

    def __init__(self, machine: TownNode) -> None:
        super().__init__()
        self._machine = machine

    def exception(self, timeout: float | None = None) -> BaseException | None:
        while not self.done():
            self._machine.spend(LOOK_S)
        return super().exception()

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._machine.spend(LOOK_S)
        return super().result()


class TownExecutor(Executor):
    """A thread of a node that does one thing after another."""

    def __init__(self, machine: TownNode, name: str) -> None:
        self._machine, self._name, self._last = machine, name, TownFuture(machine)
        self._last.set_result(None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        before, future = self._last, TownFuture(self._machine)
        self._last = future

        def work() -> None:
            before.exception()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - a future holds whatever happened; a death passes
                future.set_exception(error)

        TownThread(self._machine, self._name, work)
        return future


class OneByOne(Executor):
    """Stands for a pool of threads: each thing is done where it is asked for, in the asking thread's time."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as above
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Put:
    """A node has written an object, when it led or followed that generation."""

    instance: str
    key: str
    generation: int


class SharedStore:
    """One bucket's prefix, in memory, by its own clock. Keeps who put what, in order; `changed` is called after each
    change of a checkpoint's objects.
    """

    uri = "/r1"

    def __init__(self, now: Callable[[], float], changed: Callable[[str, str], None]) -> None:
        self._now, self._changed, self._content = now, changed, dict[str, tuple[bytes, float]]()
        self.puts: list[Put] = []

    def put(self, instance: str, content: bytes, key: str, generation: int = 0) -> None:
        self.puts.append(Put(instance, key, generation))
        self._content[key] = (content, self._now())
        if key.startswith(bucket.CHECKPOINTS):
            self._changed(f"{instance} has put", key)

    def get(self, key: str) -> bytes | None:
        found = self._content.get(key)
        return found and found[0]

    def etag(self, key: str) -> str:
        """As S3's: the same for the same content."""
        content = self.get(key)
        return ABSENT if content is None else hashlib.md5(content).hexdigest()

    def entries(self, prefix: str) -> list[Entry]:
        return [
            Entry(key=key, bytes=len(content), etag=self.etag(key), at=at)
            for key, (content, at) in sorted(self._content.items())
            if key.startswith(prefix)
        ]

    def delete(self, instance: str, keys: Iterable[str]) -> None:
        for key in keys:
            if self._content.pop(key, None) is not None:
                self._changed(f"{instance} has deleted", key)

    def json(self, key: str) -> dict[str, Any] | None:
        return atomic.parse_object(self.get(key))


class NodeStore:
    """A node's way to it, which takes time and may be cut. A call takes effect after half of its time."""

    def __init__(self, shared: SharedStore, machine: TownNode) -> None:
        self._shared, self._machine, self.uri = shared, machine, shared.uri

    def _call(self, verb: str, key: str, act: Callable[[], Any], seconds: float | None = None) -> Any:
        machine = self._machine
        seconds = (machine.town.call_s if seconds is None else seconds) * machine.slow
        for planned in [each for each in machine.at_calls if each.matches(f"{verb} {key}")]:
            machine.at_calls.remove(planned)
            planned.act()
        machine.spend(seconds / 2)
        if machine.is_dead:
            raise NodeDeath
        if machine.is_cut:
            raise StoreError("no answer")
        found = act()
        machine.spend(seconds / 2)
        return found

    def _put(self, content: bytes, key: str, over: str, seconds: float | None = None) -> None:
        def act() -> None:
            if over not in (ANY, self._shared.etag(key)):
                raise TakenError(key)
            self._shared.put(self._machine.name, content, key, self._machine.member.fence.generation)

        self._call("put", key, act, seconds)

    def put_file(self, path: Path, key: str, over: str = ANY) -> None:
        self._put(path.read_bytes(), key, over, self._machine.town.file_s)

    def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None:
        self._put(content, key, over)

    def get_bytes(self, key: str) -> bytes | None:
        found: bytes | None = self._call("get", key, lambda: self._shared.get(key))
        return found

    def get_file(self, key: str, path: Path) -> None:
        content = self._call("get", key, lambda: self._shared.get(key), self._machine.town.file_s)
        if content is None:
            raise MissingError(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def size(self, key: str) -> int | None:
        content = self.get_bytes(key)
        return None if content is None else len(content)

    def entries(self, prefix: str) -> list[Entry]:
        found: list[Entry] = self._call("list", prefix, lambda: self._shared.entries(prefix))
        return found

    def delete(self, keys: Iterable[str]) -> None:
        named = list(keys)
        if not all(key.startswith(bucket.CHECKPOINTS) for key in named):  # as the node's role has it
            raise RefusedError(f"deletion of {named}")
        self._call("delete", " ".join(named), lambda: self._shared.delete(self._machine.name, named))

    def cancel(self) -> None:
        pass


@dataclass
class FakeMetadata:
    notice: float | None = None
    save_wanted: str | None = None


@dataclass
class AtCall:
    """What happens as a node makes a call of the store, told as "put ckpt/..."."""

    matches: Callable[[str], bool]
    act: Callable[[], object]


def weights(step: int, generation: int, node: int = 0) -> bytes:
    """What a node's ranks save at a step: as on GPUs, another generation's are other bytes."""
    return f"step {step:06d} generation {generation:06d} node {node:03d} ".encode() * 5


def written(content: bytes) -> tuple[int, int, int]:
    """Step, generation and node of `weights`."""
    words = content.split()
    assert content == weights(int(words[1]), int(words[3]), int(words[5])), content
    return int(words[1]), int(words[3]), int(words[5])


class GangTrainer:
    """One node's ranks. They step while those of every member are there, and stop and end together."""

    def __init__(self, machine: TownNode, place: Rendezvous, rung: int) -> None:
        self.machine, self.place, self.rung = machine, place, rung
        self.killed = False
        self.code: int | None = None
        self.group = machine.town.groups.setdefault(place.number, {})
        self.group[place.rank] = self
        self.step, self.source = self._read() if place.rank == 0 or machine.town.parts else (0, 0)
        self.saved = self.step
        self.parts: dict[int, float] = {}  # from when on this rank's part of a save is whole, by its step
        self.began_at = self.stepped_at = machine.town.now
        self.output_at = machine.clock()
        self.fails: int | None = None
        self.code_at = 0.0  # when it ended
        self.ends_at: float | None = None  # a leader that saves for the last time
        if machine.town.first_rank_on == machine.name:
            Observed(has_first=True).write(machine.workdir)

    def _read(self) -> tuple[int, int]:
        """The step to go on from, and the generation that saved it. Where each node left a part, they are all here."""
        town, found = self.machine.town, commits(self.machine.workdir)
        if not found:
            return 0, 0
        folder, own = self.machine.workdir / "ckpt" / found[-1].folder, self.place.rank if town.parts else 0
        read = {path.name: written(path.read_bytes()) for path in folder.glob("*.bin")}
        step, generation, _ = read["w.bin"]
        whole = {"v.bin": (step, generation, 0)} if not town.parts else {}
        shards = range(self.place.nodes) if town.parts else ()
        whole |= {f"shard_{other}.bin": (step, generation, other) for other in shards}
        if read != {"w.bin": (found[-1].step, generation, own), **whole}:
            town.wrong.append(f"{self.machine.name} begins from {read}, said to be of step {found[-1].step}")
        return step, generation

    @property
    def is_stuck(self) -> bool:
        return len(self.group) < self.place.nodes or any(
            each.killed or each.machine.is_silent or each.code not in (None, 0, 75) for each in self.group.values()
        )

    def poll(self) -> int | None:
        if self.killed:
            return -9
        if self.fails is not None:
            self.code, self.fails = self.fails, None
        is_done = not self.parts or self._commit_part()
        if self.code is not None:  # a command that ended waits for its leader's last word, but not for ever
            self.code_at = self.code_at or self.machine.town.now
            is_done = is_done or self.machine.town.now >= self.code_at + LEADER_S
        if self.ends_at is not None:
            self.code = 0 if self.machine.town.now >= self.ends_at else None
            return self.code
        if self.code is not None and is_done:
            return self.code
        if self.is_stuck or self.place.rank:
            return None
        town, workdir = self.machine.town, self.machine.workdir
        if (stop := atomic.read_object(workdir / "stop.json")) is not None:
            self._end(75, save=stop["save"])
        elif self.step >= town.last:  # all that a leader before has left to do is to end the run
            self._end(0, save=False)
        elif town.now - self.stepped_at >= STEP_S:
            begun = {(each.step, each.source) for each in self.group.values()}
            if town.parts and len(begun) > 1:
                town.wrong.append(f"generation {self.place.number} trains from {begun}")
            self.stepped_at = town.now
            for each in self.group.values():
                each.step += 1
            self.output_at = self.machine.clock()
            town.steps.append((self.place.number, self.step))
            for each in self.group.values():
                (each.machine.workdir / "stepped").write_text(f"{self.step} {each.machine.own_s}")
            with (workdir / "metrics.jsonl").open("a") as file:
                seen = {"ts": town.now, "step": self.step, "phase": "dense", "loss": 1.0, "tok_s": 1.0, "step_ms": 2e3}
                file.write(json.dumps(seen) + "\n")
            if self.step >= town.last:
                self._end(0, save=True)
            elif self.step % town.saves_every == 0:
                self._save("timed")
        return self.code

    def _save(self, reason: str) -> None:
        if self.step > self.saved:
            commit(self.machine, self.step, self.place, reason)
            for each in self.group.values():
                each.saved = self.step
                if each.place.rank and self.machine.town.parts:
                    each.parts[self.step] = self.machine.town.now + self.machine.town.part_s()

    def _commit_part(self) -> bool:
        """As a command's host does it: the part that the leader asks for, once it is whole. True: no more comes."""
        told = LeaderSaved.read(self.machine.workdir)
        at = self.parts.get(told.step) if told is not None else None
        if told is not None and at is not None and self.machine.town.now >= at:
            commit(self.machine, told.step, self.place, "timed")
            self.parts = {step: at for step, at in self.parts.items() if step > told.step}
            at = None
        is_torn = at is None or at > self.machine.town.now + TORN_S
        return not self.parts or (told is not None and told.ended and is_torn)

    def _end(self, code: int, *, save: bool) -> None:
        if save:
            self._save("final" if code == 0 else "stop")
        if code == 0:
            (self.machine.workdir / "final").mkdir(exist_ok=True)
            for name in ("a.bin", "b.bin"):
                (self.machine.workdir / "final" / name).write_bytes(weights(self.step, self.place.number))
        for each in self.group.values():
            each.code = (each.place.rank and self.machine.town.follower_code) or code
        if code == 0 and self.machine.town.end_s:
            self.code, self.ends_at = None, self.machine.town.now + self.machine.town.end_s

    def kill(self) -> None:
        since = max(each.stepped_at for each in self.group.values())
        if self.code is None and not self.killed and self.machine.stopped_until < since:
            self.machine.stood_still.append(self.machine.town.now - since)
        self.killed = True


def commit(machine: TownNode, step: int, place: Rendezvous, reason: str) -> None:
    """A complete checkpoint on a node's disk; where each node leaves a part, that of its rank."""
    folder = machine.workdir / "ckpt" / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    node, content = place.rank, weights(step, place.number, place.rank)
    names = [".metadata", "v.bin", "w.bin"] if not machine.town.parts else ["w.bin", f"shard_{node}.bin"]
    for name in names:
        (folder / name).write_bytes(content)
    tree = {"schema": 1, "step": step, "config_sha256": machine.town.digest, "val_loss": None, "reason": reason}
    files = [{"name": name, "bytes": len(content)} for name in names]
    told = {"node": node, "named_by": f"step-{step}"}
    atomic.write_json(folder / "commit.json", {**tree, "files": files, "requires": [], **told})


class TownMember(GangMember):
    """Its locks are the town's."""

    machine: TownNode

    def _register(self) -> None:
        super()._register()
        self.record._sending = TownLock(self.machine)  # type: ignore[assignment]


class TownNode:
    """One node: a supervisor and what works beside it, each in a thread that runs while the town lets it."""

    def __init__(self, town: Town, number: int, skew_s: float = 0.0) -> None:
        self.town, self.name, self.skew_s = town, f"i-{number}", skew_s
        self.workdir = town.folder / self.name
        self.launched_at = town.now
        self.is_dead = self.is_killed = self.is_cut = False
        self.slow = 1.0  # each call of the store takes so many times its usual time
        self.own_s = 1.0  # of a step, before this node's ranks need the others
        self.stopped_until = 0.0  # SIGSTOP
        self.at_calls: list[AtCall] = []
        self.metadata = FakeMetadata()
        self.trainer: GangTrainer | None = None
        self.code: int | None = None
        self.stood_still: list[float] = []  # seconds that its trainers had done no step for, when they were killed
        run = load(runs.place(self.workdir, town.tree))
        log = JobLog(self.workdir / "job.log", town.output)
        self.store = NodeStore(town.store, self)
        own = Presence(instance=self.name, address=f"10.0.0.{number}", launched_at=self.launched_at)
        self.watch = Lookout(self.store, own, self.clock, log.say)
        world = Outside(
            store=self.store,
            metadata=self.metadata,  # type: ignore[arg-type]
            start=self._start,
            terminated=lambda: None,
            uploads=TownExecutor(self, "uploads"),
            pulse=TownExecutor(self, "pulse"),
            log=log,
            spot_price=lambda at: None,
            gpus=lambda: (),
            fleet_history=lambda since: History(),
            clock=self.clock,
            sleep=self.sleep,
        )
        node = Node(instance=self.name, type="g5.2xlarge", zone="us-east-2a", launched_at=self.launched_at + skew_s)
        self.member = TownMember(run, node, self.workdir, world, self.watch)
        self.member.machine = self
        for holder, name in (
            (self.watch, "_looking"),
            (self.member.publisher, "_reading"),
            (self.member.publisher.stages, "_sending"),
        ):
            setattr(holder, name, TownLock(self))
        self.main = TownThread(self, "supervisor", self._run)
        self.lookout = TownThread(self, "lookout", self._look)

    @property
    def is_there(self) -> bool:
        """Its supervisor has not ended."""
        return self.main.thread.is_alive()

    @property
    def is_silent(self) -> bool:
        return self.is_dead or self.town.now < self.stopped_until

    def clock(self) -> float:
        return self.town.now + self.skew_s

    def sleep(self, seconds: float) -> None:
        if self.watch.changed.is_set():
            self.town.resume(self.lookout, 0.0)
        self.spend(seconds)

    def spend(self, seconds: float) -> None:
        """Other threads run for so long. Threads of a pool take no time."""
        self.town.wait(seconds)
        if self.is_dead:
            raise NodeDeath

    def _start(self, rung: int, place: Rendezvous) -> GangTrainer:
        self.trainer = GangTrainer(self, place, rung)
        return self.trainer

    def _look(self) -> None:
        while self.is_there:
            self.watch.look()
            self.spend(self.watch.pause_s)

    def _run(self) -> None:
        try:
            atomic.write_json(self.workdir / "own-record", {})
            record = {
                "instance": self.name,
                "type": "g5.2xlarge",
                "zone": "us-east-2a",
                "launched_at": iso(self.clock()),
            }
            self.store.put_bytes(json.dumps(record).encode(), bucket.attempt_key(self.name))
            self.watch.look()
            self.code = self.member.run()
        finally:
            self.town.ended(self)


class Town:
    """The bucket, virtual time, and the fleet: a node that is gone is replaced after `boot_s`."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        *,
        last: int = 40,
        saves_every: int = 10,
        parts: bool = False,
        **changes: Any,
    ) -> None:
        """`parts`: each node leaves a part of a checkpoint, as ranks of a command do."""
        skip_where_the_clock_is_moved("remembers every lock of a town's threads, whose clock is the town's own")
        self.folder, self.nodes, self.last, self.saves_every, self.parts = folder, nodes, last, saves_every, parts
        steps = {"dense": last, "moe": 0, "grown": 0, "train": last}  # the last phase is a command's
        rows = [{"phase": name, "step_ms": 100.0, "steps": count} for name, count in steps.items()]
        estimate = {**runs.ESTIMATE, "phases": rows}
        config = replace(runs.TINY, checkpoint=Checkpoint(interval_s=300, heartbeat_s=60))
        self.tree = runs.with_files(
            runs.tree(config, nodes=nodes, **{"gather_s": 900.0, "estimate": estimate, **changes}),
            folder,
            {"dataset.json": b'{"schema": 1, "files": []}'},
        )
        self.tree["inputs"]["dataset"]["uri"] = str(folder / "inputs" / self.tree["inputs"]["dataset"]["sha256"])
        if parts:
            self.tree["job"] = {"experiment": "command", "parameters": command_world.of_format("dcp")}
            self.tree["inputs"]["dataset"] = None
        self.digest = config_digest(self.tree["job"]["experiment"], self.tree["job"]["parameters"])
        self.now, self.output = START, BytesIO()
        self.store = SharedStore(lambda: self.now, self._look_at_checkpoints)
        self.call_s, self.file_s = 0.05, 0.2  # that a call of the store takes, and the transfer of a file
        self.part_s: Callable[[], float] = lambda: 1.0  # that a follower's part is whole after the leader's
        self.groups: dict[int, dict[int, GangTrainer]] = {}
        self.steps: list[tuple[int, int]] = []  # generation, step
        self.newest = -1  # the newest checkpoint that verifies
        self.lost: list[str] = []  # what made an older one the newest
        self.wrong: list[str] = []  # ranks that began from a checkpoint that was none, or from different ones
        self.machines: list[TownNode] = []
        self.boot_s: float | None = 60.0
        self.end_s, self.follower_code = 0.0, 0  # of the leader after the last step, and how followers end then
        self.first_rank_on = ""  # a node on which a launcher puts rank 0, whichever leads
        self.was_cut = False  # a node from the store
        self.comes: list[int] = []  # how many nodes AWS has each time that all are asked for; then it has all
        self.awaited = 0  # times that all are asked for after a pause
        self.asked = dict[str, float]()  # when those that waited let go, and all nodes were asked for later, by name
        self.back = threading.Event()
        self._numbers, self._order = itertools.count(1), itertools.count()
        self._queue: list[tuple[float, int, int, TownThread | Callable[[], None]]] = []
        self._running: TownThread | None = None

    def boot(self, skew_s: float = 0.0) -> TownNode:
        """Another node."""
        machine = TownNode(self, next(self._numbers), skew_s)
        self.machines.append(machine)
        return machine

    def schedule(self, seconds: float, act: Callable[[], object]) -> None:
        """Happens so many seconds after the start."""
        self._push(START + seconds, lambda: (act(), None)[1])

    def when(self, condition: Callable[[], bool], act: Callable[[], object]) -> None:
        """Happens as soon as the condition holds."""

        def look() -> None:
            if condition():
                act()
            else:
                self._push(self.now + 0.5, look)

        self._push(self.now, look)

    def resume(self, task: TownThread, seconds: float) -> None:
        """The task runs in so many seconds, and not before."""
        task.ticket += 1
        self._push(self.now + seconds, task, task.ticket)

    def wait(self, seconds: float) -> None:
        """Called by the thread that runs: others run until then. A thread that is none of the town's goes on."""
        task = self._running
        if task is None or threading.current_thread() is not task.thread:
            return
        self.resume(task, seconds)
        task.go.clear()
        self.back.set()
        task.go.wait()

    def ended(self, machine: TownNode) -> None:
        """Called by a node's thread, last."""
        if (again := AskAgain.read(machine.workdir)) is not None:
            if again.name not in self.asked:
                self.asked[again.name] = self.now
                self.awaited += 1
                self._push(self.now + again.pause_s, self._replace_all)
        elif self.boot_s is not None and not self.is_over:
            self._push(self.now + self.boot_s, self._replace)

    def _push(self, at: float, what: TownThread | Callable[[], None], ticket: int = 0) -> None:
        heapq.heappush(self._queue, (at, next(self._order), ticket, what))

    def _replace_all(self) -> None:
        self.awaited -= 1
        for _ in range(self.comes.pop(0) if self.comes else self.nodes):
            self._replace()

    def _replace(self) -> None:
        if not self.is_over:
            self.boot()

    @property
    def is_over(self) -> bool:
        return self.store.get(bucket.DONE) is not None

    @property
    def _is_quiet(self) -> bool:
        return not any(each.is_there for each in self.machines)

    def run(self, limit_s: float = 3600.0) -> None:
        """Until no node is left, or so many seconds have passed."""
        with (
            mock.patch.object(publish, "ThreadPoolExecutor", OneByOne),
            mock.patch.object(staging, "ThreadPoolExecutor", OneByOne),
        ):
            while self._queue and not (self._is_quiet and (self.is_over or (self.boot_s is None and not self.awaited))):
                at, _, ticket, what = heapq.heappop(self._queue)
                if at > START + limit_s:
                    break
                self.now = max(self.now, at)
                if isinstance(what, TownThread):
                    self._go_on(what, ticket)
                else:
                    what()
            for machine in self.machines:  # machines that are still up die, so that no thread of this test outlives it
                machine.is_dead = True
            while self._queue:
                _, _, ticket, what = heapq.heappop(self._queue)
                if isinstance(what, TownThread):
                    self._go_on(what, ticket)

    def _go_on(self, task: TownThread, ticket: int) -> None:
        if ticket != task.ticket or not task.thread.is_alive():
            return
        machine = task.machine
        if self.now < machine.stopped_until and not machine.is_dead:
            self.resume(task, min(machine.stopped_until - self.now, 5.0))  # it may be woken earlier
            return
        self._running = task
        self.back.clear()
        task.go.set()
        self.back.wait()
        self._running = None

    def notice(self, machine: TownNode, seconds: float = 120.0) -> None:
        """EC2 says that it ends the machine in so many, and does."""
        machine.metadata.notice = machine.clock() + seconds
        self.schedule(self.now - START + seconds, lambda: self.kill(machine))

    def kill(self, machine: TownNode) -> None:
        """Vanishes."""
        machine.is_dead = machine.is_killed = True

    def pause(self, machine: TownNode, seconds: float) -> None:
        """SIGSTOP of all its processes, SIGCONT then."""
        machine.stopped_until = self.now + seconds

    def wake(self, machine: TownNode) -> None:
        """SIGCONT."""
        machine.stopped_until = self.now

    def cut(self, machine: TownNode, seconds: float) -> None:
        """No way to the store for so long."""
        machine.is_cut = self.was_cut = True
        self.schedule(self.now - START + seconds, lambda: setattr(machine, "is_cut", False))

    def at_call(self, machine: TownNode, matches: Callable[[str], bool], act: Callable[[], object]) -> None:
        """Happens as the node makes its next such call of the store, before that has any effect."""
        machine.at_calls.append(AtCall(matches, act))

    @property
    def step(self) -> int:
        """The newest that was trained."""
        return self.steps[-1][1] if self.steps else 0

    def generations(self) -> list[dict[str, Any]]:
        keys = [entry.key for entry in self.store.entries(bucket.GANG) if bucket.GENERATION_KEY.fullmatch(entry.key)]
        return [self.store.json(key) or {} for key in keys]

    def published(self) -> dict[int, int]:
        """The published checkpoints by their step: which generation's files a resume takes. The newest verifies: its
        files are there, as one generation wrote them at its step; and so do the others, but for one that a woken leader
        published after a later generation had swept up its files.
        """
        places = bucket.published(entry.key for entry in self.store.entries(bucket.CHECKPOINTS))
        whole = [place for place in places if self._is_whole(place)]
        assert places[-1:] == whole[-1:], places
        swept = [place for place in places if place not in whole]
        assert all(place.generation < whole[-1].generation for place in swept), places
        return {place.step: place.generation for place in whole}

    def manifests(self) -> list[int]:
        """Their steps."""
        return list(self.published())

    def _is_whole(self, place: CheckpointPlace) -> bool:
        manifest = Manifest.from_json(self.store.json(place.manifest) or {}, place.generation)
        files = [(self.store.get(key) or b"", file.sha256) for key, file in manifest.objects.items()]
        if not all(hashlib.sha256(content).hexdigest() == digest for content, digest in files):
            return False
        nodes = range(self.nodes if self.parts else 1)
        return {written(content) for content, _ in files} == {(place.step, place.generation, node) for node in nodes}

    def _look_at_checkpoints(self, what: str, key: str) -> None:
        """After each change: whether the newest checkpoint that verifies has become an older one, or a manifest of the
        newest generation is there before its files.
        """
        for place in bucket.published([key]) if self.store.get(key) else ():
            if place.generation == len(self.generations()) and not self._is_whole(place):
                self.lost.append(f"{place} is torn: {what} {key}")
        places = bucket.published(entry.key for entry in self.store.entries(bucket.CHECKPOINTS))
        newest = max((place.step for place in places if self._is_whole(place)), default=-1)
        if newest < self.newest:
            self.lost.append(f"{self.now - START:.1f} s: step {newest} instead of {self.newest}, {what} {key}")
        self.newest = newest

    def overwritten(self) -> list[Put]:
        """Objects of the run as a whole that a node wrote after one of a later generation had."""
        newest, found = dict[str, int](), []
        for put in self.store.puts:
            if not put.key.startswith(OWN):
                found += [put] if put.generation < newest.get(put.key, 0) else []
                newest[put.key] = max(put.generation, newest.get(put.key, 0))
        return found

    def writers(self, key: str) -> list[str]:
        """Who has put an object, in order."""
        return [put.instance for put in self.store.puts if put.key == key]

    @property
    def said(self) -> str:
        return self.output.getvalue().decode()
