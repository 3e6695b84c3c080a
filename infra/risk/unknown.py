"""What is uncertain before a run begins, besides interruptions: the run's speed, the spot price, and how long a node
takes until the first step.

This module defines how uncertain each of the three is. Each of them is a log-normal factor, which is random for each
run. The median of the factor is 1, so that it widens the bill's range but changes no line. Simulated runs with these
factors give the range, the chance of a limit or a deadline, the bound of `diff`, `compare`, the cheaper options and the
grade of receipts.

hazard.py defines how often nodes are interrupted and how long waits are, with the data behind it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from gpufleet.infra.risk.hazard import Floats

# Sigma of ln(actual / priced hours of work) after a measurement of this job on this GPU. bench/results/gpu.md has the
# times of five steps on an H100, measured twice, on different days and by different programs. The two times of a step
# differ by 0.06 rms.
MEASURED = 0.06
STATED = 0.25  # sigma if the definition says how long a step takes; an assumption until there are receipts
# sigma if the time comes from a web page; in two of five published pairs, the two times were within a quarter of each
# other
PAGE = 0.45
# Sigma for each doubling from the number of GPUs for which a step time is stated. Doubling the GPUs lost 8 to 10 % of
# the speed on two nodes of 8 H100s (NVIDIA NeMo AutoModel, 2026-06), 15 % from one A100 to two, and 2 % from two to
# four (vectorlm, 2024-05).
PER_DOUBLING = 0.1
SETUP = 0.3  # sigma of ln set-up time if the time is assumed by family; itself an assumption
SETUP_MEASURED = 0.1  # sigma of ln set-up time if it was measured on the nodes of a receipt; an assumption
# Sigma of ln spot price, which grows as the root of the price's age. In nine zones of p3 spot over 45 days of 2023 it
# was 0.015 after a day, 0.046 after 7, 0.070 after 30, 0.098 after 44 (github.com/andylizf/skynomad-artifact, read
# 2026-11).
PRICE_AT_7_DAYS, MOST_PRICE = 0.05, 0.25
P90 = NormalDist().inv_cdf(0.9)  # p10 and p90 of a normal distribution are this many sigmas away from its mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """Sigmas of the logarithms. By default they are 0: nothing is uncertain."""

    faster: float = 0.0  # sigma of the hours of work below the median
    slower: float = 0.0  # sigma of the hours of work above the median
    shared: float = 0.0  # the part of `faster` and `slower` that is the same for a job on every GPU
    device: str = ""  # the GPU; options on the same GPU have the same random number for the other part of this factor
    price: float = 0.0  # sigma of the node's price
    offer: str = ""  # the offer; options with the same offer have the same random number for the price
    setup: float = 0.0  # sigma of set-up and restart

    @property
    def is_drawn(self) -> bool:
        """Whether two simulated runs can differ by these sigmas."""
        return bool(self.faster or self.slower or self.price or self.setup)


NOTHING = Unknown()


def spot_price(age_days: int) -> float:
    """The sigma of ln spot price, for a price of this age."""
    return min(MOST_PRICE, PRICE_AT_7_DAYS * math.sqrt(max(age_days, 0) / 7))


def span(sigma: float) -> tuple[float, float]:
    """The factors at p10 and p90."""
    return math.exp(-P90 * sigma), math.exp(P90 * sigma)


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """The factors of each simulated run; a plain 1 if a factor is 1 for all."""

    work: Floats | float
    price: Floats | float
    setup: Floats | float


KNOWN = Factors(work=1.0, price=1.0, setup=1.0)


class Draws:
    """The random draws of `runs` runs. Each random number belongs to a run and a subject, such as a GPU, so that two
    options on one GPU have the same speed. The random number does not depend on which other numbers are computed.
    """

    def __init__(self, runs: int, seed: np.random.SeedSequence) -> None:
        self._runs, self._seed = runs, seed
        self._kept: dict[tuple[str, float], Floats] = {}

    def factors(self, unknowns: Sequence[Unknown]) -> Factors:
        """The factors of each of `unknowns`, one after the other."""
        return Factors(
            work=self._joined([self._work(one) for one in unknowns]),
            price=self._joined([self._factor(one.price, f"price of {one.offer}") for one in unknowns]),
            setup=self._joined([self._factor(one.setup, "set-up") for one in unknowns]),
        )

    def _joined(self, parts: Sequence[Floats | None]) -> Floats | float:
        if all(part is None for part in parts):
            return 1.0
        return np.concatenate([np.ones(self._runs) if part is None else part for part in parts])

    def _factor(self, sigma: float, of: str) -> Floats | None:
        return np.exp(sigma * self._normals(of)) if sigma else None

    def _work(self, one: Unknown) -> Floats | None:
        """The factors of the hours of work: one random number for the part that is the same on all GPUs, and another
        for this GPU.
        """
        widest = max(one.faster, one.slower)
        if not widest:
            return None
        luck = self._normals(f"work on {one.device}", round(min(one.shared / widest, 1.0), 3))
        return np.asarray(np.exp(luck * np.where(luck < 0, one.faster, one.slower)))

    def _normals(self, of: str, shared: float = 0.0) -> Floats:
        """The quantiles of a standard normal, in a random order that depends on `of`. So p50 is exactly the median for
        any number of runs.
        """
        if (of, shared) not in self._kept:
            seed = np.random.SeedSequence(
                self._seed.entropy, spawn_key=(*self._seed.spawn_key, zlib.crc32(of.encode()))
            )
            luck = np.random.default_rng(seed).standard_normal(self._runs)
            if shared:
                luck = shared * self._normals("work of the job") + math.sqrt(1 - shared**2) * luck
            normals = np.empty(self._runs)
            normals[np.argsort(luck)] = _quantiles(self._runs)
            self._kept[of, shared] = normals
        return self._kept[of, shared]


@cache
def _quantiles(count: int) -> Floats:
    """`count` equally likely values of a standard normal, in order."""
    lower = np.array([*map(NormalDist().inv_cdf, ((np.arange(count // 2) + 0.5) / count).tolist())])
    return np.concatenate([lower, np.zeros(count % 2), -lower[::-1]])
