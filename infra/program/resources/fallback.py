"""The fallback to on demand: a second fleet of size 0, and a schedule that sets its size to 1 once the deadline could
not be met otherwise. A training node postpones the schedule (job/node/switch.py), so the schedule fires if no node
trains. In AWS there is no right to change only the time of a schedule. A node that may change the time can also change
the schedule's target, to any action that the schedule's role may do. And a right to use ModifyFleet cannot limit the
number of nodes. So the schedule's role may only start a state machine. The steps of the state machine are written here,
and set the second fleet to 1 (docs/decisions/2026-11-26-fallback.md). So a compromised node could do no more than begin
the switch early.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET, PUBLISH, state_machine
from gpufleet.infra.program.resources.stop import FleetStop, one_time
from gpufleet.job.contract.aws import SWITCH

PAUSE_S, LONGEST_S = 900, 7 * 86_400  # seconds between two tries; seconds until the machine gives up


class FallbackSwitch(pulumi.ComponentResource):
    """State machine, its role, and the schedule that starts it. `ready`: resources that must exist before the first
    fleet.
    """

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
        topic_arn: pulumi.Input[str] = "",
        permissions_boundary: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`fleet`: the on-demand fleet of size 0. `stop`: the component that has the schedule's group and role. `at`:
        the time to switch if no work is done until then. `enabled`: whether the cost of all the work on demand fits
        within the limits. If not, a node enables the schedule as soon as the cost of the rest fits. `topic_arn`: the
        topic for messages to people; empty if there is none.
        """
        super().__init__("gpufleet:infra:FallbackSwitch", name, None, opts)
        machine = state_machine(
            name,
            definition,
            role=f"gpufleet-{definition.name}-switch",
            does="begins a gpufleet run's fallback",
            named=None,
            stop=stop,
            fleet=fleet,
            steps=pulumi.Output.all(fleet.id, topic_arn).apply(
                lambda outputs: json.dumps(
                    steps(outputs[0], outputs[1], f"gpufleet {definition.name}, run {definition.run.id}")
                )
            ),
            topic_arn=topic_arn,
            permissions_boundary=permissions_boundary,
            parent=self,
        )
        may_start = aws.iam.RolePolicy(
            f"{name}-start",
            role=stop.role.name,
            policy=machine.arn.apply(lambda arn: json.dumps(may_begin(arn))),
            opts=pulumi.ResourceOptions(parent=self),
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


def steps(fleet: str, topic_arn: str = "", run: str = "") -> dict[str, Any]:
    """The steps of the state machine: they set the on-demand fleet to 1, and do not read the input. If AWS refuses this
    for a long time, because capacity or a right of the role is missing, the machine sends one message. The machine then
    tries again until the run's fleets no longer exist.
    """
    asked = {"FleetId": fleet, "TargetCapacitySpecification": {"TotalTargetCapacity": 1}}
    switch = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [AGAIN], "End": True}

    def otherwise(next_state: str) -> dict[str, Any]:
        return {"Catch": [{"ErrorEquals": ["States.ALL"], "Next": next_state}]}

    words = (
        f"{run}: on spot it would miss its deadline, and AWS has not let its fleet on demand begin for 42 minutes. It"
        f" is asked every 15 minutes. Fleet {fleet}"
    )
    message = {"TopicArn": topic_arn, "Subject": f"{run}: no node on demand"[:100], "Message": words}
    states = {
        "Switch": {**switch, **otherwise("Tell" if topic_arn else "Pause")},
        "Tell": {"Type": "Task", "Resource": PUBLISH, "Parameters": message, "Next": "Pause", **otherwise("Pause")},
        "Pause": {"Type": "Wait", "Seconds": PAUSE_S, "Next": "Later"},
        "Later": {**switch, **otherwise("Pause")},
    }
    if not topic_arn:
        del states["Tell"]
    return {
        "Comment": "a gpufleet run goes on on demand",
        "StartAt": "Switch",
        "TimeoutSeconds": LONGEST_S,
        "States": states,
    }


def may_begin(machine_arn: str) -> dict[str, Any]:
    """The policy that lets the schedule's role start the state machine."""
    allow = {"Sid": "BeginFallback", "Effect": "Allow", "Action": "states:StartExecution", "Resource": machine_arn}
    return {"Version": "2012-10-17", "Statement": [allow]}
