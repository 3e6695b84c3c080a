"""The meter never counts less than the run costs: untold prices, a second node, a store that is down at the end."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic, clock
from gpufleet.job.contract.attempt import Node
from gpufleet.job.contract.environment import BOOTED_AT
from gpufleet.job.contract.estimate import PhaseEstimate
from gpufleet.job.contract.metrics import Save
from gpufleet.job.contract.spent import History
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.supervisor import staging
from gpufleet.job.supervisor.attempt import MARK_S, Supervisor
from gpufleet.job.supervisor.forecast import Forecast
from gpufleet.job.supervisor.store import StoreError
from tests.job.supervisor_world import STEPS, Bench, FakeTrainer, FaultyStore

LIMITS = {"max_usd": "3.00", "max_hours": "2", "deadline": None}


def hours(bench: LongBench) -> float:
    """From the first launch on, by the clock of the test."""
    return (bench.clock.now - bench.began) / 3600


class LongBench(Bench):
    """Its trainer takes a minute a step, and would go on for ever."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder, **changes)
        self.began = self.clock.now - 120

    def slow(self, trainer: FakeTrainer) -> None:
        self.clock.sleep(60)
        trainer.step = min(trainer.step, 9)

    def attempt(
        self,
        instance: str = "i-1",
        store: Any = None,
        launched_at: float | None = None,
        capacity: str = "",
        **trainer: Any,
    ) -> Supervisor:
        script = {"script": dict.fromkeys(range(1, STEPS), self.slow)}
        return super().attempt(instance, store, launched_at, capacity, **{**script, **trainer})


def test_a_price_that_rises_while_aws_does_not_answer_passes_no_cap(tmp_path: Path) -> None:
    """1.20 USD from the second hour on, of which the meter hears nothing."""
    bench = LongBench(tmp_path, limits=LIMITS | {"max_usd": "1.50", "max_hours": "9"})

    def price(at: float) -> Decimal | None:
        return Decimal("0.36") if at < bench.began + 3600 else None

    supervisor = bench.attempt()
    object.__setattr__(supervisor.world, "spot_price", price)
    assert supervisor.run() == 0
    assert bench.json("done.json")["reason"] == "max_usd"
    real = Decimal("0.36") + Decimal("1.20") * Decimal(hours(bench) - 1)
    assert Decimal("1.2") < real <= Decimal("1.50")


def test_two_nodes_that_train_at_once_stop_at_one_cap(tmp_path: Path) -> None:
    bench = LongBench(tmp_path, limits=LIMITS | {"max_hours": "1"})
    bench.history = History(there=frozenset({"i-0", "i-1"}))
    began = {"type": "g5.2xlarge", "zone": "us-east-2a", "launched_at": "2027-01-15T08:00:00Z"}
    bench.store.put_bytes(json.dumps(began).encode(), "attempts/i-0.json")
    assert bench.attempt().run() == 0
    assert bench.json("done.json")["reason"] == "max_hours"
    assert 0.9 <= 2 * hours(bench) <= 1 + 60 / 3600


def test_a_limit_that_is_passed_while_a_node_stages_ends_the_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = LongBench(tmp_path, limits=LIMITS | {"max_hours": "0.5"})

    def downloading(stage: staging.Stage) -> None:
        while True:
            bench.clock.sleep(10)
            stage.check()

    monkeypatch.setattr(staging, "inputs", downloading)
    assert bench.attempt().run() == 0
    assert (bench.json("done.json")["reason"], bench.trainers) == ("max_hours", [])
    assert hours(bench) <= 0.5


@pytest.mark.parametrize(("key", "lacks"), [("done.json", {"done.json"}), ("", {"done.json", "receipt.json"})])
def test_an_end_that_cannot_be_told_costs_minutes_and_no_further_node(
    tmp_path: Path, key: str, lacks: set[str]
) -> None:
    bench = Bench(tmp_path)
    ended: list[float] = []

    def fault(_: int, put: str) -> BaseException | None:
        if put == "final/model.safetensors":
            ended.append(bench.clock.now)
        return StoreError("503 slow down") if ended and put.startswith(key) and put in lacks | {"job.log"} else None

    assert bench.attempt(store=FaultyStore(bench.store, fault)).run() == 0
    assert bench.clock.now - ended[0] <= 2 * MARK_S
    assert {name for name in ("done.json", "receipt.json") if bench.store.get_bytes(name) is None} == lacks
    marker = atomic.read_object(bench.folder / "i-1" / "done.json")
    assert marker is not None  # the node sends it
    assert (marker["reason"], marker["instance"]) == ("finished", "i-1")


def test_a_store_that_is_down_at_a_limit_is_waited_for_a_minute_past_it_and_no_other_node_tries(
    tmp_path: Path,
) -> None:
    bench = LongBench(tmp_path, limits=LIMITS | {"max_hours": "0.5"})
    down = FaultyStore(bench.store, lambda put, key: StoreError("503") if bench.clock.now > bench.began + 900 else None)
    assert bench.attempt(store=down).run() == 0
    assert hours(bench) <= 0.5 + (60 + 2 * 60) / 3600  # the longest pause between two tries is on top
    assert "at a limit no other node tries again" in bench.said
    marker = atomic.read_object(bench.folder / "i-1" / "done.json")
    assert marker is not None
    assert marker["reason"] == "max_hours"


