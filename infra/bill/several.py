"""Computes what many runs under one budget cost together, for example a sweep.

Interruptions and spot prices differ from run to run, so the range of the sum is narrower than the sum of the ranges.
But while the speed is not measured, all runs of one file may be slower than assumed by the same factor. The module
gives both sums; for a budget, use the second one until the job is calibrated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np

from gpufleet.infra import text
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.side import Quantiles, quantiles_of
from gpufleet.infra.bill.table import QUANTILES, figures, price_age
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.risk import simulation
from gpufleet.infra.risk.hazard import Floats
from gpufleet.infra.show.sheet import Column, Sheet, plain
from gpufleet.job.text import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class StackRuns:
    """The runs of one file. `usd`: the cost of each simulated run within the limits, in USD."""

    name: str
    times: int
    one: Quantiles
    max_usd: Decimal  # limit of one run
    usd: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Several:
    """The runs of one or more definition files, whose cost one bill sums."""

    parts: tuple[StackRuns, ...]
    price_age: str  # the age of the oldest price of compute

    @property
    def independent(self) -> Quantiles:
        """USD of all runs if each run has its own random draws."""
        luck = np.random.default_rng(0)
        total = np.zeros(simulation.RUNS)
        for part in self.parts:
            for _ in range(part.times):
                total += luck.choice(part.usd, simulation.RUNS)
        return quantiles_of(total)

    @property
    def alike(self) -> Quantiles:
        """USD of all runs if all runs of all files share the same random draws."""
        ranges = [part.one.times(part.times) for part in self.parts]
        p10, p50, p90, mean = (
            sum((getattr(one, name) for one in ranges), Decimal(0)) for name in ("p10", "p50", "p90", "mean")
        )
        return Quantiles(p10=p10, p50=p50, p90=p90, mean=mean)

    @property
    def max_usd(self) -> Decimal:
        """The most that all runs may spend together within their limits."""
        return sum((part.times * part.max_usd for part in self.parts), Decimal(0))

    def lines(self) -> Iterator[str]:
        runs, (name, p10, *others) = sum(part.times for part in self.parts), QUANTILES
        whole = (("all, each with its own luck", self.independent), ("all, equally fast or slow", self.alike))
        rows = [(1, figures(part.name, part.one, 2)) for part in self.parts]
        rows += [(runs, figures(of_all, usd, 2)) for of_all, usd in whole]
        columns = (name, Column("runs", unit="runs"), p10._replace(head="USD p10"), *others)
        yield from Sheet(columns, [(first, str(count), *cells) for count, (first, *cells) in rows]).text()
        yield ""
        parts = ", ".join(f"{counted(part.times, 'run')} of {part.name}" for part in self.parts)
        yield from text.wrap(
            f"{parts}. Interruptions and spot prices differ from run to run. A speed that nobody has measured is off by"
            " as much in all runs, so the last line holds until `gpufleet calibrate`. Limits:"
            f" {self.max_usd:f} USD together."
        )
        yield from text.wrap(f"Prices: {self.price_age}.")

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        return {
            "schema": 1,
            "stacks": [{"stack": part.name, "times": part.times, "usd": plain(part.one)} for part in self.parts],
            "usd": plain(self.independent),
            "usd_alike": plain(self.alike),
            "max_usd": str(self.max_usd),
        }


def repeated(bills: Sequence[tuple[StackDefinition, Bill]], times: int, today: date) -> Several:
    """Sums the bills, each for `times` runs. The age of prices is their age on the day `today`."""
    oldest = min((bill for _, bill in bills), key=lambda bill: bill.chosen.price.as_of)
    return Several(
        price_age=price_age(oldest, today),
        parts=tuple(
            StackRuns(
                name=definition.name,
                times=times,
                one=bill.chosen.usd,
                max_usd=definition.limits.max_usd,
                usd=bill.chosen.within.usd + bill.chosen.unsimulated_usd,
            )
            for definition, bill in bills
        ),
    )
