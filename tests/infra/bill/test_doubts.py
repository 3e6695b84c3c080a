"""Odd definitions: each gets a clear answer or a clear error, and bills state their doubts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import doubts, fit, record
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.limits import enough
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition import type_checks
from gpufleet.infra.definition.model import Disk, Keep
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.evidence.speeds import Expected, Speeds
from gpufleet.infra.risk.unknown import P90
from gpufleet.job.experiments.sft.spec import SftConfig, SftPrecision
from tests.infra.cost_definitions import definition, growth, on_nodes

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
DATASET = 22_183_150  # bytes: 11,091,575 tokens of 2 bytes

WAYS_OUT = "Take it out, write fleet.capacity: on-demand, or ask AWS: `gpufleet prices refresh --region us-east-2`."


def bill(**changes: Any) -> Bill:
    dataset_bytes = changes.pop("dataset_bytes", DATASET)
    return price(definition(**changes), CATALOG, dataset_bytes=dataset_bytes, runs=2000)


def amounts(found: Bill) -> dict[str, Decimal]:
    return {line.name: line.amount for line in found.lines}


def test_spot_without_a_spot_price_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(DefinitionError, match=rf"p5\.4xlarge has no spot price in us-east-2.*{re.escape(WAYS_OUT)}"):
        bill(types=("p5.4xlarge",))


def test_on_demand_without_a_spot_price_is_priced_and_says_that_spot_is_unknown() -> None:
    found = bill(types=("p5.4xlarge",), capacity="on-demand", max_usd="20")
    assert found.spot is None
    assert found.break_even_hazard is None
    assert record.to_json(found)["spot"] is None


def test_a_type_without_on_demand_price_is_priced_on_spot_alone() -> None:
    found = bill(types=("p5e.48xlarge",), max_usd="100")
    assert found.on_demand is None
    assert (
        record.rates(found)["p5e.48xlarge"]["on_demand"] == "62.9957"
    )  # without an answer the meter uses the price of the dearest zone


def test_one_listed_type_without_a_price_is_a_problem_of_that_type() -> None:
    plan = definition(types=("g5.2xlarge", "p5.4xlarge"))
    found = problems(plan, price(plan, CATALOG, runs=100))
    assert [(problem.path, problem.value) for problem in found] == [("fleet.instance_types[1]", "p5.4xlarge")]
    assert found[0].hint.endswith(WAYS_OUT)
    with pytest.raises(DefinitionError) as alone:
        bill(types=("p5.4xlarge",))
    assert [(each.allowed, each.hint) for each in alone.value.problems] == [(found[0].allowed, found[0].hint)]


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(GpufleetError, match=r"g5\.2xlrage is not .* nearest: g5\.2xlarge"):
        bill(types=("g5.2xlrage",))


@pytest.mark.parametrize(
    ("type_", "changes", "why", "nearest"),
    [
        ("g5.2xlarge", {"state": "fp32"}, "grown.*even at the smallest", "phase3_state: bf16"),
        ("g6f.xlarge", {}, "even at the smallest micro-batch", r"g6\.xlarge"),
        ("g4dn.xlarge", {}, "T4 has no bf16", r"g6\.xlarge"),
    ],
)
def test_a_type_that_does_not_hold_the_job_says_why_and_the_nearest_change(
    type_: str, changes: dict[str, Any], why: str, nearest: str
) -> None:
    # The fleet could pick any of these types, so the error names every type that is too small.
    types = (type_, "g6e.2xlarge", type_)
    plan = definition(types=types, config=growth(**changes), step_ms=("80", "130", "600"), max_usd="50")
    found = problems(plan, price(plan, CATALOG, runs=100))
    assert [problem.path for problem in found] == ["fleet.instance_types[0]", "fleet.instance_types[2]"]
    for problem in found:
        assert re.search(why, problem.allowed)
        assert re.search(nearest, problem.hint)


def test_a_dearer_type_that_does_not_hold_the_job_is_not_what_the_bill_stands_on() -> None:
    types, timed = ("g4dn.12xlarge", "g5.2xlarge"), ("80", "130", "600")
    found = bill(types=types, capacity="on-demand", step_ms=timed, max_usd="50")
    dear, cheap = (option.on_demand for option in found.types)
    assert dear is not None
    assert cheap is not None
    assert dear.amount > 3 * cheap.amount
    assert found.chosen.type == "g5.2xlarge"


def test_a_gpu_without_bf16_is_not_advised_to_hold_its_state_in_it() -> None:
    found = fit.fits(growth(state="fp32"), CATALOG.instances["p3dn.24xlarge"], CATALOG, "us-east-2")
    assert {each.why for each in found} == {"V100 32GB has no bf16"}
    assert {each.nearest.split()[0] for each in found} == {"g6e.xlarge"}


def test_gpus_that_cannot_multiply_fp8_hold_no_base_in_it() -> None:
    config = SftConfig(precision=SftPrecision(base="fp8"))
    types = ("p4d.24xlarge", "p4de.24xlarge", "g6e.2xlarge", "p5.4xlarge")
    whys = {
        name: {each.why for each in fit.fits(config, CATALOG.instances[name], CATALOG, "us-east-2")} for name in types
    }
    assert whys["p4d.24xlarge"] == {"A100 40GB has compute capability 8.0, but the job needs 8.9"}
    assert whys["p4de.24xlarge"] == {"A100 80GB has compute capability 8.0, but the job needs 8.9"}
    assert whys["g6e.2xlarge"] == whys["p5.4xlarge"] == {""}
    assert not fit._holds(config, CATALOG.instances["p4de.24xlarge"])
    assert type_checks._misfit(CATALOG.instances["p4de.24xlarge"], config) in whys["p4de.24xlarge"]
    assert not type_checks._misfit(CATALOG.instances["p4de.24xlarge"], SftConfig())


def test_when_no_type_holds_the_job_or_has_a_speed_the_error_is_the_fit() -> None:
    with pytest.raises(DefinitionError, match="T4 has no bf16"):
        bill(types=("g4dn.xlarge",))


def test_host_memory_must_hold_a_staged_checkpoint() -> None:
    config, card = growth(state="fp32"), CATALOG.instances["g6e.xlarge"]  # 48 GB on the GPU are enough
    for memory_gib, why in (
        (27, "a checkpoint of 25.9 GB is staged in host memory, of which 25.0 GB are free"),
        (28, ""),
    ):
        dense, moe, grown = fit.fits(config, replace(card, memory_gib=memory_gib), CATALOG, "us-east-2")
        assert dense.fits
        assert moe.fits
        assert grown.why == why
        assert fit._holds(config, replace(card, memory_gib=memory_gib)) is not bool(why)


def test_a_cap_below_p50_is_a_problem_that_states_p50_and_p90() -> None:
    plan = definition(max_usd="0.80")
    found = price(plan, CATALOG, runs=2000)
    (problem,) = problems(plan, found)
    assert (problem.path, problem.value) == ("limits.max_usd", "0.80")
    stop, _ = found.chosen.reserve
    assert f"{enough(found.chosen.metered_usd.p50 + stop)}" in problem.allowed
    assert f"{enough(found.chosen.metered_usd.p90 + stop)}" in problem.hint


def test_a_cap_between_p50_and_p90_is_a_warning_with_the_probability() -> None:
    changes: dict[str, Any] = {
        "hazard_per_hour": "1",
        "keep": Keep(bucket=False),
        "step_ms": ("500", "1000", "4000"),
        "max_hours": "9",
    }
    free = bill(**changes, max_usd="50").chosen.metered_usd
    cap = str(((free.p50 + free.p90) / 2).quantize(Decimal("0.01")))
    found = bill(**changes, max_usd=cap)
    assert problems(definition(**changes, max_usd=cap), found) == []
    assert found.cap is not None
    assert 0.1 < found.cap.probability < 0.5
    assert any("between p50" in w and f"{found.cap.probability:.0%} of runs stop" in w for w in found.warnings)


def test_the_cap_is_judged_as_the_meter_counts_which_credits_no_free_hour() -> None:
    found = bill(hazard_per_hour="3", max_usd="50", max_hours="50").chosen
    assert found.metered_usd.mean > found.needed_usd.mean
    calm = bill(hazard_per_hour="0").chosen
    assert calm.metered_usd == calm.needed_usd


def test_few_runs_that_stop_are_said_and_a_limit_above_p90_lies_between_nothing() -> None:
    found = bill()
    assert found.cap is not None
    above = replace(found.cap, probability=0.05, max_usd=found.chosen.metered_usd.p90)
    assert next(doubts._limits(replace(found, cap=above))) == f"5% of runs stop at {above.first} before they are done"
    assert not list(doubts._limits(replace(found, calibrated=True, cap=replace(above, probability=0.0))))
    slow = bill(capacity="on-demand", max_hours="0.65")
    assert any("below about 64% of the assumed speed" in warning for warning in slow.warnings)
    assert not list(doubts._limits(replace(slow, calibrated=True)))


def test_a_scratch_disk_holds_four_checkpoints_and_a_fifth_part_and_what_is_exported() -> None:
    config = growth()
    sizes = [config.sizes().checkpoints[index] for index in range(3)]
    kept = sum(config.sizes().exports.values()) + sum(config.sizes().final.values())
    assert fit.scratch_gb(config) == pytest.approx((4.2 * max(sizes) + kept) / 1e9)
    root_gib = int(fit.scratch_gb(config) / 1.073741824) + 30
    for size_gib, said in ((root_gib, True), (root_gib + 1, False)):
        plan = definition(root=Disk(size_gib=size_gib))
        (option,) = bill(root=Disk(size_gib=size_gib)).types
        assert option.instance is not None
        bare = replace(option, instance=replace(option.instance, nvme_gb=0))
        found = list(doubts._types(plan, replace(bill(), types=(bare,))))
        assert any("GB of scratch" in warning for warning in found) is said


def test_step_times_for_one_type_and_a_dataset_in_s3_are_no_doubts() -> None:
    times = {"step_ms": ("100", "200", "400")}
    assert not any("used for every listed type" in warning for warning in bill(**times).warnings)
    both = bill(types=("g6e.xlarge", "g5.xlarge"), region="us-west-2", **times)
    assert any("used for every listed type" in warning for warning in both.warnings)
    for dataset, said in (("data/tinystories", True), ("s3://bucket/tinystories", False)):
        found = price(definition(dataset=dataset), CATALOG, runs=50)
        assert any("size of the dataset is assumed" in warning for warning in found.warnings) is said


def test_a_limit_far_above_the_run_raises_no_problem() -> None:
    assert problems(definition(), bill()) == []


def test_save_and_upload_that_miss_the_notice_are_said_before_the_run() -> None:
    found = bill(upload_gb_per_s="0.05")  # 12.9 GB at 50 MB/s: 259 s
    late = [notice for notice in found.notice if not notice.fits]
    assert [notice.phase for notice in late] == ["grown"]
    assert any("phase grown: save and upload take" in warning for warning in found.warnings)
    sure = bill(upload_gb_per_s="0.05", capacity="on-demand")  # AWS does not interrupt a node on demand
    assert not any("a notice gives" in warning for warning in sure.warnings)


def test_an_uncalibrated_bill_says_so_and_how_far_it_may_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Speeds, "expect", lambda *_: Expected(share=0.5, sigma=math.log(2) / P90, shared=0.0, whose="so it is")
    )
    found = bill()
    assert not found.calibrated
    said = "in eight runs of ten the work takes 50% to 200% of those hours"
    assert f"uncalibrated: 50% of the roofline, so it is; {said}" in found.warnings


def test_inferred_prices_are_marked() -> None:
    def inferred(region: str) -> dict[str, bool]:
        return {line.item: line.inferred for line in bill(region=region).lines if line.item}

    assert inferred("us-east-2") == {
        item: CATALOG.price(item, "us-east-2").status == "inferred" for item in inferred("us-east-2")
    }
    assert (inferred("us-east-2")["s3_storage"], inferred("us-east-1")["s3_storage"]) == (True, False)


def test_zones_that_differ_and_a_spot_price_at_on_demand_are_shown() -> None:
    found = bill(types=("p5.48xlarge",), region="us-east-1", max_usd="100").warnings
    assert any("spot zones differ, 17.6289 (az6) to 55.04" in warning for warning in found)
    assert any("costs as much as on demand" in warning for warning in found)
    assert any("8 GPUs, this job uses one" in warning for warning in found)


@pytest.mark.parametrize(
    ("rows", "nodes", "said"),
    [
        (12, 1, ["p4d.24xlarge: a step of 12 rows takes 8 GPUs as long as one of 16"]),
        (16, 1, []),
        (16, 4, ["4 nodes of p4d.24xlarge have 32 GPUs, this job uses 16"]),
    ],
)
def test_gpus_that_a_steps_rows_leave_without_work_are_said(rows: int, nodes: int, said: list[str]) -> None:
    config = SftConfig()
    config = replace(config, batch=replace(config.batch, tokens=rows * config.data.row))
    plan = definition(types=("p4d.24xlarge",))
    plan = on_nodes(replace(plan, job=replace(plan.job, parameters=config)), nodes)
    assert [warning for warning in price(plan, CATALOG, runs=10).warnings if "GPUs" in warning] == said


@pytest.mark.parametrize(("capacity", "times"), [("spot", 1), ("on-demand", 0)])
def test_how_often_several_nodes_are_interrupted_is_said_to_be_assumed(capacity: str, times: int) -> None:
    plan = on_nodes(definition(max_usd="30", max_hours="20", capacity=capacity), 2)
    sentence = "that 2 nodes are interrupted 1.3 times as often as one is an assumption"  # 2 ** 0.35
    assert price(plan, CATALOG, runs=10).warnings.count(sentence) == times


def test_what_the_caller_found_not_ready_is_among_the_warnings() -> None:
    assert (
        "fleet.ami is unpinned" in price(definition(), CATALOG, not_ready=["fleet.ami is unpinned"], runs=100).warnings
    )


def test_the_rehearsal_on_a_laptop_is_priced_from_its_step_times() -> None:
    config = replace(growth(device="cpu", compute="fp32", state="fp32"), steps_per_phase=30)
    found = bill(config=config, step_ms=("30", "60", "250"), setup_minutes="0.1", restart_minutes="0.1")
    assert found.chosen.runtime.setup_s == 6
    assert all(fit.fits for fit in found.fits)


def test_a_bill_that_is_mostly_a_kept_bucket_says_so() -> None:
    def said(**changes: Any) -> list[str]:
        return [warning for warning in bill(**changes).warnings if "keeping the bucket" in warning]

    kept = bill(keep=Keep(days=30), hazard_per_hour="0")
    storage = amounts(kept)["S3 storage"]
    assert storage == pytest.approx(Decimal("1.1533"), abs=Decimal("0.0003"))  # 50.84 GB x 30 x 24 / 730 x 0.023
    (warning,) = said(keep=Keep(days=30), hazard_per_hour="0")
    share = f"{storage / kept.usd.p50:.0%}"
    assert warning.startswith(f"{share} of p50 is keeping the bucket for storage.keep.days: 30; delete what you do not")
    assert not said(keep=Keep(days=7))
    assert not said(keep=Keep(bucket=False), dataset_bytes=10**13)  # a day of storage costs more than the run


def test_a_run_shorter_than_a_minute_is_billed_for_one_and_adds_nothing_for_interruptions() -> None:
    short = replace(growth(device="cpu", compute="fp32", state="fp32"), steps_per_phase=30)
    tiny = replace(short, model=replace(short.model, vocab=512, layers=3, width=64, heads=4, ffn=256, new_layers=2))
    found = bill(config=tiny, step_ms=("30", "60", "250"), setup_minutes="0.1", hazard_per_hour="0")
    assert found.lines[0].quantity == Decimal("0.016667")
    assert amounts(found)["interruptions"] == 0
