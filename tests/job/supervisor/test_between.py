"""What is known of an attempt while it does not train: it stages, or uploads the run's end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.attempt import Exit, Node
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.spent import OtherNodes
from gpufleet.job.supervisor import attempts, staging
from gpufleet.job.supervisor.store import ANY, FolderStore, GivenUpError, StoreError, open_store
from tests.job.supervisor_world import Bench, FakeTrainer, FaultyStore, NodeDeath
from tests.waiting import HANG_S, wait_for


class SlowInputs:
    """A store whose downloads take until `act` has returned."""

    def __init__(self, uri: str, act: Callable[[threading.Event], None]) -> None:
        self._inner, self.uri, self._act = open_store(uri), uri, act
        self._cancelled = threading.Event()

    def get_file(self, key: str, path: Path) -> None:
        self._act(self._cancelled)
        self._inner.get_file(key, path)

    def cancel(self) -> None:
        self._cancelled.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_notice_ends_a_download_and_is_recorded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    def downloading(cancelled: threading.Event) -> None:
        bench.notice(120)
        assert cancelled.wait(HANG_S), "the download was not ended"
        raise GivenUpError("given up")

    slow = partial(SlowInputs, act=downloading)
    monkeypatch.setattr(staging, "inputs", partial(staging.inputs, opened=slow))
    assert bench.attempt().run() == 75
    ended = bench.json("attempts/i-1.json")["exit"]
    assert (ended["reason"], ended["notice"], ended["code"]) == ("notice", True, 75)
    assert bench.trainers == []


def test_a_node_lost_while_it_stages_is_billed_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    supervisor = bench.attempt()

    def downloading(cancelled: threading.Event) -> None:
        bench.clock.now += 600
        then = iso(bench.clock.now).encode()
        wait_for("a heartbeat of then", lambda: then in (bench.store.get_bytes("heartbeat/i-1.jsonl") or b""))
        raise NodeDeath

    monkeypatch.setattr(staging, "inputs", partial(staging.inputs, opened=partial(SlowInputs, act=downloading)))
    with pytest.raises(NodeDeath):
        supervisor.run()
    later = Node(instance="i-2", type="g5.2xlarge", zone="us-east-2a", launched_at=bench.clock.now + 30)
    (found,) = OtherNodes(later, attempts.read(bench.store)).count(supervisor.run_file)
    assert found.seconds == 750  # 120 before, 600 of the download; the next came 30 s later


def test_a_notice_while_the_end_is_uploaded_is_recorded_although_the_store_refuses(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    began: list[float] = []

    def fault(_: int, key: str) -> BaseException | None:
        if not key.startswith("final/"):
            return None
        if not began:
            began.append(bench.clock.now)
            bench.notice(120)
        return NodeDeath() if bench.clock.now > began[0] + 120 else StoreError("503 slow down")

    with pytest.raises(NodeDeath):
        bench.attempt(store=FaultyStore(bench.store, fault)).run()
    assert bench.json("attempts/i-1.json")["exit"]["notice"] is True


@pytest.mark.parametrize("hangs", [True, False], ids=["its trainer stops", "it uploads"])
def test_a_notice_of_a_node_that_ends_the_run_anyway_is_recorded(tmp_path: Path, hangs: bool) -> None:
    bench = Bench(tmp_path)

    def ask(trainer: FakeTrainer) -> None:
        bench.store.put_bytes(b"{}", "stop.json")
        bench.clock.sleep(61)  # one heartbeat
        trainer.hangs = hangs

    def asleep(seconds: float) -> None:
        bench.clock.sleep(seconds)
        if supervisor.cause is not None and bench.metadata.notice is None:
            bench.notice(110)
        if bench.metadata.notice is not None and bench.clock.now > bench.metadata.notice:
            raise NodeDeath

    refusing = FaultyStore(bench.store, lambda _, key: StoreError("503") if key.startswith("ckpt/") else None)
    supervisor = bench.attempt(store=refusing, script={4: ask})
    object.__setattr__(supervisor.world, "sleep", asleep)
    with pytest.raises(NodeDeath):
        supervisor.run()
    assert supervisor.cause is not None
    assert supervisor.cause.reason == "stopped"
    ended = bench.json("attempts/i-1.json")["exit"]
    assert (ended["reason"], ended["notice"]) == ("notice", True)


def test_a_notice_sends_the_newest_checkpoint_first_although_the_run_ends_anyway(tmp_path: Path) -> None:
    bench, sent = Bench(tmp_path), list[str]()

    def ask(trainer: FakeTrainer) -> None:
        trainer.commit("best", 1.0)
        bench.store.put_bytes(b"{}", "stop.json")
        bench.clock.sleep(61)  # one heartbeat

    def fault(_: int, key: str) -> StoreError | None:
        if key.startswith("ckpt/") and bench.metadata.notice is None:
            return StoreError("503 slow down")
        sent.append(key)
        return None

    def asleep(seconds: float) -> None:
        bench.clock.sleep(seconds)
        if bench.metadata.notice is None and supervisor.cause is not None and bench.trainers[0].step == 5:
            bench.notice(110)

    supervisor = bench.attempt(store=FaultyStore(bench.store, fault), script={4: ask})
    object.__setattr__(supervisor.world, "sleep", asleep)
    assert supervisor.run() == 0
    assert next(key for key in sent if key.endswith("manifest.json")) == "ckpt/step_00000005/manifest.json"


def test_the_newest_record_of_an_attempt_is_put_last(tmp_path: Path) -> None:
    release, slow = threading.Event(), threading.Event()

    class Slow(FolderStore):
        def put_bytes(self, content: bytes, key: str, over: str = ANY) -> None:
            if b"exit" not in content:
                slow.set()
                assert release.wait(HANG_S)
            super().put_bytes(content, key, over)

    store = Slow(tmp_path)
    record = attempts.OwnRecord(store, "i-1", print)
    record.update(type="g5.2xlarge")
    pulse = threading.Thread(target=record.flush)
    pulse.start()
    assert slow.wait(HANG_S)
    record.update(exit=Exit(75, "notice"))
    leaving = threading.Thread(target=record.flush)
    leaving.start()
    leaving.join(0.2)
    release.set()
    pulse.join()
    leaving.join()
    assert json.loads(store.get_bytes("attempts/i-1.json") or b"{}")["exit"]["code"] == 75
