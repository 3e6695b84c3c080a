"""AWS's habits, as a canary's file has them: the embedded AWS takes as long, and refuses by the same codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account import refusals
from gpufleet.infra.evidence import proofs
from gpufleet.infra.evidence.proofs import Proof
from gpufleet.rehearsal import habits
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.habits import Habits
from tests.rehearsal.declared import describe
from tests.rehearsal.declared import fleet as create

FIGURES = {
    "notice.left_s": {"count": 2, "least": 110.0, "median": 115.0, "most": 117.0},
    "node.launch_s": {"count": 1, "least": 40.0, "median": 40.0, "most": 40.0},
    "fleet.deleted_s": {"count": 1, "least": 90.0, "median": 90.0, "most": 90.0},
    "tags.fleet_s": {"count": 1, "least": 3.0, "median": 3.0, "most": 3.0},
}
REFUTED = [
    {"id": "no-fleet", "expected": "is InvalidFleetId.NotFound", "seen": "InvalidFleetId.Gone"},
    {"id": "delete-unknown", "expected": "is fleetIdDoesNotExist", "seen": "fleetIdMalformed"},
    {"id": "no-parameter", "expected": "is ParameterNotFound", "seen": "ParameterAbsent"},
    {"id": "s3-absent", "expected": "is PreconditionFailed", "seen": "accepted"},
    {"id": "volume-type", "expected": "is gp3", "seen": "gp2"},
]


@pytest.fixture
def proof(tmp_path: Path) -> Proof:
    tree = {
        "schema": proofs.SCHEMA,
        "at": "2026-11-29T16:00:00+00:00",
        "region": "us-east-2",
        "embedded": False,
        "answers": {},
        "figures": FIGURES,
        "assumptions": [{**each, "state": "refuted"} for each in REFUTED],
    }
    path = tmp_path / "proof.json"
    path.write_text(json.dumps(tree))
    return proofs.read(path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime(2026, 11, 29, 12, 0, tzinfo=UTC))


@pytest.fixture
def cloud(tmp_path: Path, clock: ManualClock, proof: Proof) -> Iterator[Cloud]:
    with Cloud(tmp_path / "cloud", clock=clock, habits=habits.recorded(proof)) as cloud:
        yield cloud


def pass_s(cloud: Cloud, clock: ManualClock, seconds: float) -> None:
    clock.advance(seconds)
    cloud.tick()


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ClientError) as error:
        call()
    return refusals.code(error.value)


def test_times_are_the_files_and_what_it_lacks_is_as_usual(proof: Proof) -> None:
    own = habits.recorded(proof)
    assert (own.notice_s, own.launch_s, own.deleted_s, own.shown_s) == (117, 40, 90, 3)
    assert (own.relaunch_s, own.retry_s) == (Habits().relaunch_s, Habits().retry_s)
    assert any("40 s" in each for each in own.sentences())


def test_only_codes_of_refusals_are_taken(proof: Proof) -> None:
    codes = habits.recorded(proof).codes
    assert set(codes) == {"InvalidFleetId.NotFound", "fleetIdDoesNotExist", "ParameterNotFound"}


def test_the_first_node_comes_as_late_as_it_did(cloud: Cloud, clock: ManualClock) -> None:
    create(cloud)
    pass_s(cloud, clock, 39)
    assert cloud.instances() == []
    pass_s(cloud, clock, 2)
    assert len(cloud.instances()) == 1


def test_lists_show_a_new_fleet_as_late_as_they_did(cloud: Cloud, clock: ManualClock) -> None:
    ec2, fleet = cloud.client("ec2"), create(cloud)
    clock.advance(2)
    assert ec2.describe_fleets()["Fleets"] == []
    assert ec2.describe_fleets(FleetIds=[fleet])["Fleets"][0]["FleetId"] == fleet
    assert ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [fleet]}])["Tags"] == []
    clock.advance(2)
    assert [each["FleetId"] for each in ec2.describe_fleets()["Fleets"]] == [fleet]


def test_a_deleted_fleet_lingers_as_long_as_it_did(cloud: Cloud, clock: ManualClock) -> None:
    fleet = create(cloud)
    pass_s(cloud, clock, 41)
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    cloud.tick()
    pass_s(cloud, clock, 80)
    assert describe(cloud, fleet)["FleetState"] == "deleted_terminating"
    pass_s(cloud, clock, 11)
    assert describe(cloud, fleet)["FleetState"] == "deleted"


def test_refusals_have_the_files_codes_and_the_rest_stays(cloud: Cloud) -> None:
    ec2, unknown = cloud.client("ec2"), "fleet-00000000-0000-4000-8000-000000000000"
    assert refused(lambda: ec2.describe_fleets(FleetIds=[unknown])) == "InvalidFleetId.Gone"
    (undone,) = ec2.delete_fleets(FleetIds=[unknown], TerminateInstances=True)["UnsuccessfulFleetDeletions"]
    assert undone["Error"]["Code"] == "fleetIdMalformed"
    assert refused(lambda: cloud.client("ssm").get_parameter(Name="/none")) == "ParameterAbsent"
    assert refused(lambda: cloud.client("iam").get_role(RoleName="none")) == "NoSuchEntity"
