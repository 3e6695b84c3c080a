"""What an AMI or a snapshot of `gpufleet bake` costs, and after how many starts the AMI pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.lines import MONTH_H
from gpufleet.infra.catalog import Catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.inputs import bakes
from gpufleet.infra.inputs.bakes import Bake, BakedData

GB_PER_GIB = Decimal(2**30) / 10**9


def usd_per_month(catalog: Catalog, region: str, gb: Decimal) -> Decimal:
    """USD per month of a snapshot. Raises PriceMissing."""
    return catalog.price("ebs_snapshot", region).amount * gb


def most_usd_per_month(catalog: Catalog, definition: StackDefinition) -> Decimal:
    """USD per month of the snapshot of a full root disk. Raises PriceMissing."""
    return usd_per_month(catalog, definition.fleet.region, definition.storage.root.size_gib * GB_PER_GIB)


def usd(bake: Bake | BakedData) -> Decimal:
    """USD that the bake costs from its making until it is deleted."""
    lives = datetime.fromisoformat(bake.until) - datetime.fromisoformat(bake.made)
    return bake.builder_usd + bake.usd_per_month * Decimal(lives.total_seconds()) / 3600 / MONTH_H


def lines(parts: Sequence[tuple[StackDefinition, Bill]], root: Path) -> list[str]:
    """The sentences about the cost of the AMI from which the nodes of a run, or of its stages, start, and of the
    snapshot of data that they read. The list is empty if the run uses neither.
    """
    sentences: dict[str, list[str]] = {}  # by what was baked, which stages may share
    for definition, bill in parts:
        bake, data = bakes.read(definition, root), bakes.read_data(definition, root)
        if bake is not None:
            price = next(line.unit_price for line in bill.chosen.lines if line.kind == "compute") * definition.nodes
            stage = definition.stage and f"{definition.stage}: "
            sentences.setdefault(bake.id, [_costs(bake)]).append(f"{stage}{pays_after(bake, price)}")
        if data is not None:
            whole = f"It is a copy of {data.place}, and costs {usd(data):.2f} in all."
            sentences.setdefault(data.id, [_costs(data), whole])
    return [" ".join(some) for some in sentences.values()]


def to_json(definition: StackDefinition, root: Path) -> list[dict[str, str]]:
    """The AMI from which the nodes start and the snapshot of data that they read, if the definition uses them. The keys
    are documented in docs/bill.md.
    """
    readers = (bakes.read, bakes.read_data)
    baked = dict.fromkeys(reader(part, root) for part in definition.parts for reader in readers)
    return [
        {"id": one.id, "usd": f"{usd(one):.4f}", "usd_per_month": str(one.usd_per_month), "until": one.until}
        for one in baked
        if one is not None
    ]


def _costs(bake: Bake | BakedData) -> str:
    return f"{bake.id} of `gpufleet bake` costs {bake.usd_per_month:.2f} USD a month until {bake.until[:10]}."


def pays_after(bake: Bake, usd_per_hour: Decimal) -> str:
    """A sentence: after how many starts of nodes, at this price per node-hour, the AMI has saved as much as it
    costs.
    """
    saved = bake.pulled_s / 3600 * usd_per_hour
    if not saved:
        return "Its builder pulled the images in no time."
    starts = math.ceil(usd(bake) / saved)
    return (
        f"Its builder pulled the images in {bake.pulled_s / 60:.1f} min: if a start here saves as much,"
        f" {saved:.2f} USD, its {usd(bake):.2f} USD are paid after {starts} starts."
    )
