"""Artificial traces from a seed: two states, up and down, with a hazard that varies between zones."""

from __future__ import annotations

from datetime import date

import numpy as np

from gpufleet.infra.evidence.traces import Trace

GAP_H = 0.05


def markov(hazard: float, *, down_h: float = 1.0, hours: float = 2000.0, seed: int = 0, zone: str = "a") -> Trace:
    """Stretches of exponential length, up 1 / `hazard` and down `down_h` on average, on a grid of `GAP_H`."""
    rng = np.random.default_rng(seed)
    lengths = rng.standard_exponential((4 * int(hours * hazard) + 40, 2)) * (1 / hazard, down_h)
    edges = np.round(np.cumsum(np.maximum(lengths, GAP_H).ravel()) / GAP_H) * GAP_H
    up_to, up_from = edges[0::2], np.concatenate(([0.0], edges[1::2][:-1]))
    inside = up_from < hours
    return Trace(
        up_from_h=up_from[inside],
        up_to_h=np.minimum(up_to[inside], hours),
        hours=hours,
        type="g5.2xlarge",
        zone=zone,
        start=date(2026, 1, 1),
        source=f"{zone}.json",
    )


def stretches(*edges: tuple[float, float], hours: float) -> Trace:
    """A trace that is up in each interval of `edges`."""
    return Trace(
        up_from_h=np.array([start for start, _ in edges], dtype=np.float64),
        up_to_h=np.array([end for _, end in edges], dtype=np.float64),
        hours=hours,
        type="g5.2xlarge",
        zone="a",
        start=None,
        source="worked.json",
    )
