"""The run's own end before its last step: at a limit, or stopped by hand."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic
from gpufleet.job.experiments.growth.spec import GrowthConfig
from tests.job.supervisor_world import STEPS, Bench, FakeTrainer, interrupted


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_usd": "0.0300", "max_hours": "2", "deadline": None}, "max_usd"),
        ({"max_usd": "3.00", "max_hours": "0.055", "deadline": None}, "max_hours"),
        ({"max_usd": "3.00", "max_hours": "2", "deadline": "2027-01-15T08:03:10Z"}, "deadline"),
        ({"max_usd": "3.00", "max_hours": "2", "deadline": None, "expires": "2027-01-15T08:03:10Z"}, "expiry"),
    ],
)
def test_a_limit_ends_the_run_with_everything_saved(tmp_path: Path, limits: dict[str, Any], reason: str) -> None:
    bench = Bench(tmp_path, limits=limits)

    def idle(trainer: FakeTrainer) -> None:
        bench.clock.sleep(20)
        trainer.step = min(trainer.step, 5)  # a run that would go on for ever

    assert bench.attempt(script={4: idle, 5: idle, 6: idle}).run() == 0
    assert bench.json("done.json")["reason"] == reason
    assert bench.manifests()[-1] == bench.trainers[0].step
    receipt = bench.json("receipt.json")
    assert receipt["reason"] == reason
    assert float(receipt["usd"]["actual"]) <= 0.0300


@pytest.mark.parametrize(("saves", "last"), [(False, 6), (None, 8), (True, 8)])
def test_a_job_that_saves_only_by_itself_ends_with_its_last_checkpoint_before_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool | None, last: int
) -> None:
    """It commits steps 3, 6 and 9, a second apart; the limit comes at step 8, of which no checkpoint would be left."""
    monkeypatch.setattr(GrowthConfig, "saves_on_signal", saves)
    monkeypatch.setattr(GrowthConfig, "save_interval_s", lambda self, step_s: 300.0)
    bench = Bench(tmp_path, limits={"max_usd": "3.00", "max_hours": str((120 + 67 + 1.65) / 3600), "deadline": None})
    assert bench.attempt().run() == 0
    assert bench.trainers[0].step == last
    assert bench.json("done.json")["reason"] == "max_hours"


def test_a_checkpoint_that_a_node_is_given_is_no_save_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between it and the node's start is no interval that a limit could come into."""
    bench = interrupted(tmp_path)
    monkeypatch.setattr(GrowthConfig, "saves_on_signal", False)
    assert bench.attempt("i-2").run() == 0
    assert bench.json("done.json")["reason"] == "finished"


def test_an_untold_spot_price_is_counted_at_its_ceiling_and_said_in_log_heartbeat_and_receipt(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits={"max_usd": "0.0900", "max_hours": "2", "deadline": None})
    bench.spot_price = None  # at 0.36 an hour the cap would not be met

    def slow(_: FakeTrainer) -> None:
        bench.clock.sleep(60)

    assert bench.attempt(script={2: slow, 4: slow, 6: slow}).run() == 0
    assert bench.json("done.json")["reason"] == "max_usd"
    assert (
        "AWS gives no spot price: until it does, compute is charged at the highest possible price, $1.2120 an hour"
        in bench.said
    )
    (beats,) = [bench.store.get_bytes(entry.key) or b"" for entry in bench.store.entries("heartbeat/")]
    assert all(float(beat["ceiling_s"]) > 0 for beat in atomic.objects(beats))
    assert "AWS gave no spot price" in bench.json("receipt.json")["lines"][0]["note"]


def test_a_spot_price_that_aws_tells_later_is_counted_from_the_launch_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.spot_price = None

    def tell(_: FakeTrainer) -> None:
        bench.spot_price = Decimal("0.36")
        bench.clock.sleep(61)  # one heartbeat

    assert bench.attempt(script={4: tell}).run() == 0
    assert (
        "AWS gives the spot price, $0.36 an hour, which replaces the highest possible price since the launch"
        in bench.said
    )
    receipt = bench.json("receipt.json")
    assert (receipt["lines"][0]["note"], receipt["attempts"][0]["ceiling_s"]) == ("", "0.000")


