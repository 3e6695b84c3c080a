"""`fleet.fallback` on the embedded AWS: when it begins on demand, and that a stolen node gains nothing by it."""

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
from gpufleet.infra.program.resources import fallback, machine, stop
from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.contract.bucket import FLEETS
from gpufleet.rehearsal import account
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess
from gpufleet.rehearsal.schedules import moment
from tests import forked
from tests.rehearsal.declared import as_node, describe, fleet, living, template
from tests.rehearsal.engine_world import STACK, pinned, project

HOURS = 6.0
ON_DEMAND = {"TotalTargetCapacity": 0, "DefaultTargetCapacityType": "on-demand"}


@dataclass
class FallbackRun:
    """A stack with a fallback that is up, and the clock of its AWS."""

    cloud: Cloud
    clock: ManualClock
    engine: Engine

    def fleets(self) -> dict[str, Any]:
        """By market."""
        described = self.cloud.client("ec2").describe_fleets()["Fleets"]
        return {each["TargetCapacitySpecification"]["DefaultTargetCapacityType"]: each for each in described}

    def wanted(self) -> tuple[int, int]:
        """Capacity of spot and on demand."""
        found = self.fleets()
        spot, other = (
            found[kind]["TargetCapacitySpecification"]["TotalTargetCapacity"] for kind in ("spot", "on-demand")
        )
        return spot, other

    def passes(self, hours: float) -> None:
        self.clock.advance(hours * 3600)
        self.cloud.tick()

    def schedule(self, name: str = SWITCH, **changes: Any) -> dict[str, Any]:
        """What UpdateSchedule takes of it, with `changes` of the target."""
        scheduler = self.cloud.client("scheduler")
        group = next(g["Name"] for g in scheduler.list_schedule_groups()["ScheduleGroups"] if g["Name"] != "default")
        found = scheduler.get_schedule(GroupName=group, Name=name)
        keys = ("GroupName", "Name", "ScheduleExpression", "FlexibleTimeWindow", "Target", "State")
        kept = {key: found[key] for key in keys}
        return {**kept, "Target": {**kept["Target"], **changes}}

    def hour(self, hours: float) -> str:
        return f"at({self.clock.now() + timedelta(hours=hours):%Y-%m-%dT%H:%M:%S})"

    @property
    def refused(self) -> list[str]:
        return [each.refused for each in self.cloud.schedules.fired if each.name.endswith(f"/{SWITCH}")]

    def rests(self, declared: dict[str, Any]) -> None:
        """As it was declared, whatever a test has done."""
        self.cloud.client("scheduler").update_schedule(**declared)
        asked = {"TotalTargetCapacity": 0}
        self.cloud.client("ec2").modify_fleet(
            FleetId=self.fleets()["on-demand"]["FleetId"], TargetCapacitySpecification=asked
        )
        self.passes(0.01)

    def machine(self) -> str:
        (found,) = self.cloud.client("stepfunctions").list_state_machines()["stateMachines"]
        return str(found["stateMachineArn"])


def with_fallback(folder: Path) -> Path:
    """The definition of a new project that falls back."""
    file = pinned(project(folder))
    text = file.read_text().replace("  capacity: spot\n", "  capacity: spot\n  fallback: on-demand\n")
    file.write_text(text.replace("limits:\n", f"limits:\n  deadline: in {HOURS:g} h\n"))
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FallbackRun]:
    tmp_path = tmp_path_factory.mktemp("fallback")
    with_fallback(tmp_path / "project")
    clock = ManualClock(datetime.now(UTC))  # the program reads its own
    with (
        forked.programs(tmp_path),
        Cloud(tmp_path / "cloud", clock=clock) as cloud,
        Engine.open(tmp_path / "project", cloud.environment(), STACK, say=lambda line: None, real=False) as engine,
    ):
        assert isinstance(engine, InProcess)
        created = engine.up()
        assert created.ok, created.text
        yield FallbackRun(cloud=cloud, clock=clock, engine=engine)


