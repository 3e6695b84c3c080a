"""The bill of one run: what it costs if nothing interrupts it, what interruptions add, what it is likely to end at.

Lines are exact and price the run without interruptions; one more line, `interruptions`, makes their sum the p50 of the
simulation. It can be negative: AWS does not charge an interrupted first hour, and a limit may end the run (the table
shows that apart). The bill knows no clock: the same definition, catalog and dataset size give the same bill on any day
(its table may say how old the prices are).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from infra.catalog import Catalog
from infra.catalog.reclaim import Reclaimed, reclaimed
from infra.cost import closed_form, doubts, limits, lines, options, record, risk
from infra.cost.cadence import Cadence
from infra.cost.fit import Fit, Notice
from infra.cost.hazard import Hazard
from infra.cost.lines import Line
from infra.cost.options import Capacity, TypeCost
from infra.cost.side import UNBOUND, Hazards, Quantiles, Side, cadence, exact, half_speed, price_side, usd_at_hazards
from infra.definition import StackDefinition
from infra.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """The bound of the definition, and how likely the run is to meet it."""

    max_usd: Decimal
    max_hours: Decimal
    probability: float  # that the run is stopped before its work is done
    first: str  # limits.max_usd or limits.max_hours: the one that stops it
    at_hours: Decimal  # node-hours at which it does
    deadline: datetime | None = None  # in no figure: the bill knows no clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What stays in the bucket after `pulumi destroy`, until it expires."""

    what: str
    gb: Decimal
    usd_per_month: Decimal
    days: int
    parts: tuple[tuple[str, Decimal], ...]  # (name, GB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Everything a researcher may ask before spending a cent."""

    stack: str
    scenario: str  # of the stack's file; empty: the file as it is
    only_priced: str  # why this scenario cannot be run; empty when it can
    run: str
    region: str
    zones: tuple[str, ...]  # the definition's, by name
    capacity: Capacity
    lines: tuple[Line, ...]  # of the chosen capacity, `interruptions` last; their sum is usd.p50
    usd: Quantiles
    hours: Quantiles
    spot: Side | None
    on_demand: Side | None
    interruptions_expected: float
    hazard: Decimal | None  # fixed by the definition; None = drawn per simulated run
    chance: Hazard | None  # per node-hour, what it is drawn from and where that comes from; None on demand
    reclaimed: Reclaimed | None  # AWS's own words on the chosen type; in no calculation. None on demand or not known
    cadence: Cadence | None  # the checkpoint interval that costs least; spot only
    usd_at_hazard: tuple[tuple[str, float, Decimal], ...]  # (word, hazard per node-hour, mean USD); spot only
    half_speed: Quantiles  # USD if every step takes twice as long
    break_even_hazard: float | None  # None: spot is cheaper at any hazard up to 10, or has nothing to compare with
    types: tuple[TypeCost, ...]  # every listed type, in the file's order
    fits: tuple[Fit, ...]
    notice: tuple[Notice, ...]
    cap: Cap | None  # None: no limit is held against what is only priced
    kept: Kept
    not_priced: tuple[str, ...]
    warnings: tuple[str, ...]
    prices_as_of: date  # the oldest of its lines
    max_price_age_days: int  # the definition's: with a date of today, older prices get a sentence
    calibrated: bool
    disk_usd_per_hour: Decimal
    ipv4_usd_per_hour: Decimal

    @property
    def chosen(self) -> Side:
        side = self.spot if self.capacity == "spot" else self.on_demand
        assert side is not None  # price() raises without it
        return side

    def to_json(self) -> dict[str, Any]:
        """The bill for programs; docs/bill.md documents the keys. Same definition and catalog, same bytes."""
        return record.to_json(self)

    def outputs(self) -> dict[str, str]:
        """Dollars per line and in total, for stack outputs: a later preview then shows each change."""
        return record.outputs(self)

    def rates(self) -> dict[str, Any]:
        """`rates` of run.json: USD per node-hour by type; spot by zone name, at the dearest zone of the region."""
        return record.rates(self)

    def extras(self) -> dict[str, str]:
        """`extras` of run.json: what the job's meter adds to compute."""
        return record.extras(self)

    def predicted(self) -> list[dict[str, Any]]:
        """`predicted` of run.json: per phase, on the priced type."""
        return record.predicted(self)


