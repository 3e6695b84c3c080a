"""The expected speed of a GPU, from published figures and from the user's own."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import pytest

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.evidence import own_speeds, speeds
from gpufleet.infra.evidence.speeds import OURS, Speed, SpeedGroup, Speeds
from gpufleet.infra.risk.unknown import P90
from gpufleet.job.experiments.growth.spec import GrowthConfig
from tests.infra.calibration_world import measurement, place

H100 = SpeedGroup("H100", "from scratch", "somebody", several=False)


def figures(place: SpeedGroup, share: float, count: int) -> list[Speed]:
    """Figures of the given number of sources."""
    return [Speed(place._replace(source=f"{share} {at}"), share) for at in range(count)]


def test_one_figure_moves_a_little_and_many_decide() -> None:
    asked = H100._replace(source="new")
    few, many = (Speeds(figures(H100, 0.6, count)).expect(asked) for count in (1, 40))
    assert 0.42 < few.share < 0.55 < many.share < 0.6
    assert many.sigma < few.sigma


def test_a_gpu_without_figures_is_expected_like_the_others_and_less_sure() -> None:
    known = Speeds([*figures(H100, 0.3, 20), *figures(H100._replace(gpu="A100 80GB"), 0.5, 20)])
    seen, unseen = (known.expect(H100._replace(gpu=gpu, source="new")) for gpu in ("H100", "A10G"))
    assert seen.share < unseen.share < 0.5
    assert unseen.sigma > seen.sigma


def test_a_job_measured_on_one_gpu_is_better_known_on_another() -> None:
    before = Speeds(figures(H100, 0.4, 5))
    after = Speeds([*before.figures, Speed(H100._replace(source=OURS), 0.6)])
    asked = SpeedGroup("B200", "from scratch", OURS, several=False)
    assert after.expect(asked).share > 1.1 * before.expect(asked).share
    assert after.expect(asked).sigma < before.expect(asked).sigma


def test_what_two_gpus_share_of_a_doubt_is_less_than_all_of_it() -> None:
    expected = speeds.shipped().expect(SpeedGroup("B200", "adapter", OURS, several=True))
    assert 0 < expected.shared < expected.sigma


def test_every_figure_of_the_table_is_a_share_of_its_gpus_peak() -> None:
    for figure in speeds.shipped().figures:
        assert 0.1 < figure.share < 0.75, figure


def test_the_h100_reaches_a_smaller_share_than_the_a100_as_the_same_code_shows() -> None:
    h100, a100 = (
        speeds.shipped().expect(SpeedGroup(gpu, "from scratch", "new", True)) for gpu in ("H100", "A100 80GB")
    )
    assert a100.share > 1.1 * h100.share


def test_a_mixture_of_experts_reaches_less_of_the_peak_than_a_dense_model() -> None:
    """It rests on six figures of two sources (infra/evidence/speeds.csv). A grown model is a mixture from phase 2."""
    dense, mixture = (
        speeds.shipped().expect(SpeedGroup("H100", kind, "new", several=True)) for kind in ("from scratch", "mixture")
    )
    assert mixture.share < dense.share
    assert [size.kind for size in GrowthConfig().phases()] == ["from scratch", "mixture", "mixture"]


def test_most_sources_lie_in_the_range_that_the_others_give_and_not_all() -> None:
    """Each source is left out in turn, and its mean figure judged: 75 to 90 % lie inside (bench/results/speed.md)."""
    figures, inside = speeds.shipped().figures, []
    for source in dict.fromkeys(each.place.source for each in figures):
        own = [each for each in figures if each.place.source == source]
        others = Speeds(each for each in figures if each.place.source != source)
        expected = [others.expect(each.place) for each in own]
        error = fmean(math.log(each.share / of.share) for each, of in zip(own, expected, strict=True))
        inside.append(abs(error) <= P90 * fmean(of.sigma for of in expected))
    assert 0.75 <= sum(inside) / len(inside) <= 0.9


def test_a_projects_measurement_of_one_job_tells_of_another_on_that_gpu(tmp_path: Path) -> None:
    instances = load_catalog().instances
    asked = SpeedGroup("A10G", "from scratch", OURS, several=False)
    before = own_speeds.known(tmp_path, instances).expect(asked)
    place(tmp_path, measurement())  # 50, 100 and 150 ms: the last step is half as fast again as the data sheet allows
    after = own_speeds.known(tmp_path, instances).expect(asked)
    assert after.share > 1.2 * before.share
    assert after.sigma < before.sigma


@pytest.mark.parametrize(
    "changes", [{"device": {"kind": "cpu", "name": "CPU", "ranks": 1}}, {"experiment": "two-tower"}]
)
def test_what_is_no_measurement_of_a_known_job_on_a_gpu_tells_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    place(tmp_path, {**measurement(), **changes})
    assert own_speeds.known(tmp_path, load_catalog().instances) is speeds.shipped()


def test_the_fit_is_that_of_the_normal_equations() -> None:
    """For two figures of one cell, worked by hand, the precisions of the prior and of the figures add up."""
    both = Speeds([Speed(H100, 0.5), Speed(H100, 0.5)])
    prior = sum(s**2 for s in (0.15, 0.16, 0.1, 0.3, 0.12))
    noise = 0.14**2 / 2
    moved = prior / (prior + noise)
    assert math.log(both.expect(H100).share / 0.42) == pytest.approx(moved * math.log(0.5 / 0.42))
    assert both.expect(H100).sigma ** 2 == pytest.approx(prior * noise / (prior + noise) + 0.14**2)
