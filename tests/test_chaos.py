"""`make chaos`: every kind injects what it says, and a fault that never comes is a failure."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from chaos import __main__ as chaos
from chaos import kinds

from gpufleet.job.supervisor.store import ABSENT, S3Store, StoreError

QUICK = ["S3 faults", "clocks set", "metadata faults", "node refused"]  # the others are tests of their own, at one seed


class StopWatch:
    """A clock that a run moves by its length."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: float, injected: int = 1) -> chaos.Kind:
        def kind(seed: int, folder: Path) -> int:
            assert list(folder.iterdir()) == []
            self.now += seconds
            return injected

        return kind


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("seed", [1, 2])
def test_faults_come_and_what_is_promised_holds(kind: str, seed: int, tmp_path: Path) -> None:
    assert kinds.KINDS[kind](seed, tmp_path) > 0


def test_a_run_whose_faults_never_come_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds.FaultyNetwork, "_draw", lambda network, asked: "")
    tally = chaos.inject({"S3": kinds.s3_faulty}, minutes=0, seed=5, clock=StopWatch())["S3"]
    assert (tally.runs, tally.held, tally.injected) == (1, 0, 0)
    assert "no fault came" in tally.failed[5]


def test_an_s3_that_seldom_fails_fails_once_all_the_same(tmp_path: Path) -> None:
    network = kinds.FaultyNetwork(0, 0.0, kinds.S3_CALLS)
    with kinds.s3_bench(tmp_path) as bench:
        assert bench.attempt("i-1", store=S3Store("s3://bucket/r1", network.client())).run() == 0
    assert network.faults.total() == 1


@pytest.mark.parametrize("fault", kinds.S3_FAULTS)
def test_each_fault_of_s3_is_a_store_error_or_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever boto3 makes of it, no other error comes out, and what is put is there or not."""
    monkeypatch.setattr(kinds.FaultyNetwork, "_draw", lambda network, asked: fault)
    (tmp_path / "file").write_bytes(b"weights")
    with kinds.s3_bench(tmp_path / "bench") as bench:
        faulty = S3Store("s3://bucket/r1", kinds.FaultyNetwork(0, 1.0, 0).client())
        bench.store.put_bytes(b"old", "a/old.bin")
        for act in (
            lambda: faulty.put_file(tmp_path / "file", "a/new.bin"),
            lambda: faulty.put_bytes(b"weights", "a/new.bin", over=ABSENT),
            lambda: faulty.get_file("a/old.bin", tmp_path / "got"),
            lambda: faulty.get_bytes("a/old.bin"),
            lambda: faulty.size("a/old.bin"),
            lambda: faulty.entries("a/"),
            lambda: faulty.delete(["a/other.bin"]),
        ):
            with contextlib.suppress(StoreError):
                act()
        assert bench.store.get_bytes("a/new.bin") in (None, b"weights")
        assert not (tmp_path / "got").exists() or (tmp_path / "got").read_bytes() == b"old"


def test_what_does_not_hold_is_told_with_the_command_that_repeats_it() -> None:
    watch = StopWatch()

    def breaks(seed: int, folder: Path) -> int:
        watch.now += 30
        assert seed != 8, "the weights differ"
        return 2

    tallies = chaos.inject({"a kind": breaks}, minutes=2, seed=7, clock=watch)
    assert (tallies["a kind"].held, tallies["a kind"].injected, list(tallies["a kind"].failed)) == (3, 6, [8])
    said = "\n".join(chaos.table(tallies))
    assert "a kind, seed 8: make chaos KIND='a kind' SEED=8 MINUTES=0" in said
    assert "the weights differ" in said


def test_every_kind_comes_once_and_then_time_is_shared() -> None:
    watch = StopWatch()
    given = {"long": watch.run(100), "short": watch.run(10), "other": watch.run(10)}
    assert [each.runs for each in chaos.inject(given, minutes=0, seed=1, clock=watch).values()] == [1, 1, 1]
    shared = chaos.inject(given, minutes=5, seed=1, clock=watch)
    assert [each.seconds for each in shared.values()] == [100, 100, 100]
