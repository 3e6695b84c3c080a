"""Of a run on several nodes, in its bucket: who is there (gang/nodes/<instance>.json, written anew every few seconds),
and who trains together (gang/<number>.json, a generation, written once). What is doubtful counts as not there.
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
    """What a node says of itself: "staging" while it fetches what it needs, "busy" while it trains or still publishes,
    "gone" last of all. `generation`: the newest that it took part in; `ended`: how its trainer ended then
    (codes.TrainerExit; negative for a signal), None while it runs.
    """

    instance: str
    address: str
    launched_at: float  # epoch seconds
    state: State = "ready"
    since: float = 0.0  # epoch seconds by its own clock, as these two
    at: float = 0.0  # when it said all this
    notice: float | None = None  # when AWS ends it
    generation: int = 0
    ended: Integer | None = None
    said: str = ""  # why, where its end is the run's
    stopping: bool = False  # this node leads, and its ranks are to save and end
    rung: int = 0  # the rung of the ladder to begin at
    saved: Integer = -1  # the newest step whose checkpoint, or part of one, is whole on its disk and to be published
    named_by: str = ""  # of that one, where this node leads: commit.Commit.named_by
    own_s: Seconds = 0.0  # the usual time of a step before it needs the other nodes; 0: not known
    look_s: Seconds = 0.0  # the least time that one of its last looks at the others took
    first_in: int = 0  # the newest generation in which rank 0 was seen among this node's

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
    """Nodes that train together, in the order of their ranks: the first one leads. All of them begin from the
    checkpoint of `step` that the generation `source` published (0: the step's own folder has it), or from nothing where
    `step` is -1. `tries`: how often the same ones have begun there to no avail. `is_last`: once too often; its members
    leave instead.
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
        """Where the checkpoint lies that they begin from; None: they begin anew."""
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
