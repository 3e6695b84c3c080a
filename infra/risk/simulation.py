"""Simulates one run on spot capacity with its interruptions, thousands of times. Its random numbers have a fixed seed,
and the computation is vectorised.

A run consists of attempts. Each attempt is billed from its launch. An attempt has a set-up and then works, until the
work is done, or the node is interrupted (its life is exponential with the node's hazard), or a limit of the definition
stops the run. After an interruption there is a wait for capacity, which is log-normal and not billed, and then a
replacement, whose restart is billed. The effect of an interruption on the cost is:

- in the node's first hour, compute costs nothing (AWS does not charge an interrupted first hour, except for disk and
  address);
- if the notice is handled, only its 120 s are lost, because everything before is saved;
- if save and upload take longer than the notice, its 120 s are lost, and up to one checkpoint interval of work before
  it;
- if the notice is missed, up to one checkpoint interval of work is lost.

The hazard itself is uncertain: unless the definition fixes it, each simulated run has a random hazard
(infra/risk/hazard.py). Speed, price and set-up are uncertain too: each is a factor with median 1
(infra/risk/unknown.py). The limits stop a run as the job's meter does. The meter multiplies hours by rates, and treats
no hour as free. A run on several nodes is interrupted if any of its nodes is. In half of these cases only the lost node
has a free first hour; in the other half AWS takes all nodes, and the first hours of all are free.

A random number depends on the run and the attempt, and not on the order of evaluation. So two variants of a run have
the same random numbers, and the difference between them is not noise. The same seed gives the same results, whether
runs are simulated one by one or many at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gpufleet.infra.risk.gathering import gathered
from gpufleet.infra.risk.hazard import (
    ZONES_WAIT_H,
    ZONES_WAIT_SIGMA,
    Floats,
    Hazard,
    Indices,
    left_share,
    of_node,
)
from gpufleet.infra.risk.unknown import KNOWN, NOTHING, Draws, Factors, Unknown
from gpufleet.job.contract.aws import FREE_S, MINIMUM_S

NOTICE_MISSED = 0.05  # probability that a notice is missed; an assumption
NOTICE_H = 120 / 3600
FREE_H, MINIMUM_H = FREE_S / 3600, MINIMUM_S / 3600

RUNS = 10_000
SEED = 7
_EDGE_H = 1e-9
_CHUNK = 50_000  # number of runs that are simulated together, because their data fit into the processor's cache
_TOGETHER = 4_096  # random numbers of one kind that are drawn at once for late attempts
MAX_ATTEMPTS = 200
# if the extrapolation would need more than this many times the finished work, the run is treated as never ending
_NOWHERE = 1e4

Flags = NDArray[np.bool_]
Hours = TypeVar("Hours", float, Floats)


@dataclass(frozen=True, kw_only=True, slots=True)
class NextNode:
    """The fate of the next node of each run that needs one."""

    life_h: Floats  # hours from launch until AWS interrupts the node; inf for never
    wait_h: Floats  # hours of waiting for capacity after the interruption
    missed: Floats  # uniform random number; the notice is missed if it is below Exposure.notice_missed
    lost: Floats  # uniform random number; the share of a checkpoint interval that is lost if the notice is missed


# A function that returns the next nodes, given the runs that need one, the number of the attempt, and the wall-clock
# hours since each run began.
Fate = Callable[[Indices, int, Floats], NextNode]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedEnd:
    """The owner ends the run at the wall-clock hour `by_h`, minus `work_h` times the share of the work that is not
    done. If the work takes longer than the bill says, `work_h` grows in proportion.
    """

    by_h: float
    work_h: float

    def at_h(self, left_share: Floats) -> Floats:
        """The hour at which the owner ends runs of whose work the share `left_share` is not done."""
        return self.by_h - self.work_h * left_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """What the simulation needs to know about a run. Hours and USD are floats; exact money is in the bill's lines."""

    setup_h: float
    restart_h: float
    phase_ends_h: tuple[float, ...]  # hours of work from the first step to each phase's end
    saves_fit: tuple[bool, ...]  # for each phase, whether save and upload end within the notice
    interval_h: float  # hours between timed checkpoints
    compute_usd_h: float  # USD per hour of compute of all nodes
    extras_usd_h: float  # USD per hour of disks and addresses, which are never free
    fixed_usd: float
    hazard: Hazard | float | None  # per node-hour: a distribution, an exact figure, or None for the prior
    nodes: int = 1
    wait_h: float = ZONES_WAIT_H  # median of the hours of waiting for capacity, which are log-normal
    wait_sigma: float = ZONES_WAIT_SIGMA  # the standard deviation of the wait's logarithm
    gather_h: float = math.inf  # hours that several nodes wait for missing nodes before they end (risk/gathering.py)
    notice_missed: float = NOTICE_MISSED
    free_h: float = FREE_H
    max_usd: float | None = None
    max_hours: float | None = None
    reserve_h: float = 0.0  # hours before a limit at which the job begins to stop, to save, upload and export
    leave: PlannedEnd | None = None  # when the owner ends the run; everything is saved then
    # hours for which the node is kept idle at the end; the longer the work takes, the fewer they are
    idle_h: float = 0.0
    unknown: Unknown = NOTHING

    @property
    def chance(self) -> Hazard:
        """`hazard` as a distribution."""
        if isinstance(self.hazard, Hazard):
            return self.hazard
        return Hazard() if self.hazard is None else Hazard.fixed(self.hazard)

    def first_wait_h(self, hazard: Floats, normals: Floats, there: Floats, since: Floats) -> Floats:
        """Hours of waiting for the first node, from a normal and two uniform numbers for each run. Since a run may
        begin at any hour, AWS usually has capacity; otherwise the run begins in the middle of a wait, which is more
        likely to be a long one.
        """
        variance = self.wait_sigma**2
        mean_h = self.wait_h * math.exp(variance / 2)
        without = there < hazard * mean_h / (1 + hazard * mean_h)
        return np.where(without, since * self.wait_h * np.exp(variance + self.wait_sigma * normals), 0.0)

    @property
    def setup_share(self) -> float:
        """The share of set-up in the hours of an uninterrupted run."""
        return self.setup_h / (self.setup_h + self.phase_ends_h[-1])

    @property
    def is_drawn(self) -> bool:
        """Whether two simulated runs can differ, because something is random."""
        return bool(self.chance.median) or self.unknown.is_drawn

    @property
    def unlimited(self) -> Exposure:
        """This run without limits, since a run that a limit stops is cheap but not done."""
        return replace(self, max_usd=None, max_hours=None)

    @property
    def interruptions_alone(self) -> Exposure:
        """This run with interruptions as the only uncertainty."""
        return replace(self, unknown=NOTHING)

    @property
    def uninterrupted_h(self) -> float:
        return self.setup_h + self.phase_ends_h[-1]

    @property
    def uninterrupted_usd(self) -> float:
        return self.metered(max(self.uninterrupted_h, MINIMUM_H))

    @property
    def usd_h(self) -> float:
        """USD of a node-hour that is not free."""
        return self.compute_usd_h + self.extras_usd_h

    def metered(self, hours: Hours) -> Hours:
        """USD of `hours` node-hours as the job's meter computes them: interrupted first hours are not free."""
        return self.fixed_usd + hours * self.usd_h

    def hours_at_cap(self) -> tuple[float, float]:
        """Node-hours at which (max_usd, max_hours) stop the run; inf if there is no such limit."""
        by_money = self.hours_paid(1.0)
        by_hours = np.inf if self.max_hours is None else self.max_hours
        return max(0.0, by_money - self.reserve_h), max(0.0, by_hours - self.reserve_h)

    def hours_paid(self, price: Hours) -> Hours:
        """Node-hours that fit within max_usd if a node costs `price` times the bill's price; inf if max_usd is
        not set.
        """
        rate = price * self.compute_usd_h + self.extras_usd_h
        if self.max_usd is None or not self.usd_h:
            return rate * 0 + np.inf
        return max(0.0, self.max_usd - self.fixed_usd) / rate


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRuns:
    """One value per simulated run."""

    usd: Floats
    metered_usd: Floats  # USD as the job's meter computes them, with interrupted first hours
    hours: Floats  # node-hours as `limits.max_hours` limits them, with free first hours
    wall_hours: Floats  # wall-clock hours, with the waits for capacity
    idle_hours: Floats  # hours for which each of several nodes is billed while it waits for the others
    interruptions: NDArray[np.int64]
    stopped: Flags  # whether a limit or the owner ended the run before its work was done
    work_h: Floats  # hours that the work takes
    done_h: Floats  # hours of work that are kept; only valid if the run finished or its owner ended it


