"""What traces did to a run, as text and as JSON: replayed bills against the interval that was stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from infra.risk import hazard
from infra.risk.replay import Replayed
from infra.risk.simulation import Exposure
from infra.text import hours, wrap
from job.text import counted

HELD = 0.75  # of replayed bills inside the stated p10-p90, which eight in ten are to be
WIDE = 0.9


def interval_held(found: Sequence[Replayed]) -> bool:
    """Whether the stated interval held."""
    return contained(found) >= HELD


def contained(found: Sequence[Replayed]) -> float:
    """Share of bills inside the stated interval; every trace counts alike."""
    return sum(each.scores[0].contained for each in found) / len(found)


def render(name: str, type_: str, exposure: Exposure, found: Sequence[Replayed]) -> str:
    """What the traces did to the run, and whether to plan with its bill."""
    chance, stated = exposure.chance, found[0].scores[0]
    lines = [
        f"{name}: {hours(exposure.phase_ends_h[-1])} h of work, stated ${stated.p10_usd:.2f} to ${stated.p90_usd:.2f} "
        f"(p10 to p90; p50 ${stated.p50_usd:.2f})",
        f"hazard {chance.median:.2g} per node-hour: {chance.source}",
        "",
        f"{'trace':<32} {'bills p10':>9} {'p50':>8} {'p90':>8} {'inside':>7}  of about",
    ]
    for each in found:
        lines.append(
            f"{each.trace.source:<32} {each.p10_usd:>9.2f} {each.p50_usd:>8.2f} {each.p90_usd:>8.2f} "
            f"{each.scores[0].contained:>7.0%}  {each.independent:.0f} independent runs"
        )
    lines += ["", f"{'forecast':<32} {'inside':>7} {'pinball loss':>13}"]
    for index, score in enumerate(found[0].scores):
        inside = sum(each.scores[index].contained for each in found) / len(found)
        loss = sum(each.scores[index].pinball_usd for each in found) / len(found)
        lines.append(f"{score.name:<32} {inside:>7.0%} {f'${loss:.4f}':>13}")
    lines.append("")
    for each, learned in zip(found, _learned(found), strict=True):
        trace = each.trace
        lines.append(
            f"{trace.source}: {counted(trace.interruptions, 'interruption')} in"
            f" {counted(f'{trace.node_hours:.0f}', 'node-hour')}; "
            f"hazard of a later run {learned.median:.2g} ({learned.quantile(0.1):.2g} to {learned.quantile(0.9):.2g})"
        )
    if others := [f"{each.trace.source} ({each.trace.type})" for each in found if each.trace.type not in ("", type_)]:
        lines.append(f"The bill is for {type_}; of another type: {', '.join(others)}.")
    low, high = _likely(contained(found), sum(each.independent for each in found))
    share = f"{contained(found):.0%} of replayed bills are inside, 75 to 90 % wanted"
    if not interval_held(found):
        said = f"The stated interval did not hold: {share}. Do not plan with it where nodes are taken as here."
    elif contained(found) > WIDE:
        said = (
            f"The stated interval held: {share}. It is wider than it has to be: bills spread less here than it says, so"
            " its p90 is on the safe side."
        )
    else:
        said = f"The stated interval held: {share}. Plan with the bill's p90."
    lines += [
        *wrap(said, indent=0),
        f"From that many independent runs the true share is likely between {low:.0%} and {high:.0%}.",
    ]
    if not interval_held(found) or contained(found) > WIDE:
        lines.append("Later bills learn from traces kept in traces/ (docs/risk.md).")
    return "\n".join(lines) + "\n"


def record(name: str, type_: str, exposure: Exposure, found: Sequence[Replayed]) -> dict[str, Any]:
    """The same for programs; keys as documented in docs/risk.md."""
    low, high = _likely(contained(found), sum(each.independent for each in found))
    traces = []
    for each, learned in zip(found, _learned(found), strict=True):
        trace = each.trace
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
                "usd": {"p10": round(each.p10_usd, 4), "p50": round(each.p50_usd, 4), "p90": round(each.p90_usd, 4)},
                "interruptions_per_run": round(each.interruptions, 4),
                "windows": each.windows,
                "independent_windows": round(each.independent, 1),
                "forecasts": [
                    {
                        "name": score.name,
                        "usd": {key: round(getattr(score, f"{key}_usd"), 4) for key in ("p10", "p50", "p90")},
                        "contained": round(score.contained, 4),
                        "pinball_usd": round(score.pinball_usd, 6),
                    }
                    for score in each.scores
                ],
            }
        )
    return {
        "schema": 1,
        "stack": name,
        "type": type_,
        "work_hours": round(exposure.phase_ends_h[-1], 4),
        "held": interval_held(found),
        "contained": round(contained(found), 4),
        "contained_likely": [round(low, 4), round(high, 4)],
        "traces": traces,
    }


def _learned(found: Sequence[Replayed]) -> list[hazard.Hazard]:
    """Of each trace's zone, from all traces given; a trace that names no zone is of one of its own."""
    seen = [each.trace.observation() for each in found]
    named = [each._replace(zone=each.zone or each.source) for each in seen]
    learned = hazard.learn(named)
    return [hazard.find(learned, each.type, each.zone) for each in named]


def _likely(share: float, runs: float) -> tuple[float, float]:
    """The share that so many runs leave likely: Wilson's interval at 80 %."""
    z = 1.2816
    centre, spread = share + z * z / (2 * runs), z * math.sqrt(share * (1 - share) / runs + (z / (2 * runs)) ** 2)
    whole = 1 + z * z / runs
    return max(0.0, (centre - spread) / whole), min(1.0, (centre + spread) / whole)
