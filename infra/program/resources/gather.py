"""Asks AWS again for all nodes of a run, after the nodes that waited for missing ones have ended.

A node may end its fleet but not change the fleet's size (identity.py), and during the pause there is no node. So a
state machine changes the size; its steps are written here. A node starts the state machine and sets the length of the
pause.
"""

from __future__ import annotations

from typing import Any

from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET

LEAVE_S = 300  # seconds in which nodes can upload and end by themselves, before AWS ends those that remain


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The steps. First, the fleet stops replacing nodes. Second, the remaining nodes are ended. Third, after the pause
    that a node has set, all nodes are requested from AWS. If the fleet no longer exists by then, the run has ended.
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
    """The state machine's ARN, from the ARN of a schedule in the run's group."""
    schedule, group, _ = schedule_arn.split("/")
    return schedule.replace(":scheduler:", ":states:").replace(":schedule", f":stateMachine:{group}")