def quantiles(values: Floats) -> tuple[float, float, float, float]:
    """p10, p50, p90 and the mean. Interpolates as np.quantile does. np.quantile itself is not used, because it imports
    numpy.ma, which takes 15 ms of a cold start.
    """
    last, mean = len(values) - 1, float(values.mean())
    if not last:
        return mean, mean, mean, mean
    places = [(min(int(share * last), last - 1), share * last) for share in (0.1, 0.5, 0.9)]
    ordered = np.partition(values, [at + step for at, _ in places for step in (0, 1)])
    p10, p50, p90 = (float(ordered[at] + (ordered[at + 1] - ordered[at]) * (place - at)) for at, place in places)
    return p10, p50, p90, mean


def simulate(exposure: Exposure, *, runs: int = RUNS, seed: int = SEED, attempts: int = MAX_ATTEMPTS) -> SimulatedRuns:
    """Simulates `runs` independent runs. A run that is not done after `attempts` nodes is extrapolated."""
    return simulate_each([exposure], runs=runs, seed=seed, attempts=attempts)[0]


def simulate_each(
    exposures: Sequence[Exposure],
    *,
    runs: int = RUNS,
    seed: int = SEED,
    attempts: int = MAX_ATTEMPTS,
    unfinished: float = 1.0,
) -> list[SimulatedRuns]:
    """The result of `simulate` for each exposure, computed together. If more than the share `unfinished` of the runs is
    not done after `attempts` nodes, these runs get more nodes, up to MAX_ATTEMPTS. Raises ValueError if one of several
    exposures has a planned end.
    """
    if len(exposures) > 1 and any(exposure.leave for exposure in exposures):
        raise ValueError("simulate a run with a planned end by itself")
    sizes = [min(_CHUNK, runs - start) for start in range(0, runs, _CHUNK)]
    together = max(1, _CHUNK // max(1, runs))
    # Exposures that need the same computations (those for several nodes, those for interruptions) are simulated
    # together.
    alike: dict[tuple[bool, bool], list[Exposure]] = {}
    for exposure in dict.fromkeys(exposures):
        alike.setdefault((exposure.nodes > 1, bool(exposure.chance.median)), []).append(exposure)
    simulated: dict[Exposure, SimulatedRuns] = {}
    for group in alike.values():
        for start in range(0, len(group), together):
            some = group[start : start + together]
            parts = [
                _chunk(some, _luck(seed, at, size), attempts, unfinished=unfinished) for at, size in enumerate(sizes)
            ]
            simulated.update(zip(some, map(_joined, zip(*parts, strict=True)), strict=True))
    return [simulated[exposure] for exposure in exposures]


def simulate_together(exposures: Sequence[Exposure], *, runs: int) -> list[SimulatedRuns]:
    """Simulates runs that take place at about the same time. In each simulated case, runs on the same GPUs and offers
    have the same speed, set-up and prices, but each run has its own interruptions.
    """
    shared, simulated = Draws(runs, np.random.SeedSequence(SEED)), []
    for at, exposure in enumerate(exposures):
        luck = Luck(runs, np.random.SeedSequence(SEED, spawn_key=(1, at)))
        luck.unknown = shared
        simulated += _chunk([exposure], luck, MAX_ATTEMPTS)
    return simulated


def within_limits(exposure: Exposure, free: SimulatedRuns, *, seed: int = SEED) -> SimulatedRuns:
    """The result of `simulate(exposure)`, computed from `free`, which is the result of `simulate(exposure.unlimited)`.
    Only runs that come near a limit are simulated again.
    """
    rate = (free.metered_usd - exposure.fixed_usd) / free.hours
    paid_h = np.inf if exposure.max_usd is None else (exposure.max_usd - exposure.fixed_usd) / np.maximum(rate, _EDGE_H)
    allowed_h = np.minimum(paid_h, np.inf if exposure.max_hours is None else exposure.max_hours)
    (near,) = np.nonzero(free.hours + exposure.reserve_h + _EDGE_H > allowed_h)
    if not near.size:
        return free
    runs = len(free.hours)
    if runs > _CHUNK:
        return simulate(exposure, runs=runs, seed=seed)
    (cut,) = _chunk([exposure], _luck(seed, 0, runs), MAX_ATTEMPTS, near)
    columns = {field.name: getattr(free, field.name).copy() for field in fields(SimulatedRuns)}
    for name, values in columns.items():
        values[near] = getattr(cut, name)[near]
    return SimulatedRuns(**columns)


def _joined(parts: Sequence[SimulatedRuns]) -> SimulatedRuns:
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(SimulatedRuns)]
    return SimulatedRuns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _chunk(
    exposures: Sequence[Exposure], luck: Luck, attempts: int, only: Indices | None = None, unfinished: float = 1.0
) -> list[SimulatedRuns]:
    """Simulates runs of all exposures. The first runs of all exposures have the same random numbers, and so have the
    second runs, and so on. If `only` is given, only these runs are simulated, and the results of the others mean
    nothing.
    """
    runs = luck.runs
    factors = luck.unknown.factors([exposure.unknown for exposure in exposures])
    hazards = [exposure.chance.of_gang(exposure.nodes).per_run(luck.hazard) for exposure in exposures]
    hazard = np.concatenate(hazards)
    first_wait_h = np.concatenate(
        [
            exposure.first_wait_h(of, luck.wait, luck.there, luck.since)
            for exposure, of in zip(exposures, hazards, strict=True)
        ]
    )
    next_node = _Nodes(
        luck,
        hazard=hazard,
        unevenness=_of_each(exposures, runs, lambda exposure: exposure.chance.unevenness),
        wait_h=_of_each(exposures, runs, lambda exposure: exposure.wait_h),
        wait_sigma=_of_each(exposures, runs, lambda exposure: exposure.wait_sigma),
    )
    # needed because a hazard may be 0; set once, because setting it for each node is slow
    with np.errstate(divide="ignore"):
        return _account(exposures, runs, first_wait_h, next_node, attempts, factors, only, unfinished)


