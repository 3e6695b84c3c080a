"""What share of its spot instances AWS says it reclaimed in a month, by type and region: shown, never calculated with.

The Spot Instance Advisor counts interrupted instances of a month whatever they were used for and however long they
lived; a hazard per node-hour of a node that must finish does not follow from it (infra/risk/hazard.py).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Reclaimed:
    """A band of the Advisor, percent of instances in one month."""

    low_percent: int
    high_percent: int | None  # None: the open band at the top
    as_of: date
    source: str

    def __str__(self) -> str:
        if not self.low_percent:
            return f"less than {self.high_percent} %"
        return (
            f"more than {self.low_percent} %"
            if self.high_percent is None
            else f"{self.low_percent}-{self.high_percent} %"
        )


def reclaimed(type_: str, region: str) -> Reclaimed | None:
    """None where the Advisor had no figure."""
    return _bands().get((type_, region))


@cache
def _bands() -> dict[tuple[str, str], Reclaimed]:
    with (Path(__file__).parent / "reclaim.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["type"], row["region"]): Reclaimed(
                low_percent=int(row["low_percent"]),
                high_percent=int(row["high_percent"]) if row["high_percent"] else None,
                as_of=date.fromisoformat(row["as_of"]),
                source=row["source"],
            )
            for row in csv.DictReader(file)
        }
