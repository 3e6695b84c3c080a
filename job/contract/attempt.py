"""What a node says of itself: attempts/<instance>.json, once at boot and whenever something changes, and a line of
heartbeat/<instance>.jsonl now and then.

The node script writes a record first, the supervisor adds to it. Another node reads both: whoever may write to the
bucket may have written them, so what cannot be is set aside, said, and taken for missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

from job.contract import environment, reading
from job.contract.reading import DoubtError, Fields, epoch

Aside = Callable[[str], None]  # is told what is set aside


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The machine of this attempt, as the node script names it."""

    instance: str
    type: str
    zone: str
    launched_at: float

    @classmethod
    def of(cls, given: Mapping[str, str], now: float) -> Node:
        """From the container's environment; outside one, a node called `local` that starts now."""
        launched = epoch(given.get(environment.LAUNCHED_AT, ""))
        return cls(
            instance=given.get(environment.INSTANCE_ID, "local"),
            type=given.get(environment.INSTANCE_TYPE, "local"),
            zone=given.get(environment.ZONE, ""),
            launched_at=now if launched is None else launched,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A heartbeat: where training is, and what the attempt and its run have cost by then. None: not known then."""

    ts: str = ""  # UTC, ISO
    step: int = 0
    phase: str | None = None
    loss: float | None = None
    tok_s: float | None = None
    step_s: float | None = None
    spent_usd: Decimal | None = None  # of the run
    attempt_usd: Decimal | None = None
    attempt_s: Decimal = Decimal(0)  # as billed
    lived_s: Decimal | None = None
    compute_usd: Decimal | None = None
    usd_per_hour: Decimal | None = None  # compute
    ceiling_s: Decimal | None = None  # counted at the ceiling of a spot price

    def to_json(self) -> dict[str, Any]:
        """Amounts as decimal strings."""
        return {key: str(value) if isinstance(value, Decimal) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Beat:
        """Raises DoubtError."""
        fields = Fields(tree)
        return cls(
            ts=fields.take("ts", reading.text, ""),
            step=fields.take("step", reading.step, 0),
            phase=fields.take("phase", reading.text, None),
            loss=fields.take("loss", reading.number, None),
            tok_s=fields.take("tok_s", reading.number, None),
            step_s=fields.take("step_s", reading.seconds, None),
            spent_usd=fields.take("spent_usd", reading.unsigned, None),
            attempt_usd=fields.take("attempt_usd", reading.unsigned, None),
            attempt_s=fields.take("attempt_s", reading.unsigned, Decimal(0)),
            lived_s=fields.take("lived_s", reading.unsigned, None),
            compute_usd=fields.take("compute_usd", reading.unsigned, None),
            usd_per_hour=fields.take("usd_per_hour", reading.unsigned, None),
            ceiling_s=fields.take("ceiling_s", reading.unsigned, None),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """attempts/<instance>.json, as far as others need it."""

    type: str = ""
    zone: str = ""
    launched_at: float = 0.0  # epoch seconds; 0: unknown
    booted_at: str = ""
    started_s: Decimal | None = None  # from launch to the trainer's first step
    resumed_step: int = 0
    rung: int | None = None
    floor: int = 0
    exit: dict[str, Any] | None = None  # code, reason, notice, at; ends_at where AWS said when
    reclaimed: dict[str, bool] = field(default_factory=dict)  # what is known of earlier nodes, by instance

    @classmethod
    def from_json(cls, tree: dict[str, Any], aside: Aside) -> Record:
        fields = Fields(tree, aside=aside)
        booted_at = fields.take("booted_at", reading.text, "")
        launched = fields.take("launched_at", reading.moment, None)
        return cls(
            type=fields.take("type", reading.text, ""),
            zone=fields.take("zone", reading.text, ""),
            launched_at=launched or epoch(booted_at) or 0.0,
            booted_at=booted_at,
            started_s=fields.take("started_s", reading.unsigned, None),
            resumed_step=fields.take("resumed_step", reading.step, 0),
            rung=fields.take("rung", reading.whole, None),
            floor=fields.take("floor", reading.whole, 0),
            exit=_exit(fields),
            reclaimed=fields.take("reclaimed", reading.mapping(reading.flag), {}),
        )


def last_beat(lines: bytes | None, aside: Aside) -> Beat | None:
    """The newest heartbeat of a file that can be believed; None without one."""
    for line in reversed((lines or b"").splitlines()):
        try:
            return Beat.from_json(reading.parse(line))
        except DoubtError as error:
            aside(f"a line: {error}")
    return None


def record(content: bytes | None, aside: Aside) -> Record:
    """What a node's record says; one that says nothing where there is none to be believed."""
    try:
        tree = {} if content is None else reading.parse(content)
    except DoubtError as error:
        aside(str(error))
        tree = {}
    return Record.from_json(tree, aside)


def _exit(fields: Fields) -> dict[str, Any] | None:
    if not (tree := fields.take("exit", reading.mapping(reading.anything), None)):
        return None
    exit_ = fields.section("exit")
    found = {
        "code": exit_.take("code", reading.whole, 1),
        "reason": exit_.take("reason", reading.text, "no reason given"),
        "notice": exit_.take("notice", reading.flag, False),
        "at": exit_.take("at", reading.text, None),
    }
    return found | {"ends_at": exit_.take("ends_at", reading.text, None)} if "ends_at" in tree else found
