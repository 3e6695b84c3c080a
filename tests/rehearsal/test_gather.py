"""Nodes that waited in vain have let go: their fleet is emptied, and asked for all of them after the pause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources import gather, machine, stop
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.command_files import several_nodes
from tests.rehearsal.declared import as_node, describe, living, role
from tests.rehearsal.test_node_rights import owned_fleet

GROUP = "gpufleet-runs"


@dataclass
class WaitingRun:
    """A fleet of two nodes, what asks for them again, and one that waits."""

    cloud: Cloud
    clock: ManualClock
    fleet: str
    machine: str

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.cloud.tick()

    def let_go(self, name: str, pause_s: int = 3600) -> None:
        as_node(self.cloud, "stepfunctions").start_execution(
            stateMachineArn=self.machine, name=name, input=json.dumps({"pause_s": pause_s})
        )
        self.cloud.tick()

    def wanted(self) -> int:
        capacity = describe(self.cloud, self.fleet)["TargetCapacitySpecification"]
        return int(capacity["TotalTargetCapacity"])


def definition(folder: Path) -> StackDefinition:
    (folder / "pretrain-d64.yaml").write_text(several_nodes("one"))
    return load(folder / "pretrain-d64.yaml", now=datetime.now(UTC))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WaitingRun]:
    clock, asked = ManualClock(), definition(tmp_path)
    with Cloud(tmp_path / "cloud", clock=clock) as cloud:
        iam, states = cloud.client("iam"), cloud.client("stepfunctions")
        group = cloud.client("scheduler").create_schedule_group(Name=GROUP)["ScheduleGroupArn"]
        logs = f"arn:aws:logs:us-east-2:{cloud.account}:log-group:g"
        arns = (stop.schedule_arn(group), f"arn:aws:iam::{cloud.account}:role/stop")
        role(cloud, node_statements(asked, "arn:aws:s3:::own", logs, *arns))
        fleet = owned_fleet(cloud)
        cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 2})
        iam.create_role(RoleName="gather", AssumeRolePolicyDocument=json.dumps(machine.trust(group)))
        rights = json.dumps(machine.may_modify(f"arn:aws:ec2:us-east-2:{cloud.account}:fleet/{fleet}"))
        iam.put_role_policy(RoleName="gather", PolicyName="rights", PolicyDocument=rights)
        made = states.create_state_machine(
            name=GROUP,
            definition=json.dumps(gather.steps(fleet, 2)),
            roleArn=f"arn:aws:iam::{cloud.account}:role/gather",
        )
        cloud.tick()
        yield WaitingRun(cloud, clock, fleet, made["stateMachineArn"])


def test_a_node_knows_the_machine_by_its_schedule(run: WaitingRun) -> None:
    group = f"arn:aws:scheduler:us-east-2:{run.cloud.account}:schedule-group/{GROUP}"
    assert gather.machine_arn(stop.schedule_arn(group)) == run.machine


def test_who_leaves_is_not_replaced_and_after_the_pause_all_are_asked_for(run: WaitingRun) -> None:
    left, hangs = living(run.cloud)
    run.let_go("r1-0-1")
    run.let_go("r1-0-1")  # as every node that waited does
    run.cloud.kill(left)
    run.passes(60)
    assert (run.wanted(), living(run.cloud)) == (0, [hangs])
    run.passes(gather.LEAVE_S)
    run.passes(150)  # the notice that AWS gives it
    assert living(run.cloud) == []
    run.passes(3600 - 300)
    assert (run.wanted(), living(run.cloud)) == (0, [])
    run.passes(300)
    run.passes(10)
    assert run.wanted() == len(living(run.cloud)) == 2
    run.passes(2 * 3600)
    assert run.wanted() == len(living(run.cloud)) == 2  # once


def test_a_run_that_ends_meanwhile_stays_ended(run: WaitingRun) -> None:
    run.let_go("r1-0-1")
    run.cloud.client("ec2").delete_fleets(FleetIds=[run.fleet], TerminateInstances=True)
    run.passes(2 * 3600)
    run.passes(600)
    assert living(run.cloud) == []


@pytest.mark.parametrize("theft", ["the machine is changed", "the fleet is grown"])
def test_a_stolen_node_can_ask_for_no_more_than_the_nodes(run: WaitingRun, theft: str) -> None:
    thieves: dict[str, Any] = {
        "the machine is changed": lambda: as_node(run.cloud, "stepfunctions").update_state_machine(
            stateMachineArn=run.machine, definition=json.dumps(gather.steps(run.fleet, 40))
        ),
        "the fleet is grown": lambda: as_node(run.cloud, "ec2").modify_fleet(
            FleetId=run.fleet, TargetCapacitySpecification={"TotalTargetCapacity": 40}
        ),
    }
    with pytest.raises(ClientError):
        thieves[theft]()
