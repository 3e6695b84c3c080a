"""What each listed instance type would mean: does the job fit, how long, at which hourly price.

The fleet may pick any listed type in any listed zone, so the bill stands on the dearest one and shows them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill import fit
from gpufleet.infra.bill import runtime as runtimes
from gpufleet.infra.bill.lines import CENT_100
from gpufleet.infra.bill.own_steps import StepTime, known_steps, step_time, untried
from gpufleet.infra.catalog import Catalog, Instance, Price, SpotPrice
from gpufleet.infra.definition.model import MARKETS, Capacity, StackDefinition
from gpufleet.infra.errors import DefinitionError, GpufleetError, PriceMissing, Problem
from gpufleet.infra.evidence.calibration import Calibration, RefusedCalibration
from gpufleet.infra.evidence.speeds import Speeds

Calibrations = Mapping[str, Calibration | RefusedCalibration]  # by instance type: evidence.calibration.find_all


@dataclass(frozen=True, kw_only=True, slots=True)
class BillBasis:
    """What a bill of a definition stands on beside the catalog, as infra.bill.project.bill_basis finds it."""

    definition: StackDefinition  # with what its prepared dataset counts
    dataset_bytes: int | None = None  # None: not prepared, assumed
    calibrations: Calibrations = field(default_factory=dict)
    speeds: Speeds | None = None  # None: what the shipped table says


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeCost:
    """One listed instance type. `why` says what is missing when it cannot be priced."""

    type: str
    instance: Instance
    runtime: runtimes.Runtime | None
    fits: tuple[fit.Fit, ...]
    notices: tuple[fit.Notice, ...]
    spot: tuple[SpotPrice, ...]  # cheapest zone first
    on_demand: Price | None
    block: Price | None  # in the definition's block, whose fee pays for it: nothing
    why: str
    left_out: Mapping[Capacity, str] = field(default_factory=dict)  # why limits.usd_per_hour keeps it from the fleet
    untried: str = ""  # that nobody knows whether its GPUs hold a command

    def hourly(self, capacity: Capacity) -> Price | None:
        """The dearest price per node-hour that the fleet can meet; None where it takes no such node."""
        if capacity in self.left_out:
            return None
        if capacity != "spot":
            return self.on_demand if capacity == "on-demand" else self.block
        return self.spot[-1].price if self.spot else None

    def likely(self, capacity: Capacity) -> Price | None:
        """What a fleet that picks by price and capacity may expect to pay: of spot zones each counts the more, the
        cheaper it is (harmonic mean).
        """
        dearest = self.hourly(capacity)
        if capacity != "spot" or dearest is None:
            return dearest
        mean = len(self.spot) / sum((1 / zone.price.amount for zone in self.spot), Decimal(0))
        return replace(dearest, amount=mean.quantize(CENT_100))

    @property
    def holds_the_job(self) -> bool:
        return all(phase.fits for phase in self.fits)


def type_costs(
    definition: StackDefinition,
    catalog: Catalog,
    calibrations: Calibrations | None = None,
    speeds: Speeds | None = None,
    known: Sequence[StepTime] | None = None,
) -> tuple[TypeCost, ...]:
    """Every listed type, in the file's order. `known`: as type_cost has it."""
    return tuple(
        type_cost(definition, catalog, type_, calibrations=calibrations, speeds=speeds, known=known)
        for type_ in definition.fleet.instance_types
    )


def dearest(types: Sequence[TypeCost], capacity: Capacity, extras_usd_h: float = 0.0) -> TypeCost | None:
    """The type on which the uninterrupted run costs most, among those that hold the job when any does. `extras_usd_h`:
    disks and address, which a slow type needs for longer.
    """

    def usd(option: TypeCost) -> float:
        price, runtime = option.hourly(capacity), option.runtime
        return (float(price.amount) + extras_usd_h) * runtime.total_s if price and runtime else -1.0

    holding = [option for option in types if option.holds_the_job] or list(types)
    found = max(holding, key=usd, default=None)
    return found if found and usd(found) >= 0 else None


def refuse(definition: StackDefinition, types: Sequence[TypeCost]) -> GpufleetError:
    """Why no listed type can be priced, as the error to raise."""
    problems = fit_problems(definition, types)
    if problems:
        return DefinitionError(str(definition.source), problems)
    found = unpriced(definition, types)
    return DefinitionError(str(definition.source), found) if found else GpufleetError("fleet.instance_types is empty")


