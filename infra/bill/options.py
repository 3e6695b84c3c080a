"""Computes for each listed instance type whether the job fits, how long it takes, and the hourly price.

The fleet may pick any listed type in any listed zone, so the bill prices the dearest one and shows all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date

from gpufleet.infra.bill import fit
from gpufleet.infra.bill import runtime as runtimes
from gpufleet.infra.bill.own_steps import StepTime, known_steps, step_time, untried
from gpufleet.infra.catalog import Catalog, Instance, Price, SpotPrice
from gpufleet.infra.definition.model import Capacity, StackDefinition
from gpufleet.infra.errors import DefinitionError, GpufleetError, PriceMissing, Problem
from gpufleet.infra.evidence.calibration import Calibration, RefusedCalibration
from gpufleet.infra.evidence.speeds import Speeds
from gpufleet.infra.market import COMPARED, WAYS
from gpufleet.infra.market.market import Offer
from gpufleet.infra.risk.hazard import Hazards

# calibrations by instance type, from evidence.calibration.find_all
Calibrations = Mapping[str, Calibration | RefusedCalibration]


@dataclass(frozen=True, slots=True)
class BillBasis:
    """The data from which a bill is made. `infra.bill.project.bill_basis` collects these data from a project."""

    definition: StackDefinition  # the definition, with the sizes of its prepared dataset filled in
    catalog: Catalog
    _: KW_ONLY
    dataset_bytes: int | None = None  # None if the dataset is not prepared: its size is then assumed
    calibrations: Calibrations = field(default_factory=dict)
    speeds: Speeds | None = None  # None for the speeds in the shipped table
    hazards: Hazards = field(default_factory=dict)  # used if the definition fixes no hazard
    today: date | None = None  # the day at which the age of prices is measured; None for the day of the newest price

    def with_definition(self, definition: StackDefinition) -> BillBasis:
        """A copy for another form of the definition."""
        return replace(self, definition=definition)

    @property
    def known_steps(self) -> tuple[StepTime, ...]:
        """The known step times of a user's own command; none for a ready-made job."""
        return known_steps(self.definition, self.catalog, self.calibrations)


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeCost:
    """One listed instance type. `why` says why the type has no price; empty if it has one."""

    type: str
    instance: Instance
    runtime: runtimes.Runtime | None
    fits: tuple[fit.Fit, ...]
    notices: tuple[fit.Notice, ...]
    offers: Mapping[Capacity, Offer]  # prices in the definition's own market, and in those with which it is compared
    why: str
    # a sentence if it is not known whether the command fits in the memory of the type's GPUs; otherwise empty
    untried: str = ""

    def hourly(self, capacity: Capacity) -> Price | None:
        """The highest price per node-hour that the fleet may pay; None if it uses no nodes of this market."""
        return self.offers[capacity].hourly

    def likely(self, capacity: Capacity) -> Price | None:
        """The price per node-hour that the fleet may expect to pay, since it picks zones by price and capacity."""
        return self.offers[capacity].likely

    @property
    def spot(self) -> tuple[SpotPrice, ...]:
        """Spot prices by zone, the cheapest first."""
        return self.offers["spot"].zones

    @property
    def on_demand(self) -> Price | None:
        """The on-demand price per node-hour, even if the fleet is not on demand."""
        return self.offers["on-demand"].price

    @property
    def left_out(self) -> dict[Capacity, str]:
        """By market, the reason why limits.usd_per_hour excludes the type."""
        return {market: offer.left_out for market, offer in self.offers.items() if offer.left_out}

    @property
    def holds_the_job(self) -> bool:
        return all(phase.fits for phase in self.fits)


def type_costs(basis: BillBasis) -> tuple[TypeCost, ...]:
    """Every listed type, in the file's order."""
    known = basis.known_steps
    return tuple(type_cost(basis, type_, known=known) for type_ in basis.definition.fleet.instance_types)


def dearest(types: Sequence[TypeCost], capacity: Capacity, extras_usd_h: float = 0.0) -> TypeCost | None:
    """The type on which the uninterrupted run costs most, among those on which the job fits, or among all if it fits on
    none. `extras_usd_h`: the hourly price of disks and address. On a slow type the run pays this price for longer.
    """

    def usd(option: TypeCost) -> float:
        price, runtime = option.hourly(capacity), option.runtime
        return (float(price.amount) + extras_usd_h) * runtime.total_s if price and runtime else -1.0

    holding = [option for option in types if option.holds_the_job] or list(types)
    most = max(holding, key=usd, default=None)
    return most if most and usd(most) >= 0 else None


def refuse(definition: StackDefinition, types: Sequence[TypeCost]) -> GpufleetError:
    """The error, with the reasons, for a definition none of whose listed types can be priced."""
    problems = fit_problems(definition, types)
    if problems:
        return DefinitionError(str(definition.source), problems)
    reasons = unpriced(definition, types)
    return (
        DefinitionError(str(definition.source), reasons) if reasons else GpufleetError("fleet.instance_types is empty")
    )


