"""Begins a later stage of a run: a state machine that sets the stage's fleet, declared with a size of 0, to one node.

The last node of the stage before starts it. A node may not change a fleet itself (identity.py), and the machine's one
step is written here, so a stolen node can only begin what the run was going to do, and no more of it.
"""

from __future__ import annotations

from typing import Any

from gpufleet.infra.program.resources.machine import AGAIN, MODIFY_FLEET


def steps(fleet: str, nodes: int) -> dict[str, Any]:
    """The one step: the fleet gets its size. A fleet that has it stays as it is, and one that is gone too."""
    asked = {"FleetId": fleet, "TargetCapacitySpecification": {"TotalTargetCapacity": nodes}}
    task = {"Type": "Task", "Resource": MODIFY_FLEET, "Parameters": asked, "Retry": [AGAIN], "End": True}
    return {"Comment": "a stage of a gpufleet run begins", "StartAt": "Begin", "States": {"Begin": task}}
