"""How right the bills were: the receipts of all runs, read, checked and scored.

`gpufleet results` keeps them in `receipts/<stack>/<run>.json` of the project, to be committed. A receipt that is
damaged, of another stack or does not add up is named and left out, never a crash. A rehearsal's receipt never counts,
and of the others only those of runs that did what the bill priced: finished, or stopped by max_usd or max_hours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from job import atomic
from job.contract import reading
from job.contract.done import GRADED
from job.contract.reading import Fields
from job.text import counted

FOLDER = "receipts"
CAUSES = ("price", "runtime", "interruptions", "other")
TARGET = 0.8  # share of runs that should end between p10 and p90


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One run, graded. Money in USD; `causes` add up to actual - estimate."""

    stack: str
    run: str
    reason: str
    at: str  # UTC
    rehearsal: bool
    estimate: Decimal
    actual: Decimal
    p10: Decimal
    p90: Decimal
    causes: Mapping[str, Decimal]
    nodes: tuple[Mapping[str, Any], ...]  # spot only: type, zone, hours, interrupted

    @property
    def counts(self) -> bool:
        """Whether it belongs to the score."""
        return not self.rehearsal and self.reason in GRADED

    @property
    def within_range(self) -> bool | None:
        """None for a bill without a range, as on demand: no run meets one figure to a hundredth of a cent."""
        return None if self.p10 == self.p90 else self.p10 <= self.actual <= self.p90

    @property
    def error_percent(self) -> float:
        """Of the estimate; positive: it cost more."""
        return float((self.actual - self.estimate) / self.estimate * 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Running accuracy. Percentages are of each run's estimate, and medians over the runs."""

    runs: int
    error_percent: float  # absolute
    bias_percent: float  # signed: positive means that runs cost more than was said
    inside: float | None  # share between p10 and p90 of the runs whose bill has a range; None: none of them has
    by_cause: Mapping[str, float]  # absolute, as far as each cause alone goes

    def __str__(self) -> str:
        many = counted(self.runs, "receipt")
        inside = "" if self.inside is None else f", {self.inside * 100:.0f} % inside p10-p90"
        return f"{many}: median error {self.error_percent:.0f} %{inside}"


def read(root: Path, stack: str | None = None) -> tuple[list[Receipt], list[str]]:
    """Every receipt under `root` (the project), by stack and oldest first, and a sentence for each that is none."""
    found, damaged = [], []
    for path in sorted((root / FOLDER).glob("*/[!.]*.json")):
        if stack not in (None, path.parent.name):
            continue
        try:
            receipt = parse(path.read_bytes())
            if receipt.stack != path.parent.name:
                raise ValueError(f"it is of stack {receipt.stack}")
            if receipt.run != path.stem:  # a copy would count twice
                raise ValueError(f"it is of run {receipt.run}")
            found.append(receipt)
        except (OSError, ValueError) as error:
            damaged.append(f"{path.relative_to(root)} is left out: {error}")
    return sorted(found, key=lambda receipt: (receipt.stack, receipt.at)), damaged


def parse(content: bytes) -> Receipt:
    """A receipt.json. Raises ValueError with what is wrong."""
    fields = Fields(reading.parse(content))
    fields.schema(1)
    usd, span, causes = (fields.section(key) for key in ("usd", "range_usd", "causes"))
    spot = fields.take("capacity", reading.text, "") == "spot"
    receipt = Receipt(
        stack=fields.need("stack", reading.text),
        run=fields.need("run", reading.text),
        reason=fields.need("reason", reading.text),
        at=fields.need("counted_until", reading.text),
        rehearsal=fields.take("device", reading.text, "") == "cpu",
        estimate=usd.need("estimate", reading.amount),
        actual=usd.need("actual", reading.amount),
        p10=span.need("p10", reading.amount),
        p90=span.need("p90", reading.amount),
        causes={name: causes.need(name, reading.amount) for name in CAUSES},
        nodes=tuple(map(_node, fields.sections("attempts"))) if spot else (),
    )
    date.fromisoformat(receipt.at[:10])
    lines = [line.need("actual", reading.amount) for line in fields.sections("lines")]
    if receipt.estimate <= 0 or receipt.p10 > receipt.p90:
        raise ValueError("its amounts are not amounts")
    listed = sum(lines, Decimal(0))
    if sum(receipt.causes.values()) != receipt.actual - receipt.estimate or listed != receipt.actual:
        raise ValueError("it does not add up: lines and causes must equal the amounts they explain")
    return receipt


def keep(content: bytes, root: Path, stack: str, run: str) -> Path:
    """Puts a downloaded receipt where later bills find it. Raises ValueError when it is not this run's."""
    receipt = parse(content)
    if (receipt.stack, receipt.run) != (stack, run):
        raise ValueError(f"it is of run {receipt.run} of {receipt.stack}")
    if Path(run).name != run or Path(stack).name != stack:
        raise ValueError(f"{stack}/{run} is no name for a file")
    path = root / FOLDER / stack / f"{run}.json"
    atomic.write_bytes(path, content)
    return path


def score(root: Path, stack: str | None = None) -> Score | None:
    """Over all receipts under `root`, or one stack's; None while there are none that count."""
    return grade(read(root, stack)[0])


def grade(receipts: Sequence[Receipt]) -> Score | None:
    """The score of these receipts; None when none of them counts."""
    counted = [receipt for receipt in receipts if receipt.counts]
    if not counted:
        return None
    ranged = [receipt.within_range for receipt in counted if receipt.within_range is not None]
    return Score(
        runs=len(counted),
        error_percent=median(abs(receipt.error_percent) for receipt in counted),
        bias_percent=median(receipt.error_percent for receipt in counted),
        inside=sum(ranged) / len(ranged) if ranged else None,
        by_cause={name: median(float(abs(r.causes[name]) / r.estimate * 100) for r in counted) for name in CAUSES},
    )


def _node(fields: Fields) -> dict[str, Any]:
    lived = "lived_s" if "lived_s" in fields.tree else "seconds"
    return {
        "type": fields.need("type", reading.text),
        "zone": fields.need("zone", reading.text),
        "hours": fields.need(lived, reading.seconds) / 3600,
        "interrupted": fields.take("interrupted", reading.flag, False),
    }
