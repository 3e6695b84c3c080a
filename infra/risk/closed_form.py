"""Computes in closed form, without simulation, the mean hours at a fixed hazard, and the hazard above which spot costs
more than on demand.
"""

from __future__ import annotations

import math

from gpufleet.infra.risk.gathering import mean_billed_h
from gpufleet.infra.risk.hazard import gang, left_share
from gpufleet.infra.risk.simulation import NOTICE_H, Exposure

KEEPS_NOTHING = 100  # the checkpoint interval of a run without checkpoints, as a multiple of its work
FINEST, HIGHEST = 1e-4, 10.0  # the finest step and the highest rate of the search, in interruptions per node-hour


def expected_hours(exposure: Exposure, hazard: float) -> float:
    """Mean node-hours of a run at one fixed hazard per node-hour, without limits. Tests compare the simulation with it.

    A node gets past its first `a` = restart + notice with probability exp(-hazard a), so that one useful period costs
    (exp(hazard a) - 1) / hazard on average, and work W is cut into 1 + hazard W periods on average. The work that
    interruptions destroy is added to W. The formula is exact if set-up equals restart and no attempt is shorter than a
    checkpoint interval. If the interval is longer than all of the work, nothing is kept when a period ends early, so W
    is one period.
    """
    work_h = exposure.phase_ends_h[-1]
    if not hazard:
        return exposure.uninterrupted_h
    hazard *= gang(exposure.nodes)  # the loss of any node interrupts the run
    starts = (0.0, *exposure.phase_ends_h[:-1])
    shares = [(end - start) / work_h for start, end in zip(starts, exposure.phase_ends_h, strict=True)]
    missed = sum(
        s * (exposure.notice_missed if fit else 1.0) for s, fit in zip(shares, exposure.saves_fit, strict=True)
    )
    torn = hazard * missed * exposure.interval_h / 2  # hours of work that are lost, per hour of work
    exponent = hazard * (exposure.restart_h + NOTICE_H)
    wait_h = mean_billed_h(exposure.wait_h, exposure.wait_sigma, exposure.gather_h, exposure.restart_h)
    if exposure.interval_h > KEEPS_NOTHING * work_h:
        whole = hazard * (exposure.restart_h + work_h)
        begun_h = math.expm1(whole) / hazard if whole <= 50 else math.inf
        return (begun_h + exposure.setup_h - exposure.restart_h) * (1 + hazard * wait_h * left_share(exposure.nodes))
    if torn >= 1 or exponent > 50:
        return math.inf
    grown_h = work_h / (1 - torn)
    stretch_h = math.expm1(exponent) / hazard
    own_h = (1 + hazard * grown_h) * stretch_h + grown_h - NOTICE_H + exposure.setup_h - exposure.restart_h
    return own_h * (1 + hazard * wait_h * left_share(exposure.nodes))  # the remaining nodes wait, and are billed


def break_even(exposure: Exposure, on_demand_usd: float) -> float | None:
    """The hazard per node-hour above which spot costs more on average than `on_demand_usd`; None if spot is cheaper up
    to HIGHEST.

    Limits do not apply, because a run that a limit stops is cheap but not done. Interrupted first hours are treated as
    billed. Otherwise a node that is lost every ten minutes would cost nothing.
    """

    def dearer(hazard: float) -> bool:
        return exposure.metered(expected_hours(exposure, hazard)) > on_demand_usd

    if not dearer(HIGHEST):
        return None
    low, high = 0.0, HIGHEST
    while high - low > FINEST:
        middle = (low + high) / 2
        low, high = (low, middle) if dearer(middle) else (middle, high)
    # FINEST is taken for 0, because the amounts of the lines may differ by rounding.
    return 0.0 if high <= FINEST else high
