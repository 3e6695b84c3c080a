"""done.json says that the run is over, and why. The supervisor writes this document last; if no job could write it, the
node does. Before that, `gpufleet stop` may write stop.json, which asks the run to end. The node's own Python reads this
file, so it must work with Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpufleet.job import atomic

SCHEMA = 1

# Reasons that the supervisor writes:
FINISHED = "finished"
FAILED = "failed"  # the run cannot succeed on any node
MAX_USD, MAX_HOURS, DEADLINE = "max_usd", "max_hours", "deadline"  # the run's limits
EXPIRY = "expiry"  # the expiry of the fleet: AWS then ends the node, with or without a notice
STOPPED = "stopped"  # a person has stopped the run
# Reasons that the node writes, if the job could not write done.json:
BOOT_LOOP = "boot-loop"  # several boots in a row made no progress
TIMER = "timer"  # the node's own timer has ended the node, whatever job and supervisor did
# A reason that commands conclude if nobody wrote done.json:
FLEET_GONE = "fleet-gone"  # there is no fleet any more that launches nodes

FAILURES = (FAILED, BOOT_LOOP)
NODE_ENDED = (BOOT_LOOP, TIMER)
LIMITS = (MAX_USD, MAX_HOURS, DEADLINE, EXPIRY)
EARLY = (*LIMITS, STOPPED, FLEET_GONE)  # reasons for an end before the planned one that are no failure
# Reasons after which the next stage may begin on the same node: the fleet lives on, and nothing hangs on the node.
LEAVES_NODE = (FINISHED, FAILED, STOPPED, MAX_USD, MAX_HOURS, BOOT_LOOP)
GRADED = (FINISHED, MAX_USD, MAX_HOURS)  # reasons for an end to which the bill's p10 and p90 apply


@dataclass(frozen=True)
class Done:
    """How the run ended. `instance`: the node that wrote the document. `at`: the time in UTC, in ISO format."""

    reason: str
    detail: str
    instance: str
    at: str

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Done:
        """The document. A field that cannot be read is empty, because the run is over whenever its done.json exists."""
        return cls(*_texts(tree, "reason", "detail", "instance", "at"))


@dataclass(frozen=True)
class Asked:
    """Who asked the run to end, and when (in UTC, in ISO format)."""

    by: str
    at: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(content: bytes | None) -> Done | None:
    """The content of done.json; None if the file is missing, or is not JSON (yet)."""
    tree = atomic.parse_object(content)
    return None if tree is None else Done.from_json(tree)


def read_asked(content: bytes | None) -> Asked | None:
    """The content of stop.json in the bucket; None as in `read`."""
    tree = atomic.parse_object(content)
    return None if tree is None else Asked(*_texts(tree, "by", "at"))


def _texts(tree: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple(tree[key] if isinstance(tree.get(key), str) else "" for key in keys)
