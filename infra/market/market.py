"""The questions of other modules about a market. The class Market answers them for a market in which a fleet can keep
its nodes for any time; other markets override answers. The module does not import the definition: callers pass the
values that it needs, such as the number of nodes. The module never asks AWS.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple, Protocol

from gpufleet.infra.catalog import Catalog, Price, SpotPrice
from gpufleet.infra.market.reservation import END, CapacityBlock
from gpufleet.job.kind import JobConfig
from gpufleet.job.text import stamp

DEADLINE, MAX_HOURS = "limits.deadline", "limits.max_hours"
# If there is no deadline, a fleet exists for max_hours (the billed time) plus a day of waiting for capacity.
WAITING_TIME = timedelta(hours=24)


class FleetKeys(Protocol):
    """The keys of a definition's fleet that a market reads."""

    @property
    def region(self) -> str: ...
    @property
    def zones(self) -> tuple[str, ...]: ...
    @property
    def zone_ids(self) -> tuple[str, ...]: ...
    @property
    def instance_types(self) -> tuple[str, ...]: ...
    @property
    def capacity(self) -> str: ...


class ProblemList(Protocol):
    """Collects the problems of a file."""

    @property
    def bad(self) -> KeysView[str]: ...
    def add(self, path: str, allowed: str, hint: str = ..., value: str | None = ...) -> None: ...


