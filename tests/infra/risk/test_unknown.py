"""Unknown facts before a run widen the range of its cost, and do not move the median."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.risk import unknown
from gpufleet.infra.risk.simulation import Exposure, quantiles, simulate, simulate_each
from gpufleet.infra.risk.unknown import P90, Unknown
from tests.infra.cost_definitions import definition

RUN = Exposure(
    setup_h=0.25,
    restart_h=0.25,
    phase_ends_h=(4.0, 10.0),
    saves_fit=(True, True),
    interval_h=0.1,
    compute_usd_h=10.0,
    extras_usd_h=0.5,
    fixed_usd=3.0,
    hazard=0.0,
)


def with_doubt(**sigmas: float) -> Exposure:
    return replace(RUN, unknown=Unknown(**sigmas, device="a", offer="b"))


@pytest.mark.parametrize("runs", [250, 2_000, 9_999])
def test_no_doubt_moves_the_median_however_many_runs(runs: int) -> None:
    for one in ({"slower": 0.4, "faster": 0.4}, {"price": 0.25}, {"setup": 0.3}):
        outcome = simulate(with_doubt(**one), runs=runs)
        assert quantiles(outcome.usd)[1] == pytest.approx(RUN.uninterrupted_usd, rel=0.002)


def test_a_doubt_of_speed_takes_as_much_longer_as_its_p90_says() -> None:
    outcome = simulate(with_doubt(faster=0.1, slower=0.4))
    p10, _, p90, _ = quantiles(outcome.hours)
    assert p10 == pytest.approx(0.25 + 10 * math.exp(-0.1 * P90), rel=0.002)
    assert p90 == pytest.approx(0.25 + 10 * math.exp(0.4 * P90), rel=0.002)


def test_a_doubt_of_price_changes_dollars_and_no_hours() -> None:
    outcome = simulate(with_doubt(price=0.2))
    assert np.ptp(outcome.hours) == 0
    assert quantiles(outcome.usd)[2] == pytest.approx(3 + 10.25 * (10 * math.exp(0.2 * P90) + 0.5), rel=0.002)


def test_max_usd_stops_the_runs_whose_node_turns_out_dear() -> None:
    bound = replace(with_doubt(price=0.2), max_usd=3 + 10.25 * 10.5)  # the cost of the run at the stated price
    outcome = simulate(bound)
    assert outcome.stopped.mean() == pytest.approx(0.5, abs=0.01)
    assert outcome.usd.max() <= bound.max_usd + 1e-9  # type: ignore[operator]


def test_options_on_one_gpu_have_one_speed_and_others_share_a_part() -> None:
    doubt = Unknown(faster=0.4, slower=0.4, shared=0.2, device="8 x H100")
    runs = [replace(RUN, unknown=replace(doubt, device=device)) for device in ("8 x H100", "8 x H100", "8 x B200")]
    one, same, other = (outcome.hours for outcome in simulate_each(runs))
    assert np.array_equal(one, same)
    assert np.corrcoef(np.log(one - 0.25), np.log(other - 0.25))[0, 1] == pytest.approx(0.25, abs=0.03)


def test_luck_is_the_same_asked_alone_and_among_others() -> None:
    runs = [replace(RUN, hazard=0.3, unknown=Unknown(slower=0.3, price=0.1, device=name, offer=name)) for name in "ab"]
    together = simulate_each(runs, runs=500)
    for run, outcome in zip(runs, together, strict=True):
        assert np.array_equal(simulate(run, runs=500).usd, outcome.usd)


def test_a_spot_price_is_the_less_sure_the_older_it_is() -> None:
    day, week, month, year = map(unknown.spot_price, (1, 7, 30, 365))
    assert day < week == 0.05 < month < year == 0.25
    assert unknown.spot_price(-3) == 0


def test_the_bill_shows_its_parts_and_what_a_calibration_leaves() -> None:
    found = price(definition(max_usd="30", max_hours="20"), load_catalog())
    width = {name: high - low for name, (low, high) in found.span_usd.items()}
    assert set(width) == {"speed", "price"}
    assert found.measured_usd is not None
    whole, alone = found.chosen.needed_usd, found.chosen.alone_usd
    assert whole.p90 - whole.p10 > found.measured_usd.p90 - found.measured_usd.p10 > alone.p90 - alone.p10
    assert sum((line.amount for line in found.lines), Decimal(0)) == found.usd.p50


def test_on_demand_has_a_range_of_speed_and_none_of_price() -> None:
    found = price(definition(capacity="on-demand", max_usd="30", max_hours="20"), load_catalog())
    assert set(found.span_usd) == {"speed"}
    assert found.usd.p10 < found.usd.p50 < found.usd.p90
