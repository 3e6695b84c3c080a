"""On demand: one price in all zones, and nodes that AWS does not interrupt."""

from __future__ import annotations

from gpufleet.infra.market.market import Market


class OnDemand(Market):
    """A fleet that replaces its lost nodes on demand."""

    name = asks_for = metered_as = by_the_hour = "on-demand"
    place = bought = "on demand"
    quotas = ("on-demand",)
    never = ("with_notice",)  # AWS gives on-demand nodes neither a notice nor a free first hour
