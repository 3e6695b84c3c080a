"""Random numbers of simulated runs: they belong to a run and an attempt, whatever else is simulated beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from infra.risk.hazard import Floats, Indices

ATTEMPTS_IN_STEP = 32  # attempts for which all runs draw, finished or not


class Luck:
    """Random numbers of the runs that need a node, `active` of `runs` for each exposure.

    In the first attempts every run draws, finished or not. Later only those still going do, by their place among them:
    a generator of its own for each attempt keeps one exposure's luck apart from how many others are going.
    """

    def __init__(self, rng: np.random.Generator, runs: int, active: Indices, attempt: int) -> None:
        self._rng, self._late = rng, attempt >= ATTEMPTS_IN_STEP
        self._drawn, self._place = runs, active if active[-1] < runs else active % runs
        self._all = active.size == runs and active[-1] < runs
        if self._late:
            counts = np.bincount(active // runs)
            self._place = np.arange(active.size) - np.repeat(np.cumsum(counts) - counts, counts)
            self._drawn = int(counts.max())

    def exponential(self) -> Floats:
        """(2, active)."""
        return self._two(np.random.Generator.standard_exponential)

    def uniform(self) -> Floats:
        """(2, active)."""
        return self._two(np.random.Generator.random)

    def normal(self) -> Floats:
        """(active,)."""
        if self._late:
            return self._rng.spawn(1)[0].standard_normal(self._drawn)[self._place]
        return self._rng.standard_normal(self._drawn)[self._place]

    def _two(self, draw: Callable[[np.random.Generator, tuple[int, int]], Floats]) -> Floats:
        if self._late:  # row by row, so that the first numbers do not depend on how many are drawn
            return draw(self._rng.spawn(1)[0], (self._drawn, 2))[self._place].T
        drawn = draw(self._rng, (2, self._drawn))
        return drawn if self._all else drawn[:, self._place]