class _Nodes:
    """The nodes of simulated runs, with random numbers from `luck`. Few runs reach late attempts, so the random numbers
    for several late attempts are computed in one call of numpy.
    """

    def __init__(
        self,
        luck: Luck,
        *,
        hazard: Floats,
        unevenness: Floats | float,
        wait_h: Floats | float,
        wait_sigma: Floats | float,
    ) -> None:
        self._luck, self._hazard, self._unevenness = luck, hazard, unevenness
        self._is_uneven, self._wait_h, self._wait_sigma = bool(np.any(unevenness)), wait_h, wait_sigma
        # The attempt and the runs for which there are already random numbers.
        self._ahead: tuple[int, Indices, NextNode] | None = None

    def __call__(self, active: Indices, attempt: int, wall_h: Floats) -> NextNode:
        """The nodes of the runs `active`. From attempt ATTEMPTS_IN_STEP on, `active` has fewer runs with each
        attempt.
        """
        if attempt < ATTEMPTS_IN_STEP:
            return self._nodes(active, self._luck.draw(active, attempt), first=attempt == 0)
        if self._ahead is None or attempt >= self._ahead[0] + len(self._ahead[2].life_h):
            last = attempt + max(1, _TOGETHER // active.size)
            self._ahead = attempt, active, self._nodes(active, self._luck.draw_late(active, range(attempt, last)))
        begin, runs, nodes = self._ahead
        at, row = attempt - begin, slice(None) if runs is active else np.searchsorted(runs, active)
        return NextNode(
            life_h=nodes.life_h[at][row],
            wait_h=nodes.wait_h[at][row],
            missed=nodes.missed[at][row],
            lost=nodes.lost[at][row],
        )

    def _nodes(self, active: Indices, drawn: NodeLuck, *, first: bool = False) -> NextNode:
        life = drawn.life / self._hazard[active]
        if self._is_uneven:
            life = life / of_node(drawn.node, _select(self._unevenness, active), first=first)
        wait = _select(self._wait_h, active) * np.exp(_select(self._wait_sigma, active) * drawn.wait)
        return NextNode(life_h=life, wait_h=wait, missed=drawn.missed, lost=drawn.lost)


def account(exposure: Exposure, first_wait_h: Floats, fate: Fate, attempts: int = MAX_ATTEMPTS) -> SimulatedRuns:
    """The costs of runs that first wait for `first_wait_h` hours, and whose nodes are determined by `fate`."""
    return _account([exposure], len(first_wait_h), first_wait_h, fate, attempts)[0]


def _account(
    exposures: Sequence[Exposure],
    runs: int,
    first_wait_h: Floats,
    fate: Fate,
    attempts: int,
    factors: Factors = KNOWN,
    only: Indices | None = None,
    unfinished: float = 1.0,
) -> list[SimulatedRuns]:
    count = len(first_wait_h)
    single = exposures[0] if len(exposures) == 1 else None

    def per_exposure(get: Callable[[Exposure], float]) -> Floats | float:
        return _of_each(exposures, runs, get)

    stretch = factors.work
    work_h, reserve_h = per_exposure(lambda e: e.phase_ends_h[-1]) * stretch, per_exposure(lambda e: e.reserve_h)
    if any(e.idle_h for e in exposures):
        held_h = per_exposure(lambda e: e.phase_ends_h[-1] if e.idle_h else 0.0)
        work_h = np.maximum(work_h - per_exposure(lambda e: e.idle_h) * stretch, held_h)
    price = factors.price
    if isinstance(price, float):
        paid_h: Floats | float = per_exposure(lambda e: e.hours_paid(1.0))
    else:
        paid_h = np.concatenate([e.hours_paid(price[i * runs : (i + 1) * runs]) for i, e in enumerate(exposures)])
    allowed_h = np.minimum(paid_h, per_exposure(lambda e: np.inf if e.max_hours is None else e.max_hours))
    cap_h = np.maximum(allowed_h - reserve_h, 0.0)
    # If only one of several nodes is lost, the first hours of the others are not free, and they are billed while they
    # wait.
    free_h, stay = per_exposure(lambda e: e.free_h), per_exposure(lambda e: left_share(e.nodes))
    interval_h, notice_missed = per_exposure(lambda e: e.interval_h), per_exposure(lambda e: e.notice_missed)
    setup_h, restart_h = (per_exposure(get) * factors.setup for get in (lambda e: e.setup_h, lambda e: e.restart_h))
    phases = range(max(len(e.phase_ends_h) for e in exposures))
    begins_h = [
        per_exposure(lambda e, i=i: e.phase_ends_h[i - 1] if i < len(e.phase_ends_h) else math.inf) * stretch  # type: ignore[misc]
        for i in phases
    ]
    fits = [per_exposure(lambda e, i=i: e.saves_fit[min(i, len(e.saves_fit) - 1)]) for i in phases]  # type: ignore[misc]

    done = np.zeros(count)  # hours of work that are kept
    hours, billed, wall = np.zeros(count), np.zeros(count), np.zeros(count)
    interruptions = np.zeros(count, dtype=np.int64)
    stopped = np.zeros(count, dtype=bool)
    is_left = single is not None and single.leave is not None
    is_limited = is_left or bool(np.isfinite(cap_h).any())
    active = np.arange(count) if only is None else only
    gather_h = per_exposure(lambda e: e.gather_h)
    first_wait_h, first_billed_h = gathered(first_wait_h, gather_h, restart_h)
    wall += _patient(single, first_wait_h, wall, done, work_h)
    idle, waits_billed = np.zeros(count), bool(np.any(stay))
    if waits_billed:
        idle = np.minimum(np.minimum(wall, first_billed_h) * stay, cap_h)
        hours, billed = hours + idle, billed + idle

    for attempt in range(max(attempts, MAX_ATTEMPTS)):
        if not active.size or (attempt >= attempts and active.size <= unfinished * count):
            break
        begun_h, done_h, before_h = wall[active], done[active], hours[active]
        node = fate(active, attempt, begun_h)
        start_h = _select(restart_h if attempt else setup_h, active)
        whole_h = _select(work_h, active)
        need = start_h + whole_h - done_h
        node_h, interrupted = np.minimum(node.life_h, need), node.life_h < need
        spent_h = node_h
        if is_limited:
            left_h = _hours_left(single, begun_h, done_h, start_h, whole_h)
            room = np.maximum(np.minimum(_select(cap_h, active) - before_h, left_h), 0.0)
            at_limit = room < node_h
            if at_limit.any():
                node_h, interrupted = np.minimum(node_h, room), interrupted & ~at_limit
                allowed = np.maximum(_select(allowed_h, active) - before_h, 0.0)
                stops = at_limit & np.isfinite(allowed)  # a run with a planned end has no limits
                spent_h = np.where(stops, np.minimum(node_h + _select(reserve_h, active), allowed), node_h)
                stopped[active] |= at_limit
        span = np.maximum(spent_h, MINIMUM_H)
        if is_left:
            span = np.where(left_h > _EDGE_H, span, 0.0)
        hours[active] = before_h + span
        free = interrupted & (node_h < _select(free_h, active))
        billed[active] += np.where(free, span * _select(stay, active), span)
        wall_h = begun_h + spent_h

        worked_h = node_h - start_h
        trained, kept_h = np.maximum(worked_h, 0.0), np.maximum(worked_h - NOTICE_H, 0.0)
        missed = node.missed < _select(notice_missed, active)
        fit = _select(fits[0], active)
        for index in phases[1:]:
            if fits[index] is not fits[index - 1]:
                fit = np.where(done_h + kept_h >= _select(begins_h[index], active), _select(fits[index], active), fit)
        (torn,) = np.nonzero(missed | np.logical_not(fit))
        if torn.size:  # a node that misses its notice works until it is taken
            whole = np.where(missed[torn], trained[torn], kept_h[torn])
            kept_h[torn] = np.maximum(whole - node.lost[torn] * _select(interval_h, active[torn]), 0.0)
        done_h = done_h + np.where(interrupted, kept_h, trained)
        done[active] = done_h

        gathered_h, waited_h = gathered(node.wait_h, _select(gather_h, active), _select(restart_h, active))
        wait_h = _patient(single, gathered_h, wall_h, done_h, whole_h)
        wall[active] = wall_h + np.where(interrupted, wait_h, 0.0)
        if waits_billed:
            more = np.where(interrupted, np.minimum(wait_h, waited_h), 0.0) * _select(stay, active)
            more = np.minimum(more, np.maximum(_select(cap_h, active) - hours[active], 0.0))
            idle[active] += more
            hours[active] += more
            billed[active] += more
        active = active[interrupted]
        interruptions[active] = attempt + 1

    if active.size:  # these runs are extrapolated to the end of the work or to the limit
        work, cap = _select(work_h, active), _select(cap_h, active)
        grow = work / np.maximum(done[active], work / _NOWHERE)
        at_limit = hours[active] * grow > cap
        grow = np.where(at_limit, cap / hours[active], grow)
        hours[active], billed[active], wall[active] = hours[active] * grow, billed[active] * grow, wall[active] * grow
        interruptions[active] = (interruptions[active] * grow).astype(np.int64)
        done[active] = np.where(at_limit, done[active], work)
        stopped[active] |= at_limit
    # The charges that do not depend on hours are those of a whole run; a low limit may end it before they are spent.
    fixed_usd = per_exposure(lambda e: e.fixed_usd if e.max_usd is None else min(e.fixed_usd, e.max_usd))
    compute_usd_h, extras_usd_h = (
        per_exposure(lambda e: e.compute_usd_h) * price,
        per_exposure(lambda e: e.extras_usd_h),
    )
    usd = fixed_usd + billed * compute_usd_h + hours * extras_usd_h
    metered_usd = per_exposure(lambda e: e.fixed_usd) + hours * (compute_usd_h + extras_usd_h)
    return [
        SimulatedRuns(
            usd=usd[part],
            metered_usd=metered_usd[part],
            hours=hours[part],
            wall_hours=wall[part],
            idle_hours=idle[part],
            interruptions=interruptions[part],
            stopped=stopped[part],
            work_h=np.broadcast_to(work_h, (count,))[part],
            done_h=done[part],
        )
        for part in (slice(start, start + runs) for start in range(0, count, runs))
    ]


def _of_each(exposures: Sequence[Exposure], runs: int, get: Callable[[Exposure], float]) -> Floats | float:
    """One value for each run; a single value if all exposures have the same one."""
    values = [get(exposure) for exposure in exposures]
    return values[0] if values.count(values[0]) == len(values) else np.repeat(np.asarray(values, dtype=float), runs)


def _select(values: Floats | float, active: Indices) -> Floats | float:
    return values[active] if isinstance(values, np.ndarray) else values


def _patient(exposure: Exposure | None, wait_h: Floats, wall: Floats, done: Floats, work_h: Floats | float) -> Floats:
    """The wait for capacity; it ends when the owner ends the run."""
    if exposure is None or exposure.leave is None:
        return wait_h
    return np.clip(exposure.leave.at_h((work_h - done) / exposure.phase_ends_h[-1]) - wall, 0.0, wait_h)


def _hours_left(
    exposure: Exposure | None, wall: Floats, done: Floats, start_h: Floats | float, work_h: Floats | float
) -> Floats | float:
    """Hours until the owner ends the run, if a node is launched now and works until then."""
    if exposure is None or exposure.leave is None:
        return math.inf
    left_h = exposure.leave.at_h((work_h - done) / exposure.phase_ends_h[-1]) - wall
    falling = 1 - exposure.leave.work_h / exposure.phase_ends_h[-1]  # per hour of work
    with np.errstate(divide="ignore", invalid="ignore"):
        working = np.where(np.greater(falling, _EDGE_H), start_h + (left_h - start_h) / falling, math.inf)
    return np.where(left_h > start_h, working, left_h)


ATTEMPTS_IN_STEP = 8  # number of attempts for which all runs have random numbers, even finished runs
_WEYL, _MIX_1, _MIX_2 = (np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class NodeLuck:
    """The random numbers for the next nodes of some runs."""

    life: Floats  # exponential random numbers
    wait: Floats  # normal random numbers
    node: Floats  # normal random numbers
    missed: Floats  # uniform random numbers
    lost: Floats  # uniform random numbers


class Luck:
    """The random numbers of `runs` runs, which all simulations share. For the first attempts, the numbers of all runs
    are computed at once, even those of finished runs. For later attempts, which few runs reach, a number is computed
    from (run, attempt) alone: by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), and for normal numbers by Box-Muller.
    """

    def __init__(self, runs: int, seed: np.random.SeedSequence) -> None:
        self.runs, self.unknown = runs, Draws(runs, seed)
        self._rng = rng = np.random.default_rng(seed)
        self.hazard, self.wait = rng.standard_normal(runs), rng.standard_normal(runs)
        self.there, self.since = rng.random((2, runs))
        # A separate generator is used, so that the other numbers do not depend on whether nodes differ in hazard.
        self._uneven, late = rng.spawn(2)
        self._late = late.integers(2**63, dtype=np.uint64)
        self._in_step: list[NodeLuck] = []

    def draw(self, active: Indices, attempt: int) -> NodeLuck:
        """The numbers of the runs `active` (numbered through all exposures) for an attempt below ATTEMPTS_IN_STEP."""
        run = active if active[-1] < self.runs else active % self.runs
        while len(self._in_step) <= attempt:
            self._in_step.append(self._draw_in_step())
        luck = self._in_step[attempt]
        if active.size == self.runs and run is active:
            return luck
        return NodeLuck(luck.life[run], luck.wait[run], luck.node[run], luck.missed[run], luck.lost[run])

    def _draw_in_step(self) -> NodeLuck:
        life, wait = self._rng.standard_exponential(self.runs), self._rng.standard_normal(self.runs)
        missed, lost = self._rng.random((2, self.runs))
        return NodeLuck(life, wait, self._uneven.standard_normal(self.runs), missed, lost)

    def draw_late(self, active: Indices, attempts: range) -> NodeLuck:
        """The numbers of these runs for later attempts; each row is an attempt."""
        run = active if active[-1] < self.runs else active % self.runs
        if run is active:
            return NodeLuck(*self._late_numbers(run, attempts))
        is_there = np.zeros(self.runs, dtype=bool)
        is_there[run] = True
        column = (np.cumsum(is_there) - 1)[run]  # runs of several exposures share the same random numbers
        drawn = self._late_numbers(np.flatnonzero(is_there), attempts)
        return NodeLuck(*(of_runs.take(column, axis=1) for of_runs in drawn))

    def _late_numbers(self, run: Indices, attempts: range) -> tuple[Floats, ...]:
        of_run = run + self.runs * np.arange(attempts.start, attempts.stop)[:, None]
        mixed = (np.arange(5)[:, None, None] + 5 * of_run).astype(np.uint64)
        mixed *= _WEYL
        mixed += self._late
        # computed in place, which takes half the time
        for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, np.uint64(1))):
            mixed ^= mixed >> np.uint64(shift)
            mixed *= factor
        life, far, turn, missed, lost = (mixed >> np.uint64(11)) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log1p(-far)), 2 * math.pi * turn
        return -np.log1p(-life), radius * np.cos(angle), radius * np.sin(angle), missed, lost


def _luck(seed: int, part: int, runs: int) -> Luck:
    """The random numbers of the `part`-th group of runs that are simulated together; cached if the group has as many
    runs as a bill.
    """
    return _kept_luck(seed, part, runs) if runs <= RUNS else _new_luck(seed, part, runs)


def _new_luck(seed: int, part: int, runs: int) -> Luck:
    return Luck(runs, np.random.SeedSequence(seed, spawn_key=(part,)))


_kept_luck = lru_cache(maxsize=4)(_new_luck)  # the random draws of 10,000 runs take 13 MB
