"""How long a stop, an upload and what is exported at a limit take."""

from __future__ import annotations

import pytest

from gpufleet.job.contract.estimate import NoticeEstimate, PhaseEstimate
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind import JobConfig, from_json
from gpufleet.job.supervisor.forecast import Forecast


def test_how_long_a_stop_takes_follows_the_steps_that_the_bill_has_counted() -> None:
    config = KernelConfig()  # 16 steps by its estimate, 25 by its data
    (first, *_), rows = config.phases(), [PhaseEstimate(phase="sft", steps=25, step_ms=8000.0)]
    forecast = Forecast(config, "p5.48xlarge", phases=rows)
    assert first.steps == 16
    assert forecast.stop_s(24, None) == forecast.stop_s(0, None)
    assert forecast.stop_s(0, None) == pytest.approx(8 + 2 + 2.5 * 98.3, abs=0.5)  # a checkpoint of 98.3 GB
    assert forecast.stop_s(25, None) < 10  # nothing is left to save


def test_of_the_listed_types_the_node_s_own_counts() -> None:
    notice = [
        NoticeEstimate(type=type_, phase="dense", seconds=seconds) for type_, seconds in (("a", 30.0), ("b", 70.0))
    ]
    found = [Forecast(GrowthConfig(), type_, notice=notice).stop_s(0, None) for type_ in ("a", "b")]
    assert found == [30.0, 70.0]


def test_what_the_bill_says_of_a_stop_is_made_longer_by_slower_steps_and_never_shorter() -> None:
    rows = [PhaseEstimate(phase="dense", steps=9, step_ms=1000.0)]
    forecast = Forecast(
        GrowthConfig(), "a", notice=[NoticeEstimate(type="a", phase="dense", seconds=30.0)], phases=rows
    )
    for _ in range(2):
        assert [forecast.stop_s(0, step_s) for step_s in (None, 0.5, 4.0)] == [30.0, 30.0, 33.0]
        forecast.learn((10**9, 0.001))  # an upload as fast as that


def test_a_stop_takes_a_save_besides_an_upload_that_was_measured_to_be_slow() -> None:
    forecast, size = Forecast(KernelConfig(), "p5.48xlarge"), 98.3  # GB
    billed = forecast.stop_s(0, None)
    forecast.learn((10**9, 1.5))  # as billed
    assert forecast.stop_s(0, None) == billed
    forecast.learn((10**9, 2.0))
    assert forecast.stop_s(0, None) == pytest.approx(2 + 1.0 * size + 2.0 * size, abs=0.5)


def test_a_stop_waits_for_the_rest_of_a_slower_step_alone() -> None:
    rows = [PhaseEstimate(phase="train", steps=100, step_ms=1500.0)]
    forecast = Forecast(SftConfig(), "p5.4xlarge", phases=rows)
    more = [forecast.stop_s(9, step_s) - forecast.stop_s(9, None) for step_s in (1.0, 1.5, 4.0)]
    assert more == pytest.approx([0.0, 0.0, 2.5])


@pytest.mark.parametrize(("every", "line_s"), [(10, 15.0), (1000, 301.5)])
def test_a_line_comes_after_log_every_steps_or_with_a_save(every: int, line_s: float) -> None:
    rows = [PhaseEstimate(phase="train", steps=100, step_ms=1500.0)]
    config = from_json("sft-h100", {"log": {"every": every}, "checkpoint": {"interval_s": 300.0}})
    assert Forecast(config, "p5.4xlarge", phases=rows).line_s(9) == line_s


def test_an_upload_takes_as_long_as_the_last_one_that_could_be_measured() -> None:
    forecast = Forecast(KernelConfig(), "p5.48xlarge")
    forecast.learn((49_999_999, 100.0))  # all latency
    assert forecast.upload_s(10**9) == 2 + 1.5
    forecast.learn((50_000_000, 0.2))
    assert forecast.upload_s(10**9) == pytest.approx(2 + 1.25 * 4)


@pytest.mark.parametrize(
    ("config", "export_gb"),
    [
        (PretrainConfig(), 16.75),
        (SftConfig(), 0.336),  # the adapter
        (SftConfig(method="full"), 16.06),
        (GrowthConfig(), 0.4),  # of the first phase, in fp32
        (KernelConfig(), 16.38),
        (TwoTowerConfig(), 0),
    ],
)
def test_a_limit_leaves_time_for_what_is_exported_then(config: JobConfig, export_gb: float) -> None:
    forecast = Forecast(config, "p5.48xlarge")

    def export_s() -> float:
        return forecast.end_s(9, 4.0) - forecast.stop_s(9, 4.0)

    assert export_s() == pytest.approx(2.5 * export_gb, rel=0.01, abs=0.1)
    forecast.learn((10**9, 0.5))  # no less for an upload that was faster than billed
    assert export_s() == pytest.approx(2.5 * export_gb, rel=0.01, abs=0.1)
    forecast.learn((10**9, 10.0))
    assert export_s() == pytest.approx((1.0 + 10.0) * export_gb, rel=0.01, abs=0.1)
