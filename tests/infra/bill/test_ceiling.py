"""limits.usd_per_hour and the rule max_usd_per_hour: which zones and types a bill, a comparison and a fleet leave out.

What the zones of us-east-2 cost (infra/catalog/spot.csv): g5.2xlarge 0.3617, 0.3596 and 0.3739 USD in az1, az2 and az3,
1.212 on demand; g6e.2xlarge 0.9250 to 0.9959, 2.24208 on demand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import options, record
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.infra.review.policy import OBJECT, RUN_CONFIG, Policy, broken, declared, facts, held_to
from tests.infra.cost_definitions import definition

CATALOG = load_catalog()
NOW = datetime(2026, 11, 27, tzinfo=UTC)
IDS = ("use2-az1", "use2-az2", "use2-az3")
TWO = ("g5.2xlarge", "g6e.2xlarge")


def plan(ceiling: str | None, *, zones: tuple[str, ...] = IDS, **changes: Any) -> StackDefinition:
    plain = definition(**{"max_usd": "30", "max_hours": "20", **changes})
    limits = replace(plain.limits, usd_per_hour=None if ceiling is None else Decimal(ceiling))
    return replace(plain, limits=limits, fleet=replace(plain.fleet, zones=zones))


def pools(of: StackDefinition) -> list[tuple[str, str]]:
    return [(type_, zone[-3:]) for type_, zone in options.pools(of, CATALOG, of.fleet.capacity)]


G5 = [("g5.2xlarge", zone) for zone in ("az1", "az2", "az3")]


@pytest.mark.parametrize(
    ("ceiling", "changes", "usd_per_hour", "launched"),
    [
        (None, {}, "0.3739", G5),
        ("0.3739", {}, "0.3739", G5),
        ("0.3738", {}, "0.3617", G5[:2]),  # leaves out the dearest zone
        ("0.36", {}, "0.3596", G5[1:2]),
        ("0.38", {"types": TWO}, "0.3739", G5),  # leaves out a type
        ("0.95", {"types": TWO}, "0.9314", [*G5, ("g6e.2xlarge", "az1"), ("g6e.2xlarge", "az3")]),
        ("1.212", {"types": TWO, "capacity": "on-demand"}, "1.212", G5),
    ],
)
def test_a_fleet_launches_only_what_costs_at_most_that_and_its_bill_stands_on_the_dearest_of_it(
    ceiling: str | None, changes: dict[str, Any], usd_per_hour: str, launched: list[tuple[str, str]]
) -> None:
    asked = plan(ceiling, **changes)
    assert price(asked, CATALOG, runs=50).chosen.price.amount == Decimal(usd_per_hour)
    assert pools(asked) == launched


def test_zones_by_name_are_any_of_the_regions_and_a_type_goes_with_its_dearest() -> None:
    names = ("us-east-2a", "us-east-2b", "us-east-2c")
    for ceiling, launched in (("0.3739", 3), ("0.3738", 0)):
        asked = plan(ceiling, zones=names, types=("g5.2xlarge", "g6.2xlarge"))
        assert sum(type_ == "g5.2xlarge" for type_, _ in pools(asked)) == launched
    bill = price(plan("0.4", zones=names, types=("g5.2xlarge", "g6.2xlarge")), CATALOG, runs=50)
    reason = (
        "left out of the fleet: g6.2xlarge costs up to 0.4041 USD an hour in use2-az1, above 0.4; by id it would stay"
        " in fleet.zones: [use2-az2, use2-az3]"
    )
    assert reason in bill.warnings
    assert bill.chosen.type == "g5.2xlarge"


def test_a_type_that_goes_is_shown_as_left_out_and_may_lack_speed_and_memory() -> None:
    bill = price(plan("0.38", types=TWO), CATALOG, runs=50)
    (gone,) = (option for option in bill.types if "spot" in option.left_out)
    assert gone.left_out == {
        "spot": "g6e.2xlarge costs up to 0.9959 USD an hour in use2-az2, above 0.38",
        "on-demand": "g6e.2xlarge on demand costs 2.24208 USD an hour, above 0.38",
    }
    assert "left out" in render(bill)
    for ceiling, wrong in (("0.38", 0), (None, 2)):  # T4s have no bf16 and too little memory
        asked = plan(ceiling, types=("g5.2xlarge", "g4dn.12xlarge"))
        assert len(problems(asked, price(asked, CATALOG, runs=50))) == wrong


def test_with_nothing_left_there_is_no_bill_and_the_message_names_the_key() -> None:
    with pytest.raises(DefinitionError) as refused:
        price(plan("0.3", types=TWO), CATALOG, runs=50)
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("limits.usd_per_hour", "0.3")
    assert "g5.2xlarge costs up to 0.3739 USD an hour in use2-az3, above 0.3; g6e.2xlarge costs up to" in problem.hint


def test_a_comparison_says_why_a_type_is_none_for_both_markets() -> None:
    asked = plan("1")
    rows = ranking.every_option(asked, (asked,), Study(CATALOG), types=[*TWO, "g6.2xlarge"], runs=20)
    ranked = {(row.type, row.capacity) for row in rows if row.ranked}
    assert ranked == {
        ("g5.2xlarge", "spot"),
        ("g6.2xlarge", "spot"),
        ("g6.2xlarge", "on-demand"),
        ("g6e.2xlarge", "spot"),
    }
    reasoned = ranking.with_reasons(rows, None)
    (row,) = (row for row in reasoned if (row.type, row.capacity) == ("g5.2xlarge", "on-demand"))
    assert row.lost == "g5.2xlarge on demand costs 1.212 USD an hour, above 1"


def test_a_fallback_on_demand_is_held_to_it_as_well() -> None:
    asked = plan("1", types=TWO)
    fleet = replace(asked.fleet, fallback="on-demand")
    assert options.pools(replace(asked, fleet=fleet), CATALOG, "on-demand") == ()
    both = replace(asked, fleet=fleet, limits=replace(asked.limits, usd_per_hour=Decimal(2)))
    assert {type_ for type_, _ in options.pools(both, CATALOG, "on-demand")} == {"g5.2xlarge"}
    bill = price(both, CATALOG, runs=50)
    run = {
        "region": bill.region,
        "estimate": record.to_json(bill),
        "capacity": "spot",
        "run": {"owner": "me"},
        "fallback": {"usd_p90": "9.00"},
    }
    written = declared(OBJECT, RUN_CONFIG, {"content": json.dumps(run)})
    assert written is not None
    assert written.usd_per_hour == facts(both, bill).usd_per_hour == Decimal("1.212")


def test_a_rule_is_the_lower_of_both_and_holds_the_facts_of_a_bill() -> None:
    rule = Policy(max_usd_per_hour=Decimal("0.37"))
    for own, held in ((None, "0.37"), ("0.3", "0.3"), ("2", "0.37")):
        assert held_to(plan(own), rule).limits.usd_per_hour == Decimal(held)
    assert held_to(plan("2"), None).limits.usd_per_hour == held_to(plan("2"), Policy()).limits.usd_per_hour == 2
    (found,) = broken(rule, facts(plan(None), price(plan(None), CATALOG, runs=50)))
    assert found.message == "a node costs up to 0.3739 USD an hour, allowed are 0.37"
    under = held_to(plan(None), rule)
    assert not broken(rule, facts(under, price(under, CATALOG, runs=50)))


def test_it_is_one_of_the_settings_that_a_run_keeps() -> None:
    """A run of 0.1.0, which has no such key, counts as unchanged without the key: see tests/released."""
    assert creation_digest(plan(None)) != creation_digest(plan("1"))
