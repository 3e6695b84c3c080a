"""A hazard is learned from node-hours and interruptions, and draws interruptions."""

from __future__ import annotations

import math
from datetime import date

import numpy as np
import pytest

from gpufleet.infra.evidence.observation import Observation
from gpufleet.infra.risk.hazard import (
    DRIFT,
    HAZARD_MEDIAN,
    HAZARD_SIGMA,
    Hazard,
    Key,
    find,
    learn,
    of_node,
    prior,
    word,
)

DAY = date(2026, 11, 1)
NORMALS = np.random.default_rng(3).standard_normal(200_000)


def observed(zone: str | None, hours: float, interruptions: float, kind: str = "g5.2xlarge") -> Observation:
    return Observation(kind, zone, hours, interruptions, "a test", DAY)


def of_zone(*observations: Observation, zone: str | None = "a") -> Hazard:
    return learn(observations)[Key("g5.2xlarge", zone)]


def test_nothing_known_is_the_log_normal_of_the_public_traces() -> None:
    drawn = Hazard().per_run(NORMALS)
    assert np.median(drawn) == pytest.approx(0.3, rel=0.01)
    assert np.quantile(drawn, 0.9) == pytest.approx(Hazard().quantile(0.9), rel=0.02)
    assert drawn.max() == pytest.approx(0.3 * math.exp(2 * 1.2))
    assert Hazard().quantile(0.9) == pytest.approx(0.3 * math.exp(1.2 * 1.2816), rel=1e-3)


def test_a_node_with_eight_gpus_is_taken_more_often_and_one_seen_learns_from_there() -> None:
    assert prior(1) == Hazard()
    assert prior(8).median == pytest.approx(0.3 * 8**0.5)
    assert find({}, "p5.48xlarge", "a", 8) == prior(8)
    little = learn([observed("a", 5, 2)._replace(gpus=8)])[Key("g5.2xlarge", "a")]
    assert little.median > of_zone(observed("a", 5, 2)).median


def test_a_fixed_hazard_is_drawn_as_it_is() -> None:
    assert set(Hazard.fixed(0.2).per_run(NORMALS[:100])) == {0.2}
    assert set(Hazard.fixed(0.0).per_run(NORMALS[:100])) == {0.0}


def test_a_gang_is_interrupted_more_often_and_how_much_so_is_the_less_certain_the_more_nodes() -> None:
    """16^0.35 = 2.639. The exponent's uncertainty is 0.3 x ln 16 = 0.8318: sqrt(1.2^2 + 0.8318^2) = 1.4601."""
    one, gang = Hazard(median=0.3, sigma=1.2), Hazard(median=0.3, sigma=1.2).of_gang(16)
    assert gang.median == pytest.approx(0.3 * 2.639, abs=1e-3)
    assert gang.sigma == pytest.approx(1.4601, abs=1e-4)
    assert gang.unevenness == one.unevenness
    assert one.of_gang(1) == one
    assert Hazard.fixed(0.3).of_gang(16).sigma == 0.0


def test_a_long_history_rules_and_a_short_one_hardly_counts() -> None:
    long, short = of_zone(observed("a", 10_000, 500)), of_zone(observed("a", 5, 5))
    assert long.median == pytest.approx(0.05, rel=0.05)
    assert HAZARD_MEDIAN < short.median < 0.5  # one interruption per hour was observed, for five hours


def test_a_zone_alone_is_its_prior_times_its_own_history_once() -> None:
    found, at = of_zone(observed("a", 20, 10)), np.linspace(-9, 5, 20_001)
    log = -0.5 * (at - math.log(HAZARD_MEDIAN)) ** 2 / (1.0**2 + 0.66**2) + (10 * at - 20 * np.exp(at)) / 5
    weights = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    mean = float(weights @ at)
    assert math.log(found.median) == pytest.approx(mean, abs=1e-3)
    assert found.sigma == pytest.approx(math.sqrt(float(weights @ (at - mean) ** 2) + DRIFT**2), abs=5e-4)
    assert found.unevenness == 1.2


def test_a_hazards_word_is_the_nearest_by_ratio() -> None:
    assert [word(per_hour) for per_hour in (0.0, 0.05, 0.12, 0.2, 0.3, 0.35, 9.0)] == [
        "calm",
        "calm",
        "usual",
        "usual",
        "usual",
        "rough",
        "rough",
    ]