class Beside(NamedTuple):
    """The parts of a definition other than its fleet that its market needs. `config` is None if the job is invalid."""

    config: JobConfig | None
    deadline: object
    now: datetime
    past_end: bool  # whether the block may have ended already, because the run is over


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The hourly price of a node of one type in one market; `price` is None if it is not known."""

    price: Price | None = None  # the price in the dearest zone that the fleet may take
    zones: tuple[SpotPrice, ...] = ()  # prices by zone, the cheapest first, if zones differ
    left_out: str = ""  # why limits.usd_per_hour excludes the type from the fleet

    @property
    def hourly(self) -> Price | None:
        """The highest price that the fleet may pay; None if it takes no node at this price."""
        return None if self.left_out else self.price

    @property
    def likely(self) -> Price | None:
        """The price that a fleet may expect if it picks zones by price and capacity: the harmonic mean of the zones'
        prices, in which cheaper zones have more weight.
        """
        dearest = self.hourly
        if dearest is None or not self.zones:
            return dearest
        mean = len(self.zones) / sum((1 / zone.price.amount for zone in self.zones), Decimal(0))
        return replace(dearest, amount=mean.quantize(Decimal("0.0001")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """A market in which `nodes` machines are bought at once, at any time or within a `block`."""

    nodes: int = 1
    block: CapacityBlock | None = None

    name: ClassVar[str]  # the name in fleet.capacity
    asks_for: ClassVar[str]  # the fleet's `default_target_capacity_type`
    # the market whose rules the meter uses for the run's nodes: a key of job/contract/terms.py
    metered_as: ClassVar[str]
    by_the_hour: ClassVar[str]  # the market in which the same nodes are paid by the hour; it is used for comparisons
    place: ClassVar[str]  # the market's name in a sentence, such as `on demand`
    bought: ClassVar[str]  # the market's name in the first line of a bill, such as `spot`
    counts: ClassVar[str] = "{number} {name} node{s}"  # the form of a number of its nodes in a sentence
    has_block: ClassVar[bool] = False  # whether the section `fleet.block` is used
    is_sold_to_all: ClassVar[bool] = True  # whether a comparison ranks every instance type in this market
    is_interrupted: ClassVar[bool] = False  # whether AWS interrupts nodes
    replaces: ClassVar[bool] = True  # whether the fleet launches another node in place of a lost one
    least_share: ClassVar[Decimal] = Decimal(1)  # a run costs at least this share of its uninterrupted cost
    stands_by: ClassVar[tuple[str, ...]] = ()  # other markets, in each of which the run has a standby fleet of size 0
    quotas: ClassVar[tuple[str, ...]] = ()  # markets whose vCPU quotas its nodes use
    # the service-linked roles that its fleet needs
    roles: ClassVar[Mapping[str, str]] = {"AWSServiceRoleForEC2Fleet": "ec2fleet.amazonaws.com"}
    never: ClassVar[tuple[str, ...]] = ()  # kinds of a rehearsal's interruptions that do not happen in this market
    # The reason of the fleet's end, for messages.
    keep_ends: ClassVar[str] = "limits.deadline, or limits.max_hours + 24 h from its start"
    # the provider's default of 10 minutes is too short, because the provider sleeps for 5 of them
    delete_timeout: ClassVar[str] = "30m"

    @property
    def fleets(self) -> tuple[str, ...]:
        """The markets of all fleets of a run."""
        return (self.name, *self.stands_by)

    @property
    def moves_elsewhere(self) -> bool:
        """Whether the work can be done on another type instead."""
        return self.nodes == 1

    def check(self, findings: ProblemList, fleet: FleetKeys, beside: Beside) -> None:
        """Adds the problems of the definition that concern this market."""

    def not_ready(self) -> Iterator[str]:
        """Yields a sentence for each thing that `pulumi up` still needs to use this market."""
        yield from ()

    def require(self, catalog: Catalog, type_: str, fleet: FleetKeys) -> None:
        """Raises PriceMissing if the price of such a node is unknown."""
        catalog.on_demand(type_, fleet.region)

    def offer(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal | None) -> Offer:
        """The price of a node of the type. `ceiling`: the definition's limits.usd_per_hour."""
        price = catalog.on_demand_prices.get((type_, fleet.region))
        above = price is not None and ceiling is not None and price.amount > ceiling
        reason = f"{type_} on demand costs {price.amount} USD an hour, above {ceiling}" if price and above else ""
        return Offer(price=price, left_out=reason)

    def zones_below(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal) -> tuple[str, ...]:
        """The fleet's zones in which a node of the type is known to cost at most `ceiling`. Prices are known by zone
        id. If zones are given by name, their ids are not known here, because they differ between accounts. Then the
        price in the dearest zone of the region is used for each of them.
        """
        price = self.offer(catalog, type_, fleet, ceiling).hourly
        return fleet.zones if price else ()

    def metered(self, offers: Mapping[str, Offer]) -> tuple[Price | None, Price | None]:
        """The highest price, and the spot price, that the job's meter uses."""
        spot = offers["spot"].hourly
        return offers["on-demand"].price or spot, spot

    def fees(self, day: date) -> tuple[tuple[str, str, Price], ...]:
        """Name, item and price of each fee that is paid whatever the run does. `day`: the day of the known prices."""
        return ()

    def begins_at(self, now: datetime) -> datetime:
        """The time from which nodes can be bought."""
        return max(now, self.block.start) if self.block else now

    @property
    def last(self) -> datetime | None:
        """The time until which a node may train; None if only the run's limits end it."""
        return self.block.last if self.block else None

    def due_by(self, due: datetime | None) -> str:
        """The key of the definition file from which this time comes."""
        return END if self.block and self.last == due else DEADLINE

    def each_hours(self, max_hours: Decimal) -> float:
        """Hours for which each node may run, by the limit on the sum of all nodes' hours, and by the time for which
        nodes can be bought.
        """
        hours = float(max_hours) / self.nodes
        return min(hours, self.block.hours) if self.block else hours

    def node_hours(self, max_hours: Decimal, max_usd: Decimal, price: Price | None) -> float:
        """Node-hours at this price that fit within the limits."""
        if self.block:
            return min(float(max_hours), self.block.hours * self.nodes)
        return float(min(max_hours, max_usd / price.amount) if price else max_hours)

    def lives_hours(self, max_hours: Decimal) -> float:
        """Hours for which a fleet without a deadline exists."""
        return float(max_hours) / self.nodes + WAITING_TIME / timedelta(hours=1)

    def timer_hours(self, max_hours: Decimal) -> float:
        """Hours after which a node ends itself, whatever the job reports. If there are several nodes, some of them wait
        for others, so that the limit on the sum of all nodes' hours is reached later. Each node then has half as much
        time in addition.
        """
        return float(max_hours) / self.nodes * (1.5 if self.nodes > 1 else 1)

    def ends(self) -> Iterator[tuple[str, str, Decimal, str]]:
        """Yields the limit that the market itself adds to those in the file, if there is one: key, text, hours of each
        node, unit.
        """
        if self.block:
            unit = "hours from its start to 30 minutes before its end"
            yield END, stamp(self.block.end), Decimal(self.block.hours), unit

    def time_limit(self, max_hours: Decimal, bound_h: float | None) -> tuple[str, str, int, str]:
        """The limit that ends a node after `bound_h` hours: its key, its value, the nodes that share it, its unit."""
        if self.block and bound_h == self.block.hours:
            return END, stamp(self.block.end), 1, "hours from its start to 30 minutes before it"
        return MAX_HOURS, str(max_hours), self.nodes, "node-hours"

    def too_short(self, need: str, left_h: float, now: datetime) -> Iterator[tuple[str, str, str]]:
        """Yields a problem if the market's own end comes before `need`: the value, what is allowed, what to do."""
        # before the block's start, the whole block is compared with p50 instead
        if self.block and now > self.block.start:
            allowed = f"{need}; {max(left_h, 0):.2f} are left until 30 minutes before the block's end"
            yield stamp(self.block.end), allowed, "Take a longer block, or shorten the run."

    def not_begun(self, now: datetime) -> Iterator[str]:
        """Yields a sentence if it is too early for the first `up` of a run."""
        if self.block and now < self.block.start:
            yield f"the block begins at {stamp(self.block.start)}: before that AWS launches nothing into it."

    def late_hint(self, argument: str) -> str | None:
        """What to do if the deadline may be missed; None if the bill already says it."""
        if self.block:
            return ""
        return (
            f", waits for capacity included; `gpufleet compare {argument}` says when to switch to on demand,"
            " fleet.fallback: on-demand does it"
        )

    def fleet_arguments(self, valid_until: str) -> dict[str, Any]:
        """The fleet's arguments that only this market needs, by the provider's names."""
        return {"type": "maintain", "terminate_instances_with_expiration": True, "valid_until": valid_until}

    def template_arguments(self) -> dict[str, Any]:
        """The launch template's arguments that only this market needs."""
        return {}

    def filled_in(self, text: str) -> str:
        """The text for this number of nodes: `{number} {name} node{s} take{es}` becomes `one spot node takes`."""
        n = self.nodes
        number, times, s, es = ("one", "", "", "s") if n == 1 else (str(n), f"{n} x ", "s", "")
        return text.format(number=number, times=times, name=self.name, s=s, es=es)

    @property
    def hours_of(self) -> str:
        """The name of the hours in the bill."""
        return "node-hours" if self.nodes == 1 else "hours of each node"

    def at_price(self, usd: Decimal) -> str:
        """The words about the price of a node in the bill's first line."""
        return f"at {usd} USD/h"

    def price_age(self, days: int) -> str:
        """The age of the price of compute, in words."""
        return f"compute is {days} days old" if days >= 0 else f"compute is of {-days} days from now, which cannot be"

    def uninterrupted(self, hours: Decimal) -> str:
        """The bill's sentence about interruptions for a run of `hours` hours, if this market has no interruptions;
        otherwise empty.
        """
        return f"Interruptions: none {self.place}."