def unpriced(definition: StackDefinition, types: Sequence[TypeCost]) -> list[Problem]:
    """One problem per listed type without a price or a known speed: the fleet could pick it."""
    allowed, capacity = "types with a known price and speed", definition.fleet.capacity
    if types and all(capacity in option.left_out for option in types):
        reasons = "; ".join(option.left_out[capacity] for option in types)
        return [definition.problem("limits.usd_per_hour", str(definition.limits.usd_per_hour), CEILING, f"{reasons}.")]
    found = []
    for index, option in enumerate(types):
        if option.why and capacity not in option.left_out:
            instead = "on-demand" if definition.fleet.capacity == "spot" else "spot"
            known = bool(option.on_demand if instead == "on-demand" else option.spot)
            priced = bool(option.hourly(definition.fleet.capacity))
            other = f", write fleet.capacity: {instead}" if known and not priced else ""
            read = "" if priced else f", or ask AWS: `gpufleet prices refresh --region {definition.fleet.region}`"
            hint = f"{option.why}. Take it out{other}{read}."
            found.append(definition.problem(listed(index), option.type, allowed, hint))
    return found


def fit_problems(definition: StackDefinition, types: Sequence[TypeCost]) -> list[Problem]:
    """One problem per listed type that does not hold every phase: the fleet could pick it."""
    problems = []
    for index, option in enumerate(types):
        bad = [phase for phase in option.fits if not phase.fits]
        if bad and definition.fleet.capacity not in option.left_out:
            worst = max(bad, key=lambda phase: phase.needs_gb)
            path, allowed = listed(index), f"types on which every phase fits; phase {worst.phase}: {worst.why}"
            problems.append(definition.problem(path, option.type, allowed, f"Nearest: {worst.nearest}."))
    return problems


CEILING = "a price that a listed type has (a rule of policy.yaml may lower it)"


def pools(definition: StackDefinition, catalog: Catalog, capacity: Capacity) -> tuple[tuple[str, str], ...]:
    """(type, zone) of all that the fleet may launch: without those above limits.usd_per_hour."""
    return tuple(
        (type_, zone)
        for type_ in sorted(definition.fleet.instance_types)
        for zone in sorted(within_ceiling(definition, catalog, type_, capacity))
    )


def within_ceiling(definition: StackDefinition, catalog: Catalog, type_: str, capacity: Capacity) -> tuple[str, ...]:
    """The fleet's zones in which a node of the type is known to cost at most limits.usd_per_hour; all without such a
    limit. Prices know zones by id: of zones by name, whose ids differ per account, the dearest of the region decides.
    """
    fleet, ceiling = definition.fleet, definition.limits.usd_per_hour
    if ceiling is None or capacity == "block":
        return fleet.zones
    if capacity == "on-demand":
        price = catalog.on_demand_prices.get((type_, fleet.region))
        return fleet.zones if price is not None and price.amount <= ceiling else ()
    below = {each.zone for each in catalog.spot_zones(type_, fleet.region) if each.price.amount <= ceiling}
    if fleet.zone_ids:
        return tuple(zone for zone, own in zip(fleet.zones, fleet.zone_ids, strict=True) if own in below)
    return fleet.zones if below and len(below) == len(catalog.spot_zones(type_, fleet.region)) else ()


def _left_out(definition: StackDefinition, catalog: Catalog, type_: str, capacity: Capacity) -> str:
    """Why the fleet takes no node of this type where it has a price; or nothing."""
    region, ceiling = definition.fleet.region, definition.limits.usd_per_hour
    if ceiling is None or within_ceiling(definition, catalog, type_, capacity):
        return ""
    if capacity == "on-demand":
        price = catalog.on_demand_prices.get((type_, region))
        return f"{type_} on demand costs {price.amount} USD an hour, above {ceiling}" if price else ""
    zones, prefix = catalog.spot_zones(type_, region, definition.fleet.zone_ids), catalog.zone_id_prefix(region)
    if not zones:
        return ""
    below = [prefix + each.zone for each in zones if each.price.amount <= ceiling]
    kept = f"; by id it would stay in fleet.zones: [{', '.join(sorted(below))}]" if below else ""
    return (
        f"{type_} costs up to {zones[-1].price.amount} USD an hour in {prefix}{zones[-1].zone}, above {ceiling}{kept}"
    )


