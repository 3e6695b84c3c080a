"""The bill's third column: a run on spot that goes on on demand when it is late."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.fallback import ON_DEMAND_MISSING, Fallback, fallback_problems, price_fallbacks, switch_at
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from tests.infra.cost_definitions import definition, growth

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def priced(hours: float, **changes: Any) -> tuple[StackDefinition, Bill, Fallback]:
    plain = definition(**{"max_usd": "30", "max_hours": "20", **changes})
    limits = replace(plain.limits, deadline=timedelta(hours=hours))
    plan = replace(plain, limits=limits, fleet=replace(plain.fleet, fallback="on-demand"))
    bill = price(plan, CATALOG, runs=2000)
    (found,) = price_fallbacks(plan, bill, NOW)
    return plan, bill, found


def test_without_the_key_there_is_none() -> None:
    plan, bill, _ = priced(4)
    assert price_fallbacks(replace(plan, fleet=replace(plan.fleet, fallback="none")), bill, NOW) == []


def test_no_spot_at_all_is_on_demand_at_the_hour_that_is_named() -> None:
    """A spot node practically never comes, so the run costs a whole run on demand that begins at the switch."""
    _, bill, found = priced(4, hazard_per_hour="100", capacity_wait_minutes="10000")
    assert found.switched > 0.99
    assert bill.on_demand is not None
    assert float(found.usd.p50) == pytest.approx(float(bill.on_demand.total), rel=0.1)
    assert found.switch_h == pytest.approx(4 - found.needed_h)
    assert float(found.wall_hours.p50) == pytest.approx(found.switch_h + found.start_h + found.work_h, rel=0.01)


def test_with_time_to_spare_nothing_switches() -> None:
    _, bill, found = priced(300)
    assert (found.switched, found.missing, found.on_time) == (0, 0, 1)
    assert bill.spot is not None
    assert float(found.usd.mean) == pytest.approx(float(bill.spot.needed_usd.mean), rel=0.03)


def test_more_are_on_time_than_on_spot_alone_and_the_missing_capacity_is_taken_off() -> None:
    _, bill, found = priced(2.5, hazard_per_hour="1")
    assert bill.spot is not None
    alone = float((bill.spot.needed.wall_hours + found.stop_h <= 2.5).mean())
    assert alone < 0.9 < found.on_time
    assert found.on_time <= 1 - found.missing
    assert found.missing == pytest.approx(ON_DEMAND_MISSING * found.switched)


def test_a_cap_that_no_longer_pays_for_the_rest_forbids_the_switch() -> None:
    plan, bill, found = priced(2.5, hazard_per_hour="1")
    limit = (found.metered_usd.p50 + found.metered_usd.p90) / 2
    (poorer,) = price_fallbacks(replace(plan, limits=replace(plan.limits, max_usd=limit)), bill, NOW)
    assert 0 < poorer.unpaid < 0.5
    assert poorer.on_time < found.on_time
    assert "limits forbid the switch in" in poorer.sentence()
    assert "forbid" not in found.sentence()


def test_a_cap_below_half_of_the_runs_is_an_error() -> None:
    plan, bill, found = priced(4)
    assert not list(fallback_problems(plan, bill, [found]))
    below = found.metered_usd.p50 - Decimal("0.01")
    (problem,) = fallback_problems(replace(plan, limits=replace(plan.limits, max_usd=below)), bill, [found])
    assert problem.path == "limits.max_usd"
    assert "with fleet.fallback: half of the simulated runs need" in problem.allowed


def test_a_type_without_an_on_demand_price_is_an_error() -> None:
    plan, bill, _ = priced(4)
    (problem,) = fallback_problems(plan, replace(bill, on_demand=None), [])
    assert problem.path == "fleet.fallback"


def test_the_table_has_the_column_and_the_sentence() -> None:
    _, bill, found = priced(4)
    shown = " ".join(render(bill, fallbacks=[found]).split())
    assert f"USD on spot, on demand when late, g5.2xlarge {found.usd.p10:.2f} {found.usd.p50:.2f}" in shown
    assert "an assumption, for nobody promises it" in shown
    assert "on demand when late" not in render(bill)


def test_the_hour_is_never_past() -> None:
    _, _, found = priced(4)
    due = NOW + timedelta(hours=4)
    assert timedelta() <= due - timedelta(hours=found.needed_h) - switch_at(found, due, NOW) < timedelta(seconds=1)
    assert switch_at(found, due, due) > due


def test_of_several_types_the_hour_is_that_of_the_cheapest_which_a_fleet_launches_on_demand() -> None:
    types = ("g5.2xlarge", "p4d.24xlarge")
    _, bill, found = priced(40, types=types, max_usd="1000", max_hours="100", config=growth(steps_per_phase=50_000))
    alone, _, slow = priced(40, types=types[:1], max_usd="1000", max_hours="100", config=growth(steps_per_phase=50_000))
    assert bill.on_demand is not None
    assert bill.on_demand.type == "p4d.24xlarge"
    assert found.type == "g5.2xlarge"
    assert (found.work_h, found.start_h) == pytest.approx((slow.work_h, slow.start_h))
    assert alone.fleet.instance_types == ("g5.2xlarge",)