def test_a_trainer_that_is_deaf_at_a_limit_gets_a_minute_and_a_checkpoint_past_it(tmp_path: Path) -> None:
    bench = LongBench(tmp_path, limits=LIMITS | {"max_hours": "0.2"})

    def deaf(trainer: FakeTrainer) -> None:
        trainer.hangs = True

    assert bench.attempt(script={4: deaf}).run() == 0
    assert bench.json("done.json")["detail"] == "the trainer did not stop in time"
    assert 0.2 <= hours(bench) <= 0.2 + 75 / 3600


def test_a_save_that_took_longer_than_forecast_is_learned() -> None:
    rows = [PhaseEstimate(phase="sft", steps=25, step_ms=8000.0)]
    forecast, size = Forecast(KernelConfig(), "p5.48xlarge", phases=rows), 98.3  # GB
    billed = [forecast.stop_s(0, None), forecast.end_s(0, None)]
    saved = Save(step=1, reason="timed", bytes=10**9, blocked_s=0.1, took_s=0.5)
    forecast.learn_saves([saved])  # faster than the bill has it
    assert [forecast.stop_s(0, None), forecast.end_s(0, None)] == billed
    forecast.learn_saves([Save(step=2, reason="timed", bytes=10**9, blocked_s=0.1, took_s=4.0)])
    assert forecast.stop_s(0, None) == pytest.approx(8 + 2 + (4.0 + 1.5) * size, abs=0.5)
    assert forecast.end_s(0, None) - forecast.stop_s(0, None) == pytest.approx((4.0 + 1.5) * 16.38, abs=0.1)
    tiny = Save(step=3, reason="timed", bytes=49_999_999, blocked_s=0.1, took_s=60.0)
    untold = Save(step=4, reason="timed", bytes=10**9, blocked_s=0.1)
    forecast.learn_saves([tiny, untold])
    assert forecast.stop_s(0, None) == pytest.approx(8 + 2 + (4.0 + 1.5) * size, abs=0.5)


def test_a_save_that_a_job_tells_of_moves_the_stop_before_a_limit(tmp_path: Path) -> None:
    """Steps of a minute, and a save of 100 MB that took ten."""
    ends = []
    for took_s in (1.0, 600.0):
        bench = LongBench(tmp_path / str(took_s), limits=LIMITS | {"max_hours": "1"})

        def saves(trainer: FakeTrainer, bench: LongBench = bench, took_s: float = took_s) -> None:
            told = {"step": 1, "reason": "timed", "bytes": 100_000_000, "blocked_s": 0.1, "took_s": took_s}
            line = {"ts": bench.clock.now, "step": trainer.step, "phase": "dense", "saves": [told]}
            with (trainer.workdir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            bench.slow(trainer)

        script = {**dict.fromkeys(range(1, STEPS), bench.slow), 2: saves}
        assert bench.attempt(script=script).run() == 0
        ends.append(hours(bench) * 3600)
    size = Forecast(bench.attempt("i-2").run_file.config, "g5.2xlarge")._config.sizes().checkpoints[0]
    assert ends[0] - ends[1] == pytest.approx(size * 6e-6, abs=120)  # ten minutes for 100 MB


class Clocks:
    """What a machine shows: a clock that may be set, and the seconds since it booted."""

    def __init__(self, wall: float) -> None:
        self.shown, self.up = wall, 50.0

    def steady(self, earliest: float = 0.0) -> clock.SteadyClock:
        return clock.SteadyClock(earliest, wall=lambda: self.shown, uptime=lambda: self.up)

    def passes(self, seconds: float, jump: float = 0.0) -> None:
        self.up += seconds
        self.shown += seconds + jump


@pytest.mark.parametrize("jump", [-86400.0, -1.0, 0.0, 1.0, 86400.0])
def test_a_clock_that_is_set_changes_no_count(jump: float) -> None:
    clocks = Clocks(1000.0)
    steady = clocks.steady()
    clocks.passes(600, jump)
    assert steady() == 1600.0


def test_what_the_supervisor_starts_counts_as_it_does_and_a_file_s_time_is_of_that_count() -> None:
    ours = clock.SteadyClock(time.time() + 5000)
    theirs = clock.SteadyClock.from_environment({BOOTED_AT: repr(ours.booted)})
    assert theirs() == pytest.approx(ours(), abs=5)
    assert theirs.moment(time.time() - 100) == pytest.approx(ours() - 100, abs=5)
    assert clock.SteadyClock.from_environment({})() == pytest.approx(time.time(), abs=5)


def test_a_clock_that_is_behind_when_the_run_begins_there_loses_nothing() -> None:
    clocks = Clocks(1000.0)
    assert clocks.steady(4000.0)() == 4000.0
    clocks.passes(30)
    assert clocks.steady(900.0)() == 1030.0


def test_the_supervisor_s_clock_counts_from_the_launch_by_the_machine_s_own_seconds() -> None:
    node = Node(instance="i-1", type="a", zone="", launched_at=5000.0)
    clocks = Clocks(1000.0)  # an hour and more behind
    began = clocks.up
    clocks.passes(420)  # image and packages
    assert clocks.steady(node.launched_at + clocks.up - began)() == 5420.0
