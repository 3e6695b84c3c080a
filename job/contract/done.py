"""done.json says that the run is over, and why. The supervisor writes this document last; the node writes it if no job
could. Before that, `gpufleet stop` may write stop.json, which asks the run to end.

The node's own Python reads this file: nothing newer than 3.9 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpufleet.job import atomic

SCHEMA = 1

# Reasons. From the supervisor:
FINISHED = "finished"
FAILED = "failed"  # for good
MAX_USD, MAX_HOURS, DEADLINE = "max_usd", "max_hours", "deadline"  # the run's limits
EXPIRY = "expiry"  # the expiry of the fleet: AWS then ends the node, with or without a notice
STOPPED = "stopped"  # by hand
# Reasons that the node writes, if the job could not write done.json:
BOOT_LOOP = "boot-loop"  # boots in a row without progress
TIMER = "timer"  # the node's own timer, whatever job and supervisor do
# Concluded by commands if nobody wrote done.json:
FLEET_GONE = "fleet-gone"  # no fleet launches a node any more

FAILURES = (FAILED, BOOT_LOOP)
NODE_ENDED = (BOOT_LOOP, TIMER)
LIMITS = (MAX_USD, MAX_HOURS, DEADLINE, EXPIRY)
EARLY = (*LIMITS, STOPPED, FLEET_GONE)  # reasons for an end before the planned one that are no failure
# Reasons after which the next stage may begin on the same node: the fleet lives on, and nothing hangs on the node.
LEAVES_NODE = (FINISHED, FAILED, STOPPED, MAX_USD, MAX_HOURS, BOOT_LOOP)
GRADED = (FINISHED, MAX_USD, MAX_HOURS)  # reasons for an end to which the bill's p10 and p90 apply


@dataclass(frozen=True)
class Done:
    """How the run ended. `instance`: the node that wrote it; `at`: UTC, ISO."""

    reason: str
    detail: str
    instance: str
    at: str

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Done:
        """The document. A field that cannot be read is empty, because a run whose object exists is over in any case."""
        return cls(*_texts(tree, "reason", "detail", "instance", "at"))


@dataclass(frozen=True)
class Asked:
    """Who asked the run to end, and when (UTC, ISO)."""

    by: str
    at: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(content: bytes | None) -> Done | None:
    """The content of done.json; None if the file is missing, or not (yet) JSON."""
    tree = atomic.parse_object(content)
    return None if tree is None else Done.from_json(tree)


def read_asked(content: bytes | None) -> Asked | None:
    """stop.json of the bucket; None as in `read`."""
    tree = atomic.parse_object(content)
    return None if tree is None else Asked(*_texts(tree, "by", "at"))


def _texts(tree: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(tree[key] if isinstance(tree.get(key), str) else "" for key in keys)
