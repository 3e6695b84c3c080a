"""What would do a bill's work for less: every other type of the catalog, on spot and on demand, as a short list.

The bill says what the chosen fleet costs; this says what else to list in its place. `gpufleet compare` shows all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from infra.catalog import Catalog
from infra.cost import compare
from infra.cost.bill import Bill
from infra.cost.compare_rows import Row, filled
from infra.cost.side import Hazards
from infra.definition import StackDefinition

SHOWN = 3
LEAST = Decimal("0.02")  # of the bill's mean: what is saved at least; less is noise of the simulation
CENT = Decimal("0.01")
FREE = Decimal("0.5")  # of an uninterrupted run's dollars: more than interrupted first hours, which are free, take off


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheaper:
    """Options whose mean is below the bill's, in the definition's region."""

    rows: tuple[Row, ...]  # the SHOWN with the lowest mean, of those within every limit of the file
    more: int  # others within the limits
    beyond: int  # cheaper ones that pass a limit in more than one run in ten, or miss the deadline in most
    types: int  # of the catalog, all of which were looked at
    command: str  # shows all of them


def cheaper(
    definition: StackDefinition,
    bill: Bill,
    catalog: Catalog,
    *,
    hours_left: float | None = None,
    hazards: Hazards | None = None,
    found: compare.Found = compare.nothing,
) -> Cheaper | None:
    """None for what cannot be taken to another type: several nodes, or a run that was elsewhere."""
    if definition.nodes > 1 or definition.variant.reference:
        return None
    mean = bill.chosen.needed_usd.mean
    below = mean - max(LEAST * mean, CENT)
    options = compare.every_option(
        definition, (definition,), catalog, hours_left=hours_left, hazards=hazards, found=found, most=below / FREE
    )
    able = [row for row in options if row.ranked and not _listed(row, definition) and _mean(row) < below]
    within = [row for row in able if not row.over_limit and row.late <= compare.SURE]
    shown = filled(within[:SHOWN], hours_left, runs=compare.RUNS_SHOWN, attempts=compare.ATTEMPTS_EACH)
    scenario = f" --scenario {definition.scenario}" if definition.scenario else ""
    rows = tuple(sorted((row for row in shown if _mean(row) < below), key=_mean))
    return Cheaper(
        rows=rows,
        more=max(0, len(within) - SHOWN),
        beyond=len(able) - len(within),
        types=len(catalog.instances),
        command=f"gpufleet compare {definition.argument}{scenario}",
    )


def _listed(row: Row, definition: StackDefinition) -> bool:
    """The fleet may pick it as it is."""
    return row.type in definition.fleet.instance_types and row.capacity == definition.fleet.capacity


def _mean(row: Row) -> Decimal:
    assert row.usd is not None  # of a ranked one
    return row.usd.mean
