"""Of a run on several nodes, in its bucket: who is there (gang/nodes/<instance>.json, written anew every few seconds),
and who trains together (gang/<number>.json, a generation, written once). What is doubtful counts as not there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gpufleet.job.contract import reading
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.reading import Fields

State = Literal["staging", "ready", "busy", "gone"]


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
    ended: int | None = None
    said: str = ""  # why, where its end is the run's
    stopping: bool = False  # it leads, and its ranks are to save and end
    rung: int = 0  # of the ladder, to begin at
    saved: int = -1  # the newest step whose checkpoint, or part of one, is whole on its disk and to be published
    named_by: str = ""  # of that one, where this node leads: commit.Commit.named_by
    own_s: float = 0.0  # of its last steps, the usual time before they need the other nodes; 0: not known
    look_s: float = 0.0  # that each of its last looks at the others took at least
    first_in: int = 0  # the newest generation in which rank 0 was seen among this node's

    def to_json(self) -> dict[str, Any]:
        """The object."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Presence:
        """Raises DoubtError."""
        fields = Fields(tree)
        return cls(
            instance=fields.need("instance", reading.text),
            address=fields.need("address", reading.text),
            launched_at=fields.need("launched_at", reading.number),
            state=fields.need("state", reading.choice(*get_args(State))),
            since=fields.take("since", reading.number, 0.0),
            at=fields.take("at", reading.number, 0.0),
            notice=fields.take("notice", reading.number, None),
            generation=fields.take("generation", reading.whole_number, 0),
            ended=fields.take("ended", _code, None),
            said=fields.take("said", reading.text, ""),
            stopping=fields.take("stopping", reading.flag, False),
            rung=fields.take("rung", reading.whole_number, 0),
            saved=int(fields.take("saved", reading.number, -1)),
            named_by=fields.take("named_by", reading.text, ""),
            own_s=fields.take("own_s", reading.seconds, 0.0),
            look_s=fields.take("look_s", reading.seconds, 0.0),
            first_in=fields.take("first_in", reading.whole_number, 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GangGeneration:
    """Nodes that train together, in the order of their ranks: the first one leads. All of them begin from the
    checkpoint of `step` that the generation `source` published (0: the step's own folder has it), or from nothing where
    `step` is -1. `tries`: how often the same ones have begun there to no avail. `is_last`: once too often; its members
    leave instead.
    """

    number: int
    members: tuple[str, ...]
    addresses: tuple[str, ...]
    step: int = -1
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
        """The object."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> GangGeneration:
        """Raises DoubtError."""
        fields = Fields(tree)
        members = fields.need("members", reading.listed(reading.text))
        addresses = fields.need("addresses", reading.listed(reading.text))
        if not members or len(members) != len(addresses):
            raise reading.DoubtError(f"members {reading.show(members)} have addresses {reading.show(addresses)}")
        return cls(
            number=fields.need("number", reading.several),
            members=members,
            addresses=addresses,
            step=int(fields.take("step", reading.number, -1)),
            source=fields.take("source", reading.whole_number, 0),
            rung=fields.take("rung", reading.whole_number, 0),
            tries=fields.take("tries", reading.whole_number, 0),
            is_last=fields.take("is_last", reading.flag, False),
        )


def _code(value: Any) -> int:
    return int(reading.number(value))
