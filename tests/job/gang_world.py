"""Nodes of one run in one process: each a real supervisor with a store, a clock and trainers made by hand, of which one
at a time runs, in virtual time. What happens to them is a script.
"""

from __future__ import annotations

import heapq
import itertools
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import runs
from supervisor_world import Inline, NodeDeath, commit, state

from gpufleet.job import atomic
from gpufleet.job.contract import bucket
from gpufleet.job.contract.attempt import Node
from gpufleet.job.contract.gang import Presence
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import config_digest, load
from gpufleet.job.kind import Checkpoint
from gpufleet.job.supervisor.child import JobLog
from gpufleet.job.supervisor.fleet import History
from gpufleet.job.supervisor.gang import BEAT_S
from gpufleet.job.supervisor.member import GangMember
from gpufleet.job.supervisor.presence import Lookout
from gpufleet.job.supervisor.publish import commits
from gpufleet.job.supervisor.rendezvous import Rendezvous
from gpufleet.job.supervisor.store import Entry, MissingError, RefusedError, Store, StoreError
from gpufleet.job.supervisor.world import Outside

START = runs.LAUNCHED
STEP_S = 2.0


class SharedStore:
    """One bucket's prefix, in memory, by its own clock. Keeps who put what, in order."""

    uri = "/r1"

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._content = now, dict[str, tuple[bytes, float]]()
        self.puts: list[tuple[str, str]] = []  # instance, key

    def put(self, instance: str, content: bytes, key: str) -> None:
        self.puts.append((instance, key))
        self._content[key] = (content, self._now())

    def get(self, key: str) -> bytes | None:
        found = self._content.get(key)
        return found and found[0]

    def entries(self, prefix: str) -> list[Entry]:
        return [
            Entry(key=key, bytes=len(content), etag=str(hash(content)), at=at)
            for key, (content, at) in sorted(self._content.items())
            if key.startswith(prefix)
        ]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._content.pop(key, None)

    def json(self, key: str) -> dict[str, Any] | None:
        return atomic.parse_object(self.get(key))