@pytest.mark.parametrize(
    ("refused", "nodes"),
    [("ValidateStateMachineDefinition", 0), ("CreateSchedule", 0), ("Subscribe", 0), ("PutTargets", 1)],
)
def test_what_aws_refuses_comes_before_the_fleet_that_bills_or_its_node_is_not_known(
    tmp_path: Path, refused: str, nodes: int
) -> None:
    """A node whose fleet the bucket does not name ends it (tests of the node)."""
    file = with_fallback(tmp_path / "project")
    file.write_text(file.read_text() + "notify: {email: me@example.org}\n")
    with (
        forked.programs(tmp_path),
        Cloud(tmp_path / "cloud", clock=ManualClock(datetime.now(UTC))) as cloud,
        Engine.open(tmp_path / "project", cloud.environment(), STACK, real=False) as engine,
    ):
        cloud.deny(refused)
        result = engine.up()
        assert not result.ok
        assert refused in result.diagnostics
        cloud.tick()
        assert len(cloud.instances()) == nodes
        (bucket,) = (name for kind, name in cloud.leftovers() if kind == "bucket")
        listed = cloud.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
        assert not [each["Key"] for each in listed if FLEETS in each["Key"]]


def test_no_target_that_a_stolen_node_gives_the_schedule_launches_more_than_the_one_node(run: FallbackRun) -> None:
    """It passes one role, which may end this run, tell of it, and begin the fallback as it was declared."""
    node, other, declared = as_node(run.cloud, "scheduler"), run.fleets()["on-demand"]["FleetId"], run.schedule()
    grow = json.dumps({"FleetId": other, "TargetCapacitySpecification": {"TotalTargetCapacity": 40}})
    modify = {"Arn": "arn:aws:scheduler:::aws-sdk:ec2:modifyFleet", "Input": grow}
    for changed, capacity, said in ((modify, 0, "not allowed: ec2:ModifyFleet"), ({"Input": grow}, 1, "")):
        target = {**declared["Target"], **changed}
        node.update_schedule(**{**declared, "Target": target, "ScheduleExpression": run.hour(0.02)})
        run.passes(0.05)
        assert run.refused[-1] == said
        assert run.wanted() == (1, capacity)
        assert len(living(run.cloud)) == 1 + capacity
    run.rests(declared)


def test_the_role_of_the_schedule_may_not_change_a_fleet_and_that_of_the_machine_only_this_one(
    run: FallbackRun,
) -> None:
    iam = run.cloud.client("iam")
    for name, may in (("-stop-", False), ("-switch-", True)):
        (role,) = (each["RoleName"] for each in iam.list_roles()["Roles"] if name in each["RoleName"])
        policies = iam.list_role_policies(RoleName=role)["PolicyNames"]
        documents = [iam.get_role_policy(RoleName=role, PolicyName=each)["PolicyDocument"] for each in policies]
        statements = [statement for each in documents for statement in each["Statement"]]
        for part, each in run.fleets().items():
            arn = f"arn:aws:ec2:us-east-2:{run.cloud.account}:fleet/{each['FleetId']}"
            answer = iam_policy.allowed(statements, AccessRequest(action="ec2:ModifyFleet", resource=arn))
            assert bool(answer) == (may and part == "on-demand")


THEFTS: dict[str, Callable[[FallbackRun], Any]] = {
    "its capacity is set": lambda run: as_node(run.cloud, "ec2").modify_fleet(
        FleetId=run.fleets()["on-demand"]["FleetId"], TargetCapacitySpecification={"TotalTargetCapacity": 1}
    ),
    "the machine is started": lambda run: as_node(run.cloud, "stepfunctions").start_execution(
        stateMachineArn=run.machine()
    ),
    "the machine is changed": lambda run: as_node(run.cloud, "stepfunctions").update_state_machine(
        stateMachineArn=run.machine(), definition=json.dumps(fallback.steps("fleet-of-another"))
    ),
    "the machine's role is passed": lambda run: as_node(run.cloud, "scheduler").update_schedule(
        **run.schedule(RoleArn=run.schedule()["Target"]["RoleArn"].replace("-stop-", "-switch-"))
    ),
    "the schedule is deleted": lambda run: as_node(run.cloud, "scheduler").delete_schedule(
        GroupName=run.schedule()["GroupName"], Name=SWITCH
    ),
}


