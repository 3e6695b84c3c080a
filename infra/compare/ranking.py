"""Ranks other ways to run the work: a stack's scenarios, and every instance type for their work.

Both views consist of Row objects. `scenarios` prices each scenario of the file on its own fleet, beside the scenario's
claim. `every_option` prices each distinct piece of work among the scenarios on every type of the catalog, on spot and
on demand. Options in time are ranked by mean dollars; every other option says why it is not ranked. The definition's
limits do not stop a simulated run here, because a run that is stopped early is cheap but its work is not done. Rows
that exceed a limit are marked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING

from gpufleet.infra import text
from gpufleet.infra.bill import fit, options
from gpufleet.infra.bill.options import BillBasis, TypeCost
from gpufleet.infra.bill.side import Side
from gpufleet.infra.catalog import Catalog, Price
from gpufleet.infra.compare.rows import Row, Study, draft, filled, rate
from gpufleet.infra.definition.model import Capacity, Fleet, StackDefinition
from gpufleet.infra.market import COMPARED, WAYS
from gpufleet.infra.market.fallback import SpotThenOnDemand
from gpufleet.infra.risk import simulation

if TYPE_CHECKING:
    from gpufleet.infra.risk.deadline import DeadlinePlan

# The number of simulated runs per row of every_option. The first rows of each work are simulated again with more runs
# (`refined`).
RUNS_EACH = 250
RUNS_SHOWN = 2_000
NODE_COUNTS = (2, 4, 8)
ATTEMPTS_EACH = 24  # after this many nodes the rest of such a simulated run is extrapolated
# number of rows that are simulated with more runs (those of an answer and two more), and the least number of them for
# each work
REFINED, REFINED_EACH = 12, 3
# USD per GB from one region to another, for most pairs in AWS's table of EC2 data transfer (read 2026-11); some cost
# more.
BETWEEN_REGIONS = Decimal("0.02")
SURE = 0.5  # an option is not ranked if a larger share of its runs misses the deadline
# A relative difference in dollars or hours that is smaller than this is only noise of the simulation.
LEAST = Decimal("0.02")


def scenarios(
    definition: StackDefinition,
    variants: Sequence[StackDefinition],
    study: Study,
    *,
    runs: int = simulation.RUNS,
) -> list[Row]:
    """Each scenario on the first type of its own fleet, in the file's order; only the file if it has no scenarios."""
    catalog, own = study.catalog, definition.fleet.region
    regions = [own, *(region for region in catalog.regions() if region != own)]
    drafts = []
    for work in variants or (definition,):
        name, capacity = work.scenario or definition.name, work.fleet.capacity
        if work.variant.reference:
            drafts.append(Row(scenario=name, work=work, capacity=capacity))
            continue
        basis = study.basis(work, work.fleet.instance_types[:1])
        option = options.type_cost(basis, work.fleet.instance_types[0])
        drafted = draft(basis, name, option, capacity)
        drafts.append(replace(drafted, rates=tuple(rate(drafted, option, region, catalog) for region in regions)))
    return filled(drafts, study.hours_left, runs=runs)


