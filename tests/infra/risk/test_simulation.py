"""Interruptions: each rule of the simulation in a case that can be worked out, and the whole against theory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpufleet.infra.risk.closed_form import break_even, expected_hours
from gpufleet.infra.risk.hazard import Hazard
from gpufleet.infra.risk.simulation import Exposure, SimulatedRuns, quantiles, simulate

# Half an hour of set-up and 4 hours of work at 2 USD/h; nothing else costs anything.
RUN = Exposure(
    setup_h=0.5,
    restart_h=0.5,
    phase_ends_h=(1.0, 4.0),
    saves_fit=(True, True),
    interval_h=0.1,
    compute_usd_h=2.0,
    extras_usd_h=0.0,
    fixed_usd=0.0,
    hazard=0.3,
)


def test_without_hazard_every_run_costs_what_the_work_costs() -> None:
    outcome = simulate(replace(RUN, hazard=0.0), runs=100)
    assert set(outcome.usd) == {9.0}  # 4.5 h x 2
    assert set(outcome.hours) == set(outcome.wall_hours) == {4.5}
    assert not outcome.interruptions.any()


def test_the_same_seed_gives_the_same_figures_and_another_seed_does_not() -> None:
    first, again, other = (simulate(RUN, runs=1000, seed=seed).usd for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_runs_in_several_chunks_keep_their_number() -> None:
    assert simulate(RUN, runs=120_000).usd.shape == (120_000,)


def test_an_interrupted_first_hour_costs_no_compute_but_keeps_its_disk() -> None:
    short = replace(RUN, phase_ends_h=(0.2, 0.4), hazard=1.0, extras_usd_h=0.1)  # every attempt is under an hour
    outcome = simulate(short, runs=2000)
    lost = outcome.interruptions > 0
    assert lost.any()
    final_attempt_at_most = 2.0 * 0.9
    compute = outcome.usd - 0.1 * outcome.hours
    assert (compute <= final_attempt_at_most + 1e-9).all()
    assert (outcome.hours[lost] > 0.9).any()


def test_an_interruption_after_the_first_hour_is_billed() -> None:
    outcome = simulate(replace(RUN, free_h=0.0), runs=2000)
    assert outcome.usd == pytest.approx(2.0 * outcome.hours)


def test_a_handled_notice_loses_two_minutes_and_a_missed_one_up_to_an_interval() -> None:
    handled = simulate(replace(RUN, notice_missed=0.0, free_h=0.0), runs=20_000)
    once = handled.interruptions == 1
    # One interruption costs the replacement's 0.5 h and the notice's 120 s, unless it came before the work began.
    assert handled.hours[once].max() == pytest.approx(4.5 + 0.5 + 120 / 3600)
    missed = simulate(replace(RUN, notice_missed=1.0, free_h=0.0), runs=20_000)
    once = missed.interruptions == 1
    assert 4.5 + 0.5 < missed.hours[once].max() <= 4.5 + 0.5 + 0.1 + 1e-9


def test_where_save_and_upload_do_not_fit_the_notice_work_is_lost() -> None:
    coarse = replace(RUN, interval_h=1.0)
    fits = simulate(coarse, runs=20_000).hours.mean()
    late = simulate(replace(coarse, saves_fit=(True, False)), runs=20_000).hours.mean()
    never = simulate(replace(coarse, saves_fit=(False, False)), runs=20_000).hours.mean()
    assert fits < late < never


def test_waiting_for_capacity_takes_time_and_no_money() -> None:
    quick, slow = (simulate(replace(RUN, wait_h=wait), runs=5000) for wait in (0.0, 5.0))
    assert np.array_equal(quick.usd, slow.usd)
    assert slow.wall_hours.mean() > quick.wall_hours.mean() + 5.0
    starts = quick.interruptions + 1  # each is billed for a minute at least, so node-hours may be a little above
    assert (quick.wall_hours <= quick.hours + 1e-9).all()
    assert (quick.wall_hours >= quick.hours - starts / 60).all()


def test_max_hours_stops_the_run_and_says_so() -> None:
    outcome = simulate(replace(RUN, hazard=0.0, max_hours=3.0), runs=10)
    assert set(outcome.hours) == {3.0}
    assert set(outcome.usd) == {6.0}
    assert outcome.stopped.all()
    assert not simulate(
        replace(RUN, hazard=0.0, max_hours=4.5), runs=10
    ).stopped.any()  # all the money that the run needs


def test_max_usd_stops_the_run_where_the_meter_reaches_it_fixed_costs_included() -> None:
    outcome = simulate(replace(RUN, hazard=0.0, fixed_usd=1.0, max_usd=5.0), runs=10)
    assert set(outcome.usd) == {5.0}
    assert set(outcome.hours) == {2.0}
    assert outcome.stopped.all()


def test_what_a_limit_keeps_to_stop_in_is_paid_and_no_more_than_there_is() -> None:
    capped = replace(RUN, hazard=0.0, max_hours=3.0, reserve_h=0.5, fixed_usd=0.5)
    outcome = simulate(capped, runs=3)
    assert outcome.stopped.all()
    assert set(outcome.hours) == {3.0}
    assert set(outcome.usd) == {0.5 + 3.0 * 2.0}
    assert replace(capped, max_hours=0.3).hours_at_cap() == (np.inf, 0.0)
    assert replace(capped, max_usd=1.0).hours_at_cap() == (0.0, 2.5)
    # A run that cannot begin pays at most the limit for costs that do not depend on hours; its first minute is billed.
    assert simulate(replace(capped, max_usd=0.3), runs=1).usd == pytest.approx([0.3 + 2.0 / 60])


def test_two_nodes_are_interrupted_less_than_twice_as_often_and_half_the_time_both_are_taken() -> None:
    two = simulate(replace(RUN, nodes=2, hazard=0.3), runs=2000)
    as_often = 0.3 * 2**0.35
    free, paid = (simulate(replace(RUN, hazard=as_often, free_h=hours), runs=2000) for hours in (1.0, 0.0))
    assert np.array_equal(two.interruptions, free.interruptions)
    left = 0.5 * 0.5  # half of the time AWS leaves one of the two nodes, which waits and is billed
    idle_usd = two.idle_hours * RUN.usd_h
    assert two.usd == pytest.approx((1 - left) * free.usd + left * paid.usd + idle_usd)
    assert two.idle_hours == pytest.approx((free.wall_hours - free.hours) * left, abs=0.01)  # a started minute
    assert not free.idle_hours.any()
    assert free.usd.mean() < paid.usd.mean()
    waits_h = as_often * RUN.wait_h * np.exp(RUN.wait_sigma**2 / 2) * left
    assert expected_hours(replace(RUN, nodes=2), 0.3) == pytest.approx(expected_hours(RUN, as_often) * (1 + waits_h))


def test_a_run_mostly_finds_its_first_node_at_once_and_then_waits_as_long_as_told() -> None:
    """A node is up for 1 / 0.5 h between waits with a mean of 0.5 x exp(0.5) h, so 29 % of all hours have no node."""
    begun = simulate(replace(RUN, hazard=0.5, wait_h=0.5, wait_sigma=1.0, phase_ends_h=(1e-6, 2e-6)), runs=20_000)
    waited = begun.wall_hours - begun.hours
    untouched = begun.interruptions == 0
    mean_h = 0.5 * np.exp(0.5)
    assert (waited[untouched] > 1e-9).mean() == pytest.approx(0.5 * mean_h / (1 + 0.5 * mean_h), abs=0.02)


def test_waits_are_log_normal_with_that_median() -> None:
    run = replace(RUN, hazard=1.0, wait_h=0.4, wait_sigma=1.2)
    outcome = simulate(run, runs=40_000)
    once = (outcome.interruptions == 1) & (outcome.wall_hours > 0)
    waits = (outcome.wall_hours - outcome.hours)[once]
    assert np.median(waits) > 0.4  # the rest of the first wait is added
    there = waits[np.abs(np.log(np.maximum(waits, 1e-9) / 0.4)) < 8]
    assert np.log(there).std() == pytest.approx(1.2, abs=0.15)


def test_no_run_costs_more_than_its_cap_and_a_started_minute() -> None:
    outcome = simulate(replace(RUN, hazard=None, max_usd=10.0), runs=5000)
    assert outcome.usd.max() <= 10.0 + 2.0 / 60  # a started minute
    assert 0 < outcome.stopped.mean() < 1


def test_a_huge_hazard_ends_at_the_limit_instead_of_never() -> None:
    outcome = simulate(replace(RUN, hazard=1e6, max_hours=20.0), runs=200)
    assert outcome.stopped.all()
    assert outcome.hours == pytest.approx(np.full(200, 20.0), rel=0.01)
    assert outcome.usd.max() == 0.0  # every attempt was interrupted in its first hour


def test_a_run_of_more_nodes_than_are_followed_is_interrupted_as_often_to_its_end() -> None:
    long = replace(RUN, hazard=10.0, setup_h=0.02, restart_h=0.02, phase_ends_h=(10.0, 60.0))
    outcome = simulate(long, runs=50)
    assert outcome.hours.min() > 60.0
    assert outcome.interruptions.sum() / outcome.hours.sum() == pytest.approx(10.0, rel=0.05)
    assert not outcome.stopped.any()


def test_a_start_is_billed_for_a_minute_at_least() -> None:
    outcome = simulate(replace(RUN, hazard=0.0, setup_h=0.0, phase_ends_h=(1e-6, 2e-6)), runs=1)
    assert outcome.usd[0] == pytest.approx(2.0 / 60)


def test_the_drawn_hazard_has_the_medians_and_tails_of_the_traces() -> None:
    # P(no interruption in 4.5 h) = E[exp(-4.5 h)], h log-normal(0.3, 1.2); integrated numerically.
    z = np.linspace(-8, 8, 4001)
    density = np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    expected = np.trapezoid(density * np.exp(-4.5 * 0.3 * np.exp(1.2 * z)), z)
    found = (simulate(replace(RUN, hazard=Hazard(unevenness=0.0)), runs=50_000).interruptions == 0).mean()
    assert found == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("hazard", [0.05, 0.3, 1.0])
def test_the_simulation_agrees_with_the_closed_form(hazard: float) -> None:
    run = replace(RUN, hazard=hazard, free_h=0.0)
    assert simulate(run, runs=50_000).hours.mean() == pytest.approx(expected_hours(run, hazard), rel=0.02)
    slow = replace(run, setup_h=0.7)
    assert expected_hours(slow, 1e-9) == pytest.approx(slow.uninterrupted_h, abs=1e-6)  # nothing interrupts this run


@pytest.mark.parametrize("hazard", [0.05, 0.3])
def test_without_checkpoints_both_begin_all_of_it_again(hazard: float) -> None:
    run = replace(RUN, hazard=hazard, free_h=0.0, saves_fit=(False, False), interval_h=87_600.0)
    expected = (math.exp(hazard * 4.5) - 1) / hazard  # 4.5 h in one piece
    assert expected_hours(run, hazard) == pytest.approx(expected)
    assert simulate(run, runs=50_000).hours.mean() == pytest.approx(expected, rel=0.02)


def test_more_hazard_never_makes_a_run_shorter() -> None:
    means = [simulate(replace(RUN, hazard=hazard), runs=5000).hours.mean() for hazard in (0.0, 0.1, 0.3, 1.0, 2.0)]
    assert means == sorted(means)


def test_the_break_even_hazard_is_where_both_prices_meet() -> None:
    on_demand_usd = 4.5 * 5.0
    hazard = break_even(RUN, on_demand_usd)
    assert hazard is not None
    spot_usd = simulate(replace(RUN, hazard=hazard, free_h=0.0), runs=50_000).usd.mean()
    assert spot_usd == pytest.approx(on_demand_usd, rel=0.05)


def test_there_is_no_break_even_when_spot_costs_as_much_and_none_to_find_when_it_is_nearly_free() -> None:
    assert break_even(RUN, 4.5 * 1.9) == 0.0
    assert break_even(replace(RUN, compute_usd_h=1.0, extras_usd_h=1.0), 4.5 * 1.9) == 0.0
    assert break_even(replace(RUN, compute_usd_h=1e-6), 1e9) is None


def test_a_number_none_and_a_distribution_of_the_same_meaning_are_the_same() -> None:
    for short, long in ((0.4, Hazard.fixed(0.4)), (None, Hazard())):
        assert np.array_equal(
            simulate(replace(RUN, hazard=short), runs=500).usd, simulate(replace(RUN, hazard=long), runs=500).usd
        )


def test_a_less_certain_hazard_states_a_wider_interval() -> None:
    def width(sigma: float) -> float:
        p10, _, p90, _ = quantiles(simulate(replace(RUN, hazard=Hazard(sigma=sigma, unevenness=0.0))).usd)
        return p90 - p10

    widths = [width(sigma) for sigma in (0.0, 0.45, 0.9, 1.8)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_uneven_nodes_begin_calmly_and_lose_as_many_per_node_hour_in_the_end() -> None:
    def simulated(unevenness: float, work_h: float, runs: int) -> SimulatedRuns:
        hazard = Hazard(median=0.5, sigma=0.0, unevenness=unevenness)
        return simulate(replace(RUN, hazard=hazard, phase_ends_h=(1.0, work_h)), runs=runs)

    even, uneven = ((simulated(sd, 2.0, 5000).interruptions == 0).mean() for sd in (0.0, 1.0))
    assert uneven > even + 0.1
    for sd in (0.0, 0.6):
        found = simulated(sd, 100.0, 500)
        assert found.interruptions.sum() / found.hours.sum() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("hazard", [0.2, None, Hazard(unevenness=1.3)])
def test_more_hours_never_cost_less_on_average(hazard: Hazard | float | None) -> None:
    means = [
        simulate(replace(RUN, hazard=hazard, phase_ends_h=(1.0, end)), runs=4000).usd.mean()
        for end in (1.5, 2.0, 4.0, 8.0, 24.0)
    ]
    assert means == sorted(means)
