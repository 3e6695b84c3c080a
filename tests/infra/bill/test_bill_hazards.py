"""The bill's sentences on interruptions: the source of its hazard, and the cheapest checkpoint interval."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpufleet.infra.bill import record
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition, Variant
from gpufleet.infra.evidence.observation import Observation
from gpufleet.infra.evidence.observations import observations
from gpufleet.infra.risk.hazard import Hazard, Key, learn
from gpufleet.infra.risk.simulation import quantiles, simulate
from gpufleet.infra.risk.unknown import P90, Unknown
from tests.infra.cost_definitions import definition, growth, on_nodes
from tests.receipt_tree import node, place, receipt

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
CALM = learn(
    Observation("g5.2xlarge", zone, 4000, 40, "a test", date(2026, 11, 1))
    for zone in ("us-east-2a", "us-east-1a", "us-west-2a")
)


def bill(plan: StackDefinition | None = None, **given: Any) -> Bill:
    return price(plan or definition(), CATALOG, dataset_bytes=22_183_150, runs=2000, **given)


def in_zones(*zones: str) -> StackDefinition:
    plan = definition()
    return replace(plan, fleet=replace(plan.fleet, zones=zones))


def nodes(count: int, **changes: Any) -> StackDefinition:
    return on_nodes(definition(**changes), count)


def flat(found: Bill) -> str:
    return re.sub(r"\s+", " ", render(found))


def test_without_history_the_hazard_is_the_prior_and_its_spread_is_said_in_figures_and_words() -> None:
    found = bill()
    assert found.chance == Hazard()
    # 0.3 x exp(-+ 1.2816 x 1.2): 0.0645 and 1.396
    assert "at about 0.3 per node-hour, in eight runs of ten between 0.064 and 1.4 (calm to rough;" in flat(found)
    assert record.to_json(found)["hazard"] == {
        "median": 0.3,
        "p10": 0.0645,
        "p90": 1.3964,
        "source": "log-normal of public traces of 2022 to 2025",
    }


def test_the_usual_number_of_interruptions_is_printed_and_the_mean_is_for_programs() -> None:
    """A few runs with a high hazard dominate the mean: for a run of days it is many times the number of most runs."""
    found = bill(definition(config=growth(steps_per_phase=100_000), max_usd="900", max_hours="700"))
    met = np.sort(found.chosen.within.interruptions)
    p50, p90, mean = met[len(met) // 2], met[len(met) * 9 // 10], met.mean()
    assert mean > 1.5 * p50
    assert f"Interruptions: at most {p50} in half of the runs, at most {p90} in nine of ten, at about" in flat(found)
    assert f"{mean:.2f}" not in flat(found)
    tree = record.to_json(found)
    assert tree["interruptions_expected"] == pytest.approx(mean, abs=0.001)
    assert float(tree["interruptions"]["p50"]) == p50
    assert "Interruptions: none in half of the runs, at most " in flat(bill())


def test_what_was_learned_of_the_type_replaces_the_prior_and_names_its_source() -> None:
    found = bill(hazards=CALM)
    assert found.chance == CALM[Key("g5.2xlarge", None)]
    assert found.chance.median < 0.3
    assert found.chosen.interruptions.mean < bill().chosen.interruptions.mean
    assert "120 interruptions in 12000 node-hours seen in 3 other zones" in flat(found)
    assert record.to_json(found)["hazard"]["source"] == "120 interruptions in 12000 node-hours seen in 3 other zones"


def test_a_zones_own_history_counts_for_a_fleet_of_that_zone_alone() -> None:
    assert bill(in_zones("us-east-2a"), hazards=CALM).chance == CALM[Key("g5.2xlarge", "us-east-2a")]
    assert bill(in_zones("us-east-2b"), hazards=CALM).chance == CALM[Key("g5.2xlarge", None)]
    assert bill(in_zones("us-east-2a", "us-east-2b"), hazards=CALM).chance == CALM[Key("g5.2xlarge", None)]


def test_a_figure_of_the_definition_goes_before_what_was_learned() -> None:
    found = bill(definition(hazard_per_hour="0.5"), hazards=CALM)
    assert found.chance == Hazard.fixed(0.5)
    assert "at 0.5 per node-hour (rough; estimate.hazard_per_hour)" in flat(found)


def test_history_of_another_type_changes_no_byte() -> None:
    other = learn([Observation("g6e.2xlarge", None, 4000, 4000, "a test", None)])
    assert json.dumps(record.to_json(bill(hazards=other))) == json.dumps(record.to_json(bill()))


def test_on_demand_has_no_hazard_and_no_checkpoint_interval_to_choose() -> None:
    found = bill(definition(capacity="on-demand"), hazards=CALM)
    assert (found.chance, found.cadence) == (None, None)
    tree = record.to_json(found)
    assert (tree["hazard"], tree["cadence"]) == (None, None)
    assert "Interruptions: none on demand." in flat(found)


@pytest.mark.parametrize(("device", "counts"), [("cuda", True), ("cpu", False)])
def test_receipts_of_real_runs_are_history_and_a_rehearsals_never_is(tmp_path: Path, device: str, counts: bool) -> None:
    for run in ("r1", "r2", "r3"):
        attempt = node("i-1", seconds="360000", interrupted=run == "r1")
        place(tmp_path, receipt(run=run, device=device, attempts=[attempt]), run)
    found = bill(hazards=learn(observations(tmp_path)))
    assert (found.chance != Hazard()) is counts
    if counts:
        assert "1 interruption in 300 node-hours seen" in flat(found)


def test_the_break_even_hazard_of_two_nodes_is_per_node_and_these_are_lost_together() -> None:
    one, two, patient = (
        bill(each).break_even_hazard for each in (nodes(1), nodes(2, capacity_wait_minutes="0"), nodes(2))
    )
    assert one is not None
    assert two is not None
    assert patient is not None
    assert two == pytest.approx(one / 2**0.4, rel=0.1)
    assert patient < two  # the remaining node waits for the other, and is billed


def test_two_nodes_are_at_risk_of_twice_the_dollars() -> None:
    one, two = (bill(nodes(count)).chosen.exposure for count in (1, 2))
    assert two.compute_usd_h == 2 * one.compute_usd_h
    assert two.extras_usd_h == pytest.approx(2 * one.extras_usd_h, rel=1e-5)  # the quantities are rounded


def test_a_slow_job_on_a_held_node_costs_no_more_until_it_outlasts_it() -> None:
    held = replace(
        definition(capacity="on-demand", max_usd="50", max_hours="50"), variant=Variant(hold_hours=Decimal(1))
    )
    found = bill(held)
    assert found.chosen.hours.p50 == 1
    for slower, hours in ((2.0, 1.0), (4.0, 0.1333 + 4 * 0.3075)):  # set-up, then the work
        doubt = Unknown(slower=math.log(slower) / P90, device="x")
        outcome = simulate(replace(found.chosen.exposure, unknown=doubt))
        assert quantiles(outcome.hours)[2] == pytest.approx(hours, rel=0.01)


def test_two_nodes_are_said_to_be_priced_only() -> None:
    assert "2 spot nodes in us-east-2" in flat(bill(nodes(2)))


def test_the_cheapest_checkpoint_interval_is_one_sentence_and_in_the_json() -> None:
    long = growth(steps_per_phase=100_000, checkpoint=replace(growth().checkpoint, interval_s=7200))
    found = bill(definition(config=long, max_usd="9000", max_hours="9000", hazard_per_hour="0.3"))
    assert found.cadence is not None
    assert 60 < found.cadence.interval_s < 7200
    assert re.search(
        r"The cheapest checkpoint interval is about \d+ s; against the present 7200 s it saves \$", flat(found)
    )
    tree = record.to_json(found)["cadence"]
    assert tree["present_s"] == 7200
    assert Decimal(tree["saved_usd"]) > 0


def test_a_run_without_interruptions_has_no_checkpoint_interval_to_choose() -> None:
    assert bill(definition(hazard_per_hour="0")).cadence is None
