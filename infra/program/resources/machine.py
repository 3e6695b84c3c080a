"""Declares a state machine that changes a run's fleet, and its role. Its steps are in gather.py, fallback.py and
stages.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.stop import FleetStop
from gpufleet.infra.program.resources.tags import tags

# The AWS SDK integrations that the steps use (Step Functions guide, 2026-11).
MODIFY_FLEET, PUBLISH = "arn:aws:states:::aws-sdk:ec2:modifyFleet", "arn:aws:states:::aws-sdk:sns:publish"
# All retries together take 42 minutes.
AGAIN = {"ErrorEquals": ["States.ALL"], "IntervalSeconds": 10, "MaxAttempts": 8, "BackoffRate": 2.0}


class FleetMachine(pulumi.ComponentResource):
    """A state machine that sets a fleet's size in `steps`, and the machine's role. A node starts the machine. The
    machine's name is the name of the run's schedule group, which nodes know, followed by `part`. `kind`: the
    component's type.
    """

    machine: aws.sfn.StateMachine

    def __init__(
        self,
        kind: str,
        name: str,
        definition: StackDefinition,
        *,
        role: str,
        does: str,
        steps: Callable[[str, int], dict[str, Any]],
        fleet: aws.ec2.Fleet,
        stop: FleetStop,
        part: str = "",
        permissions_boundary: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`steps`: a function that makes the machine's definition from the fleet's id and its number of nodes."""
        super().__init__(f"gpufleet:infra:{kind}", name, None, opts)
        self.machine = state_machine(
            name,
            definition,
            role=f"gpufleet-{definition.name}-{role}",
            does=does,
            named=stop.group.name.apply(lambda group: f"{group}{part}"),
            stop=stop,
            fleet=fleet,
            steps=fleet.id.apply(lambda fleet_id: json.dumps(steps(fleet_id, definition.nodes))),
            permissions_boundary=permissions_boundary,
            parent=self,
            part=part,
        )
        self.register_outputs({})


def state_machine(
    name: str,
    definition: StackDefinition,
    *,
    role: str,
    does: str,
    named: pulumi.Input[str] | None,
    stop: FleetStop,
    fleet: aws.ec2.Fleet,
    steps: pulumi.Input[str],
    topic_arn: pulumi.Input[str] = "",
    permissions_boundary: pulumi.Input[str] | None,
    parent: pulumi.Resource,
    part: str = "",
) -> aws.sfn.StateMachine:
    """A state machine with these steps, and a role that may change this fleet and publish to the topic. If `named` is
    None, the engine chooses the name. `part`: a word that distinguishes the machines, if a run has several of them.
    """
    child, labels = pulumi.ResourceOptions(parent=parent), tags(definition)
    own = aws.iam.Role(
        role,
        assume_role_policy=stop.group.arn.apply(lambda arn: json.dumps(trust(arn))),
        description=does,
        permissions_boundary=permissions_boundary or definition.account.permissions_boundary,
        tags=labels,
        opts=child,
    )
    may = aws.iam.RolePolicy(
        f"{name}-rights",
        role=own.name,
        policy=pulumi.Output.all(fleet.arn, topic_arn).apply(lambda arns: json.dumps(may_modify(*arns))),
        opts=child,
    )
    return aws.sfn.StateMachine(
        f"gpufleet-{definition.name}{part}",
        name=named,
        role_arn=own.arn,
        definition=steps,
        tags=labels,
        opts=pulumi.ResourceOptions(parent=parent, depends_on=[may]),
    )


def trust(group_arn: str) -> dict[str, Any]:
    """The trust policy of the machine's role: the service, for this account (Step Functions guide, confused deputy)."""
    own = {"StringEquals": {"aws:SourceAccount": group_arn.split(":")[4]}}
    principal = {"Service": "states.amazonaws.com"}
    allow = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole", "Condition": own}
    return {"Version": "2012-10-17", "Statement": [allow]}


def may_modify(fleet_arn: str, topic_arn: str = "") -> dict[str, Any]:
    """The rights of the state machine."""
    allow = {"Sid": "OwnFleet", "Effect": "Allow", "Action": "ec2:ModifyFleet", "Resource": fleet_arn}
    tell = {"Sid": "Tell", "Effect": "Allow", "Action": "sns:Publish", "Resource": topic_arn}
    return {"Version": "2012-10-17", "Statement": [allow, *([tell] if topic_arn else [])]}
