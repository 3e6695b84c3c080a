"""The resources that a run in a Capacity Block declares, argument by argument, compared with those of a run on spot."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.infra.program.resources.stop import with_its_nodes
from gpufleet.job.text import stamp
from tests.infra.command_files import in_block, several_nodes
from tests.infra.declared_world import Declared, declare

TEMPLATE, FLEET = "aws:ec2/launchTemplate:LaunchTemplate", "aws:ec2/fleet:Fleet"
SCHEDULE, OBJECT = "aws:scheduler/schedule:Schedule", "aws:s3/bucketObjectv2:BucketObjectv2"
NAME = "pretrain-d64"
TEXT = several_nodes("one").replace("max_usd: 1000", "max_usd: 2000")


def block(begins: timedelta, reservation: str = "reservation: cr-0123456789abcdef0, ") -> tuple[str, datetime]:
    """A block of three days in the form of a definition file, and the block's end."""
    start = datetime.now(UTC).replace(microsecond=0) + begins
    end = start + timedelta(days=3)
    return f"{{{reservation}start: {stamp(start)}, end: {stamp(end)}, fee_usd: 900}}", end


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Declared]:
    made, folder = {}, tmp_path_factory.mktemp("block")
    for name, text in (("spot", TEXT), ("block", in_block(TEXT, block(timedelta(hours=-1))[0]))):
        made[name] = declare(folder / name, NAME, text)
        assert made[name].result.ok, made[name].result.text
    return made


def test_an_instant_fleet_asks_for_all_of_its_nodes_at_once(declared: dict[str, Declared]) -> None:
    fleet, spot = (declared[name].one(FLEET) for name in ("block", "spot"))
    assert fleet["type"] == "instant"
    assert fleet["targetCapacitySpecification"] == {
        "defaultTargetCapacityType": "capacity-block",
        "totalTargetCapacity": 2,
    }
    assert fleet["terminateInstances"] is True
    # Arguments of maintain fleets, with which EC2 would refuse an instant fleet, or which it would ignore.
    assert spot.keys() - fleet.keys() == {"spotOptions", "validUntil", "terminateInstancesWithExpiration"}
    assert fleet.keys() <= spot.keys()
    assert fleet["launchTemplateConfigs"] == spot["launchTemplateConfigs"]


def test_the_template_names_the_reservation_and_its_market_alone(declared: dict[str, Declared]) -> None:
    template, spot = (declared[name].one(TEMPLATE) for name in ("block", "spot"))
    assert template.pop("instanceMarketOptions") == {"marketType": "capacity-block"}
    assert template.pop("capacityReservationSpecification") == {
        "capacityReservationTarget": {"capacityReservationId": "cr-0123456789abcdef0"}
    }
    drawn = ("userData", "name")  # user-data has the hash of run.json and random letters
    assert all(template[key] == each for key, each in spot.items() if key not in drawn)
    assert template.keys() == spot.keys()


def test_the_schedule_and_run_json_end_it_when_aws_begins_to(declared: dict[str, Declared]) -> None:
    (run,) = (json.loads(each["content"]) for each in declared["block"].inputs(OBJECT) if each["key"] == "r1/run.json")
    ends = datetime.fromisoformat(run["limits"]["expires"])
    due = block(timedelta(hours=-1))[1] - timedelta(minutes=30)
    assert abs(due - ends) < timedelta(minutes=10)  # the block of the declared file
    assert run["limits"]["deadline"] is None
    (schedule,) = (each for each in declared["block"].inputs(SCHEDULE) if each["name"] == "stop")
    assert schedule["scheduleExpression"] == f"at({ends:%Y-%m-%dT%H:%M:%S})"
    assert run["capacity"] == "block"
    assert run["rates"]["p5.48xlarge"]["on_demand"] == "0"
    assert float(run["extras"]["fixed_usd"]) > 900


def test_nothing_is_declared_that_one_on_spot_has_not(declared: dict[str, Declared]) -> None:
    kinds = {name: Counter(each["type"] for each in found.resources) for name, found in declared.items()}
    assert not kinds["block"] - kinds["spot"]  # fleets on spot may ask for all of their nodes again
    assert not any("capacityBlock" in kind or "capacityReservation" in kind for kind in kinds["block"])


def test_its_nodes_may_end_the_fleet_with_themselves_and_nothing_more(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name, text in (("spot", TEXT), ("block", in_block(TEXT))):
        file = tmp_path / f"{NAME}.yaml"
        file.write_text(text)
        definition = load(file, now=datetime(2026, 11, 26, tzinfo=UTC))
        found[name] = node_statements(definition, "arn:b", "arn:l", "arn:aws:scheduler:r:1:schedule/g/stop", "arn:r")
    assert [each for each in found["block"] if each not in found["spot"]] == [with_its_nodes()]
    assert [each["Sid"] for each in found["spot"] if each not in found["block"]] == ["AskAgain"]


def test_before_it_begins_and_before_it_is_bought_a_preview_says_so(tmp_path: Path) -> None:
    later, bought = block(timedelta(hours=5))[0], block(timedelta(hours=-1), reservation="")[0]
    for name, told, said in (
        ("later", later, "the block begins at 20"),
        ("bought", bought, "fleet.block has no reservation: buy"),
    ):
        found = declare(tmp_path / name, NAME, in_block(TEXT, told))
        assert found.result.ok, found.result.text
        assert said in found.result.diagnostics
