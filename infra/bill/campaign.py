"""Computes what a campaign costs: the sum of its runs, how many of them fit under its cap, and the hours until its end.

In each simulated case, all runs have the same random speed and prices, and each run has its own random interruptions.
The campaign is then played as it would be carried out. If it has a pruner, it is played a second time: each run then
does only a share of its work, which infra/search.py draws at random.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from gpufleet.infra import search, text
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.limits import least_usd
from gpufleet.infra.bill.side import FEW, Quantiles, quantiles_of
from gpufleet.infra.bill.table import QUANTILES, figures
from gpufleet.infra.definition.campaign import CampaignFile
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.risk import simulation
from gpufleet.infra.risk.hazard import Floats
from gpufleet.infra.show.sheet import Column, Sheet, plain
from gpufleet.job.kind.batch import is_endless, total_steps
from gpufleet.job.text import counted

PLAYED = 400_000  # total number of runs in all cases; to play them takes Python a second
ORDERED = 1_000  # total number of runs in all simulated orders; Optuna's median pruner needs a second for them
SHOWN = 12  # most runs in the table


class PricedTrial(NamedTuple):
    """One run of a campaign with its bill. `label` is for people. A run does not begin if its limit would be below
    `least_usd`.
    """

    label: str
    bill: Bill
    least_usd: Decimal
    max_usd: Decimal
    max_hours: Decimal
    steps: int | None = None  # the steps of its work; None if the definition does not declare them

    @classmethod
    def build(cls, label: str, definition: StackDefinition, bill: Bill, *, is_made: bool) -> PricedTrial:
        """The run of a definition. `is_made`: whether the campaign writes the definition and may lower its limit."""
        limits, job = definition.limits, definition.job.parameters
        least = least_usd(definition, bill) if is_made else limits.max_usd
        steps = None if is_endless(job) else total_steps(job)
        return cls(label, bill, least, limits.max_usd, limits.max_hours, steps)


class PlayedCampaigns(NamedTuple):
    """Quantiles, over the cases, of USD spent, runs begun and wall-clock hours under the cap."""

    spent: Quantiles
    begun: Quantiles
    hours: Quantiles

    def text(self, count: int) -> str:
        """A sentence with these quantiles, for a campaign of `count` runs."""
        return (
            f"{_range(self.begun, 0)} of {count} begin in eight campaigns of ten, cost {_range(self.spent, 2)} USD, and"
            f" take {_range(self.hours, 1)} wall-clock hours"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignBill:
    """The costs of a campaign. `usd`: the cost of all its runs if there were no cap."""

    trials: tuple[PricedTrial, ...]
    described: CampaignFile
    usd: Quantiles
    played: PlayedCampaigns
    stopped: PlayedCampaigns | None  # as played with the pruner
    nodes: int = 0  # how many nodes the runs share; 0 if each has its own

    def lines(self) -> Iterator[str]:
        """The table, and sentences about the campaign's cost."""
        terms, count = self.described, len(self.trials)
        shown = self.trials[: 1 if terms.draw else SHOWN]
        name, p10, *columns = QUANTILES
        head = Column("limit", "limit", "USD", 2)
        rows = [(*figures(trial.label, trial.bill.usd, 2), f"{trial.max_usd:.2f}") for trial in shown]
        rows.append((*figures(f"all {count}, speed and prices alike", self.usd, 2), ""))
        yield from Sheet((name, p10._replace(head="USD p10"), *columns, head), rows).text()
        if terms.draw:
            yield "The campaign draws values as it goes on, so this bill prices every run with the file's own values."
        elif count > SHOWN:
            yield f"The table has the first {SHOWN} of {counted(count, 'run')}."
        yield ""
        hours = f", {terms.max_hours:f} hours" if terms.max_hours is not None else ""
        yield from text.wrap(
            f"Under {terms.max_usd:f} USD{hours}, {terms.at_once} at once: {self.played.text(count)}. A run begins only"
            " while its own limit fits what is left of the cap, so the cap holds whatever each run costs. Where what is"
            " left is below a run's limit, but enough in nine cases of ten, it becomes the run's limit."
        )
        if self.nodes:
            yield from text.wrap(self._sharing())
        yield from text.wrap(self._worth()) if terms.pruner else ()
        if too_dear := [trial for trial in self.trials if trial.least_usd > terms.max_usd]:
            least = max(trial.bill.usd.p90 for trial in too_dear)
            yield from text.wrap(
                f"{counted(len(too_dear), 'run')} can never begin, as limits.max_usd is above the cap. Nine in ten of"
                f" the dearest cost at most {least:.2f} USD."
            )
        if too_long := [trial for trial in self.trials if trial.max_hours > (terms.max_hours or math.inf)]:
            longest = max(trial.max_hours for trial in too_long)
            yield from text.wrap(
                f"{counted(len(too_long), 'run')} can never begin, as limits.max_hours, {longest:f}, is above max_hours"
                " of the campaign."
            )

    def _sharing(self) -> str:
        """A sentence about the boots in the bill, and about the cap of each node."""
        first, later = self.trials[0].bill.chosen.exposure, self.trials[1].bill.chosen.exposure
        return (
            f"The runs share {counted(self.nodes, 'node')}: the bill has one set-up of {first.setup_h * 60:.0f} minutes"
            " for each, in its first run, and one for each interruption; each later run begins on the running node,"
            f" within {later.setup_h * 3600:.0f} s (assumed). Each node may spend"
            f" {self.described.max_usd / self.nodes:.2f} USD."
        )

    def _worth(self) -> str:
        """A sentence about what the pruner saves, and what this assumes."""
        of = self.described
        if self.stopped is None:
            return f"What {of.pruner} saves is not known: a run does not say how many steps it has."
        return (
            f"With {of.pruner}, which judges {of.metric} every {counted(of.every or 1, 'step')}:"
            f" {self.stopped.text(len(self.trials))}. This assumes that good and bad runs come in any order, that"
            " each keeps its rank from its first metric value on, and that a run which loses stops at once. If each"
            " run is better than all before it, none is stopped."
        )

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        return {
            "schema": 1,
            "trials": [{"trial": trial.label, "usd": plain(trial.bill.usd)} for trial in self.trials],
            "max_usd": str(self.described.max_usd),
            "usd": plain(self.usd),
            **{name: plain(figure) for name, figure in self.played._asdict().items()},
            "stopped_early": self.stopped
            and {name: plain(quantiles) for name, quantiles in self.stopped._asdict().items()},
        }


