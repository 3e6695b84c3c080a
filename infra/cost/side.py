"""One side of the bill: the run on spot, or on demand, at the dearest type and zone the fleet may pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from infra.catalog import Catalog, Price
from infra.cost import lines, options, risk
from infra.cost.lines import Line
from infra.cost.options import Capacity, TypeCost
from infra.cost.runtime import Runtime
from infra.definition import StackDefinition

_FEW = 2_000  # simulated runs behind a figure that is only a comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Of the simulated runs."""

    p10: Decimal
    p50: Decimal
    p90: Decimal
    mean: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Without interruptions (`lines`) and with them (the rest)."""

    type: str
    zone: str | None  # by zone id; None on demand
    price: Price  # per node-hour
    lines: tuple[Line, ...]
    runtime: Runtime
    usd: Quantiles  # as the limits of the definition cut it
    hours: Quantiles  # node-hours, as limits.max_hours counts them
    wall_hours: Quantiles  # with the waits for capacity
    needed_usd: Quantiles  # without the limits: what it takes to finish
    needed_hours: Quantiles
    metered_usd: Quantiles  # the same as the job's meter counts: interrupted first hours not credited
    interruptions: float  # expected
    probability_stopped: float  # by a limit, before the work is done
    exposure: risk.Exposure
    needed: risk.Outcome = field(repr=False, compare=False)  # the simulated runs behind needed_usd
    runs: int

    @property
    def total(self) -> Decimal:
        """Sum of the lines: the run without interruptions."""
        return sum((line.amount for line in self.lines), Decimal(0))


def price_side(
    definition: StackDefinition,
    catalog: Catalog,
    types: Sequence[TypeCost],
    capacity: Capacity,
    *,
    dataset_bytes: int | None,
    runs: int,
    attempts: int = risk.MAX_ATTEMPTS,
) -> Side | None:
    """None when no listed type has both a price of this kind and a known speed. `attempts`: as in risk.simulate."""
    option = options.dearest(types, capacity)
    hourly = option.hourly(capacity) if option else None
    if option is None or hourly is None or option.runtime is None:
        return None
    node = lines.node_lines(definition, catalog, option.runtime.total_s / 3600, hourly)
    bucket = lines.bucket_lines(definition, catalog, option.runtime, dataset_bytes)
    exposure = _exposure(definition, option, option.runtime, capacity, node, bucket)
    runs = 1 if capacity == "on-demand" else runs  # nothing is drawn
    outcome = needed = risk.simulate(exposure, runs=runs, attempts=attempts)
    if outcome.stopped.any():
        needed = risk.simulate(replace(exposure, max_usd=None, max_hours=None), runs=runs)
    total = sum((line.amount for line in (*node, *bucket)), Decimal(0))
    return Side(
        type=option.type,
        zone=option.spot[-1].zone if capacity == "spot" else None,
        price=hourly,
        lines=(*node, *bucket),
        runtime=option.runtime,
        usd=_usd(outcome, exposure, total),
        hours=_quantiles(outcome.quantiles(outcome.hours)),
        wall_hours=_quantiles(outcome.quantiles(outcome.wall_hours)),
        needed_usd=_usd(needed, exposure, total),
        needed_hours=_quantiles(needed.quantiles(needed.hours)),
        metered_usd=_metered(needed, exposure, total),
        interruptions=float(outcome.interruptions.mean()),
        probability_stopped=float(outcome.stopped.mean()),
        exposure=exposure,
        needed=needed,
        runs=runs,
    )


def again(found: Side, runs: int) -> Side:
    """The same side, simulated with another number of runs and without limits."""
    unlimited = replace(found.exposure, max_usd=None, max_hours=None)
    outcome = risk.simulate(unlimited, runs=runs)
    usd = _usd(outcome, unlimited, found.total)
    hours = _quantiles(outcome.quantiles(outcome.hours))
    return replace(
        found,
        usd=usd,
        hours=hours,
        wall_hours=_quantiles(outcome.quantiles(outcome.wall_hours)),
        needed_usd=usd,
        needed_hours=hours,
        metered_usd=_metered(outcome, unlimited, found.total),
        interruptions=float(outcome.interruptions.mean()),
        needed=outcome,
        runs=runs,
    )


def half_speed(side: Side) -> Quantiles:
    """USD to finish if every step takes twice as long."""
    ends = tuple(2 * end for end in side.exposure.phase_ends_h)
    slow = replace(side.exposure, phase_ends_h=ends, max_usd=None, max_hours=None)
    return _usd(risk.simulate(slow, runs=_FEW), side.exposure, side.total)


def usd_at_hazards(side: Side) -> tuple[tuple[str, float, Decimal], ...]:
    """(word, interruptions per node-hour, mean USD to finish)."""
    found = []
    for word, hazard in risk.HAZARD_WORDS:
        fixed = replace(side.exposure, hazard=hazard, max_usd=None, max_hours=None)
        outcome = risk.simulate(fixed, runs=_FEW)
        found.append((word, hazard, _usd(outcome, side.exposure, side.total).mean))
    return tuple(found)


def exact(value: float) -> Decimal:
    """Four decimals, never minus zero."""
    return Decimal(f"{value:.4f}") or Decimal("0.0000")


def _exposure(
    definition: StackDefinition,
    option: TypeCost,
    runtime: Runtime,
    capacity: Capacity,
    node: Sequence[Line],
    bucket: Sequence[Line],
) -> risk.Exposure:
    hazard = definition.estimate.hazard_per_hour
    nodes = definition.nodes
    wait, missed = definition.estimate.capacity_wait_minutes, definition.estimate.notice_missed
    ends, worked_h = [], 0.0
    for phase in runtime.phases:
        worked_h += phase.seconds / 3600
        ends.append(worked_h)
    ends[-1] += runtime.held_s / 3600
    compute, *extras = node
    return risk.Exposure(
        setup_h=runtime.setup_s / 3600,
        restart_h=runtime.restart_s / 3600,
        phase_ends_h=tuple(ends),
        saves_fit=tuple(notice.fits for notice in option.notices),
        interval_h=definition.job.parameters.checkpoint.interval_s / 3600,
        compute_usd_h=float(compute.unit_price) * nodes,
        extras_usd_h=float(sum(line.quantity * line.unit_price for line in extras) / compute.quantity) * nodes,
        fixed_usd=float(sum(line.amount for line in bucket)),
        hazard=0.0 if capacity == "on-demand" else None if hazard is None else float(hazard),
        wait_h=(risk.CAPACITY_WAIT_MINUTES if wait is None else float(wait)) / 60,
        notice_missed=risk.NOTICE_MISSED if missed is None else float(missed),
        max_usd=float(definition.limits.max_usd),
        max_hours=float(definition.limits.max_hours) / nodes,
    )


def _usd(outcome: risk.Outcome, exposure: risk.Exposure, total: Decimal) -> Quantiles:
    """The exact total without interruptions plus the simulated difference: no interruption costs exactly nothing."""
    return _money(outcome.quantiles(outcome.usd), exposure, total)


def _metered(outcome: risk.Outcome, exposure: risk.Exposure, total: Decimal) -> Quantiles:
    metered = exposure.fixed_usd + outcome.hours * (exposure.compute_usd_h + exposure.extras_usd_h)
    return _money(outcome.quantiles(metered), exposure, total)


def _money(values: tuple[float, float, float, float], exposure: risk.Exposure, total: Decimal) -> Quantiles:
    p10, p50, p90, mean = (total + exact(usd - exposure.uninterrupted_usd) for usd in values)
    return Quantiles(p10=p10, p50=p50, p90=p90, mean=mean)


def _quantiles(values: tuple[float, float, float, float]) -> Quantiles:
    p10, p50, p90, mean = map(exact, values)
    return Quantiles(p10=p10, p50=p50, p90=p90, mean=mean)