class NodeStore:
    """A node's way to it, which may be cut."""

    def __init__(self, shared: SharedStore, machine: TownNode) -> None:
        self._shared, self._machine, self.uri = shared, machine, shared.uri

    def _reach(self) -> None:
        if self._machine.is_dead:
            raise NodeDeath
        if self._machine.is_cut:
            raise StoreError("no answer")

    def put_file(self, path: Path, key: str) -> None:
        self.put_bytes(path.read_bytes(), key)

    def put_bytes(self, content: bytes, key: str) -> None:
        self._reach()
        self._shared.put(self._machine.name, content, key)

    def create(self, content: bytes, key: str) -> bool:
        self._reach()
        if self._shared.get(key) is not None:
            return False
        self._shared.put(self._machine.name, content, key)
        return True

    def get_bytes(self, key: str) -> bytes | None:
        self._reach()
        return self._shared.get(key)

    def get_file(self, key: str, path: Path) -> None:
        content = self.get_bytes(key)
        if content is None:
            raise MissingError(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def size(self, key: str) -> int | None:
        content = self.get_bytes(key)
        return None if content is None else len(content)

    def entries(self, prefix: str) -> list[Entry]:
        self._reach()
        return self._shared.entries(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._reach()
        named = list(keys)
        if not all(key.startswith(bucket.CHECKPOINTS) for key in named):  # as the node's role has it
            raise RefusedError(f"deletion of {named}")
        self._shared.delete(named)

    def cancel(self) -> None:
        pass


@dataclass
class FakeMetadata:
    notice: float | None = None
    save_wanted: str | None = None


class GangTrainer:
    """One node's ranks. They step while those of every member are there, and stop and end together."""

    def __init__(self, machine: TownNode, place: Rendezvous, rung: int) -> None:
        self.machine, self.place, self.rung = machine, place, rung
        self.killed = False
        self.code: int | None = None
        self.group = machine.town.groups.setdefault(place.number, {})
        self.group[place.rank] = self
        found = commits(machine.workdir)
        self.step = found[-1].step if found else 0
        self.saved = self.step
        self.stepped_at = machine.town.now
        self.output_at = machine.clock()
        self.fails: int | None = None

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
        if self.code is not None:
            return self.code
        if self.is_stuck or self.place.rank:
            return None
        town, workdir = self.machine.town, self.machine.workdir
        if (stop := atomic.read_object(workdir / "stop.json")) is not None:
            self._end(75, save=stop["save"])
        elif town.now - self.stepped_at >= STEP_S:
            self.stepped_at, self.step = town.now, self.step + 1
            self.output_at = self.machine.clock()
            town.steps.append((self.place.number, self.step))
            for each in self.group.values():
                (each.machine.workdir / "stepped").write_text(str(self.step))
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
            commit(self.machine.workdir, self.step, self.machine.town.digest, reason)
            self.saved = self.step

    def _end(self, code: int, *, save: bool) -> None:
        if save:
            self._save("final" if code == 0 else "stop")
        for each in self.group.values():
            each.code = code

    def kill(self) -> None:
        since = max(each.stepped_at for each in self.group.values())
        if self.code is None and not self.killed and self.machine.stopped_until < since:
            self.machine.stood_still.append(self.machine.town.now - since)
        self.killed = True


class TownNode:
    """One node: a supervisor in a thread that runs only while the town lets it."""

    def __init__(self, town: Town, number: int, skew_s: float = 0.0) -> None:
        self.town, self.name, self.skew_s = town, f"i-{number}", skew_s
        self.workdir = town.folder / self.name
        self.launched_at = town.now
        self.is_dead = self.is_cut = False
        self.stopped_until = 0.0  # SIGSTOP
        self.metadata = FakeMetadata()
        self.trainer: GangTrainer | None = None
        self.code: int | None = None
        self.go = threading.Event()
        self.looked_at = float("-inf")
        self.stood_still: list[float] = []  # seconds that its trainers had done no step for, when they were killed
        run = load(runs.place(self.workdir, town.tree))
        log = JobLog(self.workdir / "job.log", town.output)
        self.store: Store = NodeStore(town.store, self)
        own = Presence(instance=self.name, address=f"10.0.0.{number}", launched_at=self.launched_at)
        self.watch = Lookout(self.store, own, self.clock, log.say)
        world = Outside(
            store=self.store,
            metadata=self.metadata,  # type: ignore[arg-type]
            start=self._start,
            terminated=lambda: None,
            uploads=Inline(),
            pulse=Inline(),
            log=log,
            spot_price=lambda at: None,
            gpus=lambda: (),
            fleet_history=lambda since: History(),
            clock=self.clock,
            sleep=self.sleep,
        )
        node = Node(instance=self.name, type="g5.2xlarge", zone="us-east-2a", launched_at=self.launched_at + skew_s)
        self.member = GangMember(run, node, self.workdir, world, self.watch)
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @property
    def is_silent(self) -> bool:
        return self.is_dead or self.town.now < self.stopped_until

    def clock(self) -> float:
        return self.town.now + self.skew_s

    def sleep(self, seconds: float) -> None:
        self.town.wait(self, seconds)
        if self.is_dead:
            raise NodeDeath
        if self.watch.changed.is_set() or self.town.now - self.looked_at >= BEAT_S:
            self.looked_at = self.town.now
            self.watch.look()

    def _start(self, rung: int, place: Rendezvous) -> GangTrainer:
        self.trainer = GangTrainer(self, place, rung)
        return self.trainer

    def _run(self) -> None:
        self.go.wait()
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
        except NodeDeath:
            self.is_dead = True
        finally:
            self.town.ended(self)


class Town:
    """The bucket, virtual time, and the fleet: a node that is gone is replaced after `boot_s`."""

    def __init__(self, folder: Path, nodes: int = 2, *, last: int = 40, saves_every: int = 10, **changes: Any) -> None:
        self.folder, self.nodes, self.last, self.saves_every = folder, nodes, last, saves_every
        config = replace(runs.TINY, checkpoint=Checkpoint(interval_s=300, heartbeat_s=60))
        self.tree = runs.with_files(
            runs.tree(config, nodes=nodes, **changes), folder, {"dataset.json": b'{"schema": 1, "files": []}'}
        )
        self.tree["inputs"]["dataset"]["uri"] = str(folder / "inputs" / self.tree["inputs"]["dataset"]["sha256"])
        self.digest = config_digest("tinystories-growth", self.tree["job"]["parameters"])
        self.now, self.output = START, BytesIO()
        self.store = SharedStore(lambda: self.now)
        self.groups: dict[int, dict[int, GangTrainer]] = {}
        self.steps: list[tuple[int, int]] = []  # generation, step
        self.machines: list[TownNode] = []
        self.boot_s: float | None = 60.0
        self.was_cut = False  # a node from the store
        self._numbers, self._order = itertools.count(1), itertools.count()
        self._queue: list[tuple[float, int, TownNode | Callable[[], None]]] = []
        self._back = threading.Event()

    def boot(self, skew_s: float = 0.0) -> TownNode:
        """Another node."""
        machine = TownNode(self, next(self._numbers), skew_s)
        self.machines.append(machine)
        machine.thread.start()
        heapq.heappush(self._queue, (self.now, next(self._order), machine))
        return machine

    def schedule(self, seconds: float, act: Callable[[], object]) -> None:
        """Happens so many seconds after the start."""
        heapq.heappush(self._queue, (START + seconds, next(self._order), lambda: (act(), None)[1]))

    def when(self, condition: Callable[[], bool], act: Callable[[], object]) -> None:
        """Happens as soon as the condition holds."""

        def look() -> None:
            if condition():
                act()
            else:
                heapq.heappush(self._queue, (self.now + 0.5, next(self._order), look))

        heapq.heappush(self._queue, (self.now, next(self._order), look))

    def wait(self, machine: TownNode, seconds: float) -> None:
        """Called by a node's thread: others run until then."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), machine))
        machine.go.clear()
        self._back.set()
        machine.go.wait()

    def ended(self, machine: TownNode) -> None:
        """Called by a node's thread, last."""
        if self.boot_s is not None and not self.is_over:
            heapq.heappush(self._queue, (self.now + self.boot_s, next(self._order), self._replace))
        self._back.set()

    def _replace(self) -> None:
        if not self.is_over:
            self.boot()

    @property
    def is_over(self) -> bool:
        return self.store.get(bucket.DONE) is not None

    @property
    def _is_quiet(self) -> bool:
        return not any(each.thread.is_alive() for each in self.machines)

    def run(self, limit_s: float = 3600.0) -> None:
        """Until no node is left, or so many seconds have passed."""
        while self._queue and not (self._is_quiet and (self.is_over or self.boot_s is None)):
            at, _, what = heapq.heappop(self._queue)
            if at > START + limit_s:
                break
            self.now = max(self.now, at)
            if not isinstance(what, TownNode):
                what()
                continue
            if self.now < what.stopped_until and not what.is_dead:
                heapq.heappush(self._queue, (what.stopped_until, next(self._order), what))
                continue
            self._back.clear()
            what.go.set()
            self._back.wait()
        for machine in self.machines:  # who is still there goes: nothing of this test runs on
            machine.is_dead = True
            machine.go.set()

    def notice(self, machine: TownNode, seconds: float = 120.0) -> None:
        """EC2 says that it ends the machine in so many, and does."""
        machine.metadata.notice = machine.clock() + seconds
        self.schedule(self.now - START + seconds, lambda: self.kill(machine))

    def kill(self, machine: TownNode) -> None:
        """Vanishes."""
        machine.is_dead = True

    def pause(self, machine: TownNode, seconds: float) -> None:
        """SIGSTOP of all its processes, SIGCONT then."""
        machine.stopped_until = self.now + seconds

    def cut(self, machine: TownNode, seconds: float) -> None:
        """No way to the store for so long."""
        machine.is_cut = self.was_cut = True
        self.schedule(self.now - START + seconds, lambda: setattr(machine, "is_cut", False))

    @property
    def step(self) -> int:
        """The newest that was trained."""
        return self.steps[-1][1] if self.steps else 0

    def generations(self) -> list[dict[str, Any]]:
        keys = [entry.key for entry in self.store.entries(bucket.GANG) if bucket.GENERATION_KEY.fullmatch(entry.key)]
        return [self.store.json(key) or {} for key in keys]

    def manifests(self) -> list[int]:
        """Steps of those that verify: their files are there, as they were of that step."""
        found = []
        for entry in self.store.entries(bucket.CHECKPOINTS):
            if (named := bucket.MANIFEST_KEY.fullmatch(entry.key)) is None:
                continue
            step, folder = int(named[1]), entry.key.removesuffix(bucket.MANIFEST)
            tree = self.store.json(entry.key) or {}
            assert all(len(self.store.get(folder + file["name"]) or b"") == file["bytes"] for file in tree["files"])
            assert self.store.get(f"{folder}w.bin") == state(step)
            found.append(step)
        return found

    def writers(self, key: str) -> list[str]:
        """Who has put an object, in order."""
        return [instance for instance, put in self.store.puts if put == key]

    @property
    def said(self) -> str:
        return self.output.getvalue().decode()
