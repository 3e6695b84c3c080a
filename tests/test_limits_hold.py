"""A run's limits hold with any two of its three stops dead: a few of the drawn runs of bench/stops.py."""

from __future__ import annotations

import pytest
import stops

RUNS = {"kernel-sft": 12, "tinystories-growth": 12, "two-tower": 12, "sft-h100": 4, "pretrain-d64": 2, "hf-run-clm": 6}


@pytest.fixture(scope="module", params=stops.STACKS, ids=lambda path: path.stem)
def stack(request: pytest.FixtureRequest) -> stops.PricedStack:
    return stops.stack(request.param)


@pytest.mark.parametrize("case", [case for case, (on, _) in stops.CASES.items() if len(on) == 1])
def test_with_two_stops_dead_a_run_ends_within_ten_minutes_and_a_checkpoint(
    stack: stops.PricedStack, case: str
) -> None:
    found = list(stops.results(stack, case, range(RUNS[stack.name])))
    assert max(each.past_s for each in found) <= stops.ALLOWED_S + stack.checkpoint_s
    assert {each.ended_by for each in found} & {*stops.CASES[case][0]}  # and not because nothing was drawn


@pytest.mark.parametrize("case", ["meter alone", "all three"])
def test_the_meter_ends_a_run_within_a_minute_and_a_checkpoint_unless_its_last_node_came_too_late(
    stack: stops.PricedStack, case: str
) -> None:
    for each in stops.results(stack, case, range(RUNS[stack.name])):
        assert each.past_s <= stops.MINUTE + stack.checkpoint_s or each.is_late


def test_with_all_of_them_dead_nothing_but_a_later_boot_ends_it() -> None:
    stack = stops.stack(next(path for path in stops.STACKS if path.stem == "two-tower"))
    found = [stops.Drawn(stack, seed, frozenset()).go() for seed in range(8)]
    assert {each.ended_by for each in found} == {"nothing", "boot"}
    assert max(each.past_s for each in found) > stops.HARD_S
