"""The items of services.csv. The row of an item in items.csv says whether every bill needs it, and where it is in AWS's
Price List. `price_list_units`: factors from the list's units to those of the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

from gpufleet.infra.catalog.table import read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One item of services.csv."""

    in_every_bill: bool
    service: str
    usage_type: str  # the usage type without the region's prefix
    unit: str  # the unit in the catalog
    units: Mapping[str, Decimal]


@cache
def known_items() -> dict[str, Item]:
    """All items by name, in the file's order."""
    return read_table(Path(__file__).with_name("items.csv"), "item", _item)


def _item(row: dict[str, str]) -> Item:
    factors = (word.partition("=") for word in row["price_list_units"].split())
    return Item(
        in_every_bill=row["every_bill"] == "yes",
        service=row["service"],
        usage_type=row["usage_type"],
        unit=row["unit"],
        units={unit: _factor(factor) for unit, _, factor in factors},
    )


def _factor(text: str) -> Decimal:
    above, _, below = text.partition("/")
    return Decimal(above) / Decimal(below or 1)