def test_a_run_that_is_asked_to_stop_ends_as_at_a_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def ask(_: FakeTrainer) -> None:
        bench.store.put_bytes(b"{}", "stop.json")
        bench.clock.sleep(61)  # one heartbeat

    assert bench.attempt(script={4: ask}).run() == 0
    assert (bench.json("done.json")["reason"], bench.json("receipt.json")["reason"]) == ("stopped", "stopped")
    assert bench.manifests()[-1] == bench.trainers[0].step < STEPS


def asked(tmp_path: Path, **changes: Any) -> Bench:
    """A run that was interrupted, and is asked to end before its next node comes."""
    bench = interrupted(tmp_path, **changes)
    bench.store.put_bytes(b"{}", "stop.json")
    return bench


def test_a_node_that_comes_after_the_request_leaves_what_the_checkpoint_holds(tmp_path: Path) -> None:
    bench = asked(tmp_path)
    assert bench.attempt("i-2").run() == 0
    assert [trainer.step for trainer in bench.trainers] == [5, 5]  # started to export, and stopped at once
    assert bench.json("done.json")["reason"] == "stopped"


def test_a_trainer_asked_to_stop_while_it_starts_is_given_the_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = asked(tmp_path)
    ready_at = bench.clock.now + 300  # imports, pre-flight, weights
    poll = FakeTrainer.poll
    monkeypatch.setattr(
        FakeTrainer, "poll", lambda self: None if self.clock.now < ready_at and not self.killed else poll(self)
    )
    assert bench.attempt("i-2").run() == 0
    assert "did not stop in time" not in bench.said
    assert bench.json("done.json")["reason"] == "stopped"


def test_a_bad_node_that_comes_after_the_request_leaves_it_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = asked(tmp_path)
    with monkeypatch.context() as bad:
        bad.setattr(FakeTrainer, "poll", lambda self: 71)
        assert bench.attempt("i-2").run() == 71
    assert bench.store.get_bytes("done.json") is None
    assert bench.attempt("i-3").run() == 0
    assert (bench.json("done.json")["reason"], bench.json("done.json")["detail"]) == ("stopped", "")


def test_a_trainer_deaf_to_a_stop_by_hand_is_killed_as_at_a_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits={"max_usd": "3.00", "max_hours": "0.2", "deadline": None})

    def deaf(trainer: FakeTrainer) -> None:
        bench.store.put_bytes(b"{}", "stop.json")
        bench.clock.sleep(61)
        trainer.hangs = True

    assert bench.attempt(script={4: deaf}).run() == 0
    assert bench.json("done.json")["detail"] == "the trainer did not stop in time"
    assert float(bench.json("receipt.json")["hours"]["actual"]) <= 0.2 + 120 / 3600  # as at a limit


def test_a_request_before_anything_is_saved_starts_no_trainer(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.put_bytes(b"{}", "stop.json")
    assert bench.attempt().run() == 0
    assert bench.trainers == []
    assert bench.json("done.json")["reason"] == "stopped"


def test_a_limit_that_is_reached_already_starts_no_trainer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limits={"max_usd": "0.0100", "max_hours": "2", "deadline": None})
    assert bench.attempt().run() == 0
    assert bench.trainers == []
    assert bench.json("done.json")["reason"] == "max_usd"


def test_a_node_that_comes_after_the_request_and_at_a_limit_starts_no_trainer(tmp_path: Path) -> None:
    bench = asked(tmp_path, limits={"max_usd": "3.00", "max_hours": "0.115", "deadline": None})
    assert bench.attempt("i-2").run() == 0
    assert len(bench.trainers) == 1  # of the first node
    assert bench.json("done.json")["reason"] == "max_hours"


def test_earlier_attempts_count_towards_the_limit(tmp_path: Path) -> None:
    bench = interrupted(tmp_path, limits={"max_usd": "3.00", "max_hours": "0.16", "deadline": None})
    bench.clock.sleep(600)

    def idle(_: FakeTrainer) -> None:
        bench.clock.sleep(40)

    assert bench.attempt("i-2", script=dict.fromkeys(range(1, 13), idle)).run() == 0
    assert bench.json("done.json")["reason"] == "max_hours"
    assert bench.trainers[1].step < STEPS
