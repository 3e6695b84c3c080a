"""done.json: the run is over, and why. Written last of all, by the supervisor, or by the node where no job could.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 1

# Reasons. The supervisor's:
FINISHED = "finished"
FAILED = "failed"  # for good
MAX_USD, MAX_HOURS, DEADLINE = "max_usd", "max_hours", "deadline"  # limits of the run
EXPIRY = "expiry"  # of the fleet: AWS ends the node then, with or without a notice
STOPPED = "stopped"  # by hand
# The node's, where no job could say so:
BOOT_LOOP = "boot-loop"  # boots in a row without progress
TIMER = "timer"  # the node's own, whatever job and supervisor do
# Concluded by commands where nobody wrote done.json:
FLEET_GONE = "fleet-gone"  # nothing launches a node any more

FAILURES = (FAILED, BOOT_LOOP)
NODE_ENDED = (BOOT_LOOP, TIMER)
EARLY = (MAX_USD, MAX_HOURS, DEADLINE, EXPIRY, STOPPED, FLEET_GONE)  # ends before the plan's that are no failure
GRADED = (FINISHED, MAX_USD, MAX_HOURS)  # ends that the bill's p10 and p90 speak of


@dataclass(frozen=True)
class Done:
    """How the run ended. `instance`: the node that said so; `at`: UTC, ISO."""

    reason: str
    detail: str
    instance: str
    at: str

    def to_json(self) -> dict[str, Any]:
        """The object of done.json."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Done:
        """What cannot be believed is empty: that the object is there says enough."""
        keys = ("reason", "detail", "instance", "at")
        return cls(*(tree[key] if isinstance(tree.get(key), str) else "" for key in keys))
