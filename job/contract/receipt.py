"""receipt.json: what a run cost against its bill, line by line and node by node, and why the two differ.

The supervisor writes it last but done.json, `gpufleet results` where no supervisor could. Commands, later bills and
rehearsals read it. Amounts are written to a hundredth of a cent, seconds to a thousandth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from gpufleet.job.contract import reading
from gpufleet.job.contract.attempt import Exit
from gpufleet.job.contract.reading import Amount, Fields, Step
from gpufleet.job.contract.spent import CENT_100
from gpufleet.job.text import printable

SCHEMA = 1
CAUSES = ("price", "runtime", "interruptions", "other")  # job/supervisor/receipt.py says what each is


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptLine:
    """One line of the bill, in USD, and what became of it."""

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
    """One node of the run, as it was paid."""

    instance: str
    type: str
    zone: str
    capacity: str = ""  # spot or on-demand; empty: the run's
    seconds: Decimal  # as billed
    lived_s: Decimal
    started_s: Decimal | None = None  # from launch to the trainer's first step; None: never got there
    pulled_s: Decimal | None = None  # the part that pulling its images took; None: not known
    interrupted: bool = False
    reclaimed: bool | None = None  # AWS took it; False: its owner did; None: no notice, or nobody knows
    usd: Decimal = Decimal(0)
    ceiling_s: Decimal = Decimal(0)  # counted at the ceiling of a spot price, which AWS did not tell
    free_usd: Decimal = Decimal(0)  # compute that AWS does not charge
    resumed_step: Step = 0
    last_step: Step = 0
    rung: int | None = None
    exit: Exit | None = None  # None: gone without notice
    alarm: str = ""  # what people were warned of
    network: str = ""  # how fast it reached the other nodes, and by which transport

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
        }

    @classmethod
    def from_json(cls, fields: Fields) -> AttemptCost:
        """Raises DoubtError. An earlier version wrote no `lived_s`."""
        lived_s = fields.need("lived_s" if "lived_s" in fields.tree else "seconds", reading.unsigned)
        return reading.filled(cls, fields, lived_s=lived_s, exit=Exit.from_fields(fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One run, graded. Money in USD; `causes`, by CAUSES, add up to actual - estimate."""

    run: str
    stack: str
    reason: str  # why the run ended: job/contract/done.py
    detail: str = ""
    at: str  # until when it is counted: UTC, ISO
    device: str
    capacity: str
    estimate: Decimal  # p50 of the bill
    actual: Decimal
    p10: Decimal
    p90: Decimal
    estimate_h: Decimal = Decimal(0)
    actual_h: Decimal = Decimal(0)
    lines: tuple[ReceiptLine, ...]
    causes: Mapping[str, Decimal]
    free_usd: Decimal = Decimal(0)  # first hours that AWS does not charge
    expected: float | None = None  # interruptions
    with_notice: int = 0
    without_notice: int = 0
    attempts: tuple[AttemptCost, ...]  # oldest first
    measured: Mapping[str, Any] | None = field(default=None, compare=False)  # of its own speed: job/measured.py

    @property
    def difference(self) -> Decimal:
        """Positive: it cost more than was said."""
        return self.actual - self.estimate

    @property
    def error_percent(self) -> Decimal:
        """The difference in percent of the estimate, which must not be 0."""
        return self.difference / self.estimate * 100

    @property
    def within_range(self) -> bool | None:
        """Whether it ended in the range that eight runs in ten were promised to end in. None for a bill without a
        range, to a hundredth of a cent: on demand, and where eight runs in ten meet no interruption.
        """
        return None if self.p10 == self.p90 else self.p10 <= self.actual <= self.p90

    @property
    def grade(self) -> str:
        """`within_range` in words."""
        if self.within_range is None:
            return "no range to be inside of"
        return "inside p10-p90" if self.within_range else "below p10" if self.actual < self.p10 else "above p90"

    def to_json(self) -> dict[str, Any]:
        """The object of receipt.json."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "stack": self.stack,
            "reason": self.reason,
            "detail": self.detail,
            "counted_until": self.at,
            "device": self.device,
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
            "measured": self.measured and dict(self.measured),
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Receipt:
        """Raises DoubtError. What earlier versions did not write, and no figure stands on, may be missing."""
        fields = Fields(tree)
        fields.schema(SCHEMA)
        usd, span, causes = (fields.section(key) for key in ("usd", "range_usd", "causes"))
        hours, interruptions = (Fields(tree.get(key) or {}, key) for key in ("hours", "interruptions"))
        return reading.filled(
            cls,
            fields,
            at=fields.need("counted_until", reading.text),
            device=fields.take("device", reading.text, ""),
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
    """What a node's record says of the network between the nodes; empty: nothing was measured."""
    gb_s, transport = ((preflight or {}).get(key) for key in ("between_gb_s", "transport"))
    over = f" over {printable(transport)}" if transport and isinstance(transport, str) else ""
    return f"{gb_s:.1f} GB/s to the other nodes{over}" if isinstance(gb_s, int | float) else ""


def start_up(started_s: Decimal | None, pulled_s: Decimal | None) -> str:
    """How long a node took to its first step, in words; empty: not known."""
    parts = [f"set-up {started_s / 60:.1f} min"] if started_s is not None else []
    return ", ".join([*parts, *([f"image pull {pulled_s / 60:.1f} min"] if pulled_s is not None else [])])


def money(amount: Decimal) -> str:
    """USD as the receipt writes them."""
    return f"{amount.quantize(CENT_100) + 0:f}"  # + 0: no minus zero


def seconds(amount: Decimal) -> str:
    """Seconds as the receipt writes them."""
    return f"{amount:.3f}"