def price(
    definition: StackDefinition,
    catalog: Catalog,
    *,
    dataset_bytes: int | None = None,
    not_ready: Sequence[str] = (),
    calibrations: options.Calibrations | None = None,
    hazards: Hazards | None = None,
    runs: int = risk.RUNS,
) -> Bill:
    """The bill of `definition`. Without `dataset_bytes` the dataset's size is assumed.

    `not_ready` are sentences to show among the warnings; `calibrations` come from infra.calibration.find_all, `hazards`
    from infra.cost.hazard.learn, and count where the definition fixes none. Raises PriceMissing when a needed price of
    a service is not in the catalog, DefinitionError when the job fits no listed type or none of them has a price.
    """
    only_priced = definition.variant.only_priced
    if only_priced:
        definition = replace(definition, limits=UNBOUND)
    types, capacity = options.type_costs(definition, catalog, calibrations), definition.fleet.capacity
    if options.dearest(types, capacity) is None:
        raise options.refuse(definition, types)
    spot = price_side(definition, catalog, types, "spot", dataset_bytes=dataset_bytes, runs=runs, hazards=hazards)
    on_demand = price_side(definition, catalog, types, "on-demand", dataset_bytes=dataset_bytes, runs=runs)
    chosen = spot if capacity == "spot" else on_demand
    assert chosen is not None
    disk, ipv4 = lines.per_hour(definition, catalog)
    bill = Bill(
        stack=definition.name,
        scenario=definition.scenario,
        only_priced=only_priced,
        run=definition.run.id,
        region=definition.fleet.region,
        zones=definition.fleet.zones,
        capacity=capacity,
        lines=(*chosen.lines, _interruptions(chosen)),
        usd=chosen.usd,
        hours=chosen.hours,
        spot=spot,
        on_demand=on_demand,
        interruptions_expected=chosen.interruptions,
        hazard=definition.estimate.hazard_per_hour,
        chance=chosen.exposure.chance if capacity == "spot" else None,
        reclaimed=reclaimed(chosen.type, definition.fleet.region) if capacity == "spot" else None,
        cadence=cadence(chosen) if capacity == "spot" else None,
        usd_at_hazard=usd_at_hazards(chosen) if capacity == "spot" else (),
        half_speed=half_speed(chosen, definition.variant),
        break_even_hazard=_break_even(spot, on_demand),
        types=types,
        fits=tuple(phase for option in types for phase in option.fits),
        notice=tuple(phase for option in types for phase in option.notices),
        cap=None if only_priced else _cap(definition, chosen),
        kept=_kept(definition, catalog),
        not_priced=lines.NOT_PRICED,
        warnings=(),
        prices_as_of=min(line.as_of for line in chosen.lines),
        max_price_age_days=definition.estimate.max_price_age_days,
        calibrated=chosen.runtime.calibrated,
        disk_usd_per_hour=disk,
        ipv4_usd_per_hour=ipv4,
    )
    return replace(bill, warnings=(*doubts.warnings(definition, bill, dataset_bytes, calibrations or {}), *not_ready))


def problems(definition: StackDefinition, bill: Bill) -> list[Problem]:
    """Why this definition must not be declared at this bill: a listed type on which the job does not fit, or which has
    no price, a limit below p50, a listed type whose run no limit lets end.
    """
    found = [*options.fit_problems(definition, bill.types), *options.unpriced(definition, bill.types)]
    return found if bill.only_priced else [*found, *limits.problems(definition, bill)]


def _interruptions(side: Side) -> Line:
    amount = side.usd.p50 - side.total
    drawn = f"p50 of {side.runs} simulated runs less the lines above" if side.runs > 1 else "none on demand"
    return Line(
        name="interruptions",
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


def _cap(definition: StackDefinition, chosen: Side) -> Cap:
    by_money, by_hours = chosen.exposure.hours_at_cap()
    return Cap(
        max_usd=definition.limits.max_usd,
        max_hours=definition.limits.max_hours,
        probability=chosen.probability_stopped,
        first="limits.max_usd" if by_money < by_hours else "limits.max_hours",
        at_hours=exact(min(by_money, by_hours)),
        deadline=definition.limits.deadline,
    )


def _kept(definition: StackDefinition, catalog: Catalog) -> Kept:
    """The run's own objects: job archive and dataset are the stack's, and a destroy deletes them."""
    keep, nothing = definition.storage.keep, Decimal("0.0000")
    if not keep.bucket:
        return Kept(what="nothing: the bucket goes with the stack", gb=nothing, usd_per_month=nothing, days=0, parts=())
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
    return Kept(
        what=f"bucket, at most {total:.1f} GB: {', '.join(name for name, _ in parts)}; expires after {keep.days} days",
        gb=total,
        usd_per_month=(total * monthly).quantize(lines.CENT_100),
        days=keep.days,
        parts=parts,
    )
