"""The bill of a run, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date

from gpufleet import _html
from gpufleet.infra.bill.bill import Bill as _Bill
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.bill.table import render


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One figure over the simulated runs: a tenth of them stay below `p10`, half below `p50`, nine in ten below `p90`.
    In the unit of the attribute that holds it.
    """

    p10: float
    p50: float
    p90: float
    mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One charge of the run. The lines add up to the bill's `usd.p50`."""

    name: str
    quantity: float
    unit: str
    unit_usd: float  # USD for one unit
    usd: float
    inferred: bool  # the price was read in no source for this region


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """What one run costs, with the interruptions that it may meet and the limits of its definition.

    `print(bill)` is what `gpufleet cost` prints; a notebook shows a table.
    """

    stack: str  # the definition's name
    scenario: str  # empty: the file as it is
    run: str  # run.id
    region: str
    capacity: str  # spot or on-demand
    instance_type: str  # the dearest listed one, which is what is priced
    usd: Figures  # USD of the whole run, stopped at the limits
    hours: Figures  # node-hours, over all nodes and attempts
    wall_hours: Figures  # hours by the wall, with waits for capacity
    usd_to_finish: Figures  # USD, whatever the limits
    lines: tuple[BillLine, ...]
    interruptions: float  # expected
    stopped: float | None  # probability that a limit stops the run before its work is done; None: only priced
    kept_usd_per_month: float  # USD a month for what stays in the bucket after `pulumi destroy`
    prices_as_of: date  # the oldest of its prices
    warnings: tuple[str, ...]
    problems: tuple[str, ...]  # why `pulumi up` would refuse it: limits that are too low, a deadline that is too near
    _bill: _Bill = field(repr=False, compare=False)

    def __str__(self) -> str:
        return render(self._bill)

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = [
            (f"{line.name} *" if line.inferred else line.name, line.quantity, line.unit, line.unit_usd, line.usd)
            for line in self.lines
        ]
        rows.append(("total = p50", None, "", None, self.usd.p50))
        inferred = ["* price inferred"] if any(line.inferred for line in self.lines) else []
        span = f"USD {self.usd.p10:.2f} to {self.usd.p90:.2f} in eight runs of ten, {self.hours.p50:.2f} node-hours"
        name = f"{self.stack}, scenario {self.scenario}" if self.scenario else self.stack
        caption = f"{name}, run {self.run}: {self.capacity} {self.instance_type} in {self.region}. {span}"
        notes = [*inferred, *self.warnings, *self.problems]
        return _html.table(caption, ("line", "quantity", "unit", "USD each", "USD"), rows, notes)


def figures(values: Quantiles) -> Figures:
    """As floats."""
    return Figures(p10=float(values.p10), p50=float(values.p50), p90=float(values.p90), mean=float(values.mean))


def bill_in_numbers(bill: _Bill, *, warnings: Iterable[str] = (), problems: Iterable[object] = ()) -> Bill:
    """The public form of a bill."""
    chosen = bill.chosen
    nodes = chosen.exposure.nodes
    return Bill(
        stack=bill.stack,
        scenario=bill.scenario,
        run=bill.run,
        region=bill.region,
        capacity=bill.capacity,
        instance_type=chosen.type,
        usd=figures(bill.usd),
        hours=figures(bill.hours.times(nodes)),
        wall_hours=figures(chosen.wall_hours),
        usd_to_finish=figures(chosen.needed_usd),
        lines=tuple(
            BillLine(
                name=line.name,
                quantity=float(line.quantity),
                unit=line.unit,
                unit_usd=float(line.unit_price),
                usd=float(line.amount),
                inferred=line.inferred,
            )
            for line in bill.lines
        ),
        interruptions=float(chosen.interruptions.mean),
        stopped=None if bill.cap is None else float(bill.cap.probability),
        kept_usd_per_month=float(bill.kept.usd_per_month),
        prices_as_of=bill.prices_as_of,
        warnings=(*bill.warnings, *warnings),
        problems=tuple(map(str, problems)),
        _bill=bill,
    )
