"""Begins a later stage of a run: a state machine that sets the stage's fleet, declared with a size of 0, to one node.

The last node of the stage before starts it. A node may not change a fleet itself (identity.py), and the machine's one
step is written here, so a stolen node can only begin what the run was going to do, and no more of it.
"""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET, state_machine
from gpufleet.infra.program.resources.stop import FleetStop


class StageStart(pulumi.ComponentResource):
    """The state machine and its role. It has the name of the run's schedule group and the stage, which nodes know."""

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
        super().__init__("gpufleet:infra:StageStart", name, None, opts)
        part = f"-{definition.stage}"
        self.machine = state_machine(
            name,
            definition,
            role=f"gpufleet-{definition.name}{part}",
            does="begins a stage of a gpufleet run",
            named=stop.group.name.apply(lambda group: f"{group}{part}"),
            stop=stop,
            fleet=fleet,
            steps=fleet.id.apply(lambda each: json.dumps(steps(each, definition.nodes))),
            permissions_boundary=permissions_boundary,
            parent=self,
            part=part,
        )
        self.register_outputs({})


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The one step: the fleet gets its size. A fleet that has it stays as it is, and one that is gone too."""
    asked = {"FleetId": fleet, "TargetCapacitySpecification": {"TotalTargetCapacity": nodes}}
    task = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [AGAIN], "End": True}
    return {"Comment": "a stage of a gpufleet run begins", "StartAt": "Begin", "States": {"Begin": task}}
