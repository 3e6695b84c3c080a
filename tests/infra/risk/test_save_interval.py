"""The best checkpoint interval: against Young's formula, against the simulation, and at the ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpufleet.infra.risk.hazard import Hazard
from gpufleet.infra.risk.save_interval import optimal
from gpufleet.infra.risk.simulation import Exposure, simulate

RUN = Exposure(
    setup_h=0.2,
    restart_h=0.2,
    phase_ends_h=(10.0, 40.0),
    saves_fit=(False, False),
    interval_h=300 / 3600,
    compute_usd_h=2.0,
    extras_usd_h=0.1,
    fixed_usd=1.0,
    hazard=0.2,
)


@pytest.mark.parametrize("save_s", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("hazard", [0.05, 0.2])
def test_where_every_interruption_loses_work_it_is_youngs_interval(hazard: float, save_s: float) -> None:
    found = optimal(replace(RUN, hazard=hazard), save_s)
    assert found is not None
    assert found.interval_s == pytest.approx(math.sqrt(2 * save_s * 3600 / hazard), rel=0.1)


def test_handled_notices_make_it_longer_by_the_root_of_the_share_that_is_missed() -> None:
    lost, kept = optimal(RUN, 2.0), optimal(replace(RUN, saves_fit=(True, True), notice_missed=0.04), 2.0)
    assert lost is not None
    assert kept is not None
    assert kept.interval_s == pytest.approx(lost.interval_s / math.sqrt(0.04), rel=0.1)


def test_it_grows_with_the_cost_of_a_save_and_shrinks_with_the_hazard() -> None:
    by_save = [found.interval_s for cost in (0.1, 1.0, 10.0) if (found := optimal(RUN, cost))]
    assert len(by_save) == 3
    assert by_save == sorted(by_save)
    by_hazard = [found.interval_s for h in (0.01, 0.1, 1.0) if (found := optimal(replace(RUN, hazard=h), 2.0))]
    assert len(by_hazard) == 3
    assert by_hazard == sorted(by_hazard, reverse=True)


def test_no_interval_is_cheaper_and_the_saving_is_what_it_says_in_the_simulation_too() -> None:
    sparse = replace(RUN, interval_h=4.0, free_h=0.0)
    found = optimal(sparse, 5.0)
    assert found is not None
    stalls = (1 + 5.0 / found.interval_s) / (1 + 5.0 / (4 * 3600))
    best = replace(
        sparse, interval_h=found.interval_s / 3600, phase_ends_h=tuple(end * stalls for end in sparse.phase_ends_h)
    )
    present_usd, best_usd = (simulate(run, runs=20_000, seed=99).usd.mean() for run in (sparse, best))
    assert present_usd - best_usd == pytest.approx(found.saved_usd, rel=0.1)
    assert found.share == pytest.approx(found.saved_usd / present_usd, rel=0.05)
    again = optimal(best, 5.0)
    assert again is not None
    assert again.saved_usd < 0.01
    assert again.sentence().startswith("no other checkpoint interval is cheaper than the present 419")


def test_where_interruptions_are_very_many_it_counts_in_the_dollars_of_the_bill() -> None:
    short = replace(RUN, phase_ends_h=(1.0, 6.0), hazard=10.0)  # 130 nodes a run
    found = optimal(short, 2.0)
    assert found is not None
    assert found.saved_usd / found.share == pytest.approx(simulate(short, runs=2_000).usd.mean(), rel=0.05)


def test_the_sentence_names_both_intervals_and_the_dollars() -> None:
    found = optimal(replace(RUN, interval_h=4.0), 5.0)
    assert found is not None
    assert found.sentence().startswith("the cheapest checkpoint interval is about ")
    assert f"against the present 14400 s it saves ${found.saved_usd:.2f}" in found.sentence()
    assert "it saves $1.00 (1.0%)" in replace(found, saved_usd=1.0, share=0.01).sentence()
    assert "costs less than 0.5 % more" in replace(found, saved_usd=1.0, share=0.004).sentence()


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.25])
def test_nothing_is_ever_said_to_be_saved_by_a_dearer_interval(factor: float) -> None:
    best = optimal(RUN, 2.0)
    assert best is not None
    found = optimal(replace(RUN, interval_h=factor * best.interval_s / 3600), 2.0)
    assert found is not None
    assert found.saved_usd >= 0
    assert (found.interval_s == found.present_s) == (found.saved_usd == 0)


def test_without_interruptions_one_save_at_the_end_is_best() -> None:
    found = optimal(replace(RUN, hazard=0.0, phase_ends_h=(1.0, 5.0)), 2.0)
    assert found is not None
    assert found.interval_s == pytest.approx(5 * 3600, rel=1e-3)
    assert found.saved_h == pytest.approx(5.0 - 5.0 * (1 + 2 / 18_000) / (1 + 2 / 300), rel=1e-3)


def test_free_saves_are_made_as_often_as_can_be() -> None:
    found = optimal(RUN, 0.0)
    assert found is not None
    assert found.interval_s == pytest.approx(1.0, rel=1e-3)


def test_the_limits_of_the_run_change_nothing() -> None:
    assert optimal(replace(RUN, max_usd=5.0, max_hours=2.0), 2.0) == optimal(RUN, 2.0)


def test_an_uncertain_hazard_asks_for_more_care_than_its_median() -> None:
    known, drawn = (
        optimal(replace(RUN, hazard=0.3), 2.0),
        optimal(replace(RUN, hazard=Hazard(sigma=0.9, unevenness=0.0)), 2.0),
    )
    assert known is not None
    assert drawn is not None
    assert drawn.interval_s < known.interval_s


def test_a_run_that_never_gets_anywhere_has_no_best_interval() -> None:
    for hazard in (100.0, 1000.0):
        assert optimal(replace(RUN, hazard=hazard), 2.0) is None


def test_an_impossible_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: seconds, 0 or more"):
        optimal(RUN, -1.0)
