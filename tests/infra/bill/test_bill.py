"""Single lines of the bill, and its form for programs. Whole bills, worked by hand, are in test_bill_golden.py."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill import record
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Disk, Job, Keep, Variant
from gpufleet.job.experiments.sft.spec import SftConfig
from tests.infra.cost_definitions import definition, growth, on_nodes

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
DATASET = 22_183_150  # bytes: 11,091,575 tokens of 2 bytes


def bill(**changes: Any) -> Bill:
    dataset_bytes = changes.pop("dataset_bytes", DATASET)
    return price(definition(**changes), CATALOG, dataset_bytes=dataset_bytes, runs=2000)


FIXED = ("S3 storage", "S3 write requests", "S3 read requests", "transfer of results", "logs")


def amounts(found: Bill) -> dict[str, Decimal]:
    return {line.name: line.amount for line in found.lines}


def test_the_lines_sum_to_p50_exactly_where_a_limit_stops_the_run() -> None:
    found = bill(max_usd="0.10")
    assert sum(line.amount for line in found.lines) == found.usd.p50
    assert all(line.amount.as_tuple().exponent == -4 for line in found.lines)


@pytest.mark.parametrize(
    ("disk", "lines"),
    [
        (Disk(size_gib=100), {"root disk": "0.0048"}),
        # 3000 IOPS above the included 3000: 3000 x 0.440779 / 730 x 0.005; 375 MiB/s above 125: x 0.04
        (
            Disk(size_gib=100, iops=6000, throughput_mibps=500),
            {"root disk": "0.0048", "root disk IOPS above 3000": "0.0091", "root disk MiB/s above 125": "0.0091"},
        ),
    ],
)
def test_a_disk_pays_for_iops_and_throughput_only_above_what_is_included(disk: Disk, lines: dict[str, str]) -> None:
    found = {name: amount for name, amount in amounts(bill(root=disk)).items() if name.startswith("root")}
    assert found == {name: Decimal(amount) for name, amount in lines.items()}


def test_a_dataset_that_lies_in_s3_is_not_stored_again() -> None:
    own, other = bill(dataset_bytes=10**9), bill(dataset="s3://corpus/tinystories", dataset_bytes=10**9)
    # 1 GB x 7 x 24 / 730 x 0.023
    assert amounts(own)["S3 storage"] - amounts(other)["S3 storage"] == pytest.approx(Decimal("0.0053"))


def test_base_weights_that_lie_in_s3_are_not_stored_again() -> None:
    plan = replace(definition(), job=Job(experiment="sft-h100", image="i:t", parameters=SftConfig()))
    own, other = (
        price(replace(plan, storage=replace(plan.storage, base_weights=place)), CATALOG, runs=50)
        for place in ("data/llama", "s3://corpus/llama")
    )
    # 8,030,261,248 parameters of 2 bytes x 7 x 24 / 730 x 0.023
    assert amounts(own)["S3 storage"] - amounts(other)["S3 storage"] == pytest.approx(Decimal("0.0850"))


def test_a_bucket_that_goes_with_the_stack_costs_one_day_and_keeps_nothing() -> None:
    found = bill(keep=Keep(bucket=False))
    assert amounts(found)["S3 storage"] == Decimal("0.0384")  # 50.843 GB x 24 / 730 x 0.023
    assert found.kept.usd_per_month == 0
    assert found.kept.what.startswith("nothing")


def test_what_is_kept_is_what_the_run_wrote_and_not_the_inputs_that_a_destroy_deletes() -> None:
    kept = bill().kept
    assert kept.usd_per_month == Decimal("1.1689")  # 50.8207 GB x 0.023
    assert {name for name, _ in kept.parts} == {"checkpoints", "exports", "final weights", "reports and logs"}
    assert sum(gb for _, gb in kept.parts) == kept.gb
    plan = replace(definition(), job=Job(experiment="sft-h100", image="i:t", parameters=SftConfig()))
    tuning = price(plan, CATALOG, runs=50)
    assert "exports" not in tuning.kept.what  # this job makes no checkpoint


def test_each_of_a_bills_figures_is_its_own() -> None:
    """The run is interrupted often and stopped by its limit, and a type with four GPUs stands beside one with one."""
    types = ("g6e.12xlarge", "g5.2xlarge")
    config = growth(steps_per_phase=5000, sequences=32)
    found = bill(types=types, config=config, hazard_per_hour="3", max_usd="3", max_hours="50")
    tree, chosen = record.to_json(found), found.chosen
    assert found.usd.p50 < chosen.total != chosen.needed_usd.p50 < chosen.metered_usd.p50
    assert tree["uninterrupted"]["usd"] == str(chosen.total)
    assert tree["needed"]["usd"]["p50"] == str(chosen.needed_usd.p50)
    assert tree["metered"]["usd"]["p50"] == str(chosen.metered_usd.p50)
    assert [Decimal(each["hours"]) * 3600 for each in tree["types"]] == [
        pytest.approx(Decimal(each.runtime.total_s), abs=1) for each in found.types if each.runtime
    ]
    assert {type_: rate["gpus"] for type_, rate in record.rates(found).items()} == {types[0]: 4, types[1]: 1}
    fixed = sum(amounts(found)[name] for name in FIXED)
    assert Decimal(record.extras(found)["fixed_usd"]) == fixed
    own, other = ([each.needs_gb for each in found.fits if each.type == type_] for type_ in types)
    assert (chosen.type, own == other) == (types[0], False)
    assert [phase["memory_gb"] for phase in record.predicted(found)] == [round(each, 2) for each in own]
    assert found.prices_as_of == min(line.as_of for line in found.lines)


def test_what_is_only_priced_is_stopped_by_no_limit() -> None:
    plan = on_nodes(replace(definition(max_usd="0.10"), variant=Variant(buffer=Decimal("0.1"))), 2)
    found = price(plan, CATALOG, runs=200)
    assert found.cap is None
    assert found.usd == found.chosen.needed_usd
    assert found.usd.p50 > Decimal("0.10")
    assert record.to_json(found)["needed"]["hours"]["p50"] == str(2 * found.chosen.needed_hours.p50)
    long = definition(capacity="on-demand", config=growth(steps_per_phase=10**7))
    assert price(replace(long, variant=Variant(buffer=Decimal("0.1"))), CATALOG).usd.p50 > 1000


def test_on_demand_stands_beside_spot() -> None:
    found = bill()
    assert found.on_demand is not None
    assert found.on_demand.usd.p50 - found.chosen.total == pytest.approx(
        Decimal("0.3694")
    )  # only the compute line differs


def test_a_short_run_can_end_below_its_uninterrupted_price() -> None:
    found = bill(
        types=("g5.12xlarge",), max_usd="30", hazard_per_hour="3"
    )  # nearly all of this hour's price is compute
    assert amounts(found)["interruptions"] < 0  # AWS does not charge the compute of an interrupted first hour


def test_a_slow_type_with_large_disks_is_dearer_than_a_fast_one_at_a_higher_price() -> None:
    types = ("g5.2xlarge", "g6e.2xlarge")
    assert bill(types=types).chosen.type == "g6e.2xlarge"
    data = Disk(size_gib=8000)  # 0.88 USD/h
    found = bill(types=types, data=data, max_usd="9").chosen
    assert found.type == "g5.2xlarge"
    assert found.total > bill(types=types[1:], data=data, max_usd="9").chosen.total


def test_two_types_are_both_shown_and_the_dearest_run_is_priced() -> None:
    found = bill(types=("g6e.2xlarge", "g5.2xlarge"))
    costs = {o.type: o.runtime.total_s * float(o.spot[-1].price.amount) for o in found.types if o.runtime}
    assert set(costs) == {"g5.2xlarge", "g6e.2xlarge"}
    assert found.chosen.type == max(costs, key=costs.__getitem__)
    own = next(option for option in found.types if option.type == found.chosen.type)
    assert (found.chosen.price, found.chosen.zone) == (own.spot[-1].price, own.spot[-1].zone)


def test_the_notice_counts_poll_step_save_hash_and_upload() -> None:
    grown = bill().notice[2]
    # 5 s poll + 0.590 s step + 12.935 GB x (1/1.0 + 1/1.4 + 1/0.625) s/GB
    assert grown.total_s == pytest.approx(5 + 0.590 + 12.934741 * (1 + 1 / 1.4 + 1.6), abs=0.01)


def test_the_same_definition_gives_the_same_bytes() -> None:
    first, second = (json.dumps(record.to_json(bill()), sort_keys=True) for _ in range(2))
    assert first == second


def test_outputs_are_dollars_per_line() -> None:
    found = record.outputs(bill())
    assert found["compute"] == "$0.1648"
    assert found["total"] == f"${bill().usd.p50:.4f}"


def test_the_meter_gets_rates_by_zone_name_at_the_dearest_zone_and_the_fixed_dollars() -> None:
    found = bill()
    spot = {"us-east-2a": "0.3739", "us-east-2b": "0.3739", "us-east-2c": "0.3739"}
    assert record.rates(found) == {"g5.2xlarge": {"on_demand": "1.212", "spot": spot, "gpus": 1}}
    assert Decimal(record.extras(found)["fixed_usd"]) == sum(amounts(found)[name] for name in FIXED)
    assert record.extras(found)["hourly_usd"]["root disk"] == "0.010959"  # 100 GiB x 0.08 / 730
    fast = bill(root=Disk(size_gib=100, iops=6000, throughput_mibps=500))
    assert record.extras(fast)["hourly_usd"] == record.extras(found)["hourly_usd"] | {
        "root disk": "0.010959",
        "root disk IOPS above 3000": "0.020548",  # 3000 x 0.005
        "root disk MiB/s above 125": "0.020548",  # 375 x 0.04
        "public IPv4": "0.005000",
    }


def test_halving_the_steps_changes_only_what_depends_on_time() -> None:
    long, short = amounts(bill()), amounts(bill(config=growth(steps_per_phase=500)))
    changed = {name for name in long if long[name] != short[name]}
    assert not changed & {"S3 storage", "S3 read requests", "transfer of results"}
    assert short["compute"] < long["compute"]
