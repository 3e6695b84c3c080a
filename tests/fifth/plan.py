"""A plan that was paid in advance: nodes of one region at seven tenths of their price on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal

from gpufleet.infra.catalog import Catalog, Price
from gpufleet.infra.market.market import FleetKeys, Offer
from gpufleet.infra.market.on_demand import OnDemand

SHARE = Decimal("0.7")


class SavingsPlan(OnDemand):
    """On demand as EC2 sees it, and as the node's meter counts; only the price is another."""

    name = "plan"
    place = bought = "on the plan"
    asks_for = metered_as = by_the_hour = "on-demand"
    is_sold_to_all = False

    def offer(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal | None) -> Offer:
        full = super().offer(catalog, type_, fleet, None).price
        return Offer(price=full and replace(full, amount=full.amount * SHARE))

    def metered(self, offers: Mapping[str, Offer]) -> tuple[Price | None, Price | None]:
        return offers[self.name].price, None
