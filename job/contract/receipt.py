"""receipt.json: a run's cost next to its bill, line by line and node by node, and why the two differ.

The supervisor writes this document just before done.json; if it could not, `gpufleet results` writes it. Commands,
later bills and rehearsals read it. Amounts are written to a hundredth of a cent, seconds to a thousandth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from gpufleet.job.contract import reading
from gpufleet.job.contract.attempt import Exit
from gpufleet.job.contract.goal import Grade
from gpufleet.job.contract.reading import Amount, Fields, Step
from gpufleet.job.contract.spent import CENT_100
from gpufleet.job.text import printable

SCHEMA = 1
# causes of a difference; job/supervisor/receipt.py explains each of them
CAUSES = ("price", "runtime", "interruptions", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptLine:
    """One line of the bill in USD, estimated and actual."""

    name: str
    estimate: Amount
    actual: Amount
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "estimate": money(self.estimate),
            "actual": money(self.actual),
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptCost:
    """One node's share of the run's cost."""

    instance: str
    type: str
    zone: str
    capacity: str = ""  # spot or on-demand; empty if it is the market of the run
    seconds: Decimal  # billed seconds
    lived_s: Decimal
    started_s: Decimal | None = None  # seconds from launch to the trainer's first step; None if there was no step
    pulled_s: Decimal | None = None  # the part of `started_s` for pulling images; None if unknown
    older_s: Decimal | None = None  # seconds for which it had run for earlier stages; `started_s` is then no launch's
    interrupted: bool = False
    # Whether AWS, and not the owner, ended the node; None if there was no notice, or if it is unknown.
    reclaimed: bool | None = None
    usd: Decimal = Decimal(0)
    ceiling_s: Decimal = Decimal(0)  # seconds billed at the highest possible spot price, because AWS gave no price
    free_usd: Decimal = Decimal(0)  # USD of compute that AWS does not charge
    resumed_step: Step = 0
    last_step: Step = 0
    rung: int | None = None
    exit: Exit | None = None  # None if the node ended without notice
    alarm: str = ""  # the warning that was sent to people
    network: str = ""  # the speed from this node to the others, and the transport

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "type": self.type,
            "zone": self.zone,
            "seconds": seconds(self.seconds),
            "lived_s": seconds(self.lived_s),
            "started_s": None if self.started_s is None else seconds(self.started_s),
            "interrupted": self.interrupted,
            "reclaimed": self.reclaimed,
            "usd": money(self.usd),
            "ceiling_s": seconds(self.ceiling_s),
            "free_usd": money(self.free_usd),
            "resumed_step": self.resumed_step,
            "last_step": self.last_step,
            "rung": self.rung,
            "exit": self.exit and self.exit.to_json(),
            **({"capacity": self.capacity} if self.capacity else {}),
            **({"alarm": self.alarm} if self.alarm else {}),
            **({"network": self.network} if self.network else {}),
            **({} if self.pulled_s is None else {"pulled_s": seconds(self.pulled_s)}),
            **({"older_s": seconds(self.older_s)} if self.older_s else {}),
        }

    @classmethod
    def from_json(cls, fields: Fields) -> AttemptCost:
        """Reads the JSON object; raises DoubtError. Earlier versions wrote no `lived_s`."""
        lived_s = fields.need("lived_s" if "lived_s" in fields.tree else "seconds", reading.unsigned)
        return reading.filled(cls, fields, lived_s=lived_s, exit=Exit.from_fields(fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One run's cost, compared with its bill. Money is in USD. `causes` has a part for each of CAUSES; the sum of the
    parts is actual - estimate.
    """

    run: str
    stack: str
    owner: str = ""  # empty in receipts of earlier versions
    reason: str  # why the run ended: job/contract/done.py
    detail: str = ""
    at: str  # the time until which costs are included, in UTC, in ISO format
    device: str
    rehearsal: bool = False  # whether the run was on the embedded AWS, so that it says nothing about AWS
    capacity: str
    estimate: Decimal  # the bill's p50
    actual: Decimal
    p10: Decimal
    p90: Decimal
    estimate_h: Decimal = Decimal(0)
    actual_h: Decimal = Decimal(0)
    lines: tuple[ReceiptLine, ...]
    causes: Mapping[str, Decimal]
    free_usd: Decimal = Decimal(0)  # USD of first hours, which AWS does not charge
    expected: float | None = None  # the number of interruptions that the bill expected
    with_notice: int = 0
    without_notice: int = 0
    attempts: tuple[AttemptCost, ...]  # the oldest attempt first
    goals: tuple[Grade, ...] = ()  # the goals of the definition
    measured: Mapping[str, Any] | None = field(default=None, compare=False)  # the run's own speed: job/measured.py

    @property
    def trained_h(self) -> Decimal | None:
        """Node-hours of the optimizer steps, without repeated steps; None if there is no measured speed."""
        try:
            known = self.measured or {}
            ranks, gpus = known["device"]["ranks"] or 1, known["device"]["count"] or 1
            step_ms = sum(phase["steps"] * phase["step_ms"]["median"] for phase in known["phases"])
        except (KeyError, TypeError):  # there is no measurement, or it has another form
            return None
        return Decimal(f"{max(1, ranks // gpus) * step_ms / 3_600_000:.4f}")

    @property
    def difference(self) -> Decimal:
        """Actual cost minus estimate; positive if the run cost more than estimated."""
        return self.actual - self.estimate

    @property
    def error_percent(self) -> Decimal:
        """The difference in percent of the estimate, which must not be 0."""
        return self.difference / self.estimate * 100

    @property
    def within_range(self) -> bool | None:
        """Whether the cost lies in the range that the bill gives for eight runs in ten. None if the range of the bill
        is narrower than a hundredth of a cent. This is so on demand, or if eight runs in ten have no interruption.
        """
        return None if self.p10 == self.p90 else self.p10 <= self.actual <= self.p90

    @property
    def grade(self) -> str:
        """`within_range` in words."""
        if self.within_range is None:
            return "no range to be inside of"  # as in receipts of earlier versions
        return "inside p10-p90" if self.within_range else "below p10" if self.actual < self.p10 else "above p90"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "run": self.run,
            "stack": self.stack,
            "owner": self.owner,
            "reason": self.reason,
            "detail": self.detail,
            "counted_until": self.at,
            "device": self.device,
            "rehearsal": self.rehearsal,
            "capacity": self.capacity,
            "usd": {
                "estimate": money(self.estimate),
                "actual": money(self.actual),
                "difference": money(self.difference),
            },
            "error_percent": f"{self.error_percent:.1f}" if self.estimate else None,
            "range_usd": {"p10": money(self.p10), "p90": money(self.p90)},
            "grade": self.grade,
            "inside_range": self.within_range,
            "hours": {"estimate": str(self.estimate_h), "actual": f"{self.actual_h:.4f}"},
            "lines": [line.to_json() for line in self.lines],
            "causes": {name: money(usd) for name, usd in self.causes.items()},
            "free_first_hour_usd": money(self.free_usd),
            "interruptions": {
                "expected": self.expected,
                "with_notice": self.with_notice,
                "without_notice": self.without_notice,
            },
            "attempts": [attempt.to_json() for attempt in self.attempts],
            **({"goals": [goal.to_json() for goal in self.goals]} if self.goals else {}),
            "measured": self.measured and dict(self.measured),
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Receipt:
        """Reads the JSON object; raises DoubtError. Values that earlier versions did not write may be missing."""
        fields = Fields(tree)
        fields.schema(SCHEMA)
        usd, span, causes = (fields.section(key) for key in ("usd", "range_usd", "causes"))
        hours, interruptions = (Fields(tree.get(key) or {}, key) for key in ("hours", "interruptions"))
        return reading.filled(
            cls,
            fields,
            owner=fields.take("owner", reading.text, ""),
            at=fields.need("counted_until", reading.text),
            device=fields.take("device", reading.text, ""),
            # In earlier versions, only rehearsals ran on a CPU.
            rehearsal=fields.take("rehearsal", reading.flag, tree.get("device") == "cpu"),
            capacity=fields.take("capacity", reading.text, ""),
            estimate=usd.need("estimate", reading.amount),
            actual=usd.need("actual", reading.amount),
            p10=span.need("p10", reading.amount),
            p90=span.need("p90", reading.amount),
            estimate_h=hours.take("estimate", reading.unsigned, Decimal(0)),
            actual_h=hours.take("actual", reading.unsigned, Decimal(0)),
            causes={name: causes.need(name, reading.amount) for name in CAUSES},
            free_usd=fields.take("free_first_hour_usd", reading.unsigned, Decimal(0)),
            expected=interruptions.take("expected", reading.number, None),
            with_notice=interruptions.take("with_notice", reading.whole_number, 0),
            without_notice=interruptions.take("without_notice", reading.whole_number, 0),
            attempts=tuple(map(AttemptCost.from_json, fields.sections("attempts"))),
        )


def parse(content: bytes) -> Receipt:
    """The receipt in the bytes of receipt.json. Raises DoubtError."""
    return Receipt.from_json(reading.parse(content))


def network(preflight: Mapping[str, Any] | None) -> str:
    """The network between nodes in a node's record, as text; empty if not measured."""
    gb_s, transport = ((preflight or {}).get(key) for key in ("between_gb_s", "transport"))
    over = f" over {printable(transport)}" if transport and isinstance(transport, str) else ""
    return f"{gb_s:.1f} GB/s to the other nodes{over}" if isinstance(gb_s, int | float) else ""


def start_up(started_s: Decimal | None, pulled_s: Decimal | None) -> str:
    """The time from a node's launch to its first step, as text; empty if unknown."""
    parts = [f"set-up {started_s / 60:.1f} min"] if started_s is not None else []
    return ", ".join([*parts, *([f"image pull {pulled_s / 60:.1f} min"] if pulled_s is not None else [])])


def money(amount: Decimal) -> str:
    """USD as in the receipt."""
    return f"{amount.quantize(CENT_100) + 0:f}"  # + 0 turns a minus zero into zero


def seconds(amount: Decimal) -> str:
    """Seconds as in the receipt."""
    return f"{amount:.3f}"
