"""The values of the bill in run.json. Forecast and receipt use them to compare a run with its bill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields, Seconds, Step

T = TypeVar("T")
LINE_KINDS = ("compute", "hourly", "fixed", "interruptions")  # how the meter charges a line of the bill


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """A line of the bill. `unit_price` and `quantity` are set for compute, and for lines with an `item`; for other
    lines they are 0.
    """

    name: str
    kind: str
    amount: Decimal
    unit_price: Decimal = Decimal(0)
    quantity: Decimal = Decimal(0)
    item: str = ""  # an item of the catalog's services; empty in a bill of an earlier version, or if there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEstimate:
    """The bill's assumptions about a phase. If `steps` is None, the number of steps is in the job's parameters."""

    phase: str
    step_ms: float
    steps: Step | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeEstimate:
    """How long a stop takes in a phase on a type of node; None if the bill does not say."""

    type: str
    phase: str
    seconds: Seconds | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BillEstimate:
    """The values of the bill that forecast and receipt use. Money is in USD."""

    p10: Decimal
    p50: Decimal
    p90: Decimal
    hours: Decimal  # p50 of the node-hours
    interruptions: float | None = None  # the expected number of interruptions
    lines: tuple[BillLine, ...] = ()
    kept_days: int = 0  # days for which the bill stores objects; 0 if they are deleted with the stack
    phases: tuple[PhaseEstimate, ...] = ()
    notice: tuple[NoticeEstimate, ...] = ()

    @classmethod
    def from_json(cls, estimate: Fields, hourly: Mapping[str, Decimal]) -> BillEstimate:
        """Reads the estimate; raises DoubtError. `hourly`: the price of each hourly line."""
        usd, hours = estimate.section("usd"), estimate.section("hours")
        lines = tuple(_line(line, hourly) for line in estimate.sections("lines"))
        compute = [line for line in lines if line.kind == "compute"]
        if len(compute) != 1:
            raise DoubtError(f"estimate.lines has {len(compute) or 'none'} for compute")
        for key in ("p10", "p90"):
            hours.need(key, reading.unsigned)
        return cls(
            p10=usd.need("p10", reading.unsigned),
            p50=usd.need("p50", reading.unsigned),
            p90=usd.need("p90", reading.unsigned),
            hours=hours.need("p50", reading.unsigned),
            interruptions=estimate.take("interruptions_expected", reading.number, None),
            lines=lines,
            kept_days=estimate.section("kept").take("days", reading.whole_number, 0) if "kept" in estimate.tree else 0,
            phases=_each(PhaseEstimate, estimate, "phases"),
            notice=_each(NoticeEstimate, estimate, "notice"),
        )

    def of_kind(self, kind: str) -> list[BillLine]:
        return [line for line in self.lines if line.kind == kind]


def _each(cls: type[T], section: Fields, key: str) -> tuple[T, ...]:
    return tuple(reading.filled(cls, tree) for tree in (section.sections(key) if key in section.tree else ()))


def _line(line: Fields, hourly: Mapping[str, Decimal]) -> BillLine:
    kind = line.need("kind", reading.choice(*LINE_KINDS))
    counted = kind in ("compute", "fixed")
    return BillLine(
        name=line.need("name", reading.choice(*hourly) if kind == "hourly" else reading.text),
        kind=kind,
        amount=line.need("amount", reading.amount),
        unit_price=line.need("unit_price", reading.unsigned) if counted else Decimal(0),
        quantity=line.need("quantity", reading.unsigned) if counted else Decimal(0),
        item=line.take("item", reading.text, ""),
    )
