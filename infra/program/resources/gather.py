"""Asks AWS for all of several nodes again, after those that waited for the others have ended.

A node may end its fleet but not change its size (identity.py), and during the pause there is no node. So a state
machine does it, whose steps are written here; a node starts it and sets the length of the pause.
"""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET, state_machine
from gpufleet.infra.program.resources.stop import FleetStop

LEAVE_S = 300  # seconds for the nodes to upload and end, before AWS ends the remaining ones


class GatherMachine(pulumi.ComponentResource):
    """The state machine and its role. It has the name of the run's schedule group, which nodes know."""

    machine: aws.sfn.StateMachine

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        fleet: aws.ec2.Fleet,
        stop: FleetStop,
        permissions_boundary: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("gpufleet:infra:GatherMachine", name, None, opts)
        self.machine = state_machine(
            name,
            definition,
            role=f"gpufleet-{definition.name}-gather",
            does="asks for all nodes of a gpufleet run again",
            named=stop.group.name,
            stop=stop,
            fleet=fleet,
            steps=fleet.id.apply(lambda each: json.dumps(steps(each, definition.nodes))),
            permissions_boundary=permissions_boundary,
            parent=self,
        )
        self.register_outputs({})


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The steps: no node is replaced; remaining nodes are ended; after the pause that a node has set, all are asked
    for. If the fleet is gone by then, the run has ended.
    """

    def sized(nodes: int, excess: str, after: dict[str, Any]) -> dict[str, Any]:
        asked = {
            "FleetId": fleet,
            "TargetCapacitySpecification": {"TotalTargetCapacity": nodes},
            "ExcessCapacityTerminationPolicy": excess,
        }
        task = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [AGAIN]}
        return {**task, "ResultPath": None, **after}

    states = {
        "Hold": sized(0, "no-termination", {"Next": "Leave"}),
        "Leave": {"Type": "Wait", "Seconds": LEAVE_S, "Next": "Empty"},
        "Empty": sized(0, "termination", {"Next": "Pause"}),
        "Pause": {"Type": "Wait", "SecondsPath": "$.pause_s", "Next": "Ask"},
        "Ask": sized(nodes, "termination", {"End": True}),
    }
    return {"Comment": "a gpufleet run asks for all of its nodes again", "StartAt": "Hold", "States": states}


def machine_arn(schedule_arn: str) -> str:
    """The state machine's ARN, from that of a schedule in the run's group."""
    schedule, group, _ = schedule_arn.split("/")
    return schedule.replace(":scheduler:", ":states:").replace(":schedule", f":stateMachine:{group}")