@pytest.mark.parametrize("theft", THEFTS.values(), ids=THEFTS.keys())
def test_a_stolen_node_gains_nothing(run: FallbackRun, theft: Callable[[FallbackRun], Any]) -> None:
    with pytest.raises(ClientError, match=r"AccessDenied|UnauthorizedOperation"):
        theft(run)


def test_the_fallback_is_begun_at_its_hour_and_twice_is_once(run: FallbackRun) -> None:
    declared, before = run.schedule(), len(run.refused)
    at = moment(declared["ScheduleExpression"])
    assert at is not None
    left_h = (at - run.clock.now()).total_seconds() / 3600
    assert HOURS - 1 < left_h < HOURS  # of a small job
    run.passes(left_h - 0.01)
    assert run.wanted() == (1, 0)
    run.passes(0.02)
    assert run.wanted() == (1, 1)
    assert {node.spot for node in run.cloud.instances() if not node.ended_at} == {True, False}
    run.cloud.client("scheduler").update_schedule(**{**declared, "ScheduleExpression": run.hour(0.02)})
    run.passes(0.05)
    assert run.refused[before:] == ["", ""]
    assert run.wanted() == (1, 1)


@pytest.mark.parametrize("with_topic", [True, False])
def test_a_switch_that_cannot_be_made_is_told_once_after_42_minutes_and_tried_on(
    tmp_path: Path, with_topic: bool
) -> None:
    clock = ManualClock()
    with Cloud(tmp_path, clock=clock) as cloud:
        iam, states, sns = cloud.client("iam"), cloud.client("stepfunctions"), cloud.client("sns")
        topic = sns.create_topic(Name="t")["TopicArn"] if with_topic else ""
        other = fleet(cloud, template(cloud), TargetCapacitySpecification=ON_DEMAND)
        group = f"arn:aws:scheduler:{cloud.region}:{cloud.account}:schedule-group/g"
        iam.create_role(RoleName="switch", AssumeRolePolicyDocument=json.dumps(machine.trust(group)))

        def may(fleet: str) -> None:
            rights = machine.may_modify(f"arn:aws:ec2:{cloud.region}:{cloud.account}:fleet/{fleet}", topic)
            iam.put_role_policy(RoleName="switch", PolicyName="rights", PolicyDocument=json.dumps(rights))

        def told_after(minutes: float) -> tuple[list[str], int]:
            """Messages by now, and the nodes that the fleet is to have."""
            clock.advance(60 * minutes)
            cloud.tick()
            capacity = describe(cloud, other)["TargetCapacitySpecification"]
            return account.messages(cloud.account), capacity["TotalTargetCapacity"]

        may("fleet-of-another")
        switch = states.create_state_machine(
            name="m",
            definition=json.dumps(fallback.steps(other, topic, "gpufleet x, run r1")),
            roleArn=f"arn:aws:iam::{cloud.account}:role/switch",
        )
        states.start_execution(stateMachineArn=switch["stateMachineArn"], input="{}")
        said = ["gpufleet x, run r1: no node on demand"] * with_topic
        assert told_after(0) == ([], 0)
        assert told_after(42) == ([], 0)
        assert told_after(1) == (said, 0)
        assert [told_after(60) for _ in range(3)] == [(said, 0)] * 3
        may(other)
        told_after(60)
        assert told_after(60) == (said, 1)


def test_the_stop_schedule_ends_both_fleets_and_what_fires_after_that_does_nothing(run: FallbackRun) -> None:
    assert len({each["ValidUntil"] for each in run.fleets().values()}) == 1  # they expire together
    end = {**run.schedule(stop.SCHEDULE), "ScheduleExpression": run.hour(0.02)}
    as_node(run.cloud, "scheduler").update_schedule(**end)
    run.passes(0.05)
    run.passes(0.01)
    assert living(run.cloud) == []
    as_node(run.cloud, "scheduler").update_schedule(**{**run.schedule(), "ScheduleExpression": run.hour(0.02)})
    run.passes(0.05)
    assert "cannot be modified" in run.refused[-1]
    assert living(run.cloud) == []


def test_destroy_leaves_nothing_of_it(run: FallbackRun) -> None:
    destroyed = run.engine.destroy()
    assert destroyed.ok, destroyed.text
    assert {kind for kind, _ in run.cloud.leftovers()} == {"bucket"}
