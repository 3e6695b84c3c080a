"""done.json: the run is over, and why. Written last of all, by the supervisor, or by the node where no job could.
Before that, stop.json of the bucket: `gpufleet stop` asks the run to end.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpufleet.job import atomic

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
        return cls(*_texts(tree, "reason", "detail", "instance", "at"))


@dataclass(frozen=True)
class Asked:
    """Who asked the run to end, and when (UTC, ISO)."""

    by: str
    at: str

    def to_json(self) -> dict[str, Any]:
        """The object of stop.json in the bucket."""
        return asdict(self)


def read(content: bytes | None) -> Done | None:
    """done.json; None where there is none, or what is there is not (yet) JSON."""
    tree = atomic.parse_object(content)
    return None if tree is None else Done.from_json(tree)


def read_asked(content: bytes | None) -> Asked | None:
    """stop.json of the bucket; None as in `read`."""
    tree = atomic.parse_object(content)
    return None if tree is None else Asked(*_texts(tree, "by", "at"))


def _texts(tree: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(tree[key] if isinstance(tree.get(key), str) else "" for key in keys)
