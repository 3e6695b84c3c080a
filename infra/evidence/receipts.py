"""Reads, checks and scores the receipts of all runs, which shows how accurate the bills were.

`gpufleet results` keeps them in `receipts/<stack>/<run>.json` of the project, where users commit them. A receipt that
is damaged, belongs to another stack or has a wrong sum is reported and left out, but never ends the program. The score
never includes the receipt of a rehearsal. It includes the receipt of a run if the run did what the bill priced: it
finished, or max_usd or max_hours stopped it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from gpufleet.infra.show.sheet import Column
from gpufleet.job import atomic
from gpufleet.job.text import counted

if TYPE_CHECKING:
    # imported where it is used, because the import takes 9 ms and most bills need no receipt
    from gpufleet.job.contract.receipt import Receipt

# The forms in which a line of a receipt is valid.
LINES = (
    Column("name", "line"),
    Column("estimate", "bill, USD", "USD", 4),
    Column("actual", "receipt, USD", "USD", 4),
    Column("difference", None, "USD", "{:+.4f}".format, lambda line: line.actual - line.estimate),
    Column("note", ""),
)

FOLDER = "receipts"
TARGET = 0.8  # share of runs that should end between p10 and p90


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """How accurate the bills of past runs were. Each error is the median over the runs, in percent of a run's
    estimate.
    """

    runs: int
    error_percent: float  # absolute
    bias_percent: float  # signed: positive means that runs cost more than estimated
    inside: float | None  # share of runs between p10 and p90, among bills with a range; None if no bill has one
    by_cause: Mapping[str, float]  # absolute error if this were the only cause of differences, by cause

    def __str__(self) -> str:
        many = counted(self.runs, "receipt")
        inside = "" if self.inside is None else f", {self.inside * 100:.0f} % inside p10-p90"
        return f"{many}: median error {self.error_percent:.0f} %{inside}"


def read(root: Path, stack: str | None = None) -> tuple[list[Receipt], list[str]]:
    """Every receipt in the project `root`, by stack and oldest first; and a sentence about each invalid file."""
    valid, damaged = [], []
    for path in sorted((root / FOLDER).glob("*/[!.]*.json")):
        if stack not in (None, path.parent.name):
            continue
        try:
            receipt = parse(path.read_bytes())
            if receipt.stack != path.parent.name:
                raise ValueError(f"it belongs to stack {receipt.stack}")
            if receipt.run != path.stem:  # otherwise a copied receipt would be used twice
                raise ValueError(f"it belongs to run {receipt.run}")
            valid.append(receipt)
        except (OSError, ValueError) as error:
            damaged.append(f"{path.relative_to(root)} is left out: {error}")
    return sorted(valid, key=lambda receipt: (receipt.stack, receipt.at)), damaged


def counts(receipt: Receipt) -> bool:
    """Whether the score includes the receipt."""
    from gpufleet.job.contract.done import GRADED

    return not receipt.rehearsal and receipt.reason in GRADED


def parse(content: bytes) -> Receipt:
    """The receipt in the content of a receipt.json. Raises ValueError if the receipt is damaged or its sum is wrong."""
    from gpufleet.job.contract import receipt as contract

    receipt = contract.parse(content)
    date.fromisoformat(receipt.at[:10])
    if receipt.estimate <= 0 or receipt.p10 > receipt.p90:
        raise ValueError("its amounts are not numbers of USD")
    listed = sum((line.actual for line in receipt.lines), Decimal(0))
    if sum(receipt.causes.values()) != receipt.difference or listed != receipt.actual:
        raise ValueError("it does not add up: lines and causes must equal the amounts they explain")
    return receipt


def keep(content: bytes, root: Path, stack: str, run: str) -> Path:
    """Stores a downloaded receipt for later bills, and returns its path. Raises ValueError if it belongs to another
    run.
    """
    receipt = parse(content)
    if (receipt.stack, receipt.run) != (stack, run):
        raise ValueError(f"it belongs to run {receipt.run} of {receipt.stack}")
    if Path(run).name != run or Path(stack).name != stack:
        raise ValueError(f"{stack}/{run} cannot be the name of a file")
    path = root / FOLDER / stack / f"{run}.json"
    atomic.write_bytes(path, content)
    return path


def score(root: Path, stack: str | None = None) -> Accuracy | None:
    """The score of all receipts under `root`, or of those of one stack; None if it would include no receipt."""
    return grade(read(root, stack)[0])


def grade(receipts: Sequence[Receipt]) -> Accuracy | None:
    """The score of these receipts; None if it would include none of them."""
    graded = [receipt for receipt in receipts if counts(receipt)]
    if not graded:
        return None
    from gpufleet.job.contract.receipt import CAUSES

    ranged = [receipt.within_range for receipt in graded if receipt.within_range is not None]
    return Accuracy(
        runs=len(graded),
        error_percent=median(abs(float(receipt.error_percent)) for receipt in graded),
        bias_percent=median(float(receipt.error_percent) for receipt in graded),
        inside=sum(ranged) / len(ranged) if ranged else None,
        by_cause={name: median(float(abs(r.causes[name]) / r.estimate * 100) for r in graded) for name in CAUSES},
    )
