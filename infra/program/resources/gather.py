"""Asks AWS for all of several nodes again, after the nodes that waited for the missing ones have ended.

A node may end its fleet but not change its size (identity.py), and during the pause there is no node. So a state
machine changes the size, in steps that are written here; a node starts the machine and sets the length of the pause.
"""

from __future__ import annotations

from typing import Any

from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET

LEAVE_S = 300  # seconds for the nodes to upload and end, before AWS ends the remaining ones


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The steps: no node is replaced any more; remaining nodes are ended; after the pause that a node has set, AWS is
    asked for all nodes. If the fleet is gone by then, the run has ended.
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
