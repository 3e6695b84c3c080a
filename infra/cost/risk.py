"""Interruptions: a seeded, vectorised simulation of one run on spot capacity, thousands of times.

A run is attempts. Each attempt is billed from launch: set-up, then work, until the work is done, the node is
interrupted (exponential life with the node's hazard), or a limit of the definition stops it. Then comes a wait for
capacity, not billed, and a replacement that pays its restart. What an interruption costs:

- in the node's first hour nothing for compute (AWS does not charge an interrupted first hour; disk and address go on);
- with the notice handled, the 120 s of the notice: everything before it is saved;
- where save and upload do not fit it, those 120 s and up to one checkpoint interval of work before them;
- with the notice missed, up to one checkpoint interval of work.

The hazard is itself uncertain: drawn once per simulated run, unless a figure is given (infra/cost/hazard.py). The
limits stop a run as the job's meter does, on hours times rates, without crediting free hours.

Random numbers belong to (run, attempt), not to the order of evaluation, so two variants of a run see the same luck and
their difference is not noise. Same seed, same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.cost.hazard import HAZARD_MEDIAN, HAZARD_SIGMA, HAZARD_WORDS, Hazard

__all__ = [
    "HAZARD_MEDIAN",
    "HAZARD_SIGMA",
    "HAZARD_WORDS",
    "Exposure",
    "Fate",
    "Hazard",
    "Leave",
    "Node",
    "Outcome",
    "account",
    "break_even",
    "expected_hours",
    "simulate",
]

NOTICE_MISSED = 0.05  # assumption
CAPACITY_WAIT_MINUTES = (
    30.0  # assumption; one-zone outages in those traces lasted 0.8 to 3.6 h, several zones shorten it
)
NOTICE_H = 120 / 3600
FREE_H = 1.0
MINIMUM_H = 60 / 3600  # each start is billed for 60 s at least

RUNS = 10_000
SEED = 7
_EDGE_H = 1e-9
_CHUNK = 50_000  # runs simulated together: fits the processor's cache
_ATTEMPTS_IN_STEP = 32  # attempts for which all runs draw, finished or not
MAX_ATTEMPTS = 1_000
_NOWHERE = 1e4  # times what was done so far: a run that needs more never gets anywhere

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What becomes of the next node of each run that needs one."""

    life_h: Floats  # from launch until AWS takes it; inf: never
    wait_h: Floats  # for capacity, after that
    missed: Floats  # uniform: the notice is missed where it is below Exposure.notice_missed
    lost: Floats  # uniform: the share of a checkpoint interval that is lost then


