"""When to leave spot for on demand so that a run meets its deadline, in cases that can be worked out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpufleet.infra.risk.deadline import switch
from gpufleet.infra.risk.hazard import Floats
from gpufleet.infra.risk.simulation import Exposure, PlannedEnd, simulate

SPOT = Exposure(
    setup_h=0.25,
    restart_h=0.25,
    phase_ends_h=(2.0, 5.0, 8.0),
    saves_fit=(True, True, True),
    interval_h=0.1,
    compute_usd_h=1.0,
    extras_usd_h=0.1,
    fixed_usd=0.5,
    hazard=0.3,
    wait_h=1.0,
)
ON_DEMAND = replace(SPOT, compute_usd_h=3.0, hazard=0.0)
NEVER_THERE = replace(SPOT, wait_h=1e9)  # no spot capacity at all


def test_with_time_to_spare_spot_alone_will_do() -> None:
    found = switch(SPOT, ON_DEMAND, 200.0)
    assert found.switch_h is None
    assert found.switched == 0
    assert found.on_time >= 0.95
    assert found.usd[3] == pytest.approx(simulate(SPOT).usd.mean(), rel=0.02)
    assert "no switch needed" in found.sentence()


def test_with_no_slack_it_is_on_demand_at_once() -> None:
    found = switch(SPOT, ON_DEMAND, 8.25)
    assert found.switch_h == 0
    assert found.on_time == 1
    assert found.usd == pytest.approx((0.5 + 8.25 * 3.1,) * 4)
    assert "begin on demand" in found.sentence()


def test_with_less_slack_than_a_set_up_no_spot_node_is_paid_in_vain() -> None:
    """All runs would switch before they have done any work, and those with a node would have paid for it."""
    for slack_h in (0.05, 0.2):
        found = switch(SPOT, ON_DEMAND, 8.25 + slack_h)
        assert (found.switch_h, found.on_time) == (0, 1)
        assert found.margin_h == pytest.approx(slack_h)
        assert found.usd == pytest.approx((0.5 + 8.25 * 3.1,) * 4)
        assert f"a deadline in {8.25 + slack_h:.2f} h leaves too little slack for spot" in found.sentence()


def test_a_deadline_that_nobody_can_meet_says_what_it_takes() -> None:
    for hours in (8.0, 0.0, -3.0):
        found = switch(SPOT, ON_DEMAND, hours)
        assert (found.switch_h, found.on_time) == (0, 0)
        assert "cannot be met: on demand from the first hour takes 8.25 h, and 0 min to stop in" in found.sentence()


def test_without_any_spot_capacity_the_switch_is_when_slack_runs_out() -> None:
    found = switch(NEVER_THERE, ON_DEMAND, 20.0)
    assert found.switch_h == pytest.approx(20 - 8.25)
    assert (found.switched, found.on_time) == (1, 1)
    assert found.usd == pytest.approx((0.5 + 8.25 * 3.1,) * 4)  # waiting costs nothing
    assert found.wall_hours == pytest.approx((20.0,) * 4)
    begun_late = switch(NEVER_THERE, replace(ON_DEMAND, setup_h=0.75), 20.0)  # a whole set-up, no restart
    assert begun_late.on_time == 1
    assert begun_late.usd == pytest.approx((0.5 + 8.75 * 3.1,) * 4)


def test_a_run_is_on_time_where_it_is_done_before_the_job_begins_to_stop() -> None:
    spot, on_demand = (replace(each, reserve_h=0.5) for each in (NEVER_THERE, ON_DEMAND))
    found = switch(spot, on_demand, 20.0)
    assert found.switch_h == pytest.approx(19.5 - 8.25)
    assert found.wall_hours == pytest.approx((19.5,) * 4)
    assert (
        switch(spot, ON_DEMAND, 20.0).stop_h == switch(NEVER_THERE, on_demand, 20.0).stop_h == 0.5
    )  # the longer of the two times
    assert switch(spot, on_demand, 8.76).on_time == 1
    late = switch(spot, on_demand, 8.74)
    assert late.on_time == 0
    assert "takes 8.25 h, and 30 min to stop in" in late.sentence()
    sure = replace(SPOT, hazard=0.0, reserve_h=0.5)
    assert [switch(sure, on_demand, hours).on_time_spot for hours in (8.76, 8.74)] == [1, 0]


def test_certainty_can_be_asked_for_where_it_is_there() -> None:
    assert switch(NEVER_THERE, ON_DEMAND, 20.0, on_time=1.0).switch_h == pytest.approx(20 - 8.25)
    assert switch(replace(SPOT, hazard=0.0, wait_h=0.0), ON_DEMAND, 9.0, on_time=1.0).switch_h is None


@pytest.fixture
def an_hours_wait_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is there at first, and the wait for one is exponential, an hour on average."""

    def waited(_: Exposure, hazard: Floats, normals: Floats, there: Floats, since: Floats) -> Floats:
        return -np.log(since)

    monkeypatch.setattr(Exposure, "first_wait_h", waited)


@pytest.mark.usefixtures("an_hours_wait_at_first")
def test_who_is_done_on_spot_pays_nothing_on_demand_and_typical_is_of_those_who_switch() -> None:
    kept = replace(SPOT, hazard=1e-9)
    found = switch(kept, ON_DEMAND, 10.0)
    assert found.switched == pytest.approx(math.exp(-1.5), abs=0.03)
    assert found.usd[:2] == pytest.approx((kept.uninterrupted_usd,) * 2)
    assert found.typical_switch_h == pytest.approx(1.75)


