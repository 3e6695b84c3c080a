"""Cases in which the bill must not fail: no work, no hazard, an absurd one, missing and odd prices, several nodes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import record
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.risk.closed_form import expected_hours
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind import JobConfig
from tests.infra.cost_definitions import definition, growth, on_nodes

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()


def definition_of(config: JobConfig, **changes: Any) -> StackDefinition:
    plan = definition(**{"types": ("p5.48xlarge",), "max_usd": "9000", "max_hours": "9000", **changes})
    return replace(plan, job=replace(plan.job, parameters=config))


def bill(plan: StackDefinition) -> Bill:
    return price(plan, CATALOG, runs=500)


LEAST = [
    growth(steps_per_phase=1),
    SftConfig(epochs=1, data=replace(SftConfig().data, examples=1), eval=replace(SftConfig().eval, prompts=0)),
    PretrainConfig(steps=1),
    KernelConfig(data=replace(KernelConfig().data, samples=1)),
    TwoTowerConfig(epochs=1, steps_per_epoch=1),
]


@pytest.mark.parametrize("config", LEAST, ids=lambda config: type(config).__name__)
def test_the_least_work_still_costs_its_set_up_and_what_it_keeps(config: JobConfig) -> None:
    found = bill(definition_of(config))
    assert found.hours.p50 > Decimal("0.25")  # 15 min of set-up on a P type
    assert Decimal(0) < found.usd.p50 < 30
    assert json.loads(json.dumps(record.to_json(found)))["usd"]["p50"] == str(found.usd.p50)
    assert "total = p50" in render(found)


@pytest.mark.parametrize("hazard", ["0", "1", "100", "1000000"])
def test_any_hazard_gives_finite_figures_in_order(hazard: str) -> None:
    found = bill(definition(hazard_per_hour=hazard))
    for values in (found.usd, found.hours, found.chosen.wall_hours, found.chosen.needed_usd, found.chosen.alone_usd):
        assert values.p10 <= values.p50 <= values.p90
        assert values.mean.is_finite()
    assert math.isfinite(found.chosen.interruptions.mean)
    assert "nan" not in render(found).lower()


def test_at_hazard_1_the_expected_interruptions_are_one_per_node_hour() -> None:
    found = price(definition(hazard_per_hour="1", max_usd="900", max_hours="900"), CATALOG)
    assert float(found.chosen.interruptions.mean) == pytest.approx(float(found.hours.mean), rel=0.05)


def test_a_hazard_at_which_no_node_lives_through_its_set_up_is_stopped_by_a_limit_and_refused() -> None:
    plan = definition(hazard_per_hour="1000000")
    found = bill(plan)
    assert found.cap is not None
    assert found.cap.probability == 1
    assert found.cadence is None
    assert [each.path for each in problems(plan, found)] == ["limits.max_usd", "limits.max_hours"]


def test_no_hazard_is_the_sum_of_the_lines_and_no_wait() -> None:
    found = bill(definition(hazard_per_hour="0"))
    assert found.usd.p10 == found.usd.mean == found.chosen.total
    assert found.chosen.wall_hours.mean == found.hours.mean
    assert expected_hours(found.chosen.exposure, 0.0) == pytest.approx(found.chosen.exposure.uninterrupted_h)


@pytest.mark.parametrize("type_", ["g5.2xlrage", "t3.micro", "", "G5.2XLARGE"])
def test_an_unknown_type_is_named(type_: str) -> None:
    with pytest.raises(GpufleetError, match=r"is not an instance type of the catalog"):
        bill(definition(types=(type_,)))


def test_no_type_at_all_is_an_error_and_not_a_bill_of_zero() -> None:
    with pytest.raises(GpufleetError, match=r"fleet\.instance_types is empty"):
        bill(definition(types=()))


@pytest.mark.parametrize("capacity", ["spot", "on-demand"])
def test_a_region_without_prices_is_named(capacity: str) -> None:
    with pytest.raises(DefinitionError, match="me-south-1"):
        bill(definition(region="me-south-1", capacity=capacity))


def test_spot_at_the_price_of_on_demand_is_said() -> None:
    plan = definition_of(PretrainConfig(), region="us-east-1")  # p5.48xlarge: 55.04 in two zones, 17.63 in the cheapest
    found = bill(plan)
    assert found.chosen.price.amount == Decimal("55.04")
    assert found.break_even_hazard == pytest.approx(0, abs=0.01)
    assert "on demand costs no more at any hazard" in " ".join(render(found).split())


def test_every_hours_figure_of_two_nodes_counts_node_hours_alike() -> None:
    tree = record.to_json(bill(on_nodes(definition(hazard_per_hour="0"), 2)))
    for hours in (tree["hours"], tree["needed"]["hours"], tree["spot"]["hours"], tree["on_demand"]["hours"]):
        assert float(hours["p50"]) == pytest.approx(float(tree["uninterrupted"]["hours"]), abs=2e-4)
