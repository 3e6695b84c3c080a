"""The bill of a run, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import date
from decimal import Decimal
from typing import Any, TypeVar

from gpufleet.infra.bill.bill import Bill as _Bill
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.bill.table import LINES, render
from gpufleet.infra.report import band
from gpufleet.infra.show import html
from gpufleet.infra.show.sheet import Column, Sheet

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Quantiles and mean of one quantity over the simulated runs: one run in ten is below `p10`, half are below `p50`,
    and nine in ten below `p90`. The attribute that has these values says their unit.
    """

    p10: float
    p50: float
    p90: float
    mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One charge of the run. The sum of all lines is the bill's `usd.p50`."""

    name: str
    quantity: float
    unit: str
    unit_usd: float  # USD for one unit
    usd: float
    inferred: bool  # whether no source states the price for this region


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """What one run costs, with the interruptions that it may meet and the limits of its definition.

    `print(bill)` is what `gpufleet cost` prints; a notebook shows a table.
    """

    stack: str  # the definition's name
    scenario: str  # empty if the file itself is priced, without a scenario
    run: str  # run.id
    region: str
    capacity: str  # spot or on-demand
    instance_type: str  # the most expensive listed type, which the bill prices
    usd: Figures  # USD of the whole run, stopped at the limits
    hours: Figures  # node-hours, over all nodes and attempts
    wall_hours: Figures  # hours by the clock, with waits for capacity
    usd_to_finish: Figures  # USD without limits
    lines: tuple[BillLine, ...]
    interruptions: float  # expected number of interruptions
    # The probability that a limit stops the run before its work is done; None if it was not simulated.
    stopped: float | None
    kept_usd_per_month: float  # USD per month for the objects that stay in the bucket after `pulumi destroy`
    prices_as_of: date  # the date of the oldest price
    warnings: tuple[str, ...]
    # why `pulumi up` would refuse the run: limits that are too low, a deadline that is too near
    problems: tuple[str, ...]
    _bill: _Bill = field(repr=False, compare=False)

    def __str__(self) -> str:
        return render(self._bill)

    def _repr_html_(self) -> str:
        sheet = Sheet.build(in_notebook(LINES), self._bill.lines, ("total = p50", "", "", "", figure(self.usd.p50)))
        inferred = ["* price inferred"] if any(line.inferred for line in self.lines) else []
        span = f"USD {self.usd.p10:.2f} to {self.usd.p90:.2f} in eight runs of ten, {self.hours.p50:.2f} node-hours"
        caption = f"{self._bill.title}, run {self.run}: {self.capacity} {self.instance_type} in {self.region}. {span}"
        notes = [*inferred, *self.warnings, *self.problems]
        return band.svg(self._bill.usd) + html.table(sheet, caption=caption) + "".join(map(html.paragraph, notes))


def figure(value: float | Decimal) -> str:
    """The number with two decimals, or with two digits if it is small."""
    number = float(value)
    return f"{number:,.2f}" if abs(number) >= 0.1 or not number else f"{number:.2g}"


def in_notebook(columns: Iterable[Column]) -> list[Column]:
    """The columns with numbers in a notebook's form."""
    return [column._replace(digits=figure) if column.unit else column for column in columns]


def in_numbers(cls: type[T], thing: object, **known: Any) -> T:
    """An internal object as this public class: fields from `known` or its attributes, with floats for decimals."""
    names = [spec.name for spec in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: _number(known[name] if name in known else getattr(thing, name)) for name in names})


def _number(value: Any) -> Any:
    match value:
        case Decimal():
            return float(value)
        case Quantiles():
            return in_numbers(Figures, value)
    return value


def bill_in_numbers(bill: _Bill, *, warnings: Iterable[str] = (), problems: Iterable[object] = ()) -> Bill:
    """The public form of a bill."""
    chosen = bill.chosen
    return in_numbers(
        Bill,
        bill,
        instance_type=chosen.type,
        hours=bill.hours.times(chosen.exposure.nodes),
        wall_hours=chosen.wall_hours,
        usd_to_finish=chosen.needed_usd,
        lines=tuple(in_numbers(BillLine, line, unit_usd=line.unit_price, usd=line.amount) for line in bill.lines),
        interruptions=chosen.interruptions.mean,
        stopped=bill.cap and bill.cap.probability,
        kept_usd_per_month=bill.kept.usd_per_month,
        warnings=(*bill.warnings, *warnings),
        problems=tuple(map(str, problems)),
        _bill=bill,
    )
