"""Finds the checkpoint interval that costs least on average. Frequent saves stall the steps, and with rare saves more
steps are lost.

Only interruptions that lose work are considered: if a notice is handled in time, nothing is lost with any interval. The
interval comes from the closed form of the simulation (infra/risk/closed_form.py), averaged over the hazard's
distribution. If nodes run for much longer than the interval, the result is Young's formula (CACM 17(9), 1974): sqrt(2 x
save / rate of losses). The saved dollars come from the simulation itself, in which both intervals have the same random
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpufleet.infra.risk.closed_form import expected_hours
from gpufleet.infra.risk.simulation import Exposure, simulate_each

SHORTEST_S = 1.0
LONGEST_S = 86_400.0  # the longest interval in seconds that a run config allows
_SHARES = 16  # number of quantiles that represent the hazard's distribution
# number of simulated runs from which the saving is computed, and the least number of nodes that are simulated for each
# run
_RUNS, _ATTEMPTS = 1_000, 64
# if a larger share of the runs is unfinished after _ATTEMPTS nodes, their extrapolated dollars mean nothing
_CARRIED_ON = 0.01
_NARROWINGS = 24  # number of steps of the search; each of them shortens the bracket to 62 %
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BestInterval:
    """The best interval, and what it saves on average compared with the present one."""

    interval_s: float
    present_s: float
    saved_usd: float
    saved_h: float
    share: float  # the saving as a share of the run's expected dollars

    def sentence(self) -> str:
        """A sentence about the interval, for people."""
        if not self.saved_usd:
            return f"no other checkpoint interval is cheaper than the present {self.present_s:g} s"
        best = f"the cheapest checkpoint interval is about {_rounded(self.interval_s):g} s"
        if self.share < 0.005:
            return f"{best}; the present {self.present_s:g} s costs less than 0.5 % more"
        return f"{best}; against the present {self.present_s:g} s it saves ${self.saved_usd:.2f} ({self.share:.1%})"


def optimal(exposure: Exposure, save_cost_s: float) -> BestInterval | None:
    """The interval with the least expected dollars, if a save stalls the steps by `save_cost_s`.

    The exposure's hours of work include the stalls of its present interval; its limits are not used. The interval is at
    most as long as the work, which is then saved only once. None if the run never finishes, neither with its present
    interval nor with any other. Raises ValueError if the cost is negative or infinite.
    """
    if not (0 <= save_cost_s < math.inf):
        raise ValueError(f"save_cost_s is {save_cost_s}; allowed: seconds, 0 or more")
    hazards = _hazards(exposure)
    longest_s = max(SHORTEST_S, min(LONGEST_S, exposure.phase_ends_h[-1] * 3600))
    best_s = _least(lambda interval_s: _hours(exposure, interval_s, save_cost_s, hazards), SHORTEST_S, longest_s)
    present_s = exposure.interval_h * 3600
    if any(math.isinf(_hours(exposure, interval_s, save_cost_s, hazards)) for interval_s in (best_s, present_s)):
        return None
    alone = exposure.unlimited.interruptions_alone
    both = [_with_interval(alone, interval_s, save_cost_s) for interval_s in (present_s, best_s)]
    present, best = simulate_each(both, runs=_RUNS, attempts=_ATTEMPTS, unfinished=_CARRIED_ON)
    saved_usd = float(present.usd.mean() - best.usd.mean())
    if saved_usd <= 0:  # the best interval is equal to the present one after rounding, or saves nothing
        best_s, saved_usd, best = present_s, 0.0, present
    return BestInterval(
        interval_s=best_s,
        present_s=present_s,
        saved_usd=saved_usd,
        saved_h=float(present.hours.mean() - best.hours.mean()),
        share=saved_usd / float(present.usd.mean()) if saved_usd else 0.0,
    )


def _hours(exposure: Exposure, interval_s: float, save_cost_s: float, hazards: tuple[float, ...]) -> float:
    """Mean node-hours with the given interval, in closed form."""
    changed = _with_interval(exposure, interval_s, save_cost_s)
    return sum(expected_hours(changed, hazard) for hazard in hazards) / len(hazards)


def _with_interval(exposure: Exposure, interval_s: float, save_cost_s: float) -> Exposure:
    """The run with the given interval; its hours of work include the stalls by saves at this interval."""
    present_s, whole_s = exposure.interval_h * 3600, exposure.phase_ends_h[-1] * 3600
    stalls = (1 + save_cost_s / min(interval_s, whole_s)) / (1 + save_cost_s / min(present_s, whole_s))
    ends = tuple(end * stalls for end in exposure.phase_ends_h)
    return replace(exposure, interval_h=interval_s / 3600, phase_ends_h=ends)


def _hazards(exposure: Exposure) -> tuple[float, ...]:
    """Equally likely hazards that represent the distribution."""
    chance = exposure.chance
    if not chance.sigma:
        return (chance.median,)
    return tuple(chance.quantile((index + 0.5) / _SHARES) for index in range(_SHARES))


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """The argument for which `cost` is least, by golden section on a logarithmic scale. `cost` must first fall and then
    rise.
    """
    log_low, log_high = math.log(low), math.log(high)
    first, second = log_high - _GOLDEN * (log_high - log_low), log_low + _GOLDEN * (log_high - log_low)
    at_first, at_second = cost(math.exp(first)), cost(math.exp(second))
    for _ in range(_NARROWINGS):
        if at_first <= at_second:
            log_high, second, at_second = second, first, at_first
            first = log_high - _GOLDEN * (log_high - log_low)
            at_first = cost(math.exp(first))
        else:
            log_low, first, at_first = first, second, at_second
            second = log_low + _GOLDEN * (log_high - log_low)
            at_second = cost(math.exp(second))
    return math.exp((log_low + log_high) / 2)


def _rounded(interval_s: float) -> float:
    """The interval rounded to two digits, since the minimum is flat."""
    return float(f"{interval_s:.2g}")
