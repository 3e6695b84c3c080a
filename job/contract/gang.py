"""Documents of a run on several nodes: which nodes exist (gang/nodes/<instance>.json, written again every few seconds),
and which nodes train together (gang/<number>.json, a generation, written once). An invalid document is treated as
missing.
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
    `generation`: the newest generation in which the node took part; `ended`: the exit code of its trainer in that
    generation (codes.TrainerExit; negative for a signal); None while the trainer runs.
    """

    instance: str
    address: str
    launched_at: float  # epoch seconds
    state: State = "ready"
    # the time since which the node is in this state, in epoch seconds by its own clock, as are the next two times
    since: float = 0.0
    at: float = 0.0  # the time at which the node wrote this state
    notice: float | None = None  # the time at which AWS ends the node
    generation: int = 0
    ended: Integer | None = None
    said: str = ""  # the reason of the run's end, if the run ends with this node
    stopping: bool = False  # whether this node leads, and is asking its ranks to save and end
    rung: int = 0  # the rung of the ladder to begin at
    # the newest step whose checkpoint, or part of it, is complete on the node's disk and will be published
    saved: Integer = -1
    named_by: str = ""  # Commit.named_by of that checkpoint, if this node leads
    own_s: Seconds = 0.0  # the seconds for which a step usually works before it needs the other nodes; 0 if unknown
    look_s: Seconds = 0.0  # seconds of the shortest of the node's last looks at the other nodes
    first_in: int = 0  # the newest generation in which this node had rank 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Presence:
        """Reads the JSON object. Raises DoubtError."""
        fields = Fields(tree)
        return reading.filled(cls, fields, state=fields.need("state", reading.choice(*get_args(State))))


@dataclass(frozen=True, kw_only=True, slots=True)
class GangGeneration:
    """A generation: the nodes that train together, by rank. The first node is the leader. All nodes begin from the
    checkpoint of `step` that the generation `source` published (0 stands for the step's own folder), or without a
    checkpoint if `step` is -1. `tries`: how often the same nodes have failed at this step. `is_last`: whether they have
    failed too often, so that the members end instead of training.
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
        """The place of the checkpoint from which the nodes begin; None if they begin without a checkpoint."""
        return None if self.step < 0 else CheckpointPlace(self.step, self.source)

    @property
    def leader(self) -> str:
        """The instance that publishes checkpoints and decides when training stops."""
        return self.members[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> GangGeneration:
        """Reads the JSON object. Raises DoubtError."""
        generation = reading.filled(cls, Fields(tree))
        if not generation.members or len(generation.members) != len(generation.addresses):
            members, addresses = reading.show(generation.members), reading.show(generation.addresses)
            raise reading.DoubtError(f"members {members} have addresses {addresses}")
        return generation
