"""The fallback to on demand: a second fleet, at a capacity of 0, and a schedule that sets it to 1 once the deadline
could not be kept otherwise. A node that trains moves its hour (job/node/switch.py), so it fires when none does.

Whoever may move the hour may give the schedule any target that its role may do, and ModifyFleet has no condition on
the number of nodes. So the role may only start a state machine, whose one step is written here: that fleet to 1
(docs/decisions/2026-11-26-fallback.md). A node that has been taken over gains nothing by it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.stop import FleetStop, one_time
from gpufleet.infra.program.resources.tags import tags
from gpufleet.job.contract.aws import SWITCH

MODIFY_FLEET = "arn:aws:states:::aws-sdk:ec2:modifyFleet"  # an AWS SDK integration (Step Functions guide, 2026-11)


class FallbackSwitch(pulumi.ComponentResource):
    """State machine, its role, and the schedule that starts it. `ready` is what must exist before the first fleet."""

    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        fleet: aws.ec2.Fleet,
        stop: FleetStop,
        at: datetime,
        enabled: bool,
        permissions_boundary: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`fleet`: on demand, at 0. `stop`: its group and role are the schedule's too. `at`: when to switch with
        nothing done. `enabled`: whether the limits pay for all of the work on demand; where not, a node enables it once
        they pay for the rest.
        """
        super().__init__("gpufleet:infra:FallbackSwitch", name, None, opts)
        child, labels = pulumi.ResourceOptions(parent=self), tags(definition)
        role = aws.iam.Role(
            f"gpufleet-{definition.name}-switch",
            assume_role_policy=stop.group.arn.apply(lambda arn: json.dumps(trust(arn))),
            description="begins a gpufleet run's fallback",
            permissions_boundary=permissions_boundary or definition.account.permissions_boundary,
            tags=labels,
            opts=child,
        )
        may_switch = aws.iam.RolePolicy(
            f"{name}-rights",
            role=role.name,
            policy=fleet.arn.apply(lambda arn: json.dumps(may_modify(arn))),
            opts=child,
        )
        machine = aws.sfn.StateMachine(
            f"gpufleet-{definition.name}",
            role_arn=role.arn,
            definition=fleet.id.apply(lambda each: json.dumps(steps(each))),
            tags=labels,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[may_switch]),
        )
        may_start = aws.iam.RolePolicy(
            f"{name}-start",
            role=stop.role.name,
            policy=machine.arn.apply(lambda arn: json.dumps(may_begin(arn))),
            opts=child,
        )
        schedule = one_time(
            f"{name}-schedule",
            name=SWITCH,
            stop=stop,
            description="begins on demand, where the deadline could not be kept otherwise; a node moves the hour",
            at=at,
            target=machine.arn,
            input="{}",
            depends_on=[may_start],
            trigger=pulumi.Output.concat(definition.run.id, " ", fleet.id),
            parent=self,
            enabled=enabled,
        )
        self.ready = [schedule]
        self.register_outputs({})


def steps(fleet: str) -> dict[str, Any]:
    """The state machine: one step, with nothing of its input in it."""
    asked = {"FleetId": fleet, "TargetCapacitySpecification": {"TotalTargetCapacity": 1}}
    again = {"ErrorEquals": ["States.ALL"], "IntervalSeconds": 10, "MaxAttempts": 8, "BackoffRate": 2.0}
    switch = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [again], "End": True}
    return {"Comment": "a gpufleet run goes on on demand", "StartAt": "Switch", "States": {"Switch": switch}}


def trust(group_arn: str) -> dict[str, Any]:
    """Who may act with the machine's role: the service, for this account (Step Functions guide, confused deputy)."""
    own = {"StringEquals": {"aws:SourceAccount": group_arn.split(":")[4]}}
    principal = {"Service": "states.amazonaws.com"}
    allow = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole", "Condition": own}
    return {"Version": "2012-10-17", "Statement": [allow]}


def may_modify(fleet_arn: str) -> dict[str, Any]:
    """Everything the machine may do."""
    allow = {"Sid": "OwnFallback", "Effect": "Allow", "Action": "ec2:ModifyFleet", "Resource": fleet_arn}
    return {"Version": "2012-10-17", "Statement": [allow]}


def may_begin(machine_arn: str) -> dict[str, Any]:
    """What the schedule's role may do with it."""
    allow = {"Sid": "BeginFallback", "Effect": "Allow", "Action": "states:StartExecution", "Resource": machine_arn}
    return {"Version": "2012-10-17", "Statement": [allow]}
