"""Prices the run in one market, such as spot or on demand. The price is that of the dearest type and zone that the
fleet may pick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property

from gpufleet.infra.bill import lines, options
from gpufleet.infra.bill.lines import Line
from gpufleet.infra.bill.options import BillBasis, TypeCost
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.catalog import Price
from gpufleet.infra.definition.model import Capacity, Fleet, Limits, StackDefinition
from gpufleet.infra.market import WAYS
from gpufleet.infra.risk import simulation, unknown
from gpufleet.infra.risk.hazard import HAZARD_WORDS, Floats, Hazard, Hazards, find, gather, wait
from gpufleet.infra.risk.save_interval import BestInterval, optimal
from gpufleet.infra.risk.unknown import Unknown
from gpufleet.job.contract.estimate import NoticeEstimate, PhaseEstimate
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.supervisor.forecast import RESERVE_S, Forecast

UNBOUND = Limits(max_usd=Decimal(10**9), max_hours=Decimal(10**9))
FEW = 2_000  # number of simulated runs for a cost that is only used for a comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Quantiles and mean of one quantity over the simulated runs."""

    p10: Decimal
    p50: Decimal
    p90: Decimal
    mean: Decimal

    def plus(self, amount: Decimal) -> Quantiles:
        """All quantiles and the mean, increased by this amount."""
        return Quantiles(p10=self.p10 + amount, p50=self.p50 + amount, p90=self.p90 + amount, mean=self.mean + amount)

    def times(self, count: int) -> Quantiles:
        """The quantiles and the mean of `count` nodes, from those of one node."""
        return Quantiles(p10=self.p10 * count, p50=self.p50 * count, p90=self.p90 * count, mean=self.mean * count)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A side before its runs are simulated: type, zone, price, lines, and the run's exposure to interruptions."""

    option: TypeCost
    zone: str | None  # a zone id; None if all zones have the same price
    price: Price  # per node-hour
    lines: tuple[Line, ...]  # without interruptions
    runtime: Runtime
    exposure: simulation.Exposure

    @property
    def type(self) -> str:
        return self.option.type

    @property
    def compute(self) -> Line:
        """The line of the node itself."""
        return next(line for line in self.lines if line.kind == "compute")

    @cached_property
    def total(self) -> Decimal:
        """USD of the run without interruptions: the sum of the lines."""
        return sum((line.amount for line in self.lines), Decimal(0))

    @property
    def unsimulated_usd(self) -> float:
        """USD of the lines that are not simulated."""
        return float(self.total) - self.exposure.uninterrupted_usd


@dataclass(frozen=True, kw_only=True)
class Side(Prepared):
    """A definition on one instance type, with its simulated runs. Each figure is computed when it is first needed,
    because a comparison has hundreds of sides, and needs only two or three figures of most of them.
    """

    within: simulation.SimulatedRuns = field(repr=False, compare=False)  # within the limits of the definition
    needed: simulation.SimulatedRuns = field(repr=False, compare=False)  # without the limits: until the work is done
    # without the limits, with interruptions but with the speed and the prices of the lines
    alone: simulation.SimulatedRuns = field(repr=False, compare=False)

    @cached_property
    def usd(self) -> Quantiles:
        """USD within the limits of the definition."""
        return _usd(self, self.within.usd)

    @cached_property
    def hours(self) -> Quantiles:
        """Hours of each node within the limits."""
        return quantiles_of(self.within.hours)

    @cached_property
    def wall_hours(self) -> Quantiles:
        """Hours within the limits, including the waits for capacity."""
        return quantiles_of(self.within.wall_hours)

    @cached_property
    def needed_usd(self) -> Quantiles:
        """USD to finish the work, without the limits."""
        return _usd(self, self.needed.usd)

    @cached_property
    def needed_hours(self) -> Quantiles:
        """Hours of each node to finish the work, without the limits."""
        return quantiles_of(self.needed.hours)

    @cached_property
    def metered_usd(self) -> Quantiles:
        """needed_usd as the job's meter computes it, which charges interrupted first hours too."""
        return _usd(self, self.needed.metered_usd)

    @cached_property
    def alone_usd(self) -> Quantiles:
        """needed_usd with interruptions, but with the speed and the prices of the lines."""
        return _usd(self, self.alone.usd)

    @cached_property
    def interruptions(self) -> Quantiles:
        """The number of interruptions. The quantiles are whole numbers. The mean depends mostly on a few runs with a
        high hazard.
        """
        return quantiles_of(self.within.interruptions.astype(float))

    @property
    def probability_stopped(self) -> float:
        """The share of runs that a limit stops before the work is done."""
        return float(self.within.stopped.mean())

    @property
    def runs(self) -> int:
        return len(self.within.usd)

    @property
    def trained_hours(self) -> Quantiles:
        """Hours of training within the limits, without repeated work."""
        return quantiles_of(self.within.done_h)

    @property
    def idle_usd(self) -> Quantiles:
        """USD, without limits, for the time in which nodes wait for other nodes; zero for a single node."""
        return quantiles_of(self.needed.idle_hours * self.exposure.usd_h)

    @property
    def reserve(self) -> tuple[Decimal, Decimal]:
        """USD, and hours of each node, that the job needs to stop before a limit."""
        hours, of = self.exposure.reserve_h, self.exposure
        return exact(hours * of.usd_h), exact(hours)


