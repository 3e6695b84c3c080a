"""What the run may still spend, as a node knows it. Pure.

The job's meter knows what has been spent; this knows what there can be left of it should the meter fall silent: from
its last word on every hour counts at the dearest price that there is. So the moment at which nothing is left moves away
as long as the meter speaks, and stands still once it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpufleet.job.contract import cost, done, reading
from gpufleet.job.contract.attempt import AttemptRecord, Beat
from gpufleet.job.contract.lives import Lives
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.contract.terms import RunLimits, Terms


@dataclass(frozen=True)
class SpentByNow:
    """What the whole run had spent by `at` (epoch seconds), in USD and billed seconds."""

    usd: Decimal
    seconds: Decimal
    at: float
    trained_at: float = 0.0  # when the job last told of a step; 0: not yet
    attempt: int = 1  # the number of this node's attempt
    switch_at: float = 0.0  # when the run has to begin on demand; 0: no fallback
    switch_is_paid: bool = True  # the limits allow it
    waits_since: float = 0.0  # when this node became the oldest of several that wait for others; 0: it is not

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> SpentByNow | None:
        """The figures from the supervisor's file; None when they cannot be right."""
        fields = Fields(dict(tree))
        try:
            return cls(
                usd=fields.need("spent_usd", reading.unsigned),
                seconds=fields.need("spent_s", reading.unsigned),
                at=fields.need("at", reading.number),
                trained_at=fields.take("trained_at", reading.number, 0.0),
                attempt=fields.take("attempt", reading.whole_number, 1),
                switch_at=fields.take("switch_at", reading.number, 0.0),
                switch_is_paid=fields.take("switch_is_paid", reading.flag, True),
                waits_since=fields.take("waits_since", reading.number, 0.0),
            )
        except DoubtError:
            return None


@dataclass(frozen=True)
class Means:
    """The run's limits, and what its nodes can cost at the most; `before`: all that was spent at this one's launch."""

    limits: RunLimits
    usd_per_hour: Decimal  # of all `nodes` that train together
    before: SpentByNow
    nodes: int = 1

    def when_over(self, told: SpentByNow | None) -> tuple[float, str]:
        """The moment (epoch seconds) after which nothing is left, and of which limit. `told`: by the meter."""
        known = told or self.before
        hours = min(self._hours_over(each) for each in (self.before, known))
        usd = known.at + float((self.limits.max_usd - known.usd) / self.usd_per_hour) * 3600
        return min((hours, done.MAX_HOURS), (usd, done.MAX_USD))

    def _hours_over(self, spent: SpentByNow) -> float:
        return spent.at + float(self.limits.max_hours * 3600 - spent.seconds) / self.nodes


def of_node(
    terms: Terms,
    kind: str,
    zone: str,
    launched: float,
    others: Iterable[tuple[AttemptRecord, Beat | None]],
    lives: Lives,
    capacity: str = "",
) -> Means:
    """Those of a node of this type, launched then, beside `others` of the run. `capacity`: as Terms.rates has it."""
    listed = list(others)
    launches = [launched, *(node.launched for node, _ in listed)]

    def paid_for(node: AttemptRecord, beat: Beat | None) -> cost.NodeCost:
        until = cost.next_launch(node.launched, launches, terms.nodes)
        return cost.of_node(terms.rates(node.type, node.zone, node.capacity), node, beat, lives, until)

    paid = [paid_for(node, beat) for node, beat in listed]
    rates = terms.rates(kind, zone, capacity)
    return Means(
        limits=terms.limits,
        usd_per_hour=terms.nodes * (rates.ceiling + rates.extras),
        before=SpentByNow(
            usd=sum((each.usd for each in paid), terms.fixed_usd),
            seconds=sum((each.seconds for each in paid), Decimal(0)),
            at=launched,
        ),
        nodes=terms.nodes,
    )
