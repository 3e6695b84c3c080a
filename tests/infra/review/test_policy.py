"""`policy.yaml`: the rules, how a run breaks them, and the mistakes in a policy file."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.fallback import price_fallbacks
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.review import policy
from gpufleet.infra.review.policy import Facts, Policy, broken, facts, parse
from tests.infra.cost_definitions import definition

RUN = Facts(
    region="us-east-2",
    instance_types=("g5.2xlarge", "g6.xlarge"),
    capacity="spot",
    owner="ada@example.org",
    usd_p90=Decimal("4.00"),
)


def rules(text: str) -> Policy:
    return parse(text.encode(), "policy.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_usd_per_run: 4", None),
        ("max_usd_per_run: 1e2", None),
        ("max_usd_per_run: 3.99", "max_usd_per_run: p90 is 4.00 USD, allowed are 3.99"),
        ("allowed_types: [g5.*, g6.xlarge]", None),
        ("allowed_types: [g5.*]", "allowed_types: instance types g6.xlarge, allowed: g5.*"),
        ("allowed_types: [g5.2xlarge, 'g6.?large']", None),
        ("allowed_types: [G5.*, g6.*]", "allowed_types: instance types g5.2xlarge, allowed: G5.*, g6.*"),
        ("allowed_regions: [us-east-1, us-east-2]", None),
        ("allowed_regions: [eu-west-1]", "allowed_regions: region us-east-2, allowed: eu-west-1"),
        ("spot_only: true", None),
        ("spot_only: false", None),
        ("required_owner: '*@example.org'", None),
        ("required_owner: [eve, ada@example.org]", None),
        ("required_owner: [eve]", "required_owner: owner ada@example.org, allowed: eve"),
        ("", None),
        ("# no rules yet\n", None),
    ],
)
def test_a_rule_holds_or_says_what_is_and_what_is_allowed(text: str, said: str | None) -> None:
    found = [f"{each.rule}: {each.message}" for each in broken(rules(text), RUN)]
    assert found == ([said] if said else [])


def test_spot_only_refuses_on_demand() -> None:
    (found,) = broken(rules("spot_only: true"), dataclasses.replace(RUN, capacity="on-demand"))
    assert found.message == "capacity is on-demand, allowed is spot"


def test_every_broken_rule_is_said_at_once_in_the_files_order() -> None:
    text = ["max_usd_per_run: 1", "max_usd_per_hour: 1", "allowed_types: [p5.*]", "allowed_regions: [eu-west-1]"]
    run = dataclasses.replace(RUN, capacity="on-demand", usd_per_hour=Decimal("1.212"))
    found = broken(rules("\n".join([*text, "spot_only: true", "required_owner: eve"])), run)
    assert [each.rule for each in found] == list(policy.RULES)


def test_without_a_bill_the_other_rules_still_hold() -> None:
    found = broken(rules("max_usd_per_run: 1\nspot_only: true"), dataclasses.replace(RUN, usd_p90=None))
    assert found == ()


def test_the_facts_of_a_definition_are_those_of_its_bill() -> None:
    stack = definition(types=("g5.2xlarge", "g6e.2xlarge"), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1, runs=200)
    found = facts(stack, bill)
    assert found.usd_p90 == bill.usd.p90
    assert found.instance_types == ("g5.2xlarge", "g6e.2xlarge")
    assert (found.region, found.capacity, found.owner) == ("us-east-2", "spot", "you")
    assert facts(stack, None).usd_p90 is None


def test_every_rule_is_a_key_of_the_file_and_has_its_words() -> None:
    names = [each.name for each in dataclasses.fields(Policy)]
    assert names == [*policy.RULES, "max_usd_per_month"]  # which neither definition nor resources can break


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_usd: 5", r"line 1, max_usd: unknown key.*Nearest: max_usd_per_run"),
        ("allowed_type: [g5.*]", "Nearest: allowed_types"),
        ("capacity: spot", "(?i)allowed: max_usd_per_run, max_usd_per_hour, allowed_types"),
        ("spot_only: yes", "Write true"),
        ("max_usd_per_run: $5", r"max_usd_per_run: '\$5' is not accepted"),
        ("max_usd_per_run: 0", "a number from 0.01 to 1,000,000"),
        ("allowed_types: g5.xlarge", r"Write \[g5.xlarge\]"),
        ("allowed_regions: []", "at least one name or pattern"),
        (
            "max_usd_per_run:",
            "max_usd_per_run: missing; allowed: a value. Omit the key if there should be no such rule",
        ),
        ("required_owner: null", "'null' is not accepted; allowed: a value"),
        ("spot_only: true\nspot_only: false", "each key once"),
        ("- spot_only", r"- spot_only.*allowed: rules \(spot_only: true, .*See `gpufleet docs review`"),
        ("spot_only: [", "YAML"),
    ],
)
def test_a_wrong_file_is_an_error_with_line_and_nearest_name(text: str, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        rules(text)


def test_all_problems_of_a_file_come_together() -> None:
    with pytest.raises(DefinitionError) as wrong:
        rules("spot_onyl: true\nmax_usd_per_run: much\nallowed_regions: us-east-1\n")
    assert [problem.line for problem in wrong.value.problems] == [1, 2, 3]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match="cannot be read: No such file"):
        policy.load(tmp_path / "policy.yaml")


def test_a_fallback_is_on_demand_too_and_costs_what_it_costs() -> None:
    stack = definition(max_usd="30", max_hours="20", hazard_per_hour="1")
    limits = dataclasses.replace(stack.limits, deadline=timedelta(hours=2.5))
    late = dataclasses.replace(stack, limits=limits, fleet=dataclasses.replace(stack.fleet, fallback="on-demand"))
    bill = price(late, load_catalog(), dataset_bytes=1, runs=200)
    found = facts(late, bill, price_fallbacks(late, bill, datetime(2026, 11, 21, tzinfo=UTC)))
    assert found.usd_p90 is not None
    assert found.usd_p90 > bill.usd.p90
    (broke,) = broken(rules("spot_only: true"), found)
    assert broke.message == "capacity is spot, then on-demand, allowed is spot"


def test_run_json_says_the_same_of_a_fallback() -> None:
    run = {
        "region": "us-east-2",
        "estimate": {"types": [], "usd": {"p90": "4.00"}},
        "capacity": "spot",
        "run": {"owner": "me"},
        "fallback": {"usd_p90": "9.00"},
    }
    found = policy.declared(policy.OBJECT, policy.RUN_CONFIG, {"content": json.dumps(run)})
    assert found is not None
    assert (found.capacity, found.usd_p90) == ("spot, then on-demand", Decimal("9.00"))