def prepare(
    basis: BillBasis, types: Sequence[TypeCost], capacity: Capacity, *, likely: bool = False
) -> Prepared | None:
    """The side before simulation; None if no listed type has both a price in this market and a known speed. If
    `likely`, it uses the price that the fleet may expect, not that of its dearest zone.
    """
    definition, catalog = basis.definition, basis.catalog
    extras = float(sum(charge.usd_per_hour for charge in lines.hourly_charges(definition, catalog)))
    option = options.dearest(types, capacity, extras)
    hourly = None if option is None else option.likely(capacity) if likely else option.hourly(capacity)
    if option is None or hourly is None or option.runtime is None:
        return None
    node = lines.node_lines(definition, catalog, option.runtime.total_s / 3600, hourly)
    bucket = lines.bucket_lines(definition, catalog, option.runtime, basis.dataset_bytes)
    offer = option.offers[capacity]
    chance = _chance(definition, option, basis.hazards) if WAYS[capacity].is_interrupted else 0.0
    # only prices that differ by zone (spot prices) change with time
    age = ((basis.today or catalog.as_of) - hourly.as_of).days if offer.zones else 0
    return Prepared(
        option=option,
        zone=offer.zones[-1].zone if offer.zones and not likely else None,
        price=hourly,
        lines=(*node, *bucket),
        runtime=option.runtime,
        exposure=_exposure(definition, option, option.runtime, chance, node, bucket, price_age_days=age),
    )


def price_side(basis: BillBasis, types: Sequence[TypeCost], capacity: Capacity, *, runs: int) -> Side | None:
    """The simulated side; None if `prepare` returns None."""
    prepared = prepare(basis, types, capacity)
    if prepared is None:
        return None
    exposure = prepared.exposure
    runs = runs if exposure.is_drawn else 1
    unlimited = exposure.unlimited
    needed, alone = simulation.simulate_each([unlimited, unlimited.interruptions_alone], runs=runs)
    return settle(prepared, simulation.within_limits(exposure, needed), needed, alone)


def settle(
    prepared: Prepared,
    within: simulation.SimulatedRuns,
    needed: simulation.SimulatedRuns,
    alone: simulation.SimulatedRuns,
) -> Side:
    """The side from three sets of simulated runs: within the limits, without limits, and with interruptions as the only
    uncertainty.
    """
    known = {spec.name: getattr(prepared, spec.name) for spec in fields(Prepared)}
    return Side(**known, within=within, needed=needed, alone=alone)