def every_option(
    definition: StackDefinition,
    variants: Sequence[StackDefinition],
    study: Study,
    *,
    types: Sequence[str] | None = None,
    runs: int = RUNS_EACH,
    below: Decimal | None = None,
    likely: bool = True,
    only: Collection[str] | None = None,
) -> list[Row]:
    """A row for every (work, type, capacity), and for the work's own types also on several nodes. The best row comes
    first; rows that cannot run come last, with the reason. `below`: if given, only rows whose mean may be below this
    many USD are returned, and they are not in order. `likely`: whether to use the price that a fleet may expect,
    instead of that of its most expensive zone. `only`: names of works; other work gets no rows.
    """
    catalog = study.catalog
    drafts: list[Row] = []
    fleets: dict[str, Fleet] = {}
    for work, name in works(definition, variants):
        if only is not None and name not in only:
            continue
        region = work.fleet.region
        listed = tuple(types or catalog.types_for(work.job.parameters.gpus_needed()))
        if below is not None:
            listed = tuple(instance for instance in listed if _is_sold(instance, region, catalog))
        basis = _by_the_hour(study.basis(work, listed))
        holder = "-" if below is not None else fit.cheapest_holder(basis.definition.job.parameters, catalog, region)
        known = basis.known_steps
        for type_ in listed:
            for count in node_counts(work, type_, catalog):
                there = basis.with_definition(basis.definition.on_nodes(count))
                # estimate.step_ms applies only to the file's own number of nodes
                stated = there if count == work.nodes else there.with_definition(_unstated(there.definition))
                option = options.type_cost(stated, type_, nearest=holder, known=known)
                # if the type has a runtime, only a price can be missing, for which each capacity has its own reason
                if option.runtime is not None:
                    option = replace(option, why="")
                for market in COMPARED:
                    price = option.likely(market) if likely else option.hourly(market)
                    if _may_cost_less(_compute_usd(option, price), market, below):
                        row = draft(there, name, option, market, likely=likely)
                        whole = None if row.prepared is None else row.prepared.total
                        if _may_cost_less(whole, market, below):
                            drafts.append(row)
        fleets[name] = work.fleet
    rows = filled(drafts, study.hours_left, runs=runs, attempts=ATTEMPTS_EACH, below=below)
    if below is not None:
        return rows
    theirs = {name: _own(rows, name, fleet) for name, fleet in fleets.items()}
    return in_order([replace(row, cheaper=chance_below(row.side, theirs[row.scenario])) for row in rows])


def _is_sold(type_: str, region: str, catalog: Catalog) -> bool:
    """Whether the region offers the type, and its price there is known."""
    priced = (type_, region) in catalog.spot_prices or (type_, region) in catalog.on_demand_prices
    return priced and not catalog.instances[type_].unusable


def _compute_usd(option: TypeCost, price: Price | None) -> Decimal | None:
    """USD for the nodes of an uninterrupted run; None if the row cannot be run."""
    if price is None or option.runtime is None or not option.holds_the_job:
        return None
    return price.amount * Decimal(option.runtime.total_s / 3600)


def _may_cost_less(usd: Decimal | None, capacity: Capacity, below: Decimal | None) -> bool:
    """Whether a run that costs `usd` without interruptions may have a mean below `below`. Interruptions can lower the
    mean, because AWS does not bill interrupted first hours.
    """
    if below is None:
        return True
    return usd is not None and usd * WAYS[capacity].least_share <= below


def every_region(definition: StackDefinition, study: Study, *, runs: int = RUNS_EACH) -> list[Row]:
    """The work in each region that has all prices of a bill, the cheapest region first. In each region it runs on the
    type and capacity with the lowest uninterrupted cost, including the transfer of inputs from a bucket.
    """
    catalog = study.catalog
    if not _moves_elsewhere(definition):
        return []
    basis = _by_the_hour(study.basis(definition, catalog.instances))
    work, known, drafts = basis.definition, _on_every_type(basis), list[Row]()
    for region in (name for name in catalog.regions() if not catalog.missing(name)):
        fleet = replace(work.fleet, region=region, zones=catalog.zones(region))
        there = basis.with_definition(replace(work, fleet=fleet))
        priced = (replace(option, offers=options.offers_of(there.definition, catalog, option.type)) for option in known)
        cheapest = _on_the_cheapest(there, work.name, priced, study.hours_left)
        drafts += [replace(row, inputs_usd=_brought(work, region)) for row in cheapest]
    rows = [row for row in filled(drafts, study.hours_left, runs=runs) if row.ranked]
    return sorted(rows, key=attrgetter("mean_usd"))


