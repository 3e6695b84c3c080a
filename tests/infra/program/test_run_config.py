"""run.json is the file that the job reads; the same definition and bill give the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.boot.run_config import run_config
from gpufleet.job.contract.run import encode
from gpufleet.job.kind import from_json
from tests.repository import ROOT

INPUTS: dict[str, Any] = {
    "archive": {"sha256": "a" * 64, "bytes": 1000},
    "dataset": {"uri": None, "sha256": "d" * 64, "files": [{"name": "train.bin", "bytes": 5, "sha256": "e" * 64}]},
}
EXPIRES = "2026-11-22T14:00:00Z"
DATASET_BYTES = sum(file["bytes"] for file in INPUTS["dataset"]["files"])


@pytest.fixture(scope="module")
def definition() -> StackDefinition:
    return load(ROOT / "stacks/tinystories-growth.yaml", now=datetime(2026, 11, 21, tzinfo=UTC))


@pytest.fixture(scope="module")
def bill(definition: StackDefinition) -> Bill:
    return price(definition, load_catalog(), dataset_bytes=DATASET_BYTES, runs=200)


def written(definition: StackDefinition, bill: Bill) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(run_config(definition, bill, INPUTS, expires=EXPIRES)))
    return found


def test_the_job_reads_back_the_parameters_of_the_definition(definition: StackDefinition, bill: Bill) -> None:
    read = written(definition, bill)["job"]

    assert from_json(read["experiment"], read["parameters"]) == definition.job.parameters


def test_money_and_hours_are_decimal_strings(definition: StackDefinition, bill: Bill) -> None:
    read = written(definition, bill)

    assert read["limits"] == {"max_usd": "3.00", "max_hours": "2", "deadline": None, "expires": EXPIRES}
    rates = read["rates"]["g5.2xlarge"]
    assert Decimal(rates["on_demand"]) > Decimal(rates["spot"]["us-east-2a"]) > 0
    assert set(read["extras"]) == {"hourly_usd", "fixed_usd"}
    assert all(Decimal(usd) > 0 for usd in (read["extras"]["fixed_usd"], *read["extras"]["hourly_usd"].values()))


@pytest.mark.parametrize("deadline", [datetime(2026, 11, 22, 14, tzinfo=UTC), timedelta(hours=26)])
def test_the_job_s_deadline_is_when_the_fleet_expires(
    definition: StackDefinition, bill: Bill, deadline: datetime | timedelta
) -> None:
    late = replace(definition, limits=replace(definition.limits, deadline=deadline))

    assert written(late, bill)["limits"]["deadline"] == EXPIRES


def test_run_estimate_and_inputs_are_there(definition: StackDefinition, bill: Bill) -> None:
    read = written(definition, bill)

    assert read["run"] == {
        "id": "r1",
        "stack": "tinystories-growth",
        "experiment": "tinystories-growth",
        "owner": "you",
    }
    assert (read["schema"], read["region"], read["capacity"]) == (1, "us-east-2", "spot")
    assert read["estimate"]["usd"]["p50"] == str(bill.usd.p50)
    assert [phase["phase"] for phase in read["predicted"]] == ["dense", "moe", "grown"]
    assert [phase["params_active"] for phase in read["predicted"]] == [100_038_016, 138_878_272, 693_264_000]
    assert [phase["params_total"] for phase in read["predicted"]] == [100_038_016, 371_640_256, 2_155_790_208]
    assert [round(phase["flops_per_token"] / 1e9, 3) for phase in read["predicted"]] == [0.609, 0.842, 4.186]
    assert read["inputs"] == INPUTS


def test_several_nodes_are_told_how_many_they_are_and_how_fast_their_cards(
    definition: StackDefinition, bill: Bill
) -> None:
    assert "nodes" not in written(definition, bill)
    pair = load(ROOT / "stacks/sft-h100.yaml", now=datetime(2026, 11, 21, tzinfo=UTC))
    pair = replace(pair, fleet=replace(pair.fleet, nodes=2, zones=pair.fleet.zones[:1]))
    read = written(pair, price(pair, load_catalog(), dataset_bytes=DATASET_BYTES, runs=50))
    assert read["nodes"] == 2
    assert {name: (row.get("gbps"), row.get("efa")) for name, row in read["rates"].items()} == {
        "p5.4xlarge": (100.0, 1)
    }


def test_the_same_run_is_the_same_bytes(definition: StackDefinition, bill: Bill) -> None:
    again = price(definition, load_catalog(), dataset_bytes=DATASET_BYTES, runs=200)
    reordered = {"dataset": INPUTS["dataset"], "archive": INPUTS["archive"]}

    first, second = (run_config(definition, *each, expires=EXPIRES) for each in ((bill, INPUTS), (again, reordered)))

    assert encode(first) == encode(second)
