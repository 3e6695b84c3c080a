"""What a run would have cost in the hours of an availability trace.

A replay begins the run at many hours of it: the run waits
for the next stretch, keeps its node until the stretch ends, and pays by the same rules as the simulation
(`risk.account`); only luck is replaced by what happened. A run that outlasts the trace goes on at its beginning, so
that long runs are not the ones left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from infra.errors import GpufleetError
from infra.evidence.traces import Trace
from infra.risk.hazard import Floats, Hazard, Indices
from infra.risk.simulation import SEED, Exposure, Node, Outcome, account, simulate
from infra.text import hours

STARTS = 2_000  # hours of a trace at which a run is begun, evenly spread
SHARES = (0.1, 0.5, 0.9)
FIXED_HAZARD = 0.2  # the figure that a stated interval is to beat


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A forecast against replayed bills."""

    name: str
    p10_usd: float
    p50_usd: float
    p90_usd: float
    contained: float  # share of replayed bills in p10-p90
    pinball_usd: float  # mean over the three quantiles; less is better


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a trace did to a run, against what was stated before."""

    trace: Trace
    p10_usd: float
    p50_usd: float
    p90_usd: float
    interruptions: float  # mean per run
    windows: int  # runs begun
    independent: float  # runs that fit into the trace one after the other: the sample's real size
    scores: tuple[Score, ...]  # stated first


def run(exposure: Exposure, trace: Trace, *, starts: int = STARTS, seed: int = SEED) -> Outcome:
    """The run begun at `starts` evenly spread hours of the trace. Raises ValueError for a trace without a node."""
    if not trace.up_from_h.size:
        raise ValueError("a trace without availability")
    rng = np.random.default_rng(seed)
    begin_h: Floats = np.arange(starts, dtype=np.float64) * (trace.hours / starts)

    def fate(active: Indices, attempt: int, wall_h: Floats) -> Node:
        life, wait = _next(trace, begin_h[active] + wall_h)
        missed, lost = rng.random((2, starts))[:, active]
        return Node(life_h=life, wait_h=wait, missed=missed, lost=lost)

    return account(exposure, _up_from(trace, begin_h) - begin_h, fate)


def compare(exposure: Exposure, trace: Trace, *, starts: int = STARTS) -> Replayed:
    """Replays without limits (a run that a limit stops is cheap, but not done) and grades the exposure's own hazard,
    a fixed 0.2, and the prior where that is another one. Raises GpufleetError for a trace shorter than the run: going
    round in it, every run would meet the same hours, and its interval would hold or not by construction."""
    exposure = exposure.unlimited
    if trace.hours < exposure.uninterrupted_h:
        raise GpufleetError(
            f"{trace.source}: it is {hours(trace.hours)} h long and the run takes {hours(exposure.uninterrupted_h)} h"
            " without interruptions; give a longer trace, or fewer --work-hours"
        )
    outcome = run(exposure, trace, starts=starts)
    forecasts: list[tuple[str, Hazard | float | None]] = [("stated", exposure.hazard), ("fixed 0.2", FIXED_HAZARD)]
    if exposure.chance != Hazard():
        forecasts.append(("prior", None))
    p10, p50, p90 = np.quantile(outcome.usd, SHARES)
    return Replayed(
        trace=trace,
        p10_usd=float(p10),
        p50_usd=float(p50),
        p90_usd=float(p90),
        interruptions=float(outcome.interruptions.mean()),
        windows=starts,
        independent=max(1.0, trace.hours / float(outcome.wall_hours.mean())),
        scores=tuple(score(name, replace(exposure, hazard=hazard), outcome.usd) for name, hazard in forecasts),
    )


def score(name: str, stated: Exposure, realised_usd: Floats) -> Score:
    """How the simulated p10, p50 and p90 of `stated` did on realised bills."""
    quantiles = np.quantile(simulate(stated).usd, SHARES)
    edge = 1e-9 * max(1.0, float(quantiles[-1]))  # a bill on the edge is inside: many runs meet no interruption at all
    inside = (realised_usd >= quantiles[0] - edge) & (realised_usd <= quantiles[-1] + edge)
    p10, p50, p90 = map(float, quantiles)
    return Score(
        name=name,
        p10_usd=p10,
        p50_usd=p50,
        p90_usd=p90,
        contained=float(inside.mean()),
        pinball_usd=pinball(realised_usd, (p10, p50, p90)),
    )


def pinball(values: Floats, quantiles: Sequence[float]) -> float:
    """Mean pinball loss at SHARES: distance to the quantile, times the share, or 1 less the share for values below."""
    losses = []
    for share, quantile in zip(SHARES, quantiles, strict=True):
        over = values - quantile
        losses.append(float(np.maximum(share * over, (share - 1) * over).mean()))
    return sum(losses) / len(losses)


def _next(trace: Trace, at_h: Floats) -> tuple[Floats, Floats]:
    """Hours the node lives that is launched at `at_h`, and hours until the next one can be had."""
    now = np.mod(at_h + _EDGE_H, trace.hours)
    index = np.searchsorted(trace.up_from_h, now, side="right") - 1
    ends = trace.up_to_h.copy()
    if trace.up_from_h[0] == 0 and ends[-1] == trace.hours:
        ends[-1] = math.inf if len(ends) == 1 else ends[-1] + ends[0]
    life = np.maximum(ends[index] - now, 0.0)
    lost = np.where(np.isfinite(life), at_h + life, 0.0)
    return life, np.where(np.isfinite(life), _up_from(trace, lost + 2 * _EDGE_H) - lost, 0.0)


def _up_from(trace: Trace, at_h: Floats) -> Floats:
    """The first hour from `at_h` on in which a node can be had; hours go on counting past the trace's end."""
    now = np.mod(at_h, trace.hours)
    index = np.searchsorted(trace.up_to_h, now, side="right")
    beyond = index == len(trace.up_to_h)
    starts = np.where(beyond, trace.up_from_h[0] + trace.hours, trace.up_from_h[np.where(beyond, 0, index)])
    return np.asarray(at_h + np.maximum(starts - now, 0.0))


# A third of a millisecond: which side of an edge an hour lies on survives rounding. A life of exactly an hour falls
# short of it by as much: the node was gone at that sample, so it was taken before.
_EDGE_H = 1e-7
