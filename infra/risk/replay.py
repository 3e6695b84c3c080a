"""Computes what a run would have cost in the hours of an availability trace, to compare it with the bill's range.

A replay begins the run at many hours of the trace. The run waits for the next period with capacity, and keeps its node
until this period ends. Its cost follows the rules of the simulation (`simulation.account`), with the trace instead of
random numbers. A run that reaches the end of the trace continues at its beginning, so that long runs can be replayed
too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.traces import Trace
from gpufleet.infra.risk import hazard
from gpufleet.infra.risk.hazard import Floats, Hazard, Indices
from gpufleet.infra.risk.simulation import SEED, Exposure, NextNode, SimulatedRuns, account, simulate
from gpufleet.infra.text import hours, wrap
from gpufleet.job.text import counted

STARTS = 2_000  # number of evenly spread hours of a trace at which a run begins
SHARES = (0.1, 0.5, 0.9)
FIXED_HAZARD = 0.2  # interruptions per node-hour of the simple forecast that a bill's range should beat


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How well one forecast describes the replayed bills."""

    name: str
    p10_usd: float
    p50_usd: float
    p90_usd: float
    contained: float  # share of replayed bills within p10 to p90
    contained_hours: float  # share of replayed runs whose wall-clock hours, with waits, are within p10 to p90
    pinball_usd: float  # mean pinball loss over the three quantiles; less is better


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The outcome of a run on a trace, and how well each forecast describes this outcome."""

    trace: Trace
    p10_usd: float
    p50_usd: float
    p90_usd: float
    interruptions: float  # the mean number per run
    windows: int  # number of replayed runs
    independent: float  # how many runs fit into the trace one after another: the effective sample size
    scores: tuple[Score, ...]  # scores of the forecasts; that of the bill comes first


def run(exposure: Exposure, trace: Trace, *, starts: int = STARTS, seed: int = SEED) -> SimulatedRuns:
    """Replays the run from `starts` evenly spread hours of the trace. Raises ValueError if the trace has no node."""
    if not trace.up_from_h.size:
        raise ValueError("a trace without availability")
    rng = np.random.default_rng(seed)
    begin_h: Floats = np.arange(starts, dtype=np.float64) * (trace.hours / starts)

    def next_node(active: Indices, attempt: int, wall_h: Floats) -> NextNode:
        life, wait = _next(trace, begin_h[active] + wall_h)
        missed, lost = rng.random((2, starts))[:, active]
        return NextNode(life_h=life, wait_h=wait, missed=missed, lost=lost)

    return account(exposure, _up_from(trace, begin_h) - begin_h, next_node)


def compare(exposure: Exposure, trace: Trace, *, gpus: int = 1, starts: int = STARTS) -> Replayed:
    """Replays the run and grades three forecasts: the exposure's own hazard, a fixed 0.2, and the prior for nodes with
    `gpus` GPUs if it differs from these. Limits do not apply, because a run that a limit stops is cheap but not done.
    Speed, price and set-up are those of the bill's lines. Raises GpufleetError if the trace is shorter than the run.
    All replays would then use the same hours, and the result would mean nothing.
    """
    exposure = exposure.unlimited.interruptions_alone
    if trace.hours < exposure.uninterrupted_h:
        raise GpufleetError(
            f"{trace.source}: it is {hours(trace.hours)} h long and the run takes {hours(exposure.uninterrupted_h)} h"
            " without interruptions; give a longer trace, or fewer --work-hours"
        )
    outcome = run(exposure, trace, starts=starts)
    forecasts: list[tuple[str, Hazard | float | None]] = [("stated", exposure.hazard), ("fixed 0.2", FIXED_HAZARD)]
    if exposure.chance != (before := hazard.prior(gpus)):
        forecasts.append(("prior", before))
    p10, p50, p90 = np.quantile(outcome.usd, SHARES)
    return Replayed(
        trace=trace,
        p10_usd=float(p10),
        p50_usd=float(p50),
        p90_usd=float(p90),
        interruptions=float(outcome.interruptions.mean()),
        windows=starts,
        independent=max(1.0, trace.hours / float(outcome.wall_hours.mean())),
        scores=tuple(score(name, replace(exposure, hazard=chance), outcome) for name, chance in forecasts),
    )


def score(name: str, stated: Exposure, realised: SimulatedRuns) -> Score:
    """How well the simulated p10, p50 and p90 of `stated` describe the replayed runs."""
    outcome = simulate(stated)
    p10, p50, p90 = map(float, np.quantile(outcome.usd, SHARES))
    return Score(
        name=name,
        p10_usd=p10,
        p50_usd=p50,
        p90_usd=p90,
        contained=_share_inside(realised.usd, outcome.usd),
        contained_hours=_share_inside(realised.wall_hours, outcome.wall_hours),
        pinball_usd=pinball(realised.usd, (p10, p50, p90)),
    )


def _share_inside(realised: Floats, stated: Floats) -> float:
    """The share of values within p10 to p90. A value on the edge is inside, because many runs have no interruption, and
    their value may be exactly the edge.
    """
    low, high = np.quantile(stated, (SHARES[0], SHARES[-1]))
    edge = 1e-9 * max(1.0, float(high))
    return float(((realised >= low - edge) & (realised <= high + edge)).mean())


def pinball(values: Floats, quantiles: Sequence[float]) -> float:
    """The mean pinball loss at SHARES. A value above the quantile costs its distance times the share; a value below it
    costs its distance times (1 - share).
    """
    losses = []
    for share, quantile in zip(SHARES, quantiles, strict=True):
        over = values - quantile
        losses.append(float(np.maximum(share * over, (share - 1) * over).mean()))
    return sum(losses) / len(losses)


def _next(trace: Trace, at_h: Floats) -> tuple[Floats, Floats]:
    """Returns the hours for which a node runs if it is launched at `at_h`, and the hours from its end until AWS has the
    next node.
    """
    now = np.mod(at_h + _EDGE_H, trace.hours)
    index = np.searchsorted(trace.up_from_h, now, side="right") - 1
    ends = trace.up_to_h.copy()
    if trace.up_from_h[0] == 0 and ends[-1] == trace.hours:
        ends[-1] = math.inf if len(ends) == 1 else ends[-1] + ends[0]
    life = np.maximum(ends[index] - now, 0.0)
    lost = np.where(np.isfinite(life), at_h + life, 0.0)
    return life, np.where(np.isfinite(life), _up_from(trace, lost + 2 * _EDGE_H) - lost, 0.0)


def _up_from(trace: Trace, at_h: Floats) -> Floats:
    """The first hour, from `at_h` on, in which AWS has a node. Hours are numbered on beyond the trace's end."""
    now = np.mod(at_h, trace.hours)
    index = np.searchsorted(trace.up_to_h, now, side="right")
    beyond = index == len(trace.up_to_h)
    starts = np.where(beyond, trace.up_from_h[0] + trace.hours, trace.up_from_h[np.where(beyond, 0, index)])
    return np.asarray(at_h + np.maximum(starts - now, 0.0))


