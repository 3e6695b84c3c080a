"""`make chaos`: every kind injects what it says, and a fault that never comes is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos import kinds

# The others are tests of their own, at one seed.
QUICK = ["S3 faults", "clocks set", "metadata faults", "node refused"]


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
    for name in ("_send", "_got", "_put"):
        monkeypatch.setattr(kinds.FaultyAnswers, name, lambda answers, **_: None)
    tally = chaos.inject({"S3": kinds.s3_faulty}, minutes=0, seed=5, clock=StopWatch())["S3"]
    assert (tally.runs, tally.held, tally.injected) == (1, 0, 0)
    assert "no fault came" in tally.failed[5]


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
