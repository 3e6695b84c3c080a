"""A run's cost next to its bill, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from gpufleet._bill import figure, in_notebook, in_numbers
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.evidence.receipts import LINES, counts
from gpufleet.infra.report import band
from gpufleet.infra.show import html
from gpufleet.infra.show.sheet import Sheet
from gpufleet.job.contract import receipt as _contract


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptLine:
    """One line of the bill in USD, estimated and actual."""

    name: str
    estimate: float
    actual: float
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One run's cost next to its bill. Money in USD. A notebook shows a table."""

    stack: str
    run: str
    reason: str  # why the run ended
    until: str  # the time until which costs are included, in UTC, as ISO 8601
    capacity: str  # spot or on-demand
    rehearsal: bool  # whether the run was on the embedded AWS, so that the receipt says nothing about real dollars
    counted: bool  # whether the score of past bills includes it
    estimate: float  # the bill's p50
    actual: float
    p10: float  # the bill's p10 and p90
    p90: float
    error_percent: float  # percent of the estimate; positive if the run cost more than estimated
    inside: bool | None  # whether the cost is between p10 and p90; None if the bill had no range
    estimate_hours: float  # node-hours
    actual_hours: float
    causes: Mapping[str, float]  # the parts of the difference by cause; their sum is actual - estimate
    lines: tuple[ReceiptLine, ...]

    def _repr_html_(self) -> str:
        difference, error = self.actual - self.estimate, f"{self.error_percent:+.1f} %"
        total = ("total", *map(figure, (self.estimate, self.actual, difference)), error)
        causes = ((f"because of {name}", "", "", figure(usd), "") for name, usd in self.causes.items())
        kind = "rehearsal" if self.rehearsal else self.reason
        caption = f"{self.stack}, run {self.run}: {kind}, until {self.until}"
        columns = [column._replace(head=None) if column.unit else column for column in in_notebook(LINES)]
        p10, p50, p90, actual = map(Decimal, (self.p10, self.estimate, self.p90, self.actual))
        picture = "" if self.rehearsal else band.svg(Quantiles(p10=p10, p50=p50, p90=p90, mean=p50), actual)
        return picture + html.table(Sheet.build(columns, self.lines, total, *causes), caption=caption)


def receipt_in_numbers(receipt: _contract.Receipt) -> Receipt:
    """The public form of a receipt."""
    return in_numbers(
        Receipt,
        receipt,
        until=receipt.at,
        rehearsal=receipt.rehearsal,
        counted=counts(receipt),
        inside=receipt.within_range,
        estimate_hours=receipt.estimate_h,
        actual_hours=receipt.actual_h,
        causes={name: float(usd) for name, usd in receipt.causes.items()},
        lines=tuple(in_numbers(ReceiptLine, line) for line in receipt.lines),
    )