def cadence(side: Side) -> BestInterval | None:
    """The checkpoint interval that costs least; None if there are no interruptions or saves, or the run has no end."""
    saves = sum(phase.saves for phase in side.runtime.phases)
    if not side.exposure.chance.median or not saves or not side.exposure.phase_ends_h[-1]:
        return None
    return optimal(side.exposure, side.runtime.stalls_s / saves)


def span_usd(side: Side) -> dict[str, tuple[Decimal, Decimal]]:
    """p10 and p90 of the USD to finish without interruptions, if only `speed` or only `price` is uncertain."""
    of, total = side.exposure, side.total
    ranges = {}
    ends_h, compute_usd = of.phase_ends_h[-1], of.uninterrupted_h * of.compute_usd_h

    def at_speed(factor: float) -> float:
        work_h = (ends_h - of.idle_h) * factor
        return ((max(work_h, ends_h) if of.idle_h else work_h) - ends_h) * of.usd_h

    cheap, dear = ((factor - 1) * compute_usd for factor in unknown.span(of.unknown.price))
    fast, slow = at_speed(unknown.span(of.unknown.faster)[0]), at_speed(unknown.span(of.unknown.slower)[1])
    for name, low, high in (("speed", fast, slow), ("price", cheap, dear)):
        if low or high:
            ranges[name] = (total + exact(low), total + exact(high))
    return ranges


def supposed(
    side: Side, *, interrupted: bool, measured: bool
) -> tuple[tuple[tuple[str, float, Decimal], ...], Quantiles | None]:
    """USD to finish under other assumptions. First, if `interrupted`: for each word, such as `low`, the word, its
    interruptions per node-hour, and the mean USD. Second, if `measured`: the range as if the job had been measured on
    this GPU; otherwise None.
    """
    unlimited, words = side.exposure.unlimited, HAZARD_WORDS if interrupted else ()
    exposures = [replace(unlimited.interruptions_alone, hazard=hazard) for _, hazard in words]
    if measured:
        known = replace(side.exposure.unknown, faster=unknown.MEASURED, slower=unknown.MEASURED)
        exposures.append(replace(unlimited, unknown=known))
    # all simulations in one call, because that saves the most time
    outcomes = simulation.simulate_each(exposures, runs=min(FEW, side.runs))
    usd = [_usd(side, outcome.usd) for outcome in outcomes]
    at_hazards = ((word, hazard, quantiles.mean) for (word, hazard), quantiles in zip(words, usd, strict=False))
    return tuple(at_hazards), usd[-1] if measured else None


def exact(value: float) -> Decimal:
    """Four decimals, never minus zero."""
    return Decimal(f"{value:.4f}") or Decimal("0.0000")


def mean_usd(prepared: Prepared, outcome: simulation.SimulatedRuns) -> Decimal:
    """The mean USD of the simulated runs, by the same rule as in settle()."""
    return prepared.total + exact(float(outcome.usd.mean() - prepared.exposure.uninterrupted_usd))


def quantiles_of(values: Floats) -> Quantiles:
    """The quantiles and the mean of one quantity over the simulated runs, rounded as by `exact`."""
    p10, p50, p90, mean = map(exact, simulation.quantiles(values))
    return Quantiles(p10=p10, p50=p50, p90=p90, mean=mean)