# (runs that need a node, which attempt it is, hours by the wall since the run was begun) -> their nodes
Fate = Callable[[Indices, int, Floats], Node]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """A run's owner ends it, by the wall, at `by_h` less `work_h` for the share of its work that is not done."""

    by_h: float
    work_h: float

    def at_h(self, left_share: Floats) -> Floats:
        """The hour, for runs with that share of their work left."""
        return self.by_h - self.work_h * left_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """What one run puts at risk. Hours and USD, plain floats: exact money belongs to the bill's lines."""

    setup_h: float
    restart_h: float
    phase_ends_h: tuple[float, ...]  # hours of work from the first step to each phase's end
    saves_fit: tuple[bool, ...]  # per phase: save and upload fit the notice
    interval_h: float  # between timed checkpoints
    compute_usd_h: float
    extras_usd_h: float  # disks and address: per node-hour, never free
    fixed_usd: float
    hazard: Hazard | float | None  # per node-hour; drawn per run, None from the prior; a number is taken as it is
    wait_h: float = CAPACITY_WAIT_MINUTES / 60
    notice_missed: float = NOTICE_MISSED
    free_h: float = FREE_H
    max_usd: float | None = None
    max_hours: float | None = None
    leave: Leave | None = None  # when its owner ends it, everything saved

    @property
    def chance(self) -> Hazard:
        """`hazard` as a distribution."""
        if isinstance(self.hazard, Hazard):
            return self.hazard
        return Hazard() if self.hazard is None else Hazard.fixed(self.hazard)

    @property
    def uninterrupted_h(self) -> float:
        return self.setup_h + self.phase_ends_h[-1]

    @property
    def uninterrupted_usd(self) -> float:
        return self.fixed_usd + max(self.uninterrupted_h, MINIMUM_H) * (self.compute_usd_h + self.extras_usd_h)

    def hours_at_cap(self) -> tuple[float, float]:
        """Node-hours at which (max_usd, max_hours) stop the run; inf without that limit."""
        rate = self.compute_usd_h + self.extras_usd_h
        by_money = np.inf if self.max_usd is None or not rate else max(0.0, self.max_usd - self.fixed_usd) / rate
        return by_money, np.inf if self.max_hours is None else self.max_hours


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One value per simulated run."""

    usd: Floats
    hours: Floats  # node-hours, as `limits.max_hours` counts them: free first hours included
    wall_hours: Floats  # with the waits for capacity
    interruptions: NDArray[np.int64]
    stopped: Flags  # by a limit or its owner, before the work was done
    done_h: Floats  # hours of work that survive; only of runs that ended finished or by their owner

    def quantiles(self, values: Floats) -> tuple[float, float, float, float]:
        """p10, p50, p90, mean."""
        p10, p50, p90 = np.quantile(values, (0.1, 0.5, 0.9))
        return float(p10), float(p50), float(p90), float(values.mean())


def simulate(exposure: Exposure, *, runs: int = RUNS, seed: int = SEED, attempts: int = MAX_ATTEMPTS) -> Outcome:
    """`runs` independent runs. One that is not done after `attempts` nodes is carried on as it went so far."""
    sizes = [min(_CHUNK, runs - start) for start in range(0, runs, _CHUNK)]
    seeds = np.random.SeedSequence(seed).spawn(len(sizes))
    parts = [_chunk(exposure, size, np.random.default_rng(s), attempts) for size, s in zip(sizes, seeds, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return Outcome(
        usd=np.concatenate([part.usd for part in parts]),
        hours=np.concatenate([part.hours for part in parts]),
        wall_hours=np.concatenate([part.wall_hours for part in parts]),
        interruptions=np.concatenate([part.interruptions for part in parts]),
        stopped=np.concatenate([part.stopped for part in parts]),
        done_h=np.concatenate([part.done_h for part in parts]),
    )


def expected_hours(exposure: Exposure, hazard: float) -> float:
    """Mean node-hours at one fixed hazard, without limits: the closed form the simulation is checked against.

    A node gets past its first `a` = restart + notice with probability exp(-hazard a), so one useful stretch costs
    (exp(hazard a) - 1) / hazard on average, and work W is cut into 1 + hazard W stretches on average. Work grows by
    what interruptions tear off. Exact when set-up equals restart and no checkpoint interval outlasts an attempt.
    """
    work_h = exposure.phase_ends_h[-1]
    if not hazard:
        return exposure.uninterrupted_h
    starts = (0.0, *exposure.phase_ends_h[:-1])
    shares = [(end - start) / work_h for start, end in zip(starts, exposure.phase_ends_h, strict=True)]
    missed = sum(
        s * (exposure.notice_missed if fit else 1.0) for s, fit in zip(shares, exposure.saves_fit, strict=True)
    )
    torn = hazard * missed * exposure.interval_h / 2  # per hour of work
    exponent = hazard * (exposure.restart_h + NOTICE_H)
    if torn >= 1 or exponent > 50:
        return math.inf
    grown_h = work_h / (1 - torn)
    stretch_h = math.expm1(exponent) / hazard
    return (1 + hazard * grown_h) * stretch_h + grown_h - NOTICE_H + exposure.setup_h - exposure.restart_h


def break_even(exposure: Exposure, on_demand_usd: float, *, highest: float = 10.0) -> float | None:
    """The hazard per node-hour from which spot costs more on average than `on_demand_usd`.

    Without limits, since a run that a limit stops is cheap but not done; and with interrupted first hours billed, since
    otherwise a node lost every ten minutes would cost nothing. None: spot is cheaper up to `highest`.
    """

    def dearer(hazard: float) -> bool:
        rate = exposure.compute_usd_h + exposure.extras_usd_h
        return exposure.fixed_usd + expected_hours(exposure, hazard) * rate > on_demand_usd

    if not dearer(highest):
        return None
    low, high = 0.0, highest
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if dearer(middle) else (middle, high)
    return 0.0 if dearer(0.0) else high


def _chunk(exposure: Exposure, runs: int, rng: np.random.Generator, attempts: int) -> Outcome:
    chance = exposure.chance
    hazard = chance.of(rng.standard_normal(runs))
    first_wait_h = rng.standard_exponential(runs) * exposure.wait_h if chance.median else np.zeros(runs)

    uneven = rng.spawn(1)[0]  # of its own: the other luck stays what it is for an even hazard

    def fate(active: Indices, attempt: int, wall_h: Floats) -> Node:
        life, wait, missed, lost = _luck(rng, runs, active, attempt)
        with np.errstate(divide="ignore"):
            life = life / hazard[active]
        if chance.unevenness:
            life = life / chance.of_node(_normals(uneven, runs, active, attempt), first=attempt == 0)
        return Node(life_h=life, wait_h=wait * exposure.wait_h, missed=missed, lost=lost)

    return account(exposure, first_wait_h, fate, attempts)


def account(exposure: Exposure, first_wait_h: Floats, fate: Fate, attempts: int = MAX_ATTEMPTS) -> Outcome:
    """What runs cost that wait `first_wait_h` (one value per run) for their first node and whose nodes meet `fate`."""
    runs = len(first_wait_h)
    ends = np.asarray(exposure.phase_ends_h)
    fits = np.asarray(exposure.saves_fit)
    cap_h = min(exposure.hours_at_cap())
    done = np.zeros(runs)  # hours of work that survive
    hours, billed, wall = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    interruptions = np.zeros(runs, dtype=np.int64)
    stopped = np.zeros(runs, dtype=bool)
    active = np.arange(runs)
    start_h = exposure.setup_h
    wall += _patient(exposure, first_wait_h, wall, done)

    for attempt in range(attempts):
        if not active.size:
            break
        node = fate(active, attempt, wall[active])
        life = node.life_h
        need = start_h + ends[-1] - done[active]
        left = _left(exposure, wall[active], done[active], start_h)
        room = np.maximum(np.minimum(cap_h - hours[active], left), 0.0)
        node_h = np.minimum(np.minimum(life, need), room)
        at_limit = room < np.minimum(life, need)
        interrupted = ~at_limit & (life < need)

        span = np.where(left > _EDGE_H, np.maximum(node_h, MINIMUM_H), 0.0)
        hours[active] += span
        billed[active] += np.where(interrupted & (node_h < exposure.free_h), 0.0, span)
        wall[active] += node_h
        interruptions[active] += interrupted
        stopped[active] |= at_limit

        saved = np.maximum(node_h - start_h - NOTICE_H, 0.0)
        phase = np.minimum(np.searchsorted(ends, done[active] + saved, side="right"), len(ends) - 1)
        heard = node.missed >= exposure.notice_missed
        trained = np.where(heard, saved, np.maximum(node_h - start_h, 0.0))  # who hears no notice goes on to the end
        torn = np.maximum(trained - node.lost * exposure.interval_h, 0.0)
        kept = np.where(heard & fits[phase], saved, torn)
        done[active] += np.where(interrupted, kept, np.maximum(node_h - start_h, 0.0))

        wait_h = _patient(exposure, node.wait_h, wall[active], done[active])
        wall[active] += np.where(interrupted, wait_h, 0.0)

        active = active[interrupted]
        start_h = exposure.restart_h

    if active.size:  # the same again, to the end of the work or to the limit
        grow = ends[-1] / np.maximum(done[active], ends[-1] / _NOWHERE)
        at_limit = hours[active] * grow > cap_h
        grow = np.where(at_limit, cap_h / hours[active], grow)
        hours[active], billed[active], wall[active] = hours[active] * grow, billed[active] * grow, wall[active] * grow
        interruptions[active] = (interruptions[active] * grow).astype(np.int64)
        done[active] = np.where(at_limit, done[active], ends[-1])
        stopped[active] |= at_limit | (grow >= _NOWHERE)
    usd = exposure.fixed_usd + billed * exposure.compute_usd_h + hours * exposure.extras_usd_h
    return Outcome(usd=usd, hours=hours, wall_hours=wall, interruptions=interruptions, stopped=stopped, done_h=done)


def _patient(exposure: Exposure, wait_h: Floats, wall: Floats, done: Floats) -> Floats:
    """The wait for capacity, as long as the owner waits."""
    if exposure.leave is None:
        return wait_h
    return np.clip(exposure.leave.at_h(1 - done / exposure.phase_ends_h[-1]) - wall, 0.0, wait_h)


def _left(exposure: Exposure, wall: Floats, done: Floats, start_h: float) -> Floats | float:
    """Hours until the owner ends the run, for a node launched now: while it works, what is left to do shrinks."""
    if exposure.leave is None:
        return math.inf
    work_h = exposure.phase_ends_h[-1]
    left = exposure.leave.at_h(1 - done / work_h) - wall
    falling = 1 - exposure.leave.work_h / work_h  # per hour of work
    working = start_h + (left - start_h) / falling if falling > _EDGE_H else np.full_like(left, math.inf)
    return np.where(left > start_h, working, left)


def _luck(
    rng: np.random.Generator, runs: int, active: NDArray[np.intp], attempt: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Per active run: unit life, unit wait, and two uniforms, the notice's and the lost work's."""
    if attempt < _ATTEMPTS_IN_STEP:
        exponential, uniform = rng.standard_exponential((2, runs)), rng.random((2, runs))
        if active.size < runs:
            exponential, uniform = exponential[:, active], uniform[:, active]
    else:
        exponential, uniform = rng.standard_exponential((2, active.size)), rng.random((2, active.size))
    return exponential[0], exponential[1], uniform[0], uniform[1]


def _normals(rng: np.random.Generator, runs: int, active: Indices, attempt: int) -> Floats:
    return rng.standard_normal(runs)[active] if attempt < _ATTEMPTS_IN_STEP else rng.standard_normal(active.size)