# A third of a millisecond, so that rounding does not move an hour to the other side of an edge. A life of exactly one
# hour becomes shorter by this time. This is right: the node was gone at this sample, so it ended before it.
_EDGE_H = 1e-7


HELD = 0.75  # a range holds if at least this share of replayed bills is within p10 to p90; the share should be 0.8
WIDE = 0.9


def interval_held(replays: Sequence[Replayed]) -> bool:
    """Whether the bill's ranges of dollars and of wall-clock hours held."""
    return min(contained(replays), contained_hours(replays)) >= HELD


def contained(replays: Sequence[Replayed]) -> float:
    """The share of replayed bills within the bill's range. Each trace has the same weight."""
    return sum(replay.scores[0].contained for replay in replays) / len(replays)


def contained_hours(replays: Sequence[Replayed]) -> float:
    """The share of replayed runs whose wall-clock hours are within the bill's range of hours."""
    return sum(replay.scores[0].contained_hours for replay in replays) / len(replays)


def render(name: str, type_: str, exposure: Exposure, replays: Sequence[Replayed]) -> str:
    """The outcome on the traces as text, with advice whether to rely on the bill's range."""
    chance, stated = exposure.chance, replays[0].scores[0]
    lines = [
        f"{name}: {hours(exposure.phase_ends_h[-1])} h of work, stated ${stated.p10_usd:.2f} to ${stated.p90_usd:.2f} "
        f"(p10 to p90; p50 ${stated.p50_usd:.2f})",
        f"hazard {chance.median:.2g} per node-hour: {chance.source}",
        "",
        f"{'trace':<32} {'bills p10':>9} {'p50':>8} {'p90':>8} {'inside':>7}  of about",
    ]
    for replay in replays:
        lines.append(
            f"{replay.trace.source:<32} {replay.p10_usd:>9.2f} {replay.p50_usd:>8.2f} {replay.p90_usd:>8.2f} "
            f"{replay.scores[0].contained:>7.0%}  {replay.independent:.0f} independent runs"
        )
    lines += ["", f"{'forecast':<32} {'inside':>7} {'pinball loss':>13}"]
    for index, score in enumerate(replays[0].scores):
        inside = sum(replay.scores[index].contained for replay in replays) / len(replays)
        loss = sum(replay.scores[index].pinball_usd for replay in replays) / len(replays)
        lines.append(f"{score.name:<32} {inside:>7.0%} {f'${loss:.4f}':>13}")
    lines.append("")
    for replay, learned in zip(replays, _learned(replays), strict=True):
        trace = replay.trace
        lines.append(
            f"{trace.source}: {counted(trace.interruptions, 'interruption')} in"
            f" {counted(f'{trace.node_hours:.0f}', 'node-hour')}; "
            f"hazard of a later run {learned.median:.2g} ({learned.quantile(0.1):.2g} to {learned.quantile(0.9):.2g})"
        )
    if others := [
        f"{replay.trace.source} ({replay.trace.type})" for replay in replays if replay.trace.type not in ("", type_)
    ]:
        lines.append(f"The bill is for {type_}; of another type: {', '.join(others)}.")
    low, high = _likely(contained(replays), sum(replay.independent for replay in replays))
    share = (
        f"{contained(replays):.0%} of replayed bills and {contained_hours(replays):.0%} of their hours by the wall are"
        " inside, 75 to 90 % wanted"
    )
    if not interval_held(replays):
        verdict = (
            f"The bill's range did not hold: {share}. Do not plan with this range if your nodes are interrupted as"
            " often as in these traces."
        )
    elif contained(replays) > WIDE:
        verdict = (
            f"The bill's range held: {share}. It is wider than needed: replayed bills vary less than it says, so"
            " its p90 is on the safe side."
        )
    else:
        verdict = f"The bill's range held: {share}. Plan with the bill's p90."
    lines += [
        *wrap(verdict, indent=0),
        f"From that many independent runs the true share is likely between {low:.0%} and {high:.0%}.",
    ]
    if not interval_held(replays) or contained(replays) > WIDE:
        lines.append("Later bills learn from traces kept in traces/ (`gpufleet docs risk`).")
    return "\n".join(lines) + "\n"


