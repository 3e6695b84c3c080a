"""A node's reports: attempts/<instance>.json, written at boot and after each change, and lines of
heartbeat/<instance>.jsonl.

The node first writes a record, and the supervisor adds to it. Other nodes read records and heartbeats. Anybody with
access to the bucket may have written them, so impossible values are reported and treated as missing. The node's own
Python reads this file, so it must work with Python 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from decimal import Decimal
from typing import Annotated, Any

from gpufleet.job.contract import environment, reading
from gpufleet.job.contract.reading import DoubtError, Fields, Moment, Seconds, Step, epoch, iso

SUPERSEDED = "fallback"  # reason of the exit of a spot node whose run continues on demand
SLOW = "slow"  # the end of a node for which others wait so long that a replacement is cheaper
UNREAD = ("attempt", "supervised_at", "ranks", "machine", "compiled")  # fields that no other node reads
Aside = Callable[[str], None]  # is called with a sentence about each value that is treated as missing


def _time(value: Any) -> str:
    reading.moment(value)
    return str(value)


def _key(value: Any) -> str | None:
    return reading.text(value) or None


Time = Annotated[str, _time]  # a time in UTC, in ISO format
Market = Annotated[str, reading.choice("spot", "on-demand")]
Key = Annotated[str, _key]  # a key of the bucket


@dataclass(frozen=True)
class Node:
    """This attempt's machine, as the node script describes it."""

    instance: str
    type: str
    zone: str
    launched_at: float
    pulled_s: str = ""  # seconds that the node took to pull its images; empty if unknown
    address: str = ""  # the address at which the run's other nodes reach this node; empty if there are none
    capacity: str = ""  # spot or on-demand; empty if it is the run's
    # For a stage on the node of the stage before it: when that one ended, in epoch seconds. The node counts as launched
    # then, if it trained before; `older_s` is then how long it had run.
    since: float = 0.0
    older_s: Decimal = Decimal(0)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str], now: float) -> Node:
        """The node in the container's environment; if there is none, a node called `local` that starts now."""
        launched = epoch(variables.get(environment.LAUNCHED_AT, ""))
        return cls(
            instance=variables.get(environment.INSTANCE_ID, "local"),
            type=variables.get(environment.INSTANCE_TYPE, "local"),
            zone=variables.get(environment.ZONE, ""),
            launched_at=now if launched is None else launched,
            pulled_s=variables.get(environment.PULLED_S, ""),
            address=variables.get(environment.ADDRESS, ""),
            capacity=variables.get(environment.CAPACITY, ""),
            since=epoch(variables.get(environment.SINCE, "")) or 0.0,
            older_s=Decimal(variables.get(environment.OLDER_S, "0")),
        )


