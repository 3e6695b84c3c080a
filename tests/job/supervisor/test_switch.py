"""The supervisor in a run that may go on on demand: the hour of the switch, the hand-over, each market's money."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.aws import HANDOVER_S
from gpufleet.job.contract.bucket import FALLBACK
from gpufleet.job.contract.estimate import PhaseEstimate
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.spent import History
from gpufleet.job.contract.terms import FallbackTerms, RunLimits, Terms, TypePrices
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.supervisor.fleet import of_node
from gpufleet.job.supervisor.forecast import Forecast
from gpufleet.job.supervisor.switch import Switch, find_switch
from tests.job.supervisor_world import STEPS, Bench, FakeTrainer, state

HOUR = 3600.0
TERMS = Terms(
    limits=RunLimits(max_usd=Decimal(100), max_hours=Decimal(40), deadline=100 * HOUR),
    capacity="spot",
    prices={
        "g5.2xlarge": TypePrices(on_demand=Decimal("1.2"), spot={}, gpus=1),
        "g6.2xlarge": TypePrices(on_demand=Decimal(3), spot={}, gpus=1),
    },
    hourly={"root disk": Decimal("0.5"), "public IPv4": Decimal("0.5")},
    fixed_usd=Decimal(0),
    fallback=FallbackTerms(work_s=10 * HOUR, train_s=8 * HOUR, start_s=HOUR, margin_s=HOUR / 2),
)


def found(terms: Terms = TERMS, **changes: Any) -> Switch:
    given = {"done_share": 0.0, "slower": 1.0, "stop_s": HOUR / 4, "spent_usd": Decimal(10), "spent_s": Decimal(0)}
    return find_switch(terms, **{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "hour"),
    [
        ({}, 100 - 0.25 - 1 - 10 - 0.5),
        ({"done_share": 0.5}, 100 - 0.25 - 1 - 6 - 0.5),
        ({"done_share": 1.0}, 100 - 0.25 - 1 - 2 - 0.5),  # what comes after training counts as left
        ({"done_share": 0.5, "slower": 1.5}, 100 - 0.25 - 1 - 9 - 0.5),
    ],
)
def test_the_hour_leaves_a_stop_a_start_the_rest_of_the_work_and_a_margin(changes: dict[str, Any], hour: float) -> None:
    assert found(**changes).at / HOUR == pytest.approx(hour)


def test_the_limits_have_to_pay_for_the_rest_on_the_dearest_type_on_demand() -> None:
    rest_usd, rest_h = 4 * Decimal("11.25"), Decimal("11.25")  # with a start and a stop, at 3 and 1 USD an hour
    assert found(spent_usd=100 - rest_usd).is_paid
    assert not found(spent_usd=100 - rest_usd + 1).is_paid
    assert found(spent_usd=100 - rest_usd + 1, done_share=0.5).is_paid
    assert not found(spent_s=(40 - rest_h + 1) * 3600).is_paid


def test_without_a_fallback_there_is_no_hour() -> None:
    assert found(replace(TERMS, fallback=None)) == Switch()


def test_what_is_done_counts_at_each_phases_own_pace() -> None:
    config = GrowthConfig()
    names = [phase.name for phase in config.phases() if phase.steps]
    paces = [PhaseEstimate(phase=name, step_ms=1000.0 * (number + 1), steps=10) for number, name in enumerate(names)]
    forecast = Forecast(config, "g5.2xlarge", phases=paces)
    whole = 10 * sum(range(1, len(names) + 1))
    assert forecast.done_share(0) == 0
    assert forecast.done_share(10) == pytest.approx(10 / whole)
    assert forecast.done_share(15) == pytest.approx((10 + 5 * 2) / whole)
    assert forecast.done_share(10 * len(names)) == 1
    assert forecast.slower(15, 3.0) == pytest.approx(1.5)
    assert forecast.slower(15, 1.0) == forecast.slower(15, None) == 1


def with_fallback(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.tree["fallback"] = {"work_s": 600, "train_s": 600, "start_s": 60, "margin_s": 30}
    bench.tree["limits"]["deadline"] = iso(bench.clock.now + 20 * HOUR)
    return bench


def spent(bench: Bench, instance: str = "i-1") -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((bench.folder / instance / "control/spent.json").read_text())
    return tree


def test_what_the_node_is_told_moves_on_as_the_run_trains(tmp_path: Path) -> None:
    bench, hours = with_fallback(tmp_path), list[float]()

    def look(_: FakeTrainer) -> None:
        bench.clock.sleep(6)  # the node gets a report every five seconds
        hours.append(spent(bench)["switch_at"])

    bench.attempt(capacity="spot", script=dict.fromkeys(range(1, STEPS), look)).run()
    assert hours == sorted(hours)
    assert hours[-1] - hours[0] == pytest.approx(600 * (STEPS - 2) / STEPS, rel=0.1)
    assert hours[-1] < bench.clock.now + 20 * HOUR


def taken_over(bench: Bench) -> Any:
    def happens(_: FakeTrainer) -> None:
        bench.store.put_bytes(b"{}", FALLBACK)
        bench.clock.sleep(61)  # until the next heartbeat

    return happens


def test_a_node_on_spot_saves_and_leaves_for_the_one_on_demand_without_a_step_lost(tmp_path: Path) -> None:
    bench = with_fallback(tmp_path)
    code = bench.attempt(capacity="spot", script={5: taken_over(bench)}).run()
    ended = bench.json("attempts/i-1.json")["exit"]
    assert (code, ended["code"], ended["reason"], ended["notice"]) == (75, 75, "fallback", False)
    reached = bench.trainers[0].step
    assert reached < STEPS
    assert bench.manifests()[-1] == reached
    assert bench.store.get_bytes("done.json") is None

    assert bench.attempt("i-2", capacity="on-demand").run() == 0
    assert bench.trainers[-1].began_at == reached
    assert bench.store.get_bytes("final/model.safetensors") == state(STEPS)


def test_the_one_on_demand_goes_on_though_the_object_is_there(tmp_path: Path) -> None:
    bench = with_fallback(tmp_path)
    bench.store.put_bytes(b"{}", FALLBACK)
    assert bench.attempt(capacity="on-demand").run() == 0


def test_no_notice_limits_the_save_but_the_hand_over_does(tmp_path: Path) -> None:
    bench = with_fallback(tmp_path)
    bench.attempt(capacity="spot", script={5: taken_over(bench)}).run()
    left = re.search(r"stopping: fallback, (\d+) s left", bench.said)
    assert left is not None
    assert 2 * 120 < int(left[1]) < HANDOVER_S


def test_each_node_is_paid_at_its_own_market_s_price(tmp_path: Path) -> None:
    bench = with_fallback(tmp_path)
    bench.attempt(capacity="spot", script={5: taken_over(bench)}).run()
    bench.attempt("i-2", capacity="on-demand").run()
    receipt = bench.json("receipt.json")
    first, second = receipt["attempts"]
    assert (first["capacity"], second["capacity"]) == ("spot", "on-demand")
    on_demand = Decimal(bench.tree["rates"]["g5.2xlarge"]["on_demand"])
    hourly = sum(map(Decimal, bench.tree["extras"]["hourly_usd"].values()))
    for node, price in ((first, bench.spot_price), (second, on_demand)):
        assert price is not None
        paid = Decimal(node["seconds"]) / 3600 * (price + hourly)
        assert Decimal(node["usd"]) == pytest.approx(paid, abs=Decimal("0.0002"))
    beat = json.loads((bench.store.get_bytes("heartbeat/i-2.jsonl") or b"").splitlines()[-1])
    assert Decimal(beat["usd_per_hour"]) == on_demand
    assert Decimal(beat["ceiling_s"]) == 0


def test_limits_that_do_not_pay_for_the_rest_are_said_once(tmp_path: Path) -> None:
    bench = with_fallback(tmp_path)
    bench.tree["fallback"]["work_s"] = bench.tree["fallback"]["train_s"] = 10**7
    bench.attempt(capacity="spot").run()
    assert spent(bench)["switch_is_paid"] is False
    assert bench.said.count("fallback: the cost of the rest on demand no longer fits within the limits: no switch") == 1


class Fleets:
    """EC2, as far as fleets tell of their nodes: one on spot, one on demand."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def describe_instances(self, **asked: Any) -> dict[str, Any]:
        if "InstanceIds" in asked:
            return {"Reservations": [{"Instances": [{"Tags": [{"Key": "aws:ec2:fleet-id", "Value": "fleet-od"}]}]}]}
        self.asked = asked["Filters"][0]["Values"]
        return {"Reservations": [{"Instances": [{"InstanceId": "i-2"}]}]}

    def describe_fleet_history(self, FleetId: str, **_: Any) -> dict[str, Any]:
        def event(kind: str, at: int, node: str | None = None) -> dict[str, Any]:
            told = {"EventSubType": kind, **({"InstanceId": node} if node else {})}
            return {"EventInformation": told, "Timestamp": datetime.fromtimestamp(at, UTC)}

        of = {
            "fleet-od": [event("modify_in_progress", 50), event("launched", 60, "i-2")],
            "fleet-spot": [event("launched", 10, "i-1"), event("deleted_running", 70), event("terminated", 80, "i-1")],
        }
        return {"HistoryRecords": of[FleetId]}


def test_aws_is_asked_of_both_fleets_and_who_took_a_node_on_spot_that_fleet_tells() -> None:
    fleets = Fleets()
    told = of_node("i-2", fleets, others=lambda: ["fleet-spot", "fleet-od"], on_demand=True)(0.0)
    assert told == History(
        changes=(70.0,), launched={"i-1": 10.0, "i-2": 60.0}, ended={"i-1": 80.0}, there=frozenset({"i-2"})
    )
    assert fleets.asked == ["fleet-od", "fleet-spot"]
