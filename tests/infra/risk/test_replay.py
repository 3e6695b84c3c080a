"""The replay of a run on a trace: cases worked by hand, and whether the stated intervals hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.risk import replay
from gpufleet.infra.risk.hazard import Hazard, Key, learn
from gpufleet.infra.risk.simulation import Exposure, simulate
from tests.infra.traces import markov, stretches

# A quarter of an hour of set-up and 2 hours of work at 1 USD/h and 0.10 for the disk; every notice is handled.
RUN = Exposure(
    setup_h=0.25,
    restart_h=0.5,
    phase_ends_h=(2.0,),
    saves_fit=(True,),
    interval_h=0.1,
    compute_usd_h=1.0,
    extras_usd_h=0.1,
    fixed_usd=0.5,
    hazard=0.3,
    notice_missed=0.0,
)
NOTICE_H = 120 / 3600


def test_a_run_in_a_calm_stretch_costs_what_the_bill_says_without_interruptions() -> None:
    found = replay.run(RUN, stretches((0, 10), hours=10), starts=50)
    assert found.usd == pytest.approx(np.full(50, 0.5 + 2.25 * 1.1))
    assert not found.interruptions.any()
    assert found.wall_hours == pytest.approx(np.full(50, 2.25))


def test_a_run_waits_for_capacity_and_does_not_pay_for_it() -> None:
    found = replay.run(RUN, stretches((4, 20), hours=20), starts=1)
    assert found.wall_hours[0] == pytest.approx(4 + 2.25)
    assert found.usd[0] == pytest.approx(0.5 + 2.25 * 1.1)


def test_an_interruption_after_the_first_hour_is_paid_and_its_work_kept() -> None:
    # The node is up for 1.5 h: 1.25 h of work minus the notice. Then: an hour's wait, 0.5 h of restart, the rest.
    found = replay.run(RUN, stretches((0, 1.5), (2.5, 20), hours=20), starts=1)
    second = 0.5 + 2.0 - (1.25 - NOTICE_H)
    assert found.interruptions[0] == 1
    assert found.hours[0] == pytest.approx(1.5 + second, abs=1e-6)
    assert found.usd[0] == pytest.approx(0.5 + (1.5 + second) * 1.1, abs=1e-6)
    assert found.wall_hours[0] == pytest.approx(2.5 + second, abs=1e-6)


def test_an_interrupted_first_hour_is_free_but_for_the_disk() -> None:
    found = replay.run(RUN, stretches((0, 0.2), (1, 20), hours=20), starts=1)
    assert found.interruptions[0] == 1
    assert found.usd[0] == pytest.approx(0.5 + 0.2 * 0.1 + 2.5 * 1.1, abs=1e-6)


def test_a_run_that_outlasts_the_trace_goes_on_at_its_beginning() -> None:
    # The zone is up from 5 to 6 and, at the trace's start again, from 0 to 1: a run that begins at 5 has 2 h at once.
    found = replay.run(RUN, stretches((0, 1), (5, 6), hours=6), starts=6)
    assert found.interruptions[5] == 1
    assert found.hours[5] == pytest.approx(2 + 0.5 + 0.25 + NOTICE_H, abs=1e-6)


def test_every_interruption_of_a_long_run_is_counted_once() -> None:
    trace = stretches(*((2.0 * n, 2.0 * n + 1.5) for n in range(50)), hours=100)
    found = replay.run(replace(RUN, phase_ends_h=(20.0,)), trace, starts=1)
    each = 1.5 - 0.5 - NOTICE_H  # work kept per stretch after the first
    stretches_needed = 1 + int(np.ceil((20.0 - (1.25 - NOTICE_H)) / each))
    assert found.interruptions[0] == stretches_needed - 1


def test_a_trace_without_a_node_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="without availability"):
        replay.run(RUN, stretches(hours=5))


def test_an_exponential_trace_costs_what_the_simulation_says() -> None:
    run = replace(RUN, phase_ends_h=(6.0,), hazard=0.5, wait_h=1.0, notice_missed=0.05)
    seen = replay.run(run, markov(0.5, hours=40_000), starts=8000)
    said = simulate(run)
    assert seen.usd.mean() == pytest.approx(said.usd.mean(), rel=0.03)
    assert seen.interruptions.mean() == pytest.approx(said.interruptions.mean(), rel=0.05)


def test_a_true_forecast_holds_and_beats_a_false_one() -> None:
    found = replay.compare(replace(RUN, phase_ends_h=(8.0,), hazard=0.8), markov(0.8, hours=20_000))
    stated, fixed, prior = found.scores
    assert 0.75 <= stated.contained <= 0.9
    assert stated.pinball_usd < min(fixed.pinball_usd, prior.pinball_usd)
    assert found.independent < found.windows


def test_as_many_runs_fit_into_a_trace_as_their_hours_by_the_wall_do() -> None:
    found = replay.compare(RUN, stretches((4, 20), hours=20), starts=1)
    assert found.independent == pytest.approx(20 / (4 + RUN.uninterrupted_h))
    with pytest.raises(GpufleetError, match=r"it is 2\.00 h long and the run takes 2\.25 h without interruptions"):
        replay.compare(RUN, stretches((0, 2), hours=2))


def test_the_limits_do_not_make_a_replay_cheaper() -> None:
    capped = replay.compare(replace(RUN, max_usd=0.6, max_hours=0.2), markov(0.5))
    assert capped == replace(replay.compare(RUN, markov(0.5)), trace=capped.trace)


def test_pinball_loss_is_least_at_the_true_quantiles() -> None:
    values = np.random.default_rng(1).standard_normal(20_000)
    true = tuple(float(each) for each in np.quantile(values, replay.SHARES))
    for shift in (-0.3, 0.3):
        assert replay.pinball(values, true) < replay.pinball(values, tuple(each + shift for each in true))
    assert replay.pinball(np.array([1.0]), (0.0, 1.0, 3.0)) == pytest.approx((0.1 * 1 + 0 + 0.1 * 2) / 3)


def test_a_learned_hazard_holds_on_the_zone_it_has_not_seen() -> None:
    """Nine zones whose hazards differ as in the public traces; each is left out once."""
    hazards = (0.10, 0.15, 0.16, 0.17, 0.23, 0.44, 0.60, 0.67, 1.39)
    zones = [markov(hazard, seed=seed, hours=1000, zone=str(seed)) for seed, hazard in enumerate(hazards)]
    run = replace(RUN, phase_ends_h=(8.0,))
    learned_loss = fixed_loss = 0.0
    contained = []
    for zone in zones:
        rest = learn(other.observation() for other in zones if other is not zone)
        outcome = replay.run(run, zone)
        found = replay.score("learned", replace(run, hazard=rest[Key("g5.2xlarge", None)]), outcome)
        contained.append(found.contained)
        learned_loss += found.pinball_usd
        fixed_loss += replay.score("fixed", replace(run, hazard=Hazard.fixed(0.2)), outcome).pinball_usd
    assert 0.7 <= np.mean(contained) <= 0.95
    assert learned_loss < fixed_loss
