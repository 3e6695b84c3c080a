"""What a campaign costs: the sum of its runs, how many of them fit under its cap, and the hours until its end.

Every simulated case has one luck with speed and prices, which the runs share, and for each run a luck of its own with
interruptions. In each case the campaign is played as its driver carries it out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from gpufleet.infra import text
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.side import FEW, Quantiles, quantiles_of
from gpufleet.infra.bill.table import QUANTILES, figures
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.risk import simulation
from gpufleet.infra.show.sheet import Column, Sheet, plain
from gpufleet.job.text import counted

PLAYED = 400_000  # runs of all cases together: a second of Python
SHOWN = 12  # runs of the table


class PricedTrial(NamedTuple):
    """One run of a campaign with its bill. `label` is for people."""

    label: str
    bill: Bill
    max_usd: Decimal
    max_hours: Decimal

    @classmethod
    def build(cls, label: str, definition: StackDefinition, bill: Bill) -> PricedTrial:
        """The run of a definition."""
        return cls(label, bill, definition.limits.max_usd, definition.limits.max_hours)


class CampaignTerms(NamedTuple):
    """What a campaign allows: dollars, hours by the wall from its beginning (None: any), and runs at the same time."""

    max_usd: Decimal
    max_hours: Decimal | None
    at_once: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignBill:
    """The figures of a campaign. `usd`: of all its runs, if the campaign had no cap; `spent`, `begun` and `hours`: in
    dollars, runs and hours by the wall, as the cap allows.
    """

    trials: tuple[PricedTrial, ...]
    terms: CampaignTerms
    usd: Quantiles
    spent: Quantiles
    begun: Quantiles
    hours: Quantiles

    def lines(self) -> Iterator[str]:
        """The table and what it comes to."""
        terms, count = self.terms, len(self.trials)
        name, p10, *columns = QUANTILES
        head = Column("limit", "limit", "USD", 2)
        rows = [(*figures(each.label, each.bill.usd, 2), f"{each.max_usd:.2f}") for each in self.trials[:SHOWN]]
        rows.append((*figures(f"all {count}, speed and prices alike", self.usd, 2), ""))
        yield from Sheet((name, p10._replace(head="USD p10"), *columns, head), rows).text()
        if count > SHOWN:
            yield f"The table has the first {SHOWN} of {counted(count, 'run')}."
        yield ""
        hours = f", {terms.max_hours:f} hours" if terms.max_hours is not None else ""
        yield from text.wrap(
            f"Under {terms.max_usd:f} USD{hours}, {terms.at_once} at once: {_range(self.begun, 0)} of {count} begin in"
            f" eight campaigns of ten, cost {_range(self.spent, 2)} USD, and take {_range(self.hours, 1)} h by the"
            " wall. A run begins only while its own limit fits what is left, so the cap holds whatever each costs."
        )
        if too_dear := [each for each in self.trials if each.max_usd > terms.max_usd]:
            least = max(each.bill.usd.p90 for each in too_dear)
            yield from text.wrap(
                f"{counted(len(too_dear), 'run')} can never begin, as limits.max_usd is above the cap. Nine in ten of"
                f" the dearest cost at most {least:.2f} USD."
            )

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        return {
            "schema": 1,
            "trials": [{"trial": each.label, "usd": plain(each.bill.usd)} for each in self.trials],
            "max_usd": str(self.terms.max_usd),
            **{name: plain(getattr(self, name)) for name in ("usd", "spent", "begun", "hours")},
        }


def price(trials: Sequence[PricedTrial], terms: CampaignTerms) -> CampaignBill:
    """The bill of a campaign whose runs begin in this order."""
    cases = max(100, min(FEW, PLAYED // max(1, len(trials))))
    chosen = [each.bill.chosen for each in trials]
    simulated = simulation.simulate_together([each.exposure for each in chosen], runs=cases)
    usd = np.array([each.usd + side.unsimulated_usd for each, side in zip(simulated, chosen, strict=True)])
    hours = np.array([each.wall_hours for each in simulated])
    limits = [(float(each.max_usd), float(each.max_hours)) for each in trials]
    played = np.array([play(limits, usd[:, case].tolist(), hours[:, case].tolist(), terms) for case in range(cases)])
    spent, begun, ended = (quantiles_of(played[:, at]) for at in range(3))
    return CampaignBill(
        trials=tuple(trials), terms=terms, usd=quantiles_of(usd.sum(axis=0)), spent=spent, begun=begun, hours=ended
    )


def play(
    limits: Sequence[tuple[float, float]], usd: Sequence[float], hours: Sequence[float], terms: CampaignTerms
) -> tuple[float, int, float]:
    """One campaign: dollars spent, runs begun, hours until the last one's end. `limits` has max_usd and max_hours of
    each run, `usd` and `hours` what it costs and how long it takes.
    """
    rest, now, waiting, running = float(terms.max_usd), 0.0, list(range(len(limits))), list[tuple[float, int]]()
    last = math.inf if terms.max_hours is None else float(terms.max_hours)
    spent, begun = 0.0, 0
    while True:
        fits = (at for at in waiting if limits[at][0] <= rest + 1e-9 and now + limits[at][1] <= last)
        at = next(fits, None) if len(running) < terms.at_once else None
        if at is not None:
            waiting.remove(at)
            rest -= limits[at][0]
            begun += 1
            heapq.heappush(running, (now + float(hours[at]), at))
        elif running:
            now, at = heapq.heappop(running)
            rest += limits[at][0] - float(usd[at])
            spent += float(usd[at])
        else:
            return spent, begun, now


def _range(of: Quantiles, digits: int) -> str:
    low, high = f"{of.p10:.{digits}f}", f"{of.p90:.{digits}f}"
    return low if low == high else f"{low} to {high}"