def every_batch(definition: StackDefinition, study: Study, *, runs: int = RUNS_EACH) -> list[Row]:
    """One row for the work with the file's batch, then rows for larger batches. Each is on the type and capacity with
    the lowest uninterrupted cost. Empty if the parameters allow no larger batch.
    """
    larger = [
        (variant.setting, variant.config) for variant in definition.job.parameters.variants() if not variant.narrower
    ]
    if not _moves_elsewhere(definition) or not larger:
        return []
    drafts: list[Row] = []
    doubted = 0
    for name, parameters in (("as in the file", definition.job.parameters), *larger):
        other = replace(definition, job=replace(definition.job, parameters=parameters))
        if parameters is not definition.job.parameters:
            other = _unstated(other)
        basis = _by_the_hour(study.basis(other, study.catalog.instances))
        config = basis.definition.job.parameters
        doubts = len([*config.doubts(max(phase.steps for phase in config.phases()))])
        # such as a warm-up that is as long as the run; this is no better with still larger batches
        if drafts and doubts > doubted:
            break
        doubted = doubts
        drafts += _on_the_cheapest(basis, name, _on_every_type(basis), study.hours_left)
    return [row for row in filled(drafts, study.hours_left, runs=runs) if row.ranked]


def _moves_elsewhere(definition: StackDefinition) -> bool:
    """Whether the work can move to another type. The work of a run elsewhere cannot."""
    market = definition.fleet.bought_as(definition.fleet.market.by_the_hour).market
    return market.moves_elsewhere and not definition.variant.reference


def _on_every_type(basis: BillBasis) -> list[TypeCost]:
    """The cost of the work on each type that has the GPUs it asks for, at its region's prices."""
    known, least = basis.known_steps, basis.definition.job.parameters.gpus_needed()
    return [
        replace(options.type_cost(basis, type_, nearest="-", known=known), why="")
        for type_, instance in basis.catalog.instances.items()
        if not instance.unusable and least <= instance.gpu_count
    ]


def _on_the_cheapest(basis: BillBasis, name: str, known: Iterable[TypeCost], hours_left: float | None) -> list[Row]:
    """The row with the lowest uninterrupted cost, among the types and capacities on which the job fits and which have a
    price. If some of them meet the deadline, only these are compared. Empty if there is none.
    """
    most_s = math.inf if hours_left is None else hours_left * 3600
    priced = [
        (option.runtime.total_s > most_s, float(price.amount) * option.runtime.total_s, option, market)
        for option in known
        for market in COMPARED
        if (price := option.likely(market)) and option.runtime and option.holds_the_job
    ]
    if not priced:
        return []
    *_, option, market = min(priced, key=lambda offer: offer[:2])
    return [draft(basis, name, option, market, likely=True)]


def _unstated(work: StackDefinition) -> StackDefinition:
    """A copy of the work without the step time that its file states."""
    return replace(work, estimate=replace(work.estimate, step_ms=None))


def _brought(work: StackDefinition, region: str) -> Decimal:
    """USD of the transfer if a run in another region reads inputs that are in a bucket of the file's region."""
    if region == work.fleet.region:
        return Decimal(0)
    sizes, storage = work.job.parameters.sizes(), work.storage
    places = ((storage.dataset, sizes.dataset), *storage.weights(sizes))
    held_gb = sum(held for place, held in places if place.startswith("s3://")) / 1e9
    return (Decimal(f"{held_gb:.6f}") * BETWEEN_REGIONS).quantize(Decimal("0.0001"))


def chance_below(one: Side | None, other: Side | None) -> float | None:
    """The probability that `one` costs less to finish than `other`; None if one of them has no figures. Both have the
    same number of runs and the same random draws.
    """
    if one is None or other is None or len(one.needed.usd) != len(other.needed.usd):
        return None
    return float((one.needed.usd < other.needed.usd).mean())


def _own(rows: Sequence[Row], name: str, fleet: Fleet) -> Side | None:
    """The row of the most expensive type that the work's file lists. The bill prices this type."""
    sides = [
        row.side
        for row in rows
        if row.scenario == name
        and row.type in fleet.instance_types
        and (row.capacity, row.nodes) == (fleet.capacity, fleet.nodes)
        and row.side
    ]
    return max(sides, key=lambda side: side.total, default=None)