def prices(definition: StackDefinition, catalog: Catalog, type_: str) -> dict[str, Any]:
    """The type's prices in the definition's region as fields of a TypeCost, without zones that its fleet leaves out."""
    fleet, ceiling = definition.fleet, definition.limits.usd_per_hour
    spot = catalog.spot_zones(type_, fleet.region, fleet.zone_ids)
    reasons = {market: _left_out(definition, catalog, type_, market) for market in MARKETS}
    return {
        "spot": tuple(each for each in spot if ceiling is None or each.price.amount <= ceiling),
        "on_demand": catalog.on_demand_prices.get((type_, fleet.region)),
        "left_out": {market: why for market, why in reasons.items() if why},
    }


def listed(index: int) -> str:
    """Where the definition lists its type number `index`."""
    return f"fleet.instance_types[{index}]"


def type_cost(
    definition: StackDefinition,
    catalog: Catalog,
    type_: str,
    *,
    nearest: str | None = None,
    calibrations: Calibrations | None = None,
    speeds: Speeds | None = None,
    known: Sequence[StepTime] | None = None,
) -> TypeCost:
    """One type, listed or not. `nearest`: fit.cheapest_holder's words, `known`: known_steps of the definition, for who
    asks about many types, or about another number of nodes. Raises GpufleetError for one that the catalog has never
    heard of, which no definition file may list.
    """
    found = (calibrations or {}).get(type_)
    calibration = found if isinstance(found, Calibration) else None
    config, region = definition.job.parameters, definition.fleet.region
    root = definition.storage.root
    instance = catalog.instances.get(type_)
    if instance is None:
        raise GpufleetError(catalog.unknown_type(type_))
    estimate = definition.estimate if _is_of(definition, type_, catalog) else replace(definition.estimate, step_ms=None)
    known = known_steps(definition, catalog, calibrations or {}) if known is None else known
    why, runtime = [], None
    zones = definition.fleet.zone_ids
    priced = prices(definition, catalog, type_)
    spot, on_demand = priced["spot"], priced["on_demand"]
    capacity, block = definition.fleet.capacity, definition.fleet.block
    price = on_demand if capacity == "on-demand" else spot[-1].price if capacity == "spot" and spot else None
    config = config.bounded(_most_hours(definition, price))
    ranks = config.ranks(instance.gpu_count, definition.nodes)
    try:  # the other price may be missing: it is only compared with
        if capacity == "spot":
            catalog.spot(type_, region, zones)
        elif block is None:
            catalog.on_demand(type_, region)
    except PriceMissing as missing:
        why.append(str(missing))
    try:
        runtime = runtimes.hours(
            config,
            instance,
            estimate,
            root,
            nodes=definition.nodes,
            cards=definition.fleet.cards,
            buffer=float(definition.variant.buffer),
            hold_hours=None if definition.variant.hold_hours is None else float(definition.variant.hold_hours),
            calibration=calibration,
            own=step_time(known, instance, ranks, speeds),
            speeds=speeds,
        )
    except GpufleetError as unknown:
        why.append(str(unknown))
    return TypeCost(
        type=type_,
        instance=instance,
        runtime=runtime,
        fits=fit.fits(config, instance, catalog, region, holder=nearest),
        notices=tuple(
            fit.notices(config, instance, runtime, estimate, root, calibration.stop_s if calibration else None)
        )
        if runtime
        else (),
        **priced,
        block=None if block is None else _paid(catalog.as_of),
        why="; ".join(why),
        untried="" if config.memory_is_predicted else untried(known, instance, ranks),
    )


def _is_of(definition: StackDefinition, type_: str, catalog: Catalog) -> bool:
    """Whether estimate.step_ms is of this type: listed, or with as many of a listed one's GPUs at work on a step."""

    def device(name: str) -> tuple[str, float, int] | None:
        kind = catalog.instances.get(name)
        if kind is None:
            return None
        return kind.gpu.name, kind.gpu_share, definition.job.parameters.ranks(kind.gpu_count)

    listed = definition.fleet.instance_types
    return definition.estimate.step_ms is None or type_ in listed or device(type_) in map(device, listed)


def _paid(day: date) -> Price:
    """What an hour in a block costs beyond its fee."""
    return Price(amount=Decimal(0), unit="node-hour", source="paid by the block's fee", as_of=day, status="verified")


def _most_hours(definition: StackDefinition, price: Price | None) -> float:
    """That the limits pay for at this price per node-hour."""
    limits, block = definition.limits, definition.fleet.block
    if block is not None:
        return min(float(limits.max_hours), block.hours * definition.nodes)
    return float(min(limits.max_hours, limits.max_usd / price.amount) if price else limits.max_hours)
