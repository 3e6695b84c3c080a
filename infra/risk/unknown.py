"""What nobody knows of a run before it begins, beside when AWS interrupts it: how fast it is, what spot costs then, how
long a node takes to its first step.

The one owner of these widths. Each is a log-normal factor, drawn once per run, whose median is what the bill's lines
say, so that it widens the range and moves no line. The range, the chance of a limit and of a deadline, `diff`'s bound,
`compare`, the cheaper options and the receipts' grade all come from runs simulated with them.

How often nodes are taken and how long the waits for the next are is in hazard.py, with what was fitted.
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

# Of ln(actual/priced hours of work), where a measurement of this job on this GPU counts: bench/results/gpu.md has five
# steps of an H100 twice, days and programs apart; they differ by 0.06 root mean square.
MEASURED = 0.06
STATED = 0.25  # where the definition says how long a step takes: assumption, until a receipt tells
PAGE = 0.45  # where it has that from somebody's page: of five published pairs two lay within a quarter of each other
# For each doubling of the GPUs that a step is said to be of. Twice as many lacked of twice the speed 8 to 10 % on two
# nodes of 8 H100s (NVIDIA NeMo AutoModel, 2026-06), 15 % on two A100s and 2 % more on four (vectorlm, 2024-05).
PER_DOUBLING = 0.1
SETUP = 0.3  # of ln set-up time, as assumed by family: assumption
SETUP_MEASURED = 0.1  # as a receipt's nodes took: assumption
# Of ln spot price: grows as the root of the price's age. Nine zones of p3 spot over 45 days in 2023: 0.015 after a day,
# 0.046 after 7, 0.070 after 30, 0.098 after 44 (github.com/andylizf/skynomad-artifact, read 2026-11).
PRICE_AT_7_DAYS, MOST_PRICE = 0.05, 0.25
P90 = NormalDist().inv_cdf(0.9)  # p10 and p90 of a normal distribution are so many sigmas from its middle


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """Sigmas of the logarithms. The default: everything is known."""

    faster: float = 0.0  # of the hours of work, below the median
    slower: float = 0.0  # above it
    shared: float = 0.0  # the part of both that the same job has on every GPU
    device: str = ""  # whose luck the rest is: equal for options on the same GPUs
    price: float = 0.0  # of the node's price
    offer: str = ""  # whose luck that is
    setup: float = 0.0  # of set-up and restart

    @property
    def is_drawn(self) -> bool:
        """Whether two runs differ by it."""
        return bool(self.faster or self.slower or self.price or self.setup)


NOTHING = Unknown()


def spot_price(age_days: int) -> float:
    """Sigma of ln spot price, where it was read so many days ago."""
    return min(MOST_PRICE, PRICE_AT_7_DAYS * math.sqrt(max(age_days, 0) / 7))


def span(sigma: float) -> tuple[float, float]:
    """The factors at p10 and p90."""
    return math.exp(-P90 * sigma), math.exp(P90 * sigma)


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """What each simulated run is multiplied with; a number where it is 1 for all."""

    work: Floats | float
    price: Floats | float
    setup: Floats | float


KNOWN = Factors(work=1.0, price=1.0, setup=1.0)


class Draws:
    """The luck of `runs` runs. It belongs to (run, what it is of): two options on one GPU have the same speed, and a
    draw is the same whatever else is drawn beside it.
    """

    def __init__(self, runs: int, seed: np.random.SeedSequence) -> None:
        self._runs, self._seed = runs, seed
        self._kept: dict[tuple[str, float], Floats] = {}

    def factors(self, unknowns: Sequence[Unknown]) -> Factors:
        """Factors of each, one after the other."""
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
        """Factors of the hours of work. What a job has on any GPU is one draw, what it has on this one another."""
        widest = max(one.faster, one.slower)
        if not widest:
            return None
        luck = self._normals(f"work on {one.device}", round(min(one.shared / widest, 1.0), 3))
        return np.asarray(np.exp(luck * np.where(luck < 0, one.faster, one.slower)))

    def _normals(self, of: str, shared: float = 0.0) -> Floats:
        """The quantiles of a standard normal in an order of their own: p50 is the median with any number of runs."""
        if (of, shared) not in self._kept:
            seed = np.random.SeedSequence(
                self._seed.entropy, spawn_key=(*self._seed.spawn_key, zlib.crc32(of.encode()))
            )
            luck = np.random.default_rng(seed).standard_normal(self._runs)
            if shared:
                luck = shared * self._normals("work of the job") + math.sqrt(1 - shared**2) * luck
            found = np.empty(self._runs)
            found[np.argsort(luck)] = _quantiles(self._runs)
            self._kept[of, shared] = found
        return self._kept[of, shared]


@cache
def _quantiles(count: int) -> Floats:
    """`count` equally likely values of a standard normal, in order."""
    inverse = NormalDist().inv_cdf
    lower = [inverse((at + 0.5) / count) for at in range(count // 2)]
    return np.array([*lower, *[0.0] * (count % 2), *(-value for value in reversed(lower))])
