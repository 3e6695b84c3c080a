"""The bill of a run in stages: its parts, their sum, and the money that is reserved for later stages."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.runtime import WARM_S
from gpufleet.infra.bill.stages import StagedBill, price_stages
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence.speeds import Speeds, shipped
from tests.infra.shared_files import SHARED
from tests.infra.staged_files import STAGED, several_in
from tests.repository import ROOT

CATALOG = load_catalog()


def priced(stage: StackDefinition) -> Bill:
    return price(stage, CATALOG)


@pytest.fixture(scope="module")
def definition(tmp_path_factory: pytest.TempPathFactory) -> StackDefinition:
    file = tmp_path_factory.mktemp("staged") / "staged.yaml"
    file.write_text(STAGED)
    return load(file, now=datetime(2026, 11, 30, tzinfo=UTC), staged=True)


@pytest.fixture(scope="module")
def bill(definition: StackDefinition) -> StagedBill:
    found, wrong = price_stages(definition, priced, date(2026, 11, 30))
    assert not wrong
    assert found is not None
    return found


def test_each_stage_has_its_own_bill_and_the_whole_is_their_sum(bill: StagedBill) -> None:
    assert [each.chosen.type for each in bill.bills] == ["c7i.xlarge", "g5.2xlarge", "c7i.xlarge"]
    assert bill.usd.mean == pytest.approx(sum(each.usd.mean for each in bill.bills), rel=Decimal("0.03"))
    spread = sum(each.usd.p90 - each.usd.p10 for each in bill.bills)
    assert bill.usd.p90 - bill.usd.p10 < spread  # each stage has its own luck
    text = "\n".join(bill.lines())
    assert all(f"\n{name} " in text for name in ("prepare", "train", "judge"))
    assert [each["stage"] for each in bill.to_json()["stages"]] == ["prepare", "train", "judge"]


def test_a_stage_leaves_what_later_ones_need(bill: StagedBill) -> None:
    need = [each.chosen.metered_usd.p50 + each.chosen.reserve[0] for each in bill.bills]
    caps = [stage.limits.max_usd for stage in bill.launched]
    assert caps[2] == bill.whole.limits.max_usd
    assert caps[2] - caps[1] >= need[2]
    assert caps[1] - caps[0] >= need[1]
    hours = [stage.limits.max_hours for stage in bill.launched]
    assert hours[0] < hours[1] < hours[2] == bill.whole.limits.max_hours


def test_the_hours_of_all_nodes_of_a_stage_are_left_to_it(tmp_path: Path) -> None:
    file, now = tmp_path / "staged.yaml", datetime(2026, 12, 1, tzinfo=UTC)
    file.write_text(several_in("judge", nodes=4))
    definition = load(file, now=now, staged=True)
    found, _ = price_stages(definition, priced, now.date())
    assert found is not None
    judge, least = found.bills[2].chosen, found.whole.limits.max_hours - found.launched[1].limits.max_hours
    assert least >= 4 * (judge.needed_hours.p50 + judge.reserve[1])


def test_a_run_whose_first_stage_has_several_nodes_may_last_as_long_as_its_later_ones(tmp_path: Path) -> None:
    file, now = tmp_path / "staged.yaml", datetime(2026, 12, 1, tzinfo=UTC)
    file.write_text(STAGED)
    alone = load(file, now=now, staged=True).expiry(now)
    file.write_text(several_in("prepare"))
    assert load(file, now=now, staged=True).expiry(now) == alone


def test_limits_that_do_not_pay_for_all_stages_are_refused(definition: StackDefinition) -> None:
    poor = replace(definition, limits=replace(definition.limits, max_usd=Decimal("0.15")))
    found, (problem,) = price_stages(poor, priced, date(2026, 11, 30))
    assert found is None
    assert problem.path == "limits.max_usd"
    assert "prepare 0." in problem.allowed


def test_kernel_sft_in_stages_costs_less_than_in_one_by_what_its_judging_wastes() -> None:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    whole = price(load(ROOT / "stacks" / "kernel-sft.yaml", now=now), CATALOG)
    parts = load(ROOT / "stacks" / "kernel-sft-stages.yaml", now=now, staged=True)
    found, wrong = price_stages(parts, priced, now.date())
    assert found is not None, wrong
    train, judge = found.bills
    *others, verify = whole.chosen.runtime.phases
    assert [phase.name for phase in train.chosen.runtime.phases] == [phase.name for phase in others]
    assert [phase.name for phase in judge.chosen.runtime.phases] == ["verify"]
    usd_on_eight = Decimal(verify.seconds / 3600) * whole.chosen.price.amount
    assert judge.usd.p50 < usd_on_eight / 2
    assert found.usd.p50 < whole.usd.p50 - usd_on_eight / 3
    assert {line.name for line in judge.lines if line.amount > Decimal("0.05")} == {"compute"}  # no weights, no dataset
    assert not any(phase.saves for phase in judge.chosen.runtime.phases)


def test_stages_on_one_node_have_one_boot_and_a_limit_each(tmp_path: Path) -> None:
    file = tmp_path / "staged.yaml"
    file.write_text(SHARED)
    definition = load(file, now=datetime(2026, 11, 30, tzinfo=UTC), staged=True)
    found, _ = price_stages(definition, priced, date(2026, 11, 30))
    assert found is not None
    first, *later = (each.chosen.exposure for each in found.bills)
    assert first.setup_h == pytest.approx(8 / 60)
    assert [each.setup_h for each in later] == [WARM_S / 3600] * 2
    assert {each.restart_h for each in later} == {first.restart_h}  # a node in place of a lost one boots
    assert [stage.limits.max_usd for stage in found.launched] == [2, 2, 2]
    assert "The stages share one node, whose boot is in the first one's bill." in " ".join(
        "\n".join(found.lines()).split()
    )
    assert "Each later one begins within 60 s (assumed)" in " ".join("\n".join(found.lines()).split())
    measured = Speeds(shipped().figures, {"g": 400.0})
    own = [price(stage, CATALOG, speeds=measured, runs=100).chosen.runtime for stage in definition.stages[:2]]
    assert [(each.setup_s, each.setup_seen) for each in own] == [(400.0, True), (WARM_S, False)]
    poor = replace(definition, limits=replace(definition.limits, max_usd=Decimal("0.02")))
    missing, (wrong,) = price_stages(poor, priced, date(2026, 11, 30))
    assert missing is None
    assert "nine in ten of t1 need" in str(wrong)