def test_a_calm_run_switches_more_rarely_than_a_rough_one_and_both_are_on_time() -> None:
    calm, rough = (switch(replace(SPOT, hazard=hazard), ON_DEMAND, 11.0) for hazard in (0.2, 1.0))
    for found in (calm, rough):
        assert found.on_time >= 0.95 > found.on_time_spot
    assert 0 < calm.switched < rough.switched < 1
    assert calm.usd[3] < rough.usd[3]


@pytest.mark.usefixtures("an_hours_wait_at_first")
def test_slack_is_used_up_by_waiting_and_not_by_working() -> None:
    # A certain interruption would use up slack. None happens, so a run that gets a node in time keeps it.
    found = switch(replace(SPOT, hazard=1e-9), ON_DEMAND, 9.0)
    assert found.switch_h == pytest.approx(0.75)
    assert found.switched == pytest.approx(math.exp(-0.5), abs=0.03)  # no capacity, or no set-up done, by 0.75 h
    assert found.on_time == 1


def test_more_time_never_means_an_earlier_switch_or_a_dearer_run() -> None:
    found = [switch(SPOT, ON_DEMAND, hours) for hours in (8.5, 9.5, 10.5, 11.5, 13.0)]
    begins = [math.inf if each.switch_h is None else each.switch_h for each in found]
    assert begins == sorted(begins)
    means = [each.usd[3] for each in found]
    assert means == sorted(means, reverse=True)


def test_a_faster_machine_on_demand_leaves_more_slack() -> None:
    fast = replace(ON_DEMAND, phase_ends_h=(1.0, 2.5, 4.0))
    slow, quick = switch(NEVER_THERE, ON_DEMAND, 12.0), switch(NEVER_THERE, fast, 12.0)
    assert slow.switch_h == pytest.approx(12 - 8.25)
    assert quick.switch_h == pytest.approx(12 - 4.25)


def test_a_slower_spot_machine_eats_slack_while_it_works() -> None:
    slow = replace(SPOT, phase_ends_h=(4.0, 10.0, 16.0), hazard=1e-9, wait_h=0.0)
    found = switch(slow, replace(ON_DEMAND, setup_h=5.0), 12.0)  # a run that has begun pays only a restart
    # 3.75 h of slack: a quarter of an hour of set-up, then half an hour per hour of work.
    assert found.typical_switch_h == pytest.approx(0.25 + 3.5 * 2)
    assert found.wall_hours == pytest.approx((12.0,) * 4)
    assert found.usd[1] == pytest.approx(0.5 + 7.25 * 1.1 + (12 - 7.25) * 3.1)


def test_a_stricter_share_keeps_a_larger_margin() -> None:
    rough = replace(SPOT, hazard=1.5, saves_fit=(False, False), interval_h=1.0)
    lax, strict = (switch(rough, ON_DEMAND, 14.0, on_time=share) for share in (0.5, 0.999))
    assert lax.margin_h < strict.margin_h
    assert lax.on_time < strict.on_time
    assert strict.on_time >= 0.999


def test_a_hazard_of_zero_or_a_hundred_gives_a_plain_answer() -> None:
    none = switch(replace(SPOT, hazard=0.0), ON_DEMAND, 9.0)
    assert none.switch_h is None
    rough = switch(replace(SPOT, hazard=100.0), ON_DEMAND, 12.0)
    assert (rough.switch_h, rough.on_time) == (0, 1)  # no node lives through its set-up


def test_the_sentence_names_the_hour_and_that_nothing_switches_by_itself() -> None:
    found = switch(SPOT, ON_DEMAND, 11.0)
    said = found.sentence()
    assert f"{found.switch_h:.2f} h after the start if nothing is done by then" in said
    assert f"% of runs switch, typically at {found.typical_switch_h:.2f} h);" in said
    assert "fleet.fallback: on-demand does it by itself" in said


def test_the_limits_of_the_definition_do_not_end_the_policy() -> None:
    capped = replace(SPOT, max_usd=1.0, max_hours=0.5)
    assert switch(capped, ON_DEMAND, 11.0) == switch(SPOT, ON_DEMAND, 11.0)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="on_time is 0"):
        switch(SPOT, ON_DEMAND, 10.0, on_time=0)
    with pytest.raises(ValueError, match="allowed"):
        switch(SPOT, ON_DEMAND, math.nan)
    with pytest.raises(ValueError, match="no work"):
        switch(replace(SPOT, phase_ends_h=(0.0,)), ON_DEMAND, 10.0)


def test_a_run_that_its_owner_ends_keeps_its_work_and_stops_paying() -> None:
    calm = replace(SPOT, hazard=0.0)
    found = simulate(replace(calm, leave=PlannedEnd(by_h=3.0, work_h=0.0)), runs=10)
    assert found.stopped.all()
    assert found.done_h == pytest.approx(np.full(10, 2.75))
    assert found.usd == pytest.approx(np.full(10, 0.5 + 3 * 1.1))
    assert found.wall_hours == pytest.approx(np.full(10, 3.0))
    done = simulate(calm, runs=10)
    assert not done.stopped.any()
    assert done.done_h == pytest.approx(np.full(10, 8.0))
    waiting = simulate(replace(NEVER_THERE, leave=PlannedEnd(by_h=3.0, work_h=0.0)), runs=10)
    assert set(waiting.usd) == {0.5}
    assert set(waiting.wall_hours) == {3.0}
