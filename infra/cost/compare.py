"""What else could be run, where, and for how much: a stack's scenarios, and every instance type for their work.

Two views of one Row. `scenarios` prices each scenario of the file on the fleet it asks for, beside what its plan
claimed. `options` takes the distinct pieces of work among them to every type of the catalog, on spot and on demand, and
ranks what finishes in time by mean dollars; the others say why they lost. Limits of the definition do not cut a run
here, since one that is stopped early is cheap and not done: rows beyond them are marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from statistics import median
from typing import Any

import numpy as np

from infra.catalog import Catalog
from infra.cost import fit, options, risk, side
from infra.cost.options import Capacity, TypeCost
from infra.cost.side import Quantiles, Side
from infra.definition import Claim, Limits, StackDefinition
from infra.errors import PriceMissing
from job import sizing
from job.config import JobConfig

CAPACITIES: tuple[Capacity, ...] = ("spot", "on-demand")
RUNS_EACH = 250  # simulated runs behind a row of `options`; the rows shown first are simulated again with risk.RUNS
ATTEMPTS_EACH = 24  # nodes of such a run before it is carried on as it went so far
REFINED = 24
SURE = 0.5  # an option that misses the deadline more often than this is none
_UNBOUND = Limits(max_usd=Decimal(10**9), max_hours=Decimal(10**9))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Compute dollars of the run in one region, without interruptions and set-up. None: no price known there."""

    region: str
    on_demand: Decimal | None
    spot: Decimal | None  # at the median zone


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to do one piece of work. Figures are None where they cannot be known; `why` says so."""

    scenario: str  # every name with this work, the first one leading
    type: str
    capacity: Capacity
    region: str
    gpus: str = ""
    ranks: int = 0  # GPUs used, of all nodes
    nodes: int = 1
    note: str = ""
    claim: Claim = field(default_factory=Claim)
    reference: bool = False
    tokens: int = 0  # trained on
    compute_h: float | None = None  # optimizer steps alone; a held node's hours where they are longer
    hours: Quantiles | None = None  # node-hours
    wall_hours: Quantiles | None = None
    usd: Quantiles | None = None  # to finish, with everything the bill counts
    free_usd: Decimal | None = None  # mean of what AWS does not charge: interrupted first hours; part of usd
    interruptions: float | None = None
    interrupted: float | None = None  # probability of at least one
    lost_minutes: float | None = None  # mean work done twice and restarts
    rates: tuple[Rate, ...] = ()
    fits: bool = False
    launchable: bool = False
    why: str = ""  # does not fit, has no price, has left EC2, is several nodes
    nearest: str = ""  # change that would make it fit
    over_limit: bool = False  # p90 passes limits.max_usd or limits.max_hours
    late: float = 0.0  # probability of missing the deadline
    basis: str = ""  # claim, target (roofline and an efficiency), measured
    sharded: bool = False  # trained state cut over the GPUs
    settings: dict[str, Any] = field(default_factory=dict, repr=False)  # path -> value, of job, fleet and estimate
    lost: str = ""  # why it is not the first
    side: Side | None = field(default=None, repr=False)

    @property
    def ranked(self) -> bool:
        """Could be run as it is."""
        return self.launchable and self.fits and self.usd is not None


def scenarios(
    definition: StackDefinition,
    variants: Sequence[StackDefinition],
    catalog: Catalog,
    *,
    hours_left: float | None = None,
    runs: int = risk.RUNS,
) -> list[Row]:
    """Each scenario on the first type of its own fleet, in the file's order. Without any, the file as it is."""
    regions = [definition.fleet.region, *(r for r in catalog.regions() if r != definition.fleet.region)]
    rows = []
    for variant in variants or (definition,):
        name, fleet = variant.scenario or definition.name, variant.fleet
        if variant.variant.reference:
            rows.append(
                Row(
                    scenario=name,
                    type="elsewhere",
                    capacity=fleet.capacity,
                    region="",
                    note=variant.variant.note,
                    claim=variant.variant.claim,
                    reference=True,
                    basis="claim",
                )
            )
            continue
        option = options.type_costs(_alone(variant, fleet.instance_types[0]), catalog)[0]
        row = _row(variant, name, option, fleet.capacity, catalog, runs=runs, hours_left=hours_left)
        rates = tuple(_rate(row, option, region, catalog) for region in regions)
        rows.append(replace(row, rates=rates, settings=settings(variant)))
    return rows


def every_option(
    definition: StackDefinition,
    variants: Sequence[StackDefinition],
    catalog: Catalog,
    *,
    hours_left: float | None = None,
    types: Sequence[str] | None = None,
    runs: int = RUNS_EACH,
) -> list[Row]:
    """Every (work, type, capacity), the best first; those that cannot run come last with the reason."""
    rows = []
    for work, name in _works(definition, variants):
        holder = fit.cheapest_holder(work.job.parameters, catalog, work.fleet.region)
        for type_ in types or catalog.instance_types():
            for option, capacity in _both(work, type_, catalog, holder):
                rows.append(
                    _row(
                        work,
                        name,
                        option,
                        capacity,
                        catalog,
                        runs=runs,
                        hours_left=hours_left,
                        attempts=ATTEMPTS_EACH,
                    )
                )
    return _ranked(rows, hours_left)


