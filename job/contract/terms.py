"""The parts of run.json on which money depends, for supervisor and node: the run's limits, and the prices of its nodes.
The node's own Python reads this file, so it must work with Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

from gpufleet.job.contract import reading
from gpufleet.job.contract.gathering import MOST_NODES
from gpufleet.job.contract.reading import DoubtError, Fields, Moment, Seconds


@dataclass(frozen=True)
class CapacityTerms:
    """The rules for nodes that were bought in one market. The defaults are for a market that is not in BY_CAPACITY.
    `moves`: whether the price changes; an hour then costs the price at its start, which AWS publishes. `replaces`:
    whether the market's fleet launches another node after one has ended. `gives_way`: whether a node of this market
    ends when a node of the fallback's market takes the run over.
    """

    moves: bool = False
    replaces: bool = True
    gives_way: bool = False


BY_CAPACITY = {  # by the `capacity` of run.json
    "spot": CapacityTerms(moves=True, gives_way=True),
    "on-demand": CapacityTerms(),
    "block": CapacityTerms(replaces=False),
}


@dataclass(frozen=True)
class RunLimits:
    """The run's limits; `deadline`, and `expires`, the time at which AWS ends the fleet, are in epoch seconds."""

    max_usd: Decimal
    max_hours: Decimal
    deadline: Moment | None = None
    expires: Moment | None = None


@dataclass(frozen=True)
class Rates:
    """USD per node-hour of one type in one zone. `spot` is the bill's price, which may be out of date."""

    capacity: str
    on_demand: Decimal
    spot: Decimal | None
    hourly: Mapping[str, Decimal]  # hourly prices other than compute, by line of the bill

    @property
    def ceiling(self) -> Decimal:
        """The highest price of compute. This is the on-demand price, because a fleet without a maximum price pays at
        most this for spot.
        """
        return max(self.on_demand, self.spot or self.on_demand) if self.moves else self.on_demand

    @property
    def moves(self) -> bool:
        """Whether an hour costs the price at its start, which AWS publishes."""
        return BY_CAPACITY.get(self.capacity, CapacityTerms()).moves

    @property
    def extras(self) -> Decimal:
        """The cost of a node-hour without compute."""
        return sum(self.hourly.values(), Decimal(0))


@dataclass(frozen=True)
class TypePrices:
    """The prices of a type that the run may use: USD per node-hour, spot by zone. `gpus`: 0 if unknown. `gbps`: the
    rate of the EFA cards between nodes; 0 if unknown, or if there are none. `efa`: number of these cards.
    """

    on_demand: Decimal
    spot: Mapping[str, Decimal] = field(default_factory=dict)
    gpus: int = 0
    gbps: float = 0.0
    efa: int = 0


@dataclass(frozen=True)
class FallbackTerms:
    """The times of a run that continues on demand if spot would be late, in seconds: all of its work on demand, the
    training part of this work, the start of a node, and the time between the switch and the last possible moment for
    it.
    """

    work_s: Seconds
    train_s: Seconds
    start_s: Seconds
    margin_s: Seconds


@dataclass(frozen=True)
class OwnLimits:
    """The limits of one of several stages that train one after another on one node."""

    max_usd: Decimal
    max_hours: Decimal


@dataclass(frozen=True)
class Following:
    """The stage that begins on this node when this one ends, and the sha256 of its run.json."""

    stage: str
    sha256: str


@dataclass(frozen=True)
class Terms:
    """Limits, and the prices of at least one type."""

    limits: RunLimits
    capacity: str
    prices: Mapping[str, TypePrices]
    hourly: Mapping[str, Decimal]  # USD per node-hour without compute, by line of the bill
    fixed_usd: Decimal
    nodes: int = 1  # number of nodes that train together
    gather_s: float | None = None  # seconds that nodes wait for others before all leave; None if they wait for ever
    fallback: FallbackTerms | None = None
    before: tuple[str, ...] = ()  # for a stage: the stages before it, whose money counts too
    # For stages on one node: `limits` are of all of them together, and `own` of this stage alone. A stage does not
    # begin if less than `least_usd` is left.
    own: OwnLimits | None = None
    least_usd: Decimal = Decimal(0)
    following: Following | None = None

    def limits_after(self, usd: Decimal, seconds: Decimal) -> RunLimits:
        """The limits of what this stage and those before it spend together, if those before spent this much."""
        if self.own is None:
            return self.limits
        max_usd = min(self.limits.max_usd, usd + self.own.max_usd)
        max_hours = min(self.limits.max_hours, seconds / 3600 + self.own.max_hours)
        return replace(self.limits, max_usd=max_usd, max_hours=max_hours)

    @property
    def is_gang(self) -> bool:
        """Whether several nodes train together."""
        return self.nodes > 1

    @property
    def replaces(self) -> bool:
        """Whether the fleet launches another node after one has ended."""
        return BY_CAPACITY.get(self.capacity, CapacityTerms()).replaces

    def gives_way(self, capacity: str) -> bool:
        """Whether a node of that market ends when a node of another market takes the run over."""
        return self.fallback is not None and BY_CAPACITY.get(capacity, CapacityTerms()).gives_way

    def rates(self, instance_type: str, zone: str, capacity: str = "") -> Rates:
        """Rates of a type. If run.json does not have the type, its price is the highest on-demand price in run.json.
        `capacity`: the node's market; empty if it is the market of the run.
        """
        listed = self.prices.get(instance_type)
        spot = None
        if listed is None:
            on_demand = max(price.on_demand for price in self.prices.values())
        else:
            on_demand = listed.on_demand
            spot = listed.spot.get(zone, max(listed.spot.values(), default=None))
        return Rates(capacity=capacity or self.capacity, on_demand=on_demand, spot=spot, hourly=self.hourly)


# The terms as long as run.json is missing: one node, which is replaced if it is lost.
UNKNOWN = Terms(
    limits=RunLimits(Decimal(0), Decimal(0)), capacity="on-demand", prices={}, hourly={}, fixed_usd=Decimal(0)
)


def read(run: Fields) -> Terms:
    """The terms in run.json. Raises DoubtError."""
    extras = run.section("extras")
    return Terms(
        limits=reading.filled(RunLimits, run.section("limits")),
        capacity=run.need("capacity", reading.choice(*BY_CAPACITY)),
        prices=_prices(run.table("rates")),
        hourly=extras.need("hourly_usd", reading.mapping(reading.unsigned)),
        fixed_usd=extras.need("fixed_usd", reading.unsigned),
        nodes=run.take("nodes", reading.choice(*range(1, MOST_NODES + 1)), 1),
        gather_s=run.take("gather_s", reading.seconds, None),
        fallback=reading.filled(FallbackTerms, run.section("fallback")) if "fallback" in run.tree else None,
        before=run.take("before", reading.listed(reading.text), ()),
        own=reading.filled(OwnLimits, run.section("own")) if "own" in run.tree else None,
        least_usd=run.take("least_usd", reading.unsigned, Decimal(0)),
        following=reading.filled(Following, run.section("following")) if "following" in run.tree else None,
    )


def _prices(table: Mapping[str, Fields]) -> dict[str, TypePrices]:
    if not table:
        raise DoubtError("rates has no type")
    return {name: reading.filled(TypePrices, row) for name, row in table.items()}
