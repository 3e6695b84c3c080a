"""The cost of nodes that wait for others until they give up."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gpufleet.infra.risk import hazard
from gpufleet.infra.risk.closed_form import expected_hours
from gpufleet.infra.risk.gathering import gathered, mean_billed_h
from gpufleet.infra.risk.simulation import Exposure, simulate
from gpufleet.job.contract.gathering import LATER_S, LONGEST_PAUSE_S, PAUSE_S, pause_s, wait_s

GATHER_H, BOOT_H = 0.2, 0.1
LATER_H = LATER_S / 3600
RUN = Exposure(
    setup_h=0.1,
    restart_h=BOOT_H,
    phase_ends_h=(10.0,),
    saves_fit=(True,),
    interval_h=0.25,
    compute_usd_h=1.0,
    extras_usd_h=0.0,
    fixed_usd=0.0,
    hazard=0.2,
    nodes=2,
    wait_h=hazard.GANG_WAIT_H,
    wait_sigma=hazard.GANG_WAIT_SIGMA,
    gather_h=GATHER_H,
)


@pytest.mark.parametrize(
    ("wait_h", "until_h", "billed_h"),
    [
        (0.15, 0.15, 0.15),
        (0.21, 1.2, 0.2),  # the nodes that are requested after the pause come at once
        (1.25, 1.2, 0.2),  # the first node waits while the others boot
        (1.35, 1.25, 0.2 + 0.05),  # the others wait for this node
        (1.3 + LATER_H + 0.01, 1.2 + BOOT_H + LATER_H + 2, 0.2 + BOOT_H + LATER_H),  # the pause is twice as long
    ],
)
def test_a_wait_is_billed_until_they_let_go_and_each_time_that_aws_is_asked_in_vain(
    wait_h: float, until_h: float, billed_h: float
) -> None:
    until, billed = gathered(np.array([wait_h]), GATHER_H, BOOT_H)
    assert (until[0], billed[0]) == pytest.approx((until_h, billed_h))


def test_who_waits_for_ever_is_billed_for_all_of_it() -> None:
    waits = np.array([0.1, 5.0, 100.0])
    until, billed = gathered(waits, math.inf, BOOT_H)
    assert (list(until), list(billed)) == ([0.1, 5.0, 100.0], [0.1, 5.0, 100.0])
    mixed, paid = gathered(waits, np.array([math.inf, math.inf, GATHER_H]), BOOT_H)
    assert (list(mixed[:2]), list(paid[:2])) == ([0.1, 5.0], [0.1, 5.0])
    assert mixed[2] > 100 > 10 * paid[2]


def test_of_the_drawn_runs_waiting_costs_less_than_a_quarter_and_they_take_longer() -> None:
    for_ever, lets_go = (simulate(each, runs=4000) for each in (replace(RUN, gather_h=math.inf), RUN))
    assert lets_go.idle_hours.mean() < 0.25 * for_ever.idle_hours.mean()
    assert 0.1 < lets_go.wall_hours.mean() / for_ever.wall_hours.mean() - 1 < 0.5
    assert lets_go.usd.mean() < for_ever.usd.mean()
    assert simulate(replace(RUN, nodes=1), runs=500).idle_hours.max() == 0


def test_the_closed_form_agrees() -> None:
    mean_h = simulate(replace(RUN, free_h=0.0), runs=6000).hours.mean()
    assert expected_hours(RUN, 0.2) == pytest.approx(mean_h, rel=0.05)
    drawn = RUN.wait_h * np.exp(RUN.wait_sigma * np.random.default_rng(1).standard_normal(200_000))
    found = mean_billed_h(RUN.wait_h, RUN.wait_sigma, GATHER_H, BOOT_H)
    assert found == pytest.approx(gathered(drawn, GATHER_H, BOOT_H)[1].mean(), rel=0.02)


def test_later_waits_are_no_longer_and_pauses_double() -> None:
    assert [wait_s(1800, times) for times in (0, 1, 2)] == [1800, LATER_S, LATER_S]
    assert wait_s(300, 3) == 300
    pauses = [pause_s(times) for times in range(1, 6)]
    assert pauses[0] == PAUSE_S
    assert all(later == min(2 * earlier, LONGEST_PAUSE_S) for earlier, later in pairwise(pauses))


@pytest.mark.parametrize(("wait_h", "gather_h"), [(hazard.GANG_WAIT_H, 0.2), (0.01, 1 / 12), (9.0, 0.5)])
def test_unless_the_file_says_it_nodes_wait_two_fifths_of_the_median_and_half_an_hour_at_most(
    wait_h: float, gather_h: float
) -> None:
    assert hazard.gather(wait_h) == gather_h