def _both(work: StackDefinition, type_: str, catalog: Catalog, holder: str) -> Iterator[tuple[TypeCost, Capacity]]:
    option = options.type_cost(_alone(work, type_), catalog, type_, nearest=holder)
    if option.runtime is not None:  # what it lacks is then a price, and each capacity says so for itself
        option = replace(option, why="")
    for capacity in CAPACITIES:
        yield option, capacity


def refined(rows: Sequence[Row], *, hours_left: float | None = None, runs: int = risk.RUNS) -> list[Row]:
    """The same, the first REFINED of each work simulated with more runs, so that what is read is not noise."""
    again, seen = [], Counter[str]()
    works = len({row.scenario for row in rows})
    for row in rows:
        seen[row.scenario] += 1
        if seen[row.scenario] <= max(1, REFINED // works) and row.ranked and row.side is not None and row.side.runs > 1:
            again.append(_figures(row, side.again(row.side, runs), hours_left))
        else:
            again.append(row)
    return _ranked(again, hours_left)


def settings(definition: StackDefinition) -> dict[str, Any]:
    """Every setting of job parameters, fleet and estimate by its path."""
    trees = {
        "job.parameters": asdict(definition.job.parameters),
        "fleet": asdict(definition.fleet),
        "estimate": asdict(definition.estimate),
    }
    return {path: value for name, tree in trees.items() for path, value in _flat(tree, name)}


def _flat(tree: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}.{key}")
        else:
            yield f"{above}.{key}", value


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Of the rows that could be run, those that no other of the same work beats in both mean dollars and median hours
    by the wall.
    """
    best: dict[str, list[Row]] = {}
    able = [row for row in rows if row.ranked and row.usd and row.wall_hours]
    for row in sorted(able, key=lambda r: (r.usd.mean, r.wall_hours.p50)):  # type: ignore[union-attr]
        own = best.setdefault(row.scenario, [])
        if not own or row.wall_hours.p50 < own[-1].wall_hours.p50:  # type: ignore[union-attr]
            own.append(row)
    return [row for own in best.values() for row in own]


def _works(definition: StackDefinition, variants: Sequence[StackDefinition]) -> list[tuple[StackDefinition, str]]:
    """The distinct (parameters, estimate, held hours) among the scenarios on one node, with the names sharing each."""
    found: dict[tuple[JobConfig, object, object], tuple[StackDefinition, list[str]]] = {}
    for variant in variants or (definition,):
        if variant.variant.reference or variant.nodes > 1:
            continue
        key = (variant.job.parameters, variant.estimate, variant.variant.hold_hours)
        found.setdefault(key, (variant, []))[1].append(variant.scenario or definition.name)
    # Where a scenario asks for another region, the stack's own is what is compared.
    return [
        (replace(work, fleet=replace(work.fleet, region=definition.fleet.region)), ", ".join(names))
        for work, names in found.values()
    ]


def _alone(definition: StackDefinition, type_: str) -> StackDefinition:
    """The same with one type and without limits."""
    return replace(definition, fleet=replace(definition.fleet, instance_types=(type_,)), limits=_UNBOUND)


def _row(
    definition: StackDefinition,
    name: str,
    option: TypeCost,
    capacity: Capacity,
    catalog: Catalog,
    *,
    runs: int,
    hours_left: float | None,
    attempts: int = risk.MAX_ATTEMPTS,
) -> Row:
    fleet, instance, runtime = definition.fleet, option.instance, option.runtime
    config, variant = definition.job.parameters, definition.variant
    base = Row(
        scenario=name,
        type=option.type,
        capacity=capacity,
        region=fleet.region,
        note=variant.note,
        claim=variant.claim,
        nodes=definition.nodes,
        tokens=sum(phase.steps * phase.tokens_per_step for phase in sizing.phases(config)),
        basis="measured" if runtime and runtime.measured else "target",
        sharded=any(phase.sharded for phase in sizing.phases(config)),
    )
    if instance is None:
        return replace(base, why=option.why)
    share = "" if instance.gpu_share == 1 else f" (1/{1 / instance.gpu_share:g})"
    base = replace(base, gpus=f"{instance.gpu_count} x {instance.gpu.name}{share}")
    unfit = next((phase for phase in option.fits if not phase.fits), None)
    why = _unlaunchable(option, fleet.region, definition.nodes)
    base = replace(
        base,
        fits=unfit is None,
        launchable=not why,
        why=why or (f"phase {unfit.phase}: {unfit.why}" if unfit else option.why),
        nearest=unfit.nearest if unfit else "",
        ranks=runtime.ranks if runtime else 0,
        compute_h=_compute_h(definition, option),
    )
    if runtime is None or option.hourly(capacity) is None or unfit is not None:
        return base
    found = side.price_side(
        replace(definition, limits=_UNBOUND),
        catalog,
        [option],
        capacity,
        dataset_bytes=None,
        runs=runs,
        attempts=attempts,
    )
    assert found is not None  # it has a price and a runtime
    limits = definition.limits
    most_usd, most_hours = limits.max_usd, limits.max_hours
    over = found.metered_usd.p90 > most_usd or found.hours.p90 * definition.nodes > most_hours
    return _figures(replace(base, over_limit=over), found, hours_left)


def _figures(row: Row, found: Side, hours_left: float | None) -> Row:
    """What the simulated runs say."""
    outcome = found.needed
    return replace(
        row,
        hours=_times(found.hours, row.nodes),
        wall_hours=found.wall_hours,
        usd=found.usd,
        free_usd=_free(found, outcome),
        interruptions=found.interruptions,
        interrupted=float((outcome.interruptions > 0).mean()),
        lost_minutes=60 * max(0.0, float(outcome.hours.mean()) - found.exposure.uninterrupted_h),
        late=0.0 if hours_left is None else float((outcome.wall_hours > hours_left).mean()),
        side=found,
    )


def _compute_h(definition: StackDefinition, option: TypeCost) -> float | None:
    if option.runtime is None:
        return None
    held = definition.variant.hold_hours
    return option.runtime.compute_s / 3600 if held is None else max(float(held), option.runtime.compute_s / 3600)


def _unlaunchable(option: TypeCost, region: str, nodes: int) -> str:
    instance = option.instance
    assert instance is not None
    if instance.left_ec2:
        return f"left EC2 by {instance.left_ec2}"
    if instance.regions is not None and region not in instance.regions:
        return f"not offered in {region}"
    return "" if nodes == 1 else f"{nodes} nodes: priced only, a run is one node"


def _rate(row: Row, option: TypeCost, region: str, catalog: Catalog) -> Rate:
    """Compute hours x price, as the tables of an experiment print them."""

    def amount(price: Decimal | None) -> Decimal | None:
        if price is None or row.compute_h is None:
            return None
        return (Decimal(f"{row.compute_h:.6f}") * price * row.nodes).quantize(Decimal("0.01"))

    spot = on_demand = None
    with suppress(PriceMissing):
        spot = median(zone.price.amount for zone in catalog.spot(option.type, region))
    with suppress(PriceMissing):
        on_demand = catalog.on_demand(option.type, region).amount
    return Rate(region=region, on_demand=amount(on_demand), spot=amount(spot))


def _free(found: Side, outcome: risk.Outcome) -> Decimal:
    """Mean of what was used and not charged."""
    exposure = found.exposure
    metered = exposure.fixed_usd + outcome.hours * (exposure.compute_usd_h + exposure.extras_usd_h)
    return side.exact(float(np.mean(metered - outcome.usd)))


def _times(values: Quantiles, nodes: int) -> Quantiles:
    return Quantiles(p10=values.p10 * nodes, p50=values.p50 * nodes, p90=values.p90 * nodes, mean=values.mean * nodes)


def _ranked(rows: list[Row], hours_left: float | None) -> list[Row]:
    """In time first, by mean dollars; then late ones; then those that cannot run. The reasons are against the first of
    the same work.
    """

    def order(row: Row) -> tuple[int, Decimal, str]:
        group = 2 if not row.ranked else 1 if row.late > SURE else 0
        return group, row.usd.mean if row.usd else Decimal(0), row.type

    ordered = sorted(rows, key=order)
    first: dict[str, Row] = {}
    for row in ordered:
        if row.ranked and row.late <= SURE:
            first.setdefault(row.scenario, row)
    return [replace(row, lost=_lost(row, first.get(row.scenario), hours_left)) for row in ordered]


def _lost(row: Row, best: Row | None, hours_left: float | None) -> str:
    if not row.ranked:
        change = f"; nearest: {row.nearest}" if row.nearest else ""
        return (row.why or f"no {row.capacity} price in {row.region}") + change
    if row.late > SURE:
        return f"misses the deadline, {hours_left:.1f} h from now, in {row.late:.0%} of runs"
    if best is None or row is best or best.usd is None or row.usd is None:
        return ""
    assert row.side is not None
    assert best.side is not None
    hours = row.side.runtime.total_s / best.side.runtime.total_s
    price = float(row.side.price.amount / best.side.price.amount)
    again = row.side.usd.mean - row.side.total - (best.side.usd.mean - best.side.total)
    words = [f"+{row.usd.mean - best.usd.mean:.2f} USD: {hours:.2f}x the hours at {price:.2f}x the price"]
    if again >= Decimal("0.01"):
        words.append(f"interruptions cost {again:.2f} more")
    if row.late >= 0.1:
        words.append(f"late in {row.late:.0%} of runs")
    return ", ".join(words)
