"""The bill: lines worked by hand, exact sums, and what programs read."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from cost_definitions import definition, growth

from infra.catalog import load_catalog
from infra.cost import record
from infra.cost.bill import Bill
from infra.cost.estimate import price
from infra.definition import Disk, Job, Keep, Variant
from job.config import SftConfig

CATALOG = load_catalog()
DATASET = 22_183_150  # bytes: 11,091,575 tokens of 2 bytes


def bill(**changes: Any) -> Bill:
    dataset_bytes = changes.pop("dataset_bytes", DATASET)
    return price(definition(**changes), CATALOG, dataset_bytes=dataset_bytes, runs=2000)


def amounts(found: Bill) -> dict[str, Decimal]:
    return {line.name: line.amount for line in found.lines}


def test_compute_root_disk_and_storage_are_what_the_working_by_hand_gives() -> None:
    # g5.2xlarge, 1000 steps per phase at batch 16 (4096 tokens), half the roofline:
    #   set-up                                                                      480.00 s
    #   steps: 2 x (1000 x (40.287 + 66.587 + 295.225) ms)                          804.20 s
    #   evaluations: 60 x 32 windows = 2 batches each, a third of a step per token,
    #     20 x 2/3 x (80.573 + 133.175 + 590.450) ms, and 3 x 3 x 40 tokens x 20 ms  17.92 s
    #   stalls: 65.74 saves x 0.1 s, and each phase's saves x size / 4 GB/s:
    #     (21.280 x 1.2005 + 21.458 x 4.4597 + 23.002 x 12.9347) GB / 4 GB/s        111.27 s
    #   growth: 2 x 40 s compile, 5 passes over 4 x (0.37164 + 2.15579) GB          130.55 s
    #   last save, hash and upload, weights alone: 3 x 4.3116 = 12.9347 GB
    #     x (1 / 1.0 + 1 / 1.4 + 1 / 0.625 s/GB)                                     42.87 s
    #   together 1586.81 s = 0.440779 h
    found = bill()
    compute, root = found.lines[0], found.lines[1]
    storage = next(line for line in found.lines if line.name == "S3 storage")
    # 0.440779 h x 0.3739 USD/h, the dearest of three zones (0.3596, 0.3617, 0.3739)
    assert (compute.quantity, compute.unit_price) == (Decimal("0.440779"), Decimal("0.3739"))
    assert compute.amount == Decimal("0.1648")
    # 100 GiB x 0.440779 h / 730 h = 0.060381 GiB-months x 0.08
    assert (root.quantity, root.amount) == (Decimal("0.060381"), Decimal("0.0048"))
    # 2 checkpoints x 12.934741 + the last one 4.311580 + exports 0.400152 + 2 x 1.486561 + 8.623161 + 4.311580
    #   + final 4.311580 + dataset 0.022183 + reports 0.02 = 50.843 GB; x 7 days x 24 / 730 = 11.7008 GB-months x 0.023
    assert float(storage.quantity) == pytest.approx(11.7008, abs=0.0002)
    assert storage.amount == Decimal("0.2691")


def test_transfer_address_and_logs_are_what_the_working_by_hand_gives() -> None:
    found = amounts(bill())
    assert found["public IPv4"] == Decimal("0.0022")  # 0.440779 h x 0.005
    assert found["transfer of results"] == Decimal("0.3898")  # (4.311580 + 0.02) GB x 0.09
    assert found["logs"] == Decimal("0.0025")  # (0.005 + 300 lines x 250 B) GB x 0.50


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"capacity": "on-demand"},
        {"hazard_per_hour": "5"},
        {"types": ("g5.2xlarge", "g6e.2xlarge"), "region": "us-east-1"},
        {"root": Disk(size_gib=200, iops=6000, throughput_mibps=500), "data": Disk(size_gib=50)},
        {"max_usd": "0.10"},
    ],
)
def test_the_lines_sum_to_p50_exactly(changes: dict[str, Any]) -> None:
    found = bill(**changes)
    assert sum(line.amount for line in found.lines) == found.usd.p50
    assert all(line.amount.as_tuple().exponent == -4 for line in found.lines)


def test_each_amount_is_its_quantity_times_its_unit_price() -> None:
    for line in bill(root=Disk(size_gib=200, iops=6000, throughput_mibps=500)).lines:
        assert line.amount == (line.quantity * line.unit_price).quantize(Decimal("0.0001"))


def test_quantiles_come_in_order_and_respect_the_cap() -> None:
    found = bill(hazard_per_hour="2", keep=Keep(bucket=False), max_usd="0.9")
    assert found.usd.p10 <= found.usd.p50 <= found.usd.p90 <= Decimal("0.9")


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


def test_a_data_disk_adds_its_own_lines_and_changes_no_other() -> None:
    without, with_ = amounts(bill()), amounts(bill(data=Disk(size_gib=500)))
    assert set(with_) - set(without) == {"data disk"}
    assert {k: v for k, v in with_.items() if k in without and k != "interruptions"} == {
        k: v for k, v in without.items() if k != "interruptions"
    }


def test_a_dataset_that_lies_in_s3_is_not_stored_again() -> None:
    own, other = bill(dataset_bytes=10**9), bill(dataset="s3://corpus/tinystories", dataset_bytes=10**9)
    # 1 GB x 7 x 24 / 730 x 0.023
    assert amounts(own)["S3 storage"] - amounts(other)["S3 storage"] == pytest.approx(Decimal("0.0053"))


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
    assert "exports" not in tuning.kept.what  # it makes none


def test_each_of_a_bills_figures_is_its_own() -> None:
    """Interrupted often, stopped by its limit, on a type with four GPUs beside one with one."""
    types = ("g6e.12xlarge", "g5.2xlarge")
    found = bill(types=types, config=growth(steps_per_phase=5000), hazard_per_hour="3", max_usd="3", max_hours="50")
    tree, chosen = record.to_json(found), found.chosen
    assert found.usd.p50 < chosen.total != chosen.needed_usd.p50 < chosen.metered_usd.p50
    assert tree["uninterrupted"]["usd"] == str(chosen.total)
    assert tree["needed"]["usd"]["p50"] == str(chosen.needed_usd.p50)
    assert tree["metered"]["usd"]["p50"] == str(chosen.metered_usd.p50)
    assert [Decimal(each["hours"]) * 3600 for each in tree["types"]] == [
        pytest.approx(Decimal(each.runtime.total_s), abs=1) for each in found.types if each.runtime
    ]
    assert {type_: rate["gpus"] for type_, rate in record.rates(found).items()} == {types[0]: 4, types[1]: 1}
    node = {"compute", "root disk", "public IPv4", "interruptions"}
    fixed = sum(line.amount for line in found.lines if line.name not in node)
    assert Decimal(record.extras(found)["fixed_usd"]) == fixed
    own = [each.needs_gb for each in found.fits if each.type == chosen.type]
    assert [phase["memory_gb"] for phase in record.predicted(found)] == [round(each, 2) for each in own]
    assert found.prices_as_of == min(line.as_of for line in found.lines)


def test_what_is_only_priced_is_stopped_by_no_limit() -> None:
    plan = replace(definition(max_usd="0.10"), variant=Variant(nodes=2))
    found = price(plan, CATALOG, runs=200)
    assert found.cap is None
    assert found.usd == found.chosen.needed_usd
    assert found.usd.p50 > Decimal("0.10")


def test_on_demand_capacity_has_no_interruptions_and_one_price() -> None:
    found = bill(capacity="on-demand")
    assert amounts(found)["interruptions"] == 0
    assert found.usd.p10 == found.usd.p50 == found.usd.p90 == found.usd.mean
    assert amounts(found)["compute"] == Decimal("0.5342")  # 0.440779 h x 1.212
    assert found.spot is not None
    assert found.spot.usd.mean < found.usd.mean


def test_on_demand_stands_beside_spot() -> None:
    found = bill()
    assert found.on_demand is not None
    assert found.on_demand.usd.p50 - found.chosen.total == pytest.approx(Decimal("0.3694"))  # compute alone differs


def test_a_short_run_can_end_below_its_uninterrupted_price() -> None:
    found = bill(hazard_per_hour="3")
    assert amounts(found)["interruptions"] < 0  # AWS does not charge an interrupted first hour


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


def test_json_has_its_documented_keys_and_decimal_strings() -> None:
    found = json.loads(json.dumps(record.to_json(bill())))
    assert {"name", "quantity", "unit", "unit_price", "amount", "source", "as_of"} <= set(found["lines"][0])
    for key in ("usd", "hours"):
        assert set(found[key]) == {"p10", "p50", "p90", "mean"}
        assert all(isinstance(value, str) and Decimal(value) >= 0 for value in found[key].values())
    assert sum(Decimal(line["amount"]) for line in found["lines"]) == Decimal(found["usd"]["p50"])


def test_outputs_are_dollars_per_line() -> None:
    found = record.outputs(bill())
    assert found["compute"] == "$0.1648"
    assert found["total"] == f"${bill().usd.p50:.4f}"


def test_the_meter_gets_rates_by_zone_name_at_the_dearest_zone_and_the_fixed_dollars() -> None:
    found = bill()
    spot = {"us-east-2a": "0.3739", "us-east-2b": "0.3739", "us-east-2c": "0.3739"}
    assert record.rates(found) == {"g5.2xlarge": {"on_demand": "1.212", "spot": spot, "gpus": 1}}
    per_node = Decimal("0.0048") + Decimal("0.0022") + Decimal("0.1648")
    assert Decimal(record.extras(found)["fixed_usd"]) == found.chosen.total - per_node
    assert record.extras(found)["disk_usd_per_hour"] == "0.010959"  # 100 GiB x 0.08 / 730


def test_halving_the_steps_changes_only_what_depends_on_time() -> None:
    long, short = amounts(bill()), amounts(bill(config=growth(steps_per_phase=500)))
    changed = {name for name in long if long[name] != short[name]}
    assert changed <= {"compute", "root disk", "public IPv4", "S3 write requests", "logs", "interruptions"}
    assert short["compute"] < long["compute"]


def test_a_run_without_interruptions_is_never_cheaper_with_more_steps() -> None:
    totals = [
        bill(config=growth(steps_per_phase=steps), max_usd="900", max_hours="900").chosen.total
        for steps in (1, 100, 10_000)
    ]
    assert totals == sorted(totals)
