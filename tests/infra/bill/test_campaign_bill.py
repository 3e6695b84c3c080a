"""The bill of a campaign: what its runs come to together, how many fit under its cap, and how long it takes."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from gpufleet.infra.bill import campaign
from gpufleet.infra.bill.campaign import CampaignTerms, PricedTrial, play
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from tests.infra.cost_definitions import definition


def terms(usd: str, at_once: int = 1, hours: str | None = None) -> CampaignTerms:
    return CampaignTerms(Decimal(usd), None if hours is None else Decimal(hours), at_once)


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
    allowed: CampaignTerms, spent: float, begun: int, hours: float
) -> None:
    """Four runs that cost 1 USD and take two hours."""
    assert play([(3.0, 3.0)] * 4, [1.0] * 4, [2.0] * 4, allowed) == (spent, begun, hours)


def test_past_what_does_not_fit_the_next_begins() -> None:
    assert play([(9.0, 1.0), (1.0, 1.0)], [9.0, 0.5], [1.0, 1.0], terms("2")) == (0.5, 1, 1.0)


def test_runs_of_one_campaign_share_what_nobody_has_measured() -> None:
    """The range of a sum of nine is between three times a run's range, were each by itself, and nine times."""
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1)
    one = PricedTrial.build("one", stack, bill)
    found = campaign.price([one] * 9, terms("1000", 3))
    width, single = (float(each.p90 - each.p10) for each in (found.usd, bill.usd))
    assert math.sqrt(9) * single < width < 9.5 * single
    assert float(found.usd.mean) == pytest.approx(9 * float(bill.usd.mean), rel=0.03)
    assert (found.begun.p10, found.spent) == (Decimal(9), found.usd)
    tight = campaign.price([one] * 9, terms("25", 3))
    assert 1 <= tight.begun.p90 < 9
    assert tight.spent.p90 <= 25


def test_a_run_whose_limit_is_above_the_cap_is_said_to_have_no_chance() -> None:
    stack = definition(types=("g5.2xlarge",), max_usd="20")
    bill = price(stack, load_catalog(), dataset_bytes=1, runs=200)
    lines = " ".join(campaign.price([PricedTrial.build("one", stack, bill)], terms("19")).lines())
    assert "1 run can never begin, as limits.max_usd is above the cap." in lines