def test_uncertainty_falls_with_exposure_down_to_the_drift() -> None:
    sigmas = [of_zone(observed("a", hours, hours / 4)).sigma for hours in (4, 40, 400, 4000, 400_000)]
    assert sigmas == sorted(sigmas, reverse=True)
    assert sigmas[-1] == pytest.approx(DRIFT, rel=0.01)


def test_more_interruptions_in_the_same_hours_are_a_higher_hazard() -> None:
    medians = [of_zone(observed("a", 100, count)).median for count in (0, 1, 10, 100)]
    assert medians == sorted(medians)
    assert medians[0] > 0


def test_hours_without_any_interruption_lower_the_hazard_the_longer_they_are() -> None:
    medians = [of_zone(observed("a", hours, 0)).median for hours in (1, 10, 100, 1000)]
    assert medians == sorted(medians, reverse=True)


def test_a_zone_without_history_gets_its_types_and_is_less_certain_than_one_with() -> None:
    learned = learn([observed(zone, 500, 500) for zone in "abcdef"])
    other, known = find(learned, "g5.2xlarge", "z"), find(learned, "g5.2xlarge", "a")
    assert HAZARD_MEDIAN < other.median < known.median
    assert other.sigma > known.sigma


def test_a_type_never_seen_gets_the_prior() -> None:
    assert find(learn([observed("a", 100, 10)]), "p5.48xlarge", "a") == Hazard()
    assert learn([]) == {}


def test_a_zone_with_little_history_leans_on_the_other_zones_of_its_type_only() -> None:
    little = observed("a", 10, 3)
    rough = [observed(zone, 1000, 2000) for zone in "bcd"]
    assert of_zone(little, *rough).median > of_zone(little).median
    elsewhere = [observed(zone, 1000, 2000, kind="p5.48xlarge") for zone in "bcd"]
    assert of_zone(little, *elsewhere).median == of_zone(little).median


def test_two_observations_of_a_zone_are_one_history() -> None:
    apart, together = of_zone(observed("a", 30, 4), observed("a", 70, 8)), of_zone(observed("a", 100, 12))
    assert apart == together
    assert "12 interruptions in 100 node-hours" in apart.source


def test_an_unknown_zone_teaches_the_type_and_gets_no_hazard_of_its_own() -> None:
    learned = learn([observed(None, 5000, 5000)])
    assert set(learned) == {Key("g5.2xlarge", None)}
    assert learned[Key("g5.2xlarge", None)].median > HAZARD_MEDIAN


def test_learning_from_nothing_seen_gives_the_prior_widened_by_the_drift() -> None:
    found = of_zone(observed("a", 0, 0))
    assert found.median == pytest.approx(HAZARD_MEDIAN, rel=0.01)
    assert found.sigma == pytest.approx(math.hypot(HAZARD_SIGMA, DRIFT), rel=0.01)


def test_stated_intervals_of_zones_drawn_from_the_prior_contain_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        truth = 0.3 * math.exp(0.85 * rng.standard_normal())
        later = truth * math.exp(DRIFT * rng.standard_normal())
        clusters = rng.poisson(truth * 200 / 5)  # five interruptions at once
        found = of_zone(observed("a", 200, 5 * clusters))
        held += found.quantile(0.1) <= later <= found.quantile(0.9)
    assert 0.72 < held / 300 < 0.88


@pytest.mark.parametrize(("hours", "count"), [(-1, 0), (1, -1), (math.inf, 0), (math.nan, 0), (0, 1)])
def test_impossible_observations_are_refused_by_their_source(hours: float, count: float) -> None:
    with pytest.raises(ValueError, match=r"a test: .* allowed"):
        learn([observed("a", hours, count)])


def test_uneven_nodes_keep_the_hazard_per_node_hour_and_the_first_node_is_calmer() -> None:
    uneven = Hazard(median=0.5, sigma=0.0, unevenness=1.0)
    # Mean lives of nodes that follow an interruption.
    after = 1 / (0.5 * of_node(NORMALS, uneven.unevenness, first=False))
    assert after.mean() == pytest.approx(2.0, rel=0.02)  # so interruptions per node-hour are 0.5
    # The chance that a node is up at a random hour is in proportion to its life.
    first = 0.5 * of_node(NORMALS, uneven.unevenness, first=True)
    assert first.mean() == pytest.approx(float(np.average(1 / after, weights=after)), rel=0.02)
