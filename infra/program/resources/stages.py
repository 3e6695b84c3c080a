"""Begins a later stage of a run: a state machine sets the size of the stage's fleet, which was declared as 0, to one
node.

The last node of the stage before starts the machine. A node itself may not change a fleet (identity.py), and the
machine's only step is written here. So all that a compromised node can do with it is to begin a stage that the run
would begin anyway.
"""

from __future__ import annotations

from typing import Any

from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The only step: it sets the fleet's size. The step changes nothing if the fleet already has this size, or no
    longer exists.
    """
    asked = {"FleetId": fleet, "TargetCapacitySpecification": {"TotalTargetCapacity": nodes}}
    task = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [AGAIN], "End": True}
    return {"Comment": "a stage of a gpufleet run begins", "StartAt": "Begin", "States": {"Begin": task}}
