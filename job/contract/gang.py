"""Documents of a run on several nodes: which nodes exist (gang/nodes/<instance>.json, rewritten every few seconds), and
which train together (gang/<number>.json, a generation, written once). A doubtful document counts as missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from gpufleet.job.contract import reading
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.reading import Fields, Integer, Seconds

State = Literal["staging", "ready", "busy", "gone"]
Several = Annotated[int, reading.several]


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """A node's state: "staging" while it downloads, "busy" while it trains or still publishes, "gone" at its end.
    `generation`: the newest that it took part in; `ended`: its trainer's exit code then (codes.TrainerExit; negative
    for a signal), None while it runs.
    """

    instance: str
    address: str
    launched_at: float  # epoch seconds
    state: State = "ready"
    since: float = 0.0  # epoch seconds by its own clock, like the next two
    at: float = 0.0  # when it wrote this
    notice: float | None = None  # when AWS ends it
    generation: int = 0
    ended: Integer | None = None
    said: str = ""  # the reason, if its end is the run's
    stopping: bool = False  # this node leads, and tells its ranks to save and end
    rung: int = 0  # the rung of the ladder to begin at
    saved: Integer = -1  # the newest step whose checkpoint, or part of one, is whole on its disk and ready to publish
    named_by: str = ""  # Commit.named_by of that checkpoint, if this node leads
    own_s: Seconds = 0.0  # the usual time of a step before it needs the others; 0: not known
    look_s: Seconds = 0.0  # the shortest of its last looks at the others
    first_in: int = 0  # the newest generation in which this node had rank 0

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Presence:
        """Reads the JSON object. Raises DoubtError."""
        fields = Fields(tree)
        return reading.filled(cls, fields, state=fields.need("state", reading.choice(*get_args(State))))


@dataclass(frozen=True, kw_only=True, slots=True)
class GangGeneration:
    """Nodes that train together, by rank: the first one leads. All begin from the checkpoint of `step` that the
    generation `source` published (0: in the step's own folder), or from nothing if `step` is -1. `tries`: how often the
    same nodes have failed there. With `is_last` it was once too often, so its members leave instead.
    """

    number: Several
    members: tuple[str, ...]
    addresses: tuple[str, ...]
    step: Integer = -1
    source: int = 0
    rung: int = 0
    tries: int = 0
    is_last: bool = False

    @property
    def origin(self) -> CheckpointPlace | None:
        """The place of the checkpoint that they begin from; None to begin from nothing."""
        return None if self.step < 0 else CheckpointPlace(self.step, self.source)

    @property
    def leader(self) -> str:
        """The instance that publishes, and decides when training stops."""
        return self.members[0]

    def to_json(self) -> dict[str, Any]:
        """The JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> GangGeneration:
        """Reads the JSON object. Raises DoubtError."""
        found = reading.filled(cls, Fields(tree))
        if not found.members or len(found.members) != len(found.addresses):
            members, addresses = reading.show(found.members), reading.show(found.addresses)
            raise reading.DoubtError(f"members {members} have addresses {addresses}")
        return found
