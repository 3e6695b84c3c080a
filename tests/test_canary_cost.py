"""A canary costs at most what it says, in some of the drawn canaries of bench/canary_cost.py."""

from __future__ import annotations

from pathlib import Path

import canary_cost
import pytest

from gpufleet.infra.canary import stacks
from gpufleet.infra.catalog.regions import known_regions


def costs(folder: Path, regions: list[str], canaries: int) -> list[canary_cost.CanaryCost]:
    among = list(canary_cost.places(folder, regions))
    return [canary_cost.drawn(among, seed) for seed in range(canaries)]


def test_drawn_canaries_cost_at_most_half_a_dollar(tmp_path: Path) -> None:
    found = costs(tmp_path, ["us-east-2"], 20)
    assert max(each.usd for each in found) <= stacks.MOST_USD
    interrupted, stopped, capped = zip(*(each.ended_by for each in found), strict=True)
    assert {"script", "meter"} <= {*interrupted}  # some train to their end, and some overrun to the limit
    assert stopped.count("script") > 5  # it ends when it is asked to
    assert capped.count("meter") > 10


@pytest.mark.slow
def test_two_hundred_canaries_in_every_region_cost_at_most_half_a_dollar(tmp_path: Path) -> None:
    assert max(each.usd for each in costs(tmp_path, list(known_regions()), 200)) <= stacks.MOST_USD
