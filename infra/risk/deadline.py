"""Computes the policy 'spot until slack runs out, then on-demand': the hour of the switch, and the cost.

Slack is the time until the deadline minus the time that the rest of the work takes on demand, with a restart. The slack
shrinks while the run waits for capacity, starts up, or repeats lost work. When the slack has shrunk to a margin, the
run is ended with a checkpoint, and continues on demand. The model assumes that AWS has an on-demand node at once. The
margin is the smallest one with which enough runs are on time. A run is on time if it is done before the job begins to
stop for the deadline. With `fleet.fallback: on-demand` a second fleet takes over, at another margin
(infra/bill/fallback.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from gpufleet.infra.risk.hazard import Floats
from gpufleet.infra.risk.simulation import MINIMUM_H, Exposure, PlannedEnd, SimulatedRuns, quantiles, simulate
from gpufleet.infra.text import hours

ON_TIME = 0.95
RUNS = 2_000
_MARGINS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlinePlan:
    """The time of the switch to on demand, and the outcome. Hours are wall-clock hours from the run's start."""

    hours_left: float  # hours to the deadline
    stop_h: float  # hours before the deadline at which the job begins to stop
    # Hours after which a run that has done no work switches; None if spot alone is on time, 0 if the run switches at
    # once.
    switch_h: float | None
    typical_switch_h: float | None  # the median over the runs that switch; None if no run does
    margin_h: float  # the slack in hours at which the run switches
    on_time: float  # probability of being on time with the switch
    on_time_spot: float  # probability that spot alone is on time
    switched: float  # probability of a switch
    usd: tuple[float, float, float, float]  # p10, p50, p90, mean
    wall_hours: tuple[float, float, float, float]

    def sentence(self) -> str:
        """A sentence about the plan, for people."""
        deadline, cost = f"{hours(self.hours_left)} h", f"${self.usd[1]:.2f} p50, ${self.usd[2]:.2f} p90"
        if self.switch_h is None:
            return f"spot alone is done in {deadline} in {self.on_time:.0%} of runs: no switch needed; {cost}"
        if not self.on_time:
            takes = f"{hours(self.wall_hours[1])} h, and {60 * self.stop_h:.0f} min to stop in"
            return f"the deadline in {deadline} cannot be met: on demand from the first hour takes {takes}"
        if not self.switch_h:
            return f"a deadline in {deadline} leaves too little slack for spot: begin on demand; {cost}"
        typical = "" if self.typical_switch_h is None else f", typically at {hours(self.typical_switch_h)} h"
        return (
            f"begin on spot and switch to on demand {hours(self.switch_h)} h after the start if nothing is done by"
            f" then, later by the hours of work that are done ({self.switched:.0%} of runs switch{typical}); "
            f"fleet.fallback: on-demand does it by itself; {self.on_time:.0%} are done in {deadline}; {cost}"
        )


def switch(spot: Exposure, on_demand: Exposure, hours_left: float, *, on_time: float = ON_TIME) -> DeadlinePlan:
    """The policy for a run that begins now and has `hours_left` wall-clock hours.

    The exposures are the same job on spot and on demand, each on the type that it would use. Limits are not applied.
    Progress is the share of the hours of work that is already done. Raises ValueError if this share is not between 0
    and 1, if the hours are not a number, or if the run has no work.
    """
    if not (0 < on_time <= 1) or not math.isfinite(hours_left):
        raise ValueError(f"on_time is {on_time}, hours_left {hours_left}; allowed: above 0 to 1, and hours")
    if not (spot.phase_ends_h[-1] > 0 and on_demand.phase_ends_h[-1] > 0):
        raise ValueError("the run has no work. The hours of work must be above 0.")
    spot = spot.unlimited
    alone = simulate(spot, runs=RUNS)
    stop_h = max(spot.reserve_h, on_demand.reserve_h)
    by_h = hours_left - stop_h
    on_time_spot = float((alone.wall_hours <= by_h).mean())
    slack_h = by_h - on_demand.restart_h - on_demand.phase_ends_h[-1]
    switch_h: float | None = None
    margin_h, met, begun, usd, wall = 0.0, on_time_spot, alone, alone.usd, alone.wall_hours
    if on_time_spot < on_time:

        def leaving(at_h: float) -> tuple[SimulatedRuns, Floats, Floats]:
            leave = PlannedEnd(by_h=at_h + on_demand.phase_ends_h[-1], work_h=on_demand.phase_ends_h[-1])
            simulated = simulate(replace(spot, leave=leave), runs=RUNS)
            return simulated, *finished(simulated, spot, on_demand)

        sure = leaving(0.0)
        most = min(on_time, float((sure[2] <= by_h + 1e-6).mean()))  # a slow job may miss the deadline even on demand
        # Small margins are tried in finer steps, because a margin usually has to cover only one lost checkpoint
        # interval.
        for margin_h in max(slack_h, 0.0) * np.linspace(0, 1, _MARGINS) ** 2:
            switch_h = max(0.0, slack_h - margin_h)
            begun, usd, wall = leaving(switch_h)
            if (wall <= by_h + 1e-6).mean() >= most:
                break
        # If there is too little slack, a spot node completes no work before the switch, and its price is wasted.
        if sure[1].mean() < usd.mean() - 1e-9:
            margin_h, switch_h, (begun, usd, wall) = max(slack_h, 0.0), 0.0, sure
        met = float((wall <= by_h + 1e-6).mean())
    left_at_h = begun.wall_hours[begun.stopped]
    return DeadlinePlan(
        hours_left=hours_left,
        stop_h=stop_h,
        switch_h=switch_h,
        typical_switch_h=float(np.median(left_at_h)) if left_at_h.size else None,
        margin_h=float(margin_h),
        on_time=met,
        on_time_spot=on_time_spot,
        switched=float(begun.stopped.mean()),
        usd=quantiles(usd),
        wall_hours=quantiles(wall),
    )


def finished(begun: SimulatedRuns, spot: Exposure, on_demand: Exposure) -> tuple[Floats, Floats]:
    """USD and wall-clock hours of the runs that left spot and finish on demand."""
    # The part of the bill's work that is not done yet.
    left_share = (begun.work_h - begun.done_h) / spot.phase_ends_h[-1]
    start_h = np.where(begun.done_h > 0, on_demand.restart_h, on_demand.setup_h)
    rest_h = np.maximum(start_h + left_share * on_demand.phase_ends_h[-1], MINIMUM_H)
    more_h = np.where(begun.stopped, rest_h, 0.0)
    usd = begun.usd + more_h * on_demand.usd_h
    return usd, begun.wall_hours + more_h
