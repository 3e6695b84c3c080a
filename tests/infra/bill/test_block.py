"""The bill of a run in a Capacity Block, by hand: its fee is always due, nothing interrupts, and its end is a limit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import limits, record
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.cheaper import cheaper
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.definition.model import CapacityBlock, StackDefinition
from tests.infra.cost_definitions import definition, on_nodes

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
START = datetime(2026, 12, 1, 11, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)


def in_block(hours: float = 24.5, fee: str = "900", nodes: int = 1, **changes: Any) -> StackDefinition:
    """A node trains half an hour less than the block is long."""
    plain = on_nodes(definition(**{"max_usd": "1000", "max_hours": "100", "capacity": "block", **changes}), nodes)
    block = CapacityBlock(start=START, end=START + hours * HOUR, fee_usd=Decimal(fee))
    return replace(plain, fleet=replace(plain.fleet, block=block, zones=plain.fleet.zones[:1]))


def test_the_fee_is_one_line_and_the_nodes_cost_nothing_an_hour() -> None:
    bill, spot = price(in_block(), CATALOG), price(definition(max_usd="30"), CATALOG)
    amounts = {line.name: line.amount for line in bill.lines}
    assert amounts.pop("compute") == 0
    assert amounts.pop("capacity block") == 900
    beside = {line.name: line.amount for line in spot.lines}
    beside.pop("compute")
    assert {name for name, amount in amounts.items() if amount != beside[name]} <= {
        "interruptions",
        "what is not known",
    }
    assert bill.usd.p50 == sum(line.amount for line in bill.lines)
    assert bill.usd.p90 - bill.usd.p10 < Decimal("0.01")  # only the lines for disk and address differ
    assert bill.chosen.interruptions.mean == 0
    assert (bill.chance, bill.cadence, bill.usd_at_hazard) == (None, None, ())


def test_what_it_would_cost_by_the_hour_has_no_fee() -> None:
    bill, plain = price(in_block(), CATALOG), definition(max_usd="1000", max_hours="100")
    one_zone = replace(plain, fleet=replace(plain.fleet, zones=plain.fleet.zones[:1]))
    other = price(one_zone, CATALOG)
    assert bill.spot is not None
    assert other.spot is not None
    assert (bill.spot.total, bill.on_demand and bill.on_demand.total) == (
        other.spot.total,
        other.on_demand and other.on_demand.total,
    )
    text = render(bill)
    assert "one node of a capacity block in us-east-2" in text
    assert "USD on spot, g5.2xlarge at" in text
    assert "USD on demand, g5.2xlarge at" in text
    used = f"{bill.hours.p50:.2f}"
    paid = "Its fee, 900.00 USD, is paid whatever the run does, which takes"
    assert f"{paid} {used} h of it (p50)." in " ".join(text.split())


def test_the_end_of_the_block_is_a_limit_and_too_short_a_one_is_refused() -> None:
    whole = price(in_block(), CATALOG)
    assert whole.cap is not None
    assert (whole.cap.first, whole.cap.probability) == ("fleet.block.end", 0)
    needed = float(whole.chosen.needed_hours.p50 + whole.chosen.reserve[1])
    short = in_block(hours=0.5 + needed * 0.9)
    bill = price(short, CATALOG)
    assert bill.cap is not None
    assert bill.cap.probability > 0.5
    (found,) = problems(short, bill)
    assert found.path == "fleet.block.end"
    assert found.allowed.startswith(f"at least {limits.enough(Decimal(needed))} hours from its start to 30 minutes")
    assert not problems(in_block(hours=0.6 + needed), price(in_block(hours=0.6 + needed), CATALOG))


def test_max_hours_binds_where_it_is_less_and_counts_all_nodes() -> None:
    assert price(in_block(max_hours="10"), CATALOG).chosen.exposure.max_hours == 10
    assert price(in_block(max_hours="10", nodes=2), CATALOG).chosen.exposure.max_hours == 5
    assert price(in_block(max_hours="100", nodes=2), CATALOG).chosen.exposure.max_hours == 24


def test_the_fee_counts_against_max_usd() -> None:
    poor = in_block(max_usd="900")
    assert [each.path for each in problems(poor, price(poor, CATALOG))] == ["limits.max_usd"]
    assert not problems(in_block(max_usd="905"), price(in_block(max_usd="905"), CATALOG))


def test_begun_late_what_is_left_has_to_do() -> None:
    plan = in_block()
    bill = price(plan, CATALOG)
    needed = bill.chosen.runtime.total_s / 3600
    last = plan.fleet.block.last if plan.fleet.block else START
    assert limits.deadline_problems(plan, bill, START) == []  # `problems` has refused it already
    assert limits.deadline_problems(plan, bill, last - 2 * needed * HOUR) == []
    (late,) = limits.deadline_problems(plan, bill, last - needed / 2 * HOUR)
    assert late.path == "fleet.block.end"
    assert "are left until 30 minutes before the block's end" in late.allowed


def test_a_deadline_counts_from_the_block_s_start_before_which_nothing_begins() -> None:
    """A run of some 15 h, and a block that begins five days from now."""
    plan, now = in_block(), START - 120 * HOUR
    needed_h = price(plan, CATALOG).chosen.runtime.total_s / 3600

    def due(deadline: datetime | timedelta) -> tuple[float | None, list[str], list[str]]:
        told = replace(plan, limits=replace(plan.limits, deadline=deadline))
        bill = price(told, CATALOG)
        refused = [each.allowed for each in limits.deadline_problems(told, bill, now)]
        return told.hours_left(now), refused, list(limits.deadline_warnings(told, bill, now))

    assert due(20 * HOUR)[:2] == (20, [])
    left, refused, _ = due(START + needed_h / 2 * HOUR)
    assert left == pytest.approx(needed_h / 2)
    assert refused[0].endswith(f"this is {needed_h / 2:.2f} hours from the block's start")
    left, refused, warned = due(START + (needed_h + 0.1) * HOUR)
    assert refused == []
    said = " ".join(warned)
    assert "uncalibrated: below about" in said
    assert "limits.deadline stops the run before it is done" in said


def test_the_meter_s_rates_are_nothing_and_its_fixed_sum_has_the_fee() -> None:
    bill = price(in_block(), CATALOG)
    assert record.rates(bill) == {"g5.2xlarge": {"on_demand": "0", "spot": {}, "gpus": 1}}
    fixed = Decimal(record.extras(bill)["fixed_usd"])
    assert 900 < fixed < 905
    assert record.to_json(bill)["block"]["usd_per_hour"] == "0"
    assert "block" not in record.to_json(price(definition(max_usd="30"), CATALOG))


def test_other_ways_to_do_the_work_are_ranked_by_the_hour_and_none_is_cheaper_than_what_is_paid() -> None:
    plan = in_block()
    rows = ranking.every_option(plan, (plan,), Study(CATALOG), types=["g5.2xlarge", "g6.xlarge"])
    assert {row.capacity for row in rows} == {"spot", "on-demand"}
    assert all(row.usd is not None and row.usd.p90 < 100 for row in rows)
    (own,) = ranking.scenarios(plan, (), Study(CATALOG))
    assert own.usd is not None
    assert own.usd.p50 > 900
    assert cheaper(plan, price(plan, CATALOG), Study(CATALOG)) is None
