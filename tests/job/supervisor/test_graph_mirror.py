"""Compiled graphs outlive their node and their run, and never stand in a checkpoint's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic
from gpufleet.job.contract.run import load
from gpufleet.job.contract.workdir import GRAPHS
from gpufleet.job.supervisor import compile_cache
from gpufleet.job.supervisor.compile_cache import MOST_BYTES, GraphMirror, place
from gpufleet.job.supervisor.store import ANY, FolderStore, StoreError
from tests.job.supervisor_world import Bench, FakeTrainer, FaultyStore, Inline, Queue


def folder(trainer: FakeTrainer) -> Path:
    return trainer.workdir / GRAPHS


def compiles(trainer: FakeTrainer, name: str = "dense.bin", content: bytes = b"graphs") -> None:
    atomic.write_bytes(folder(trainer) / name, content)


def crash(trainer: FakeTrainer) -> int:
    return 1


def stored_graphs(bench: Bench) -> dict[str, bytes]:
    """What lies in the bucket, by name."""
    return {path.name: path.read_bytes() for path in (bench.bucket / GRAPHS).rglob("*") if path.is_file()}


def mirror(bench: Bench, store: Any, said: list[str]) -> GraphMirror:
    """Of a run on this bucket, with `store` for its graphs."""
    run = load(bench.folder / "i-1" / "run.json")
    return GraphMirror(run, bench.store, bench.folder / "i-1", said.append, lambda uri: store)


def test_the_next_attempt_and_the_next_run_find_what_was_compiled(tmp_path: Path) -> None:
    bench, found = Bench(tmp_path), []

    def look(trainer: FakeTrainer) -> int | None:
        found.append(sorted(path.name for path in folder(trainer).glob("*")))
        compiles(trainer, f"{trainer.workdir.name}.bin")
        return None

    assert bench.attempt("i-1", script={1: look, 5: crash}).run() == 1
    assert bench.attempt("i-2", script={4: look}).run() == 0
    bench.store = FolderStore(bench.bucket / "r2")
    bench.tree["run"]["id"] = "r2"
    assert bench.attempt("i-3", script={1: look}).run() == 0
    assert found == [[], ["i-1.bin"], ["i-1.bin", "i-2.bin"]]
    assert "compiled graphs: 2 files" in bench.said


def test_settings_that_change_a_graph_change_the_place_and_a_learning_rate_does_not(tmp_path: Path) -> None:
    def place_with(**changes: Any) -> str:
        tree = Bench(tmp_path).tree
        tree["job"]["parameters"] = {**tree["job"]["parameters"], **changes}
        path = tmp_path / "run.json"
        atomic.write_json(path, tree)
        return place(load(path), "s3://bucket/r1")

    usual = place_with()
    parameters = Bench(tmp_path).tree["job"]["parameters"]
    assert usual.startswith(f"s3://bucket/{GRAPHS}/")
    assert place_with(optim={**parameters["optim"], "lr": [1.0, 1.0, 1.0]}, seed=99) == usual
    assert place_with(batch={**parameters["batch"], "sequences": 8}) != usual
    assert place_with(precision={**parameters["precision"], "compute": "bf16"}) != usual


def test_what_came_from_the_bucket_is_not_sent_back_and_what_changed_is(tmp_path: Path) -> None:
    bench, sent = Bench(tmp_path), []
    bench.attempt()
    store = FaultyStore(FolderStore(tmp_path / "graphs"), lambda put, key: sent.append(key))
    store.inner.put_bytes(b"one", "dense.bin")
    store.inner.put_bytes(b"two", "moe.bin")
    cache = mirror(bench, store, [])
    cache.restore(lambda: None)
    cache.poll(Inline())
    assert sent == []
    atomic.write_bytes(tmp_path / "i-1" / GRAPHS / "moe.bin", b"new")
    for _ in range(3):
        cache.poll(Inline())
    assert sent == ["moe.bin"]
    assert store.get_bytes("moe.bin") == b"new"


def test_one_file_at_a_time_is_sent(tmp_path: Path) -> None:
    bench, queue = Bench(tmp_path), Queue()
    bench.attempt()
    cache = mirror(bench, FolderStore(tmp_path / "graphs"), [])
    for name in ("dense.bin", "moe.bin"):
        atomic.write_bytes(tmp_path / "i-1" / GRAPHS / name, b"graph")
    for _ in range(2):
        cache.poll(queue)
    queue.run()  # the one that waits
    cache.poll(queue)
    queue.run()
    assert [entry.key for entry in FolderStore(tmp_path / "graphs").entries("")] == ["dense.bin", "moe.bin"]


def test_files_of_a_used_disk_are_not_believed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    left = tmp_path / "i-1" / GRAPHS / "left.bin"
    atomic.write_bytes(left, b"whose?")
    assert bench.attempt("i-1").run() == 0
    assert not left.exists()
    assert stored_graphs(bench) == {}


class Deaf(FolderStore):
    """Answers nothing."""

    def entries(self, prefix: str) -> Any:
        raise StoreError("AccessDenied")

    def put_file(self, path: Path, key: str, over: str = ANY) -> None:
        raise StoreError("AccessDenied")


def test_a_store_that_refuses_costs_a_message_each_way(tmp_path: Path) -> None:
    bench, said = Bench(tmp_path), list[str]()
    supervisor = bench.attempt(script={2: compiles})
    supervisor.graphs = mirror(bench, Deaf(tmp_path / "graphs"), said)
    assert supervisor.run() == 0
    assert said == [
        "compiled graphs not restored, they are compiled again: AccessDenied",
        "compiled graphs not kept: AccessDenied",
    ]
    assert bench.manifests()


def test_a_folder_beyond_all_bounds_is_neither_fetched_nor_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 10)
    bench = Bench(tmp_path)
    supervisor = bench.attempt("i-1", script={2: lambda trainer: compiles(trainer, "large.bin", b"x" * 11), 9: crash})
    assert supervisor.run() == 1
    assert stored_graphs(bench) == {}
    assert "large.bin is not kept" in bench.said
    there = Path(place(supervisor.run_file, bench.store.uri))
    for name in ("a.bin", "b.bin"):
        atomic.write_bytes(there / name, b"x" * 6)
    assert bench.attempt("i-2").run() == 0
    assert [path.name for path in (tmp_path / "i-2" / GRAPHS).iterdir()] == ["a.bin"]
    assert "b.bin is not restored" in bench.said
    assert MOST_BYTES < 2**30  # 10 s of a node's network


def test_under_a_stop_nothing_is_sent_and_what_is_on_its_way_is_given_up_before_the_checkpoint_goes(
    tmp_path: Path,
) -> None:
    bench, happened = Bench(tmp_path), []

    class Watched(FolderStore):
        def put_file(self, path: Path, key: str, over: str = ANY) -> None:
            happened.append(key)

        def cancel(self) -> None:
            happened.append("given up")

    def notice(trainer: FakeTrainer) -> None:
        bench.answers["spot/instance-action"] = b'{"action": "terminate", "time": "2027-01-15T08:05:00Z"}'

    def slow(trainer: FakeTrainer) -> None:
        """More to send than one look takes, and a trainer whose last step takes a while."""
        for name in ("a.bin", "b.bin", "c.bin"):
            compiles(trainer, name)
        poll, rest = trainer.poll, iter(range(8))
        trainer.poll = lambda: None if next(rest, None) is not None else poll()  # type: ignore[method-assign]

    store = FaultyStore(bench.store, lambda put, key: happened.append(key))
    supervisor = bench.attempt(store=store, script={5: notice, 6: slow}, commit_every=100)
    supervisor.graphs = mirror(bench, Watched(tmp_path / "graphs"), [])
    assert supervisor.run() == 75
    assert [event for event in happened if event.endswith(".bin") and "/" not in event] == ["a.bin"]
    assert happened.index("a.bin") < happened.index("given up") < happened.index("ckpt/step_00000006/manifest.json")
