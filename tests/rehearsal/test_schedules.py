"""The schedule that ends a run's fleet: it fires at its hour with its role's rights, and a node gains nothing by it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account import iam_policy
from gpufleet.infra.account.iam_policy import AccessRequest
from gpufleet.infra.definition.loader import load
from gpufleet.infra.program.resources import stop
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.infra.program.resources.tags import own_tags, tags
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from tests.rehearsal.declared import as_node, describe, living, role
from tests.rehearsal.test_node_rights import owned_fleet
from tests.repository import ROOT

RUN = load(ROOT / "stacks" / "tinystories-growth.yaml", now=datetime(2026, 11, 21, tzinfo=UTC))
GROUP = "gpufleet-runs"


@dataclass
class StoppedFleet:
    """A Cloud with a fleet, the schedule that ends it in two hours, and a node."""

    cloud: Cloud
    clock: ManualClock
    fleet: str

    def asked(self, hours: float, **changes: Any) -> dict[str, Any]:
        """What UpdateSchedule is given: an hour so far ahead, and `changes` of the target."""
        target = {
            "Arn": stop.END_FLEET,
            "RoleArn": self.role("stop"),
            "Input": json.dumps({"FleetIds": [self.fleet], "TerminateInstances": True}),
        }
        return {
            "GroupName": GROUP,
            "Name": stop.SCHEDULE,
            "ScheduleExpression": f"at({self.clock.now() + timedelta(hours=hours):%Y-%m-%dT%H:%M:%S})",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": {**target, **changes},
        }

    def role(self, name: str) -> str:
        return f"arn:aws:iam::{self.cloud.account}:role/{name}"

    def node(self) -> Any:
        """A client of the scheduler with the node's rights."""
        return as_node(self.cloud, "scheduler")

    def passes(self, hours: float) -> None:
        self.clock.advance(hours * 3600)
        self.cloud.tick()

    @property
    def refused(self) -> list[str]:
        return [each.refused for each in self.cloud.schedules.fired]


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[StoppedFleet]:
    clock = ManualClock()
    with Cloud(tmp_path, clock=clock) as cloud:
        iam, scheduler = cloud.client("iam"), cloud.client("scheduler")
        group = scheduler.create_schedule_group(Name=GROUP)["ScheduleGroupArn"]
        for name, statements in (("stop", stop.stop_statements(RUN)), ("other", [_everything()])):
            iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(stop.trust(group)))
            policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
            iam.put_role_policy(RoleName=name, PolicyName="rights", PolicyDocument=policy)
        logs = f"arn:aws:logs:us-east-2:{cloud.account}:log-group:g"
        arns = (stop.schedule_arn(group), f"arn:aws:iam::{cloud.account}:role/stop")
        role(cloud, node_statements(RUN, "arn:aws:s3:::own", logs, *arns))
        made = StoppedFleet(cloud, clock, owned_fleet(cloud))
        scheduler.create_schedule(**made.asked(2))
        cloud.tick()
        yield made


def _everything() -> dict[str, str]:
    return {"Effect": "Allow", "Action": "*", "Resource": "*"}


def test_at_its_hour_the_fleet_is_deleted_and_its_node_ended(stopped: StoppedFleet) -> None:
    stopped.passes(1.99)
    assert len(living(stopped.cloud)) == 1
    stopped.passes(0.02)
    stopped.passes(0.1)
    assert living(stopped.cloud) == []
    assert describe(stopped.cloud, stopped.fleet)["FleetState"] == "deleted"
    assert stopped.refused == [""]
    stopped.passes(5)
    assert stopped.refused == [""]  # once


def test_a_node_moves_the_hour_and_what_stands_then_fires(stopped: StoppedFleet) -> None:
    stopped.node().update_schedule(**stopped.asked(5))
    stopped.passes(4.9)
    assert stopped.refused == []
    stopped.passes(0.2)
    assert stopped.refused == [""]


def test_a_schedule_that_finds_its_fleet_deleted_does_nothing(stopped: StoppedFleet) -> None:
    stopped.cloud.client("ec2").delete_fleets(FleetIds=[stopped.fleet], TerminateInstances=True)
    stopped.passes(1)
    stopped.passes(1.1)
    assert stopped.refused == ["The fleet is deleted"]


@pytest.mark.parametrize("hours", [0, -1])
def test_an_hour_that_has_passed_is_refused(stopped: StoppedFleet, hours: float) -> None:
    with pytest.raises(ClientError, match="Invalid Schedule Expression"):
        stopped.node().update_schedule(**stopped.asked(hours))


