"""The markets in which a run's nodes are bought. To add a market, add a class in this folder and a row in WAYS."""

from __future__ import annotations

from gpufleet.infra.market.block import InBlock
from gpufleet.infra.market.fallback import SpotThenOnDemand
from gpufleet.infra.market.market import Market
from gpufleet.infra.market.on_demand import OnDemand
from gpufleet.infra.market.reservation import CapacityBlock
from gpufleet.infra.market.spot import Spot

WAYS: dict[str, type[Market]] = {  # the market by fleet.capacity
    "spot": Spot,
    "on-demand": OnDemand,
    "block": InBlock,
}
# the market by fleet.fallback
FALLBACKS: dict[str, tuple[type[Market], ...]] = {"none": (), "on-demand": (SpotThenOnDemand,)}
# the markets in which a comparison ranks every type
COMPARED = tuple(name for name, way in WAYS.items() if way.is_sold_to_all)
INTERRUPTED = tuple(name for name, way in WAYS.items() if way.is_interrupted)


def asked(capacity: str, fallback: str, nodes: int, block: CapacityBlock | None) -> list[Market]:
    """The markets that a definition's capacity and its fallback name. The two may contradict each other."""
    return [way(nodes=nodes, block=block) for way in (WAYS[capacity], *FALLBACKS[fallback])]


def find(capacity: str, fallback: str = "none", *, nodes: int = 1, block: CapacityBlock | None = None) -> Market:
    """The market in which nodes are bought. The market includes the fallback if there is one for this capacity."""
    return [market for market in asked(capacity, fallback, nodes, block) if market.name == capacity][-1]