def unpriced(definition: StackDefinition, types: Sequence[TypeCost]) -> list[Problem]:
    """One problem per listed type without a price or a known speed, because the fleet could pick that type."""
    allowed, capacity = "types with a known price and speed", definition.fleet.capacity
    if types and all(option.offers[capacity].left_out for option in types):
        reasons = "; ".join(option.offers[capacity].left_out for option in types)
        return [definition.problem("limits.usd_per_hour", str(definition.limits.usd_per_hour), CEILING, f"{reasons}.")]
    problems = []
    for index, option in enumerate(types):
        if option.why and not option.offers[capacity].left_out:
            instead = next(market for market in COMPARED if market != capacity)
            known = bool(option.offers[instead].price)
            priced = bool(option.hourly(definition.fleet.capacity))
            other = f", write fleet.capacity: {instead}" if known and not priced else ""
            read = "" if priced else f", or ask AWS: `gpufleet prices refresh --region {definition.fleet.region}`"
            hint = f"{option.why}. Take it out{other}{read}."
            problems.append(definition.problem(listed(index), option.type, allowed, hint))
    return problems


def fit_problems(definition: StackDefinition, types: Sequence[TypeCost]) -> list[Problem]:
    """One problem per listed type on which a phase does not fit, because the fleet could pick that type."""
    problems = []
    for index, option in enumerate(types):
        bad = [phase for phase in option.fits if not phase.fits]
        if bad and not option.offers[definition.fleet.capacity].left_out:
            worst = max(bad, key=lambda phase: phase.needs_gb)
            path, allowed = listed(index), f"types on which every phase fits; phase {worst.phase}: {worst.why}"
            problems.append(definition.problem(path, option.type, allowed, f"Nearest: {worst.nearest}."))
    return problems


CEILING = "a limit that the price of a listed type meets (a rule of policy.yaml may lower it)"


def pools(definition: StackDefinition, catalog: Catalog, capacity: Capacity) -> tuple[tuple[str, str], ...]:
    """Every (type, zone) in which the fleet may launch, except those that cost more than limits.usd_per_hour."""
    fleet, ceiling, way = definition.fleet, definition.limits.usd_per_hour, WAYS[capacity]()
    return tuple(
        (type_, zone)
        for type_ in sorted(fleet.instance_types)
        for zone in sorted(fleet.zones if ceiling is None else way.zones_below(catalog, type_, fleet, ceiling))
    )


def offers_of(definition: StackDefinition, catalog: Catalog, type_: str) -> dict[Capacity, Offer]:
    """By market, the prices of a node of this type in the region and zones of the definition."""
    fleet, ceiling = definition.fleet, definition.limits.usd_per_hour
    ways = (*(WAYS[name]() for name in COMPARED), fleet.market)
    return {way.name: way.offer(catalog, type_, fleet, ceiling) for way in ways}


def listed(index: int) -> str:
    """The path of the listed type with this index in the definition, such as fleet.types[0]."""
    return f"fleet.instance_types[{index}]"


def type_cost(
    basis: BillBasis, type_: str, *, nearest: str | None = None, known: Sequence[StepTime] | None = None
) -> TypeCost:
    """The cost of one type, listed or not. `nearest` (from fit.cheapest_holder) and `known` (the basis' known_steps)
    save time if a caller has many types or numbers of nodes. Raises GpufleetError if the type is not in the catalog; no
    definition file may list such a type.
    """
    definition, catalog, speeds = basis.definition, basis.catalog, basis.speeds
    measurement = basis.calibrations.get(type_)
    calibration = measurement if isinstance(measurement, Calibration) else None
    config, region = definition.job.parameters, definition.fleet.region
    root = definition.storage.root
    instance = catalog.instances.get(type_)
    if instance is None:
        raise GpufleetError(catalog.unknown_type(type_))
    estimate = definition.estimate if _is_of(definition, type_, catalog) else replace(definition.estimate, step_ms=None)
    known = basis.known_steps if known is None else known
    why, runtime = [], None
    offers, market, limits = offers_of(definition, catalog, type_), definition.fleet.market, definition.limits
    price = offers[market.name].price
    config = config.completed(hours=market.node_hours(limits.max_hours, limits.max_usd, price))
    ranks = config.ranks(instance.gpu_count, definition.nodes)
    try:  # a price in another market may be missing, because it is only used for a comparison
        market.require(catalog, type_, definition.fleet)
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
    if runtime is not None and definition.fleet_of and runtime.setup_s > runtimes.WARM_S:
        # a replacement of the node has the whole set-up: restart_s
        runtime = replace(runtime, setup_s=runtimes.WARM_S, setup_seen=False, setup_source="")
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
        offers=offers,
        why="; ".join(why),
        untried=untried(known, instance, ranks) if config.memory(0, config.ladder(ranks)[0], ranks) is None else "",
    )


def _is_of(definition: StackDefinition, type_: str, catalog: Catalog) -> bool:
    """Whether estimate.step_ms applies to this type: the type is listed, or has the same number and kind of GPUs as a
    listed type.
    """

    def device(name: str) -> tuple[str, float, int] | None:
        kind = catalog.instances.get(name)
        if kind is None:
            return None
        return kind.gpu.name, kind.gpu_share, definition.job.parameters.ranks(kind.gpu_count)

    listed = definition.fleet.instance_types
    return definition.estimate.step_ms is None or type_ in listed or device(type_) in map(device, listed)
