"""Prices of the tests' own, in frozen/prices: they stand in the catalog's place wherever a test reads that, so that a
changed or newer row of the catalog changes no amount that a test names. What the catalog alone has, a new type or item
say, counts as it stands there. A command that a test starts as a process of its own reads the catalog alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.catalog import SHIPPED, Catalog, files, read_catalog

FOLDER = Path(__file__).parent / "frozen" / "prices"
_read = files.read


def read(folder: Path) -> files.Prices:
    """As `files.read`, of the shipped folder with the tests' own prices."""
    prices = _read(folder)
    if folder == SHIPPED:
        own = _read(FOLDER)
        for name in ("on_demand", "spot", "services", "notes"):
            getattr(prices, name).update(getattr(own, name))
        for key in own.on_demand.keys() & prices.dated.keys():
            del prices.dated[key]
    return prices


def shipped_catalog() -> Catalog:
    """The catalog as users have it."""
    files.read = _read
    try:
        return read_catalog.__wrapped__(SHIPPED, None).in_force_on(datetime.now(UTC).date())
    finally:
        files.read = read


files.read = read