THEFTS: dict[str, Callable[[StoppedFleet], Any]] = {
    "another role is passed": lambda s: s.node().update_schedule(**s.asked(1, RoleArn=s.role("other"))),
    "another schedule is made": lambda s: s.node().create_schedule(**{**s.asked(1), "Name": "more"}),
    "the schedule is made anew": lambda s: s.node().create_schedule(**s.asked(1)),
    "another schedule is moved": lambda s: s.node().update_schedule(**{**s.asked(1), "GroupName": "default"}),
    "the schedule is deleted": lambda s: s.node().delete_schedule(GroupName=GROUP, Name=stop.SCHEDULE),
    "its group is deleted": lambda s: s.node().delete_schedule_group(Name=GROUP),
    "schedules are listed": lambda s: s.node().list_schedules(),
}


@pytest.mark.parametrize("theft", THEFTS.values(), ids=THEFTS.keys())
def test_a_stolen_node_changes_nothing_but_the_hour(
    stopped: StoppedFleet, theft: Callable[[StoppedFleet], Any]
) -> None:
    with pytest.raises(ClientError, match="AccessDenied"):
        theft(stopped)


def test_the_role_is_passed_to_the_scheduler_alone(stopped: StoppedFleet) -> None:
    iam = stopped.cloud.client("iam")
    statements = iam.get_role_policy(RoleName="node", PolicyName="rights")["PolicyDocument"]["Statement"]
    answers = [
        iam_policy.allowed(
            statements,
            AccessRequest(
                action="iam:PassRole", resource=stopped.role("stop"), context={"iam:PassedToService": service}
            ),
        )
        for service in (stop.SERVICE, "ec2.amazonaws.com", "lambda.amazonaws.com")
    ]
    assert answers == [True, False, False]


@pytest.mark.parametrize("key", own_tags(RUN))
def test_what_a_stolen_node_makes_the_schedule_do_ends_nobody_else_s_fleet(stopped: StoppedFleet, key: str) -> None:
    theirs = owned_fleet(stopped.cloud, **{key: "other"})
    stopped.cloud.tick()
    asked = json.dumps({"FleetIds": [stopped.fleet, theirs], "TerminateInstances": True})
    stopped.node().update_schedule(**stopped.asked(0.5, Input=asked))
    stopped.passes(1)
    assert stopped.refused == ["not allowed: ec2:DeleteFleets"]
    assert len(living(stopped.cloud)) == 2


ASKED = {
    "to launch": ("ec2:RunInstances", "instance/*"),
    "to grow a fleet": ("ec2:ModifyFleet", "fleet/f-1"),
    "to make one": ("ec2:CreateFleet", "fleet/*"),
    "to change a tag": ("ec2:CreateTags", "fleet/f-1"),
    "to read": ("s3:GetObject", "x"),
    "to pass a role": ("iam:PassRole", "x"),
    "to move a schedule": ("scheduler:UpdateSchedule", "x"),
}


@pytest.mark.parametrize(("action", "resource"), ASKED.values(), ids=ASKED.keys())
def test_the_schedule_s_role_may_end_the_fleet_and_nothing_else(action: str, resource: str) -> None:
    mine = {f"aws:ResourceTag/{key}": value for key, value in tags(RUN).items()}
    wish = AccessRequest(action=action, resource=f"arn:aws:ec2:us-east-2:1:{resource}", context=mine)
    assert iam_policy.allowed(stop.stop_statements(RUN), wish) is False


@pytest.mark.parametrize(
    ("context", "may"),
    [
        (
            {f"aws:ResourceTag/{key}": value for key, value in tags(RUN).items()} | {"ec2:InstanceType": "g5.xlarge"},
            True,
        ),
        ({"ec2:InstanceType": "g5.xlarge"}, False),  # somebody's instance
        ({f"aws:ResourceTag/{key}": "other" for key in tags(RUN)} | {"ec2:InstanceType": "g5.xlarge"}, False),
        ({}, True),  # whom it ends is the fleet's to say
    ],
)
def test_the_schedule_s_role_ends_own_nodes_and_no_instance_that_is_named(context: dict[str, str], may: bool) -> None:
    wish = AccessRequest(
        action="ec2:TerminateInstances", resource="arn:aws:ec2:us-east-2:1:instance/i-1", context=dict(context)
    )
    assert iam_policy.allowed(stop.stop_statements(RUN), wish) is may


def test_a_role_that_trusts_another_group_is_not_acted_with(stopped: StoppedFleet) -> None:
    trust = json.dumps(stop.trust(f"arn:aws:scheduler:us-east-2:{stopped.cloud.account}:schedule-group/other"))
    stopped.cloud.client("iam").update_assume_role_policy(RoleName="stop", PolicyDocument=trust)
    stopped.passes(2.1)
    assert "does not trust scheduler.amazonaws.com" in stopped.refused[0]
    assert len(living(stopped.cloud)) == 1
