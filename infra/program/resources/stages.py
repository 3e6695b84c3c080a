"""Begins a later stage of a run: a state machine that sets the stage's fleet, declared with a size of 0, to one node.

The last node of the stage before starts it. A node may not change a fleet itself (identity.py), and the machine's one
step is written here. So a compromised node can only begin a stage that the run would have begun anyway.
"""

from __future__ import annotations

from typing import Any

from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The one step: it sets the fleet's size. It changes nothing for a fleet that has this size already, or that does
    not exist any more.
    """
    asked = {"FleetId": fleet, "TargetCapacitySpecification": {"TotalTargetCapacity": nodes}}
    task = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [AGAIN], "End": True}
    return {"Comment": "a stage of a gpufleet run begins", "StartAt": "Begin", "States": {"Begin": task}}