def _exposure(
    definition: StackDefinition,
    option: TypeCost,
    runtime: Runtime,
    chance: Hazard | float,
    node: Sequence[Line],
    bucket: Sequence[Line],
    *,
    price_age_days: int,
) -> simulation.Exposure:
    nodes = definition.nodes
    stated, missed = definition.estimate.capacity_wait_minutes, definition.estimate.notice_missed
    wait_h, wait_sigma = wait(len(definition.fleet.zones), nodes)
    if stated is not None:  # the mean wait
        wait_h = float(stated) / 60 * math.exp(-(wait_sigma**2) / 2)
    ends, worked_h = [], 0.0
    for phase in runtime.phases:
        worked_h += phase.seconds / 3600
        ends.append(worked_h)
    ends[-1] += runtime.held_s / 3600
    (compute,) = (line for line in node if line.kind == "compute")
    extras = [line for line in node if line.kind == "hourly"]
    return simulation.Exposure(
        setup_h=runtime.setup_s / 3600,
        restart_h=runtime.restart_s / 3600,
        phase_ends_h=tuple(ends),
        saves_fit=tuple(notice.fits for notice in option.notices),
        interval_h=definition.job.parameters.save_interval_s(runtime.phases[-1].step_ms / 1e3) / 3600,
        compute_usd_h=float(compute.unit_price) * nodes,
        extras_usd_h=float(sum(line.quantity * line.unit_price for line in extras) / compute.quantity) * nodes,
        fixed_usd=float(sum(line.amount for line in bucket)),
        hazard=chance,
        nodes=nodes,
        wait_h=wait_h,
        wait_sigma=wait_sigma,
        gather_h=_gather_h(definition.fleet, wait_h),
        notice_missed=simulation.NOTICE_MISSED if missed is None else float(missed),
        max_usd=float(definition.limits.max_usd),
        max_hours=_max_hours(definition),
        reserve_h=reserve_h(definition.job.parameters, option),
        idle_h=0.0 if definition.variant.hold_hours is None else runtime.held_s / 3600,
        unknown=_unknown(definition, option, runtime, price_age_days),
    )


def _gather_h(fleet: Fleet, wait_h: float) -> float:
    if not fleet.lets_go:
        return math.inf
    return gather(wait_h) if fleet.gather_minutes is None else float(fleet.gather_minutes) / 60


def _max_hours(definition: StackDefinition) -> float:
    """Hours that each node may run under limits.max_hours."""
    fleet = replace(definition.fleet, block=None) if definition.variant.only_priced else definition.fleet
    return fleet.market.each_hours(definition.limits.max_hours)


def _unknown(definition: StackDefinition, option: TypeCost, runtime: Runtime, price_age_days: int) -> Unknown:
    """The uncertainties of the run other than interruptions."""
    return Unknown(
        faster=runtime.faster,
        slower=runtime.slower,
        shared=runtime.shared,
        device=option.instance.gpus,
        price=unknown.spot_price(price_age_days),
        offer=f"{option.type} in {definition.fleet.region}",
        setup=unknown.SETUP_MEASURED if runtime.setup_seen else unknown.SETUP,
    )


def reserve_h(config: JobConfig, option: TypeCost) -> float:
    """Hours before a limit at which the job's meter stops the run at the end of its work, so that everything is saved
    in time.
    """
    notice = [
        NoticeEstimate(type=noticed.type, phase=noticed.phase, seconds=noticed.total_s) for noticed in option.notices
    ]
    phases = option.runtime.phases if option.runtime else ()
    pace = [
        PhaseEstimate(phase=phase.name, steps=phase.steps, step_ms=phase.step_ms) for phase in phases if phase.steps
    ]
    forecast = Forecast(config, option.type, phases=pace, notice=notice)
    return (forecast.end_s(batch.total_steps(config), None) + RESERVE_S) / 3600


def _chance(definition: StackDefinition, option: TypeCost, hazards: Hazards) -> Hazard | float:
    """Interruptions per node-hour: the value in the definition, the value learned for the type, or the prior, in this
    order. The value learned for one zone is used only for a fleet in that zone alone. Any other fleet may get a zone
    without history, so the value of the type is used.
    """
    fixed = definition.estimate.hazard_per_hour
    if fixed is not None:
        return float(fixed)
    zones = definition.fleet.zones
    return find(hazards, option.type, zones[0] if len(zones) == 1 else None, option.instance.gpu_count)


def _usd(of: Prepared, usd: Floats) -> Quantiles:
    """Quantiles and mean of the simulated dollars. The dollars are the exact total without interruptions plus a
    simulated difference, which is exactly zero for a run without interruptions.
    """
    return quantiles_of(usd - of.exposure.uninterrupted_usd).plus(of.total)
