"""Computes the bill of a run from its definition and the catalog.

The lines are the exact cost of the run without interruptions. One more line, `interruptions`, is added, so that the sum
of all lines is the p50 of the simulated runs. This line can be negative, because AWS does not charge a first hour that
it interrupts, and because a limit may end the run. (The table shows separately what a limit cuts off, and what unknown
speed, price and set-up add.) The only date is `today`, which gives spot prices their age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill import doubts, limits, lines, options
from gpufleet.infra.bill.bill import Bill, Cap, Chance, KeptStorage
from gpufleet.infra.bill.lines import Line
from gpufleet.infra.bill.options import BillBasis
from gpufleet.infra.bill.side import FEW, UNBOUND, Side, cadence, exact, price_side, span_usd, supposed
from gpufleet.infra.catalog import Catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import Problem
from gpufleet.infra.market import COMPARED
from gpufleet.infra.risk import closed_form, simulation
from gpufleet.job.contract.goal import HOURS, USD
from gpufleet.job.kind import batch


def price(
    definition: StackDefinition,
    catalog: Catalog,
    *,
    not_ready: Sequence[str] = (),
    runs: int = simulation.RUNS,
    **known: Any,
) -> Bill:
    """The bill that `price_of` makes. `known`: the fields of BillBasis other than definition and catalog."""
    return price_of(BillBasis(definition, catalog, **known), not_ready=not_ready, runs=runs)


def price_of(basis: BillBasis, *, not_ready: Sequence[str] = (), runs: int = simulation.RUNS) -> Bill:
    """The bill of a definition. `not_ready`: sentences to show among the warnings. Raises PriceMissing if the catalog
    lacks the price of a service, and DefinitionError if the job fits no listed type or none of them has a price.
    """
    definition, catalog = basis.definition, basis.catalog
    only_priced = definition.variant.only_priced
    if only_priced:
        definition = replace(definition, limits=UNBOUND)
        basis = basis.with_definition(definition)
    types = options.type_costs(basis)
    market, capacity = definition.fleet.market, definition.fleet.capacity
    if options.dearest(types, capacity) is None:
        raise options.refuse(definition, types)
    sides = {
        kind: price_side(
            basis.with_definition(replace(definition, fleet=definition.fleet.bought_as(kind))),
            types,
            kind,
            runs=runs if kind == capacity else min(runs, FEW),
        )
        for kind in dict.fromkeys((*COMPARED, capacity))
    }
    spot, on_demand, chosen = sides["spot"], sides["on-demand"], sides[capacity]
    assert chosen is not None
    endless = batch.is_endless(definition.job.parameters)
    unmeasured = not (chosen.runtime.calibrated or endless)
    at_hazards, measured_usd = supposed(chosen, interrupted=market.is_interrupted, measured=unmeasured)
    bill = Bill(
        stack=definition.name,
        scenario=definition.scenario,
        only_priced=only_priced,
        run=definition.run.id,
        region=definition.fleet.region,
        zones=definition.fleet.zones,
        market=market,
        lines=(*chosen.lines, _interruptions(chosen)),
        usd=chosen.usd,
        hours=chosen.hours,
        spot=spot,
        on_demand=on_demand,
        chosen=chosen,
        hazard=definition.estimate.hazard_per_hour,
        chance=chosen.exposure.chance if market.is_interrupted else None,
        cadence=cadence(chosen),
        usd_at_hazard=at_hazards,
        span_usd=span_usd(chosen),
        measured_usd=measured_usd,
        break_even_hazard=_break_even(spot, on_demand),
        types=types,
        fits=tuple(phase for option in types for phase in option.fits),
        notice=tuple(phase for option in types for phase in option.notices),
        cap=None if only_priced else _cap(definition, chosen),
        kept=_kept_storage(definition, catalog),
        warnings=(),
        prices_as_of=min(line.as_of for line in chosen.lines),
        max_price_age_days=definition.estimate.max_price_age_days,
        calibrated=chosen.runtime.calibrated,
        goals=_chances(definition, chosen),
        buys=chosen.trained_hours if endless else None,
        hourly_usd={charge.name: charge.usd_per_hour for charge in lines.hourly_charges(definition, catalog)},
    )
    return replace(bill, warnings=(*doubts.warnings(basis, bill), *not_ready))


def problems(definition: StackDefinition, bill: Bill) -> list[Problem]:
    """Reasons to refuse the definition: the job does not fit on a listed type, a listed type has no price, a limit is
    below p50, or on a listed type the run cannot end within a limit.
    """
    refused = [*options.fit_problems(definition, bill.types), *options.unpriced(definition, bill.types)]
    return refused if bill.only_priced else [*refused, *limits.problems(definition, bill)]


def _interruptions(side: Side) -> Line:
    amount = side.usd.p50 - side.total
    drawn = f"p50 of {side.runs} simulated runs less the lines above"
    return Line(
        name="interruptions",
        kind="interruptions",
        quantity=Decimal(1),
        unit="run",
        unit_price=amount,
        amount=amount,
        source=drawn,
        as_of=side.price.as_of,
    )


def _break_even(spot: Side | None, on_demand: Side | None) -> float | None:
    if spot is None or on_demand is None:
        return None
    return closed_form.break_even(spot.exposure, float(on_demand.total))


def _chances(definition: StackDefinition, chosen: Side) -> tuple[Chance, ...]:
    """The chance of each goal, from the same simulated runs as the bill's range."""
    runs = chosen.within
    drawn = {USD: runs.usd + chosen.unsimulated_usd, HOURS: runs.wall_hours}
    done = ~runs.stopped | batch.is_endless(definition.job.parameters)
    return tuple(
        Chance(
            name=name,
            wanted=figure,
            share=float((done & (drawn[name] <= float(figure))).mean()) if name in drawn else None,
        )
        for name, figure in definition.goal.wanted.items()
    )


def _cap(definition: StackDefinition, chosen: Side) -> Cap:
    by_money, by_hours = chosen.exposure.hours_at_cap()
    by_time, *_ = definition.fleet.market.time_limit(definition.limits.max_hours, chosen.exposure.max_hours)
    return Cap(
        max_usd=definition.limits.max_usd,
        max_hours=definition.limits.max_hours,
        probability=chosen.probability_stopped,
        first="limits.max_usd" if by_money < by_hours else by_time,
        at_hours=exact(min(by_money, by_hours) * definition.nodes),
        deadline=definition.limits.deadline,
    )


def _kept_storage(definition: StackDefinition, catalog: Catalog) -> KeptStorage:
    """The storage that the run's objects need after `pulumi destroy`, and its cost. (Job archive and dataset belong to
    the stack; a destroy deletes them.)
    """
    keep, nothing = definition.storage.keep, Decimal("0.0000")
    if not keep.bucket:
        return KeptStorage(
            what="nothing: the bucket goes with the stack", gb=nothing, usd_per_month=nothing, days=0, parts=()
        )
    held = lines.stored(definition, None)
    named = {
        "checkpoints": held.checkpoints,
        "exports": held.exports,
        "final weights": held.final,
        "reports and logs": held.small,
    }
    parts = tuple((name, exact(gb)) for name, gb in named.items() if gb)
    total = sum((gb for _, gb in parts), nothing)
    monthly = catalog.price("s3_storage", definition.fleet.region).amount
    return KeptStorage(
        what=f"bucket, at most {total:.1f} GB: {', '.join(name for name, _ in parts)}; expires {keep.expiry}",
        gb=total,
        usd_per_month=(total * monthly).quantize(lines.CENT_100),
        days=keep.days,
        parts=parts,
    )
