"""Spot: each zone has its own changing price, and AWS interrupts nodes, usually with a notice."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, ClassVar

from gpufleet.infra.catalog import Catalog
from gpufleet.infra.market.market import FleetKeys, Market, Offer


class Spot(Market):
    """A fleet that replaces a lost node on spot."""

    name = asks_for = metered_as = by_the_hour = "spot"
    place, bought = "on spot", "spot"
    is_interrupted = True
    # If there is at most one interruption in an hour, free first hours save at most half of the dollars of an
    # uninterrupted run.
    least_share = Decimal("0.5")
    quotas: ClassVar[tuple[str, ...]] = ("spot",)
    roles: ClassVar[Mapping[str, str]] = {**Market.roles, "AWSServiceRoleForEC2Spot": "spot.amazonaws.com"}

    def require(self, catalog: Catalog, type_: str, fleet: FleetKeys) -> None:
        catalog.spot(type_, fleet.region, fleet.zone_ids)

    def offer(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal | None) -> Offer:
        zones = catalog.spot_zones(type_, fleet.region, fleet.zone_ids)
        below = tuple(zone for zone in zones if ceiling is None or zone.price.amount <= ceiling)
        dearest = below[-1].price if below else None
        if ceiling is None or not zones or self.zones_below(catalog, type_, fleet, ceiling):
            return Offer(price=dearest, zones=below)
        prefix, high = catalog.zone_id_prefix(fleet.region), zones[-1]
        named = ", ".join(sorted(prefix + zone.zone for zone in below))
        hint = f"; by id it would stay in fleet.zones: [{named}]" if below else ""
        reason = f"{type_} costs up to {high.price.amount} USD an hour in {prefix}{high.zone}, above {ceiling}{hint}"
        return Offer(price=dearest, zones=below, left_out=reason)

    def zones_below(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal) -> tuple[str, ...]:
        known = catalog.spot_zones(type_, fleet.region)
        below = {zone.zone for zone in known if zone.price.amount <= ceiling}
        if fleet.zone_ids:
            return tuple(zone for zone, own in zip(fleet.zones, fleet.zone_ids, strict=True) if own in below)
        return fleet.zones if below and len(below) == len(known) else ()

    def fleet_arguments(self, valid_until: str) -> dict[str, Any]:
        """Adds the allocation strategy, because the provider's default is lowestPrice. There is no maintenance
        strategy, because it would run two nodes.
        """
        stated = {"allocation_strategy": "price-capacity-optimized", "instance_interruption_behavior": "terminate"}
        return {**super().fleet_arguments(valid_until), "spot_options": stated}

    def uninterrupted(self, hours: Decimal) -> str:
        return ""
