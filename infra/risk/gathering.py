"""Computes what it costs to gather several nodes. Nodes that already run wait for missing ones, and are billed
meanwhile. After some time the waiting nodes end, and all nodes are requested from AWS again at intervals. How long
nodes wait, and how long the pauses between two requests are, is defined in job/contract/gathering.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from gpufleet.infra.risk.hazard import Floats
from gpufleet.job.contract.gathering import LATER_S, pause_s

_MOST_TIMES = 40  # requests to AWS that are simulated: a week of pauses
_POINTS = 2000  # number of equally likely values of a log-normal distribution whose mean is used


def gathered(wait_h: Floats, gather_h: Floats | float, boot_h: Floats | float) -> tuple[Floats, Floats]:
    """Returns the hours until all nodes train again, and the hours that are billed for each waiting node. `wait_h`: the
    waits as they would be if no node ended. `gather_h`: hours that nodes wait for others; inf if they wait for ever.
    `boot_h`: hours that a node's start takes. If a request to AWS does not bring all nodes, the nodes that wait are
    billed for their start and their wait.
    """
    if not (wait_h > gather_h).any():
        return wait_h, wait_h
    until, billed = np.array(wait_h), np.minimum(wait_h, gather_h)
    # The hour of the next request to AWS.
    asked_h = np.broadcast_to(np.asarray(gather_h, dtype=float), wait_h.shape).copy()
    later_h = np.minimum(LATER_S / 3600, asked_h)
    (lacking,) = np.nonzero(wait_h > asked_h)
    boot = np.broadcast_to(np.asarray(boot_h, dtype=float), wait_h.shape)
    for time in range(1, _MOST_TIMES):
        asked_h[lacking] += pause_s(time) / 3600
        ready_h = asked_h + boot
        came = wait_h[lacking] <= (ready_h + later_h)[lacking]
        there = lacking[came]
        # The start of a node is included elsewhere, as part of the run.
        until[there] = np.maximum(asked_h[there], wait_h[there] - boot[there])
        billed[there] += np.maximum(wait_h[there] - ready_h[there], 0.0)
        lacking = lacking[~came]
        if not lacking.size:
            break
        billed[lacking] += (boot + later_h)[lacking]
        asked_h[lacking] = (ready_h + later_h)[lacking]
    return until, billed


@lru_cache(maxsize=256)
def mean_billed_h(median_h: float, sigma: float, gather_h: float, boot_h: float) -> float:
    """The mean of the hours that `gathered` bills, for log-normal waits."""
    if math.isinf(gather_h):
        return median_h * math.exp(sigma**2 / 2)
    normals = np.array([NormalDist().inv_cdf((point + 0.5) / _POINTS) for point in range(_POINTS)])
    return float(gathered(median_h * np.exp(sigma * normals), gather_h, boot_h)[1].mean())