def record(name: str, type_: str, exposure: Exposure, replays: Sequence[Replayed]) -> dict[str, Any]:
    """The result of a replay for --json; its keys are documented in docs/risk.md."""
    low, high = _likely(contained(replays), sum(replay.independent for replay in replays))
    traces = []
    for replay, learned in zip(replays, _learned(replays), strict=True):
        trace = replay.trace
        traces.append(
            {
                "trace": trace.source,
                "type": trace.type,
                "zone": trace.zone,
                "hours": round(trace.hours, 4),
                "node_hours": round(trace.node_hours, 4),
                "interruptions": trace.interruptions,
                "hazard": {
                    "median": float(f"{learned.median:.4g}"),
                    "p10": float(f"{learned.quantile(0.1):.4g}"),
                    "p90": float(f"{learned.quantile(0.9):.4g}"),
                },
                "usd": {
                    "p10": round(replay.p10_usd, 4),
                    "p50": round(replay.p50_usd, 4),
                    "p90": round(replay.p90_usd, 4),
                },
                "interruptions_per_run": round(replay.interruptions, 4),
                "windows": replay.windows,
                "independent_windows": round(replay.independent, 1),
                "forecasts": [
                    {
                        "name": score.name,
                        "usd": {key: round(getattr(score, f"{key}_usd"), 4) for key in ("p10", "p50", "p90")},
                        "contained": round(score.contained, 4),
                        "contained_hours": round(score.contained_hours, 4),
                        "pinball_usd": round(score.pinball_usd, 6),
                    }
                    for score in replay.scores
                ],
            }
        )
    return {
        "schema": 1,
        "stack": name,
        "type": type_,
        "work_hours": round(exposure.phase_ends_h[-1], 4),
        "held": interval_held(replays),
        "contained": round(contained(replays), 4),
        "contained_hours": round(contained_hours(replays), 4),
        "contained_likely": [round(low, 4), round(high, 4)],
        "traces": traces,
    }


def _learned(replays: Sequence[Replayed]) -> list[hazard.Hazard]:
    """The hazard of each trace's zone, learned from all traces. A trace that names no zone is treated as a zone of its
    own.
    """
    seen = [replay.trace.observation() for replay in replays]
    named = [observation._replace(zone=observation.zone or observation.source) for observation in seen]
    learned = hazard.learn(named)
    return [hazard.find(learned, observation.type, observation.zone) for observation in named]


def _likely(share: float, runs: float) -> tuple[float, float]:
    """Wilson's interval at 80 %: the range that likely contains the true share, if `share` was observed in
    `runs` runs.
    """
    z = 1.2816
    centre, spread = share + z * z / (2 * runs), z * math.sqrt(share * (1 - share) / runs + (z / (2 * runs)) ** 2)
    whole = 1 + z * z / runs
    return max(0.0, (centre - spread) / whole), min(1.0, (centre + spread) / whole)