def price(trials: Sequence[PricedTrial], described: CampaignFile, hands: Sequence[int] = ()) -> CampaignBill:
    """The bill of a campaign whose runs begin in this order. If the campaign draws values, the only run is the file for
    which they are drawn. `hands`: how many of the runs each node does one after another, if nodes are shared.
    """
    trials = [*trials] * (described.trials or 1)
    cases = max(100, min(FEW, PLAYED // max(1, len(trials))))
    chosen = [trial.bill.chosen for trial in trials]
    simulated = simulation.simulate_together([side.exposure for side in chosen], runs=cases)
    usd = np.array([outcome.usd + side.unsimulated_usd for outcome, side in zip(simulated, chosen, strict=True)])
    hours = np.array([outcome.wall_hours for outcome in simulated])
    stopped = None
    if described.pruner and all(trial.steps for trial in trials):
        share = _shares(trials, described, cases)
        stopped = _played(trials, described, usd * share, hours * share, hands)
    return CampaignBill(
        trials=tuple(trials),
        described=described,
        usd=quantiles_of(usd.sum(axis=0)),
        played=_played(trials, described, usd, hours, hands),
        stopped=stopped,
        nodes=len(hands) if max(hands, default=0) > 1 else 0,
    )


def _shares(trials: Sequence[PricedTrial], described: CampaignFile, cases: int) -> Floats:
    """For each run in each case, the share of its dollars and of its hours that the run has used when the pruner stops
    it.
    """
    judgements = [max(1, (trial.steps or 0) // (described.every or 1)) for trial in trials]
    orders = search.simulate_shares(described, judgements, max(3, min(20, ORDERED // len(trials))))
    work = np.array([orders[case % len(orders)] for case in range(cases)]).T
    setup = np.array([trial.bill.chosen.exposure.setup_share for trial in trials])[:, None]
    share: Floats = setup + (1 - setup) * work
    return share


def _played(
    trials: Sequence[PricedTrial], described: CampaignFile, usd: Floats, hours: Floats, hands: Sequence[int] = ()
) -> PlayedCampaigns:
    """With `hands`, each node has its share of the cap."""
    limits = [(float(trial.least_usd), float(trial.max_usd), float(trial.max_hours)) for trial in trials]
    ends = [*itertools.accumulate(hands or [len(trials)])]
    terms = replace(described, max_usd=described.max_usd / len(hands), at_once=1) if hands else described
    played = []
    for case in range(usd.shape[1]):
        of_nodes = [
            play(limits[end - count : end], usd[end - count : end, case], hours[end - count : end, case], terms)
            for end, count in zip(ends, hands or [len(trials)], strict=True)
        ]
        spent, begun, ended = zip(*of_nodes, strict=True)
        played.append((sum(spent), sum(begun), max(ended)))
    return PlayedCampaigns(*(quantiles_of(column) for column in np.array(played).T))


def play(
    limits: Sequence[tuple[float, float, float]],
    usd: Sequence[float] | Floats,
    hours: Sequence[float] | Floats,
    terms: CampaignFile,
) -> tuple[float, int, float]:
    """Plays one campaign. Returns dollars spent, runs begun, and hours until the last run ends. `limits`: for each run
    the lowest limit with which it begins, its max_usd and its max_hours. `usd`, `hours`: what each run costs and takes.
    """
    rest, now, waiting, running = float(terms.max_usd), 0.0, list(range(len(limits))), list[tuple[float, int, float]]()
    last = math.inf if terms.max_hours is None else float(terms.max_hours)
    spent, begun = 0.0, 0
    while True:
        fits = (at for at in waiting if limits[at][0] <= rest + 1e-9 and now + limits[at][2] <= last)
        at = next(fits, None) if len(running) < terms.at_once else None
        if at is not None:
            waiting.remove(at)
            reserved = min(limits[at][1], rest)
            rest -= reserved
            begun += 1
            heapq.heappush(running, (now + float(hours[at]), at, reserved))
        elif running:
            now, at, reserved = heapq.heappop(running)
            cost = min(float(usd[at]), reserved)
            rest += reserved - cost
            spent += cost
        else:
            return spent, begun, now


def _range(of: Quantiles, digits: int) -> str:
    low, high = f"{of.p10:.{digits}f}", f"{of.p90:.{digits}f}"
    return low if low == high else f"{low} to {high}"
