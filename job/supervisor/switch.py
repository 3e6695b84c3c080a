"""Computes when the run has to switch to on demand to meet its deadline, from what the training node knows. All
functions are pure. The node's own program moves AWS's schedule to this time (job/node/fallback.py). The remaining work
is the bill's work on demand minus the finished training, and longer if this node's steps are slower. It is unknown how
much of a phase after training is done, so the whole phase is taken to remain. During such a phase the switch may come
too early, but never too late.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from gpufleet.job.contract.spent import hours
from gpufleet.job.contract.terms import Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """The switch of a run, at one moment."""

    at: float = 0.0  # epoch seconds; 0 if the run has no fallback
    is_paid: bool = True  # whether the cost of the rest on demand fits within the limits


def find_switch(
    terms: Terms, *, done_share: float, slower: float, stop_s: float, spent_usd: Decimal, spent_s: Decimal
) -> Switch:
    """Computes the switch. `done_share`: the finished share of training. `slower`: the factor by which training takes
    longer than in the bill. `stop_s`: seconds of a stop at a limit. `spent_usd` and `spent_s`: what the whole run has
    spent so far.
    """
    fallback, limits = terms.fallback, terms.limits
    if fallback is None or limits.deadline is None:
        return Switch()
    left_s = slower * (fallback.work_s - done_share * fallback.train_s)
    node_s = Decimal(f"{fallback.start_s + left_s + stop_s:.3f}")
    dearest = max(price.on_demand for price in terms.prices.values()) + sum(terms.hourly.values(), Decimal(0))
    pays = spent_usd + hours(node_s) * dearest <= limits.max_usd and hours(spent_s + node_s) <= limits.max_hours
    return Switch(at=limits.deadline - stop_s - fallback.start_s - left_s - fallback.margin_s, is_paid=pays)
