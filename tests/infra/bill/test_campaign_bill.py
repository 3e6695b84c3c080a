"""The bill of a campaign: what its runs come to together, how many fit under its cap, and how long it takes."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import campaign
from gpufleet.infra.bill.campaign import PricedTrial, play
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.campaign import CampaignFile, DrawnRange
from tests.infra.cost_definitions import definition


def terms(usd: str, at_once: int = 1, hours: str | None = None, **more: Any) -> CampaignFile:
    by = None if hours is None else Decimal(hours)
    return CampaignFile(name="night", files=("mine",), max_usd=Decimal(usd), max_hours=by, at_once=at_once, **more)


@pytest.mark.parametrize(
    ("allowed", "spent", "begun", "hours"),
    [
        (terms("5"), 3.0, 3, 6.0),  # 5, 4, 3 are left, then 2, and each run has a limit of 3
        (terms("6", 2), 4.0, 4, 6.0),  # two, then 4 are left for one, then 3 for the last
        (terms("2.99"), 0.0, 0, 0.0),
        (terms("100", 4), 4.0, 4, 2.0),
        (terms("100", 1, "7"), 3.0, 3, 6.0),  # each may take three hours
    ],
)
def test_a_campaign_is_played_as_its_driver_carries_it_out(
    allowed: CampaignFile, spent: float, begun: int, hours: float
) -> None:
    """Four runs that cost 1 USD and take two hours."""
    assert play([(3.0, 3.0, 3.0)] * 4, [1.0] * 4, [2.0] * 4, allowed) == (spent, begun, hours)


def test_past_what_does_not_fit_the_next_begins() -> None:
    assert play([(9.0, 9.0, 1.0), (1.0, 1.0, 1.0)], [9.0, 0.5], [1.0, 1.0], terms("2")) == (0.5, 1, 1.0)


def test_runs_of_one_campaign_share_what_nobody_has_measured() -> None:
    """The range of a sum of nine is between three times a run's range, were each by itself, and nine times."""
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1)
    one = PricedTrial.build("one", stack, bill, is_made=False)
    found = campaign.price([one] * 9, terms("1000", 3))
    width, single = (float(each.p90 - each.p10) for each in (found.usd, bill.usd))
    assert math.sqrt(9) * single < width < 9.5 * single
    assert float(found.usd.mean) == pytest.approx(9 * float(bill.usd.mean), rel=0.03)
    assert (found.played.begun.p10, found.played.spent) == (Decimal(9), found.usd)
    tight = campaign.price([one] * 9, terms("25", 3))
    assert 1 <= tight.played.begun.p90 < 9
    assert tight.played.spent.p90 <= 25


def test_a_run_whose_limit_is_above_the_cap_is_said_to_have_no_chance() -> None:
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1, runs=200)
    lines = " ".join(campaign.price([PricedTrial.build("one", stack, bill, is_made=False)], terms("19")).lines())
    assert "1 run can never begin, as limits.max_usd is above the cap." in lines
    long = campaign.price([PricedTrial.build("one", stack, bill, is_made=False)], terms("20", hours="1"))
    hours = f"{stack.limits.max_hours:f}"
    assert f"1 run can never begin, as limits.max_hours, {hours}, is above max_hours" in " ".join(long.lines())


def test_the_last_dollars_begin_a_run_with_a_lower_limit() -> None:
    """Of 5 USD two runs take 2 each; the third begins with the 1 that is left, and spends it."""
    assert play([(0.8, 2.0, 1.0)] * 4, [2.0] * 4, [1.0] * 4, terms("5", 4)) == (5.0, 3, 1.0)


def test_a_made_definition_s_limit_is_lowered_to_what_nine_runs_in_ten_need() -> None:
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1)
    made, own = (PricedTrial.build("one", stack, bill, is_made=is_made) for is_made in (True, False))
    assert bill.usd.p90 <= made.least_usd < 20 == own.least_usd
    assert bill.chosen.metered_usd.p90 + bill.chosen.reserve[0] <= made.least_usd


def test_what_a_pruner_is_worth_is_a_range_with_its_assumption() -> None:
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1)
    one = PricedTrial.build("one", stack, bill, is_made=False)
    assert one.steps is not None
    search: dict[str, Any] = {"metric": "val_loss", "direction": "minimize", "every": max(1, one.steps // 16)}
    plain = campaign.price([one] * 12, terms("60", 3))
    found = campaign.price([one] * 12, terms("60", 3, pruner="asha", **search))
    assert plain.stopped is None
    assert found.stopped is not None
    assert found.played == plain.played
    assert found.stopped.begun.p10 >= found.played.begun.p10
    assert found.stopped.spent.p90 < found.played.spent.p10
    setup = bill.chosen.exposure.setup_share * float(found.usd.p10)
    assert float(found.stopped.spent.p10) > setup  # each boots and judges at least once
    assert "each keeps its rank from its first metric value on" in " ".join(found.lines())
    unknown = campaign.price([one._replace(steps=None)], terms("60", pruner="asha", **search))
    assert unknown.stopped is None
    assert "What asha saves is not known" in " ".join(unknown.lines())


def test_a_file_whose_values_are_drawn_is_priced_as_often_as_it_is_drawn() -> None:
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    one = PricedTrial.build("one", stack, price(stack, load_catalog(), dataset_bytes=1), is_made=True)
    found = campaign.price([one], terms("500", trials=7, draw={"--lr": DrawnRange(choices=("1", "2"))}))
    assert len(found.trials) == 7
    assert sum(line.startswith("one ") for line in found.lines()) == 1
    assert "prices every run with the file" in " ".join(found.lines())


def test_each_shared_node_has_an_equal_share_and_the_bill_says_where_the_boots_are() -> None:
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1)
    one = PricedTrial.build("one", stack, bill, is_made=True)
    shared = terms(f"{4 * one.least_usd + 1}", 2, share_node=True)
    alone, together = campaign.price([one] * 6, terms("1000", 2)), campaign.price([one] * 6, shared, [3, 3])
    assert alone.nodes == 0
    assert together.played.begun.p90 <= 6
    assert together.played.spent.p90 <= shared.max_usd
    played = campaign.price([one] * 4, terms(f"{one.least_usd}", 4, share_node=True), [2, 2]).played
    assert played.begun.p90 == 0  # half of what one needs is left to each node
    assert "The runs share 2 nodes: the bill has one set-up of" in " ".join(together.lines())
    assert campaign.price([one] * 2, shared, [1, 1]).nodes == 0