@dataclass(frozen=True)
class Beat:
    """A heartbeat: the training's position, and the cost of attempt and run by then. A field is None if it was unknown
    at that time.
    """

    ts: str = ""  # in UTC, in ISO format
    step: Step = 0
    phase: str | None = None
    loss: float | None = None
    tok_s: float | None = None
    step_s: Seconds | None = None
    spent_usd: Decimal | None = None  # the run's cost so far
    attempt_usd: Decimal | None = None
    attempt_s: Decimal = Decimal(0)  # billed seconds
    lived_s: Decimal | None = None
    compute_usd: Decimal | None = None
    usd_per_hour: Decimal | None = None  # the price of compute
    ceiling_s: Decimal | None = None  # seconds billed at the highest possible spot price
    gpu_util: float | None = None  # percent, of the least busy GPU
    gpu_mem_gb: float | None = None  # memory used on the fullest GPU
    gpu_temp_c: float | None = None  # temperature of the hottest GPU
    xids: tuple[int, ...] = ()  # the driver's errors on this node

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with amounts as decimal strings."""
        return {key: str(value) if isinstance(value, Decimal) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Beat:
        """Reads the JSON object. Raises DoubtError."""
        return reading.filled(cls, Fields(tree))


@dataclass(frozen=True)
class Exit:
    """How an attempt ended."""

    code: int
    reason: str
    notice: bool = False  # whether AWS gave notice
    at: str | None = None  # in UTC, in ISO format
    ends_at: str | None = None  # the time of the end in AWS's notice

    def to_json(self) -> dict[str, Any]:
        tree = asdict(self)
        return tree if self.ends_at is not None else {key: tree[key] for key in tree if key != "ends_at"}

    @classmethod
    def from_fields(cls, fields: Fields) -> Exit | None:
        """The `exit` of a document, or None."""
        if not fields.take("exit", reading.mapping(reading.anything), None):
            return None
        section = fields.section("exit")
        return cls(
            code=section.take("code", reading.whole_number, 1),
            reason=section.take("reason", reading.text, "no reason given"),
            notice=section.take("notice", reading.flag, False),
            at=section.take("at", reading.text, None),
            ends_at=section.take("ends_at", reading.text, None),
        )


@dataclass(frozen=True)
class Hardware:
    """The hardware and software that the supervisor finds on its node. None means that something is unknown or
    absent.
    """

    gpu: str | None = None
    gpu_count: int = 0
    gpu_memory_gb: float | None = None  # memory of the smallest GPU
    driver: str | None = None
    cpus: int | None = None
    python: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of packages


@dataclass(frozen=True)
class AttemptRecord:
    """attempts/<instance>.json. A field that is not known (yet) is None or empty, and is not written."""

    # Fields that the node writes.
    instance: str = ""
    type: str = ""
    zone: str = ""
    capacity: Market = ""  # empty if it is the market of the run
    launched_at: Time = ""
    booted_at: str = ""
    older_s: Decimal | None = None  # seconds from the machine's launch to `launched_at`; None if they are the same
    stayed: bool = False  # whether the machine went on for the next stage
    manifest_at_boot: Key | None = None  # key of the newest manifest at boot
    # When other nodes ended, in epoch seconds, kept because AWS forgets it. For a node without a record the launch is
    # kept too.
    ended: Mapping[str, Moment] = field(default_factory=dict)
    untold: Mapping[str, Moment] = field(default_factory=dict)
    # Fields that the supervisor writes.
    attempt: int | None = None  # the attempt's number in the run, from 1
    supervised_at: str = ""
    pulled_s: Decimal | None = None  # seconds for pulling the images
    ranks: int | None = None  # training processes
    machine: Hardware | None = None
    resumed_step: Step | None = None
    started_s: Decimal | None = None  # seconds from launch to the trainer's first step
    rung: int | None = None
    floor: int | None = None  # the rung at which a node has to begin, because memory ran out on the rung above
    results: bool = False  # whether a phase after training has left results
    reclaimed: Mapping[str, bool] = field(default_factory=dict)  # whether AWS took each earlier node, by instance
    preflight: Mapping[str, Any] | None = None  # the fields of messages.Preflight
    compiled: Mapping[str, Any] | None = None  # the compilation, by phase
    alarm: str = ""  # the text of the newest messages.Alarm
    # A field that the node or the supervisor writes, whichever ends first.
    exit: Exit | None = None

    @property
    def launched(self) -> float:
        """Epoch seconds of the launch; 0 if unknown."""
        return epoch(self.launched_at) or epoch(self.booted_at) or 0.0

    def to_json(self) -> dict[str, Any]:
        tree = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "machine"}
        tree |= {name: float(tree[name]) for name in ("started_s", "pulled_s", "older_s") if tree[name] is not None}
        for key in ("ended", "untold"):
            tree[key] = {name: iso(at) for name, at in tree[key].items()}
        tree["exit"] = self.exit and self.exit.to_json()
        entries = {
            key: value
            for key, value in tree.items()
            if value is not None and value is not False and value not in ("", {})
        }
        if self.booted_at:
            entries["manifest_at_boot"] = self.manifest_at_boot  # null means that there was no heartbeat
        return {**entries, **(asdict(self.machine) if self.machine else {})}

    @classmethod
    def from_json(cls, tree: dict[str, Any], aside: Aside) -> AttemptRecord:
        """The record, as far as other processes need it; doubtful values are left out and reported to `aside`."""
        fields = Fields(tree, aside=aside)
        return reading.filled(cls, fields, UNREAD, exit=Exit.from_fields(fields))


def last_beat(lines: bytes | None, aside: Aside) -> Beat | None:
    """The newest valid heartbeat in a file; None if there is none."""
    for line in reversed((lines or b"").splitlines()):
        try:
            return Beat.from_json(reading.parse(line))
        except DoubtError as error:
            aside(f"a line: {error}")
    return None


def record(content: bytes | None, aside: Aside) -> AttemptRecord:
    """A node's record; an empty record if there is no valid one."""
    try:
        tree = {} if content is None else reading.parse(content)
    except DoubtError as error:
        aside(str(error))
        tree = {}
    return AttemptRecord.from_json(tree, aside)