def refined(rows: Sequence[Row], *, works: int = 0, hours_left: float | None = None) -> list[Row]:
    """The rows in order and with reasons. The first rows of each work are simulated with more runs, so that their noise
    is small. `works`: the number of works of the comparison, if `rows` has only a part of it.
    """
    seen = Counter[str]()
    shown: dict[int, list[Row]] = {simulation.RUNS: [], RUNS_SHOWN: []}
    most = max(REFINED_EACH, REFINED // max(1, works or len({row.scenario for row in rows})))
    for row in rows:
        seen[row.scenario] += 1
        if seen[row.scenario] <= most and row.ranked and row.side is not None and row.side.runs > 1:
            shown[simulation.RUNS if seen[row.scenario] == 1 else RUNS_SHOWN].append(row)
    better: dict[int, Row] = {}
    for runs, some in shown.items():
        better.update(zip(map(id, some), filled(some, hours_left, runs=runs), strict=True))
    return with_reasons([better.get(id(row), row) for row in rows], hours_left)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The rows that can be run, without those that another row of the same work beats in both mean dollars and median
    wall-clock hours. A more expensive row is included only if it is faster by more than the simulation's noise.
    """
    best: dict[str, list[Row]] = {}
    able = [row for row in rows if row.ranked and row.usd and row.wall_hours]
    for row in sorted(able, key=lambda r: (r.usd.mean, r.wall_hours.p50)):  # type: ignore[union-attr]
        own = best.setdefault(row.scenario, [])
        if not own or row.wall_hours.p50 < (1 - LEAST) * own[-1].wall_hours.p50:  # type: ignore[union-attr]
            own.append(row)
    return [row for own in best.values() for row in own]


def works(definition: StackDefinition, variants: Sequence[StackDefinition]) -> list[tuple[StackDefinition, str]]:
    """One scenario for each (parameters, estimate, hold, storage, nodes, zone ids), with the names of all scenarios
    that share these, and with the widest of their limits.
    """
    groups: dict[tuple[object, ...], list[StackDefinition]] = {}
    for variant in variants or (definition,):
        if variant.variant.reference:
            continue
        held = variant.variant.hold_hours, variant.variant.buffer
        storage = repr(variant.storage)  # as text, because the map of inputs cannot be hashed
        fleet = variant.fleet
        asked = fleet.nodes, fleet.cards, fleet.zone_ids if fleet.region == definition.fleet.region else ()
        key = (variant.job.parameters, variant.estimate, held, storage, variant.own_data, asked)
        groups.setdefault(key, []).append(variant)
    # the options are compared in the stack's region, even if a scenario asks for another
    return [
        (
            replace(
                alike[0],
                fleet=alike[0].fleet
                if alike[0].fleet.region == definition.fleet.region
                else replace(alike[0].fleet, region=definition.fleet.region, zones=definition.fleet.zones),
                limits=replace(
                    alike[0].limits,
                    max_usd=max(work.limits.max_usd for work in alike),
                    max_hours=max(work.limits.max_hours for work in alike),
                    usd_per_hour=_highest(work.limits.usd_per_hour for work in alike),
                ),
            ),
            ", ".join(work.scenario or definition.name for work in alike),
        )
        for alike in groups.values()
    ]


def _highest(ceilings: Iterable[Decimal | None]) -> Decimal | None:
    """The highest of several ceilings; None if one of them is None."""
    known = list(ceilings)
    return None if None in known else max(ceiling for ceiling in known if ceiling is not None)


def node_counts(work: StackDefinition, type_: str, catalog: Catalog) -> list[int]:
    """The numbers of nodes for which a type gets a row. Every type gets a row for a single node. The types in the file
    also get a row for the file's number of nodes, and for those of NODE_COUNTS that the job can use.
    """
    config, own = work.job.parameters, work.nodes
    rows = config.rows()
    if type_ not in work.fleet.instance_types or config.demands.one_node or config.device == "cpu" or rows is None:
        return sorted({1, own} if type_ in work.fleet.instance_types else {1})
    gpus = catalog.instances[type_].gpu_count
    able = (count for count in NODE_COUNTS if count * gpus <= rows and config.gpus in (None, gpus))
    return sorted({1, own, *able})


def _by_the_hour(basis: BillBasis) -> BillBasis:
    """The work without its prepaid Capacity Block, because other ways to run the work cannot use the block."""
    work = basis.definition
    return basis.with_definition(replace(work, fleet=work.fleet.bought_as(work.fleet.market.by_the_hour)))


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows in time come first, by mean dollars; then late rows; then rows that cannot run."""

    def order(row: Row) -> tuple[int, Decimal, str]:
        group = 2 if not row.ranked else 1 if row.late > SURE else 0
        return group, row.mean_usd, row.type

    return sorted(rows, key=order)


def with_reasons(rows: Iterable[Row], hours_left: float | None) -> list[Row]:
    """The rows in order, each with its reason, which compares it with the first row of the same work."""
    ordered = in_order(rows)
    first: dict[str, Row] = {}
    for row in ordered:
        if row.ranked and row.late <= SURE:
            first.setdefault(row.scenario, row)
    return [replace(row, lost=_lost(row, first.get(row.scenario), hours_left)) for row in ordered]


def _lost(row: Row, best: Row | None, hours_left: float | None) -> str:
    if not row.ranked:
        change = f"; nearest: {row.nearest}" if row.nearest else ""
        return (row.reason or f"no {row.capacity} price in {row.region}") + change
    if row.late > SURE:
        return f"misses the deadline, {text.hours(hours_left or 0.0)} h from now, in {row.late:.0%} of runs"
    if best is None or row is best or best.usd is None or row.usd is None:
        return row.untried
    assert row.side is not None
    assert best.side is not None
    hours = row.side.runtime.total_s / best.side.runtime.total_s
    price = float(row.side.price.amount * row.nodes / (best.side.price.amount * best.nodes))
    again = row.side.usd.mean - row.side.total - (best.side.usd.mean - best.side.total)
    words = [f"+{row.usd.mean - best.usd.mean:.2f} USD: {hours:.2f}x the hours at {price:.2f}x the price"]
    if WAYS[row.capacity].is_interrupted and again >= Decimal("0.01"):
        words.append(f"interruptions cost {again:.2f} more")
    if row.late >= 0.1:
        words.append(f"late in {row.late:.0%} of runs")
    if row.untried:
        words.append(row.untried)
    return ", ".join(words)


def default_scenario(definition: StackDefinition, variants: Sequence[StackDefinition]) -> str:
    """The name of the scenario that equals the file, except that it may keep its node longer. If there is none, the
    name of the first scenario that has a price.
    """
    own = [variant for variant in variants if not variant.variant.only_priced and _work(variant) == _work(definition)]
    priced = [variant for variant in variants if not variant.variant.reference]
    return next((variant.scenario for variant in (*own, *priced, *variants)), "") or definition.name


def _work(definition: StackDefinition) -> tuple[object, ...]:
    return definition.job, definition.fleet, definition.storage, definition.estimate


def deadline_policy(rows: list[Row], scenario: str, hours_left: float | None) -> tuple[DeadlinePlan, str] | None:
    """Returns the deadline policy for the work of this scenario, and its type: the best type that has both a spot and
    an on-demand price. None if there is no deadline.
    """
    from gpufleet.infra.risk import deadline

    if hours_left is None:
        return None
    spot, on_demand = SpotThenOnDemand().fleets
    sides = {(row.capacity, row.type, row.nodes, row.scenario): row.side for row in rows}
    for row in rows:
        same = row.type, row.nodes, row.scenario
        begun, sure = sides.get((spot, *same)), sides.get((on_demand, *same))
        if row.ranked and row.side is begun and begun and sure and scenario in row.scenario.split(", "):
            return deadline.switch(begun.exposure, sure.exposure, hours_left), row.type
    return None
