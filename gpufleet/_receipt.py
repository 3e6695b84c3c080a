"""What a run cost against its bill, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpufleet import _html
from gpufleet.infra.evidence.receipts import counts, is_rehearsal
from gpufleet.job.contract import receipt as _contract


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptLine:
    """One line of the bill, in USD, and what became of it."""

    name: str
    estimate: float
    actual: float
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One run against its bill. Money in USD. A notebook shows a table."""

    stack: str
    run: str
    reason: str  # why the run ended
    until: str  # until when it is counted: UTC, ISO 8601
    capacity: str  # spot or on-demand
    rehearsal: bool  # of an embedded AWS: tells nothing of real dollars
    counted: bool  # belongs to the score of the bills
    estimate: float  # the bill's p50
    actual: float
    p10: float  # the bill's
    p90: float
    error_percent: float  # of the estimate; positive: it cost more than was said
    inside: bool | None  # between p10 and p90; None: the bill had no range
    estimate_hours: float  # node-hours
    actual_hours: float
    causes: Mapping[str, float]  # why the two differ; they add up to actual - estimate
    lines: tuple[ReceiptLine, ...]

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = [
            (line.name, line.estimate, line.actual, line.actual - line.estimate, line.note) for line in self.lines
        ]
        rows.append(("total", self.estimate, self.actual, self.actual - self.estimate, f"{self.error_percent:+.1f} %"))
        rows += [(f"because of {name}", None, None, usd, "") for name, usd in self.causes.items()]
        kind = "rehearsal" if self.rehearsal else self.reason
        caption = f"{self.stack}, run {self.run}: {kind}, until {self.until}"
        return _html.table(caption, ("line", "estimate", "actual", "difference", ""), rows)


def receipt_in_numbers(found: _contract.Receipt) -> Receipt:
    """The public form of a receipt."""
    return Receipt(
        stack=found.stack,
        run=found.run,
        reason=found.reason,
        until=found.at,
        capacity=found.capacity,
        rehearsal=is_rehearsal(found),
        counted=counts(found),
        estimate=float(found.estimate),
        actual=float(found.actual),
        p10=float(found.p10),
        p90=float(found.p90),
        error_percent=float(found.error_percent),
        inside=found.within_range,
        estimate_hours=float(found.estimate_h),
        actual_hours=float(found.actual_h),
        causes={name: float(usd) for name, usd in found.causes.items()},
        lines=tuple(
            ReceiptLine(name=line.name, estimate=float(line.estimate), actual=float(line.actual), note=line.note)
            for line in found.lines
        ),
    )
