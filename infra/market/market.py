"""What other modules ask about a way of buying nodes, with the answers for a fleet that keeps its nodes as long as it
wants. The module does not import the definition: callers pass the values that it needs, such as the number of nodes. It
never asks AWS.
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
# If there is no deadline, a fleet lives max_hours (the billed time) plus a day of waiting for capacity.
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
    """The other parts of a definition that matter for its market; `config` is None if the job is invalid."""

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
        """The highest price that the fleet may pay; None if it takes no such node."""
        return None if self.left_out else self.price

    @property
    def likely(self) -> Price | None:
        """The price that a fleet may expect if it picks zones by price and capacity: their harmonic mean, in which
        cheaper zones count more.
        """
        dearest = self.hourly
        if dearest is None or not self.zones:
            return dearest
        mean = len(self.zones) / sum((1 / zone.price.amount for zone in self.zones), Decimal(0))
        return replace(dearest, amount=mean.quantize(Decimal("0.0001")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """One way of buying `nodes` machines at once, at any time or within a `block`."""

    nodes: int = 1
    block: CapacityBlock | None = None

    name: ClassVar[str]  # the name in fleet.capacity
    asks_for: ClassVar[str]  # the fleet's `default_target_capacity_type`
    # the market whose rules the meter uses for the run's nodes: a key of job/contract/terms.py
    metered_as: ClassVar[str]
    by_the_hour: ClassVar[str]  # the market that sells the same nodes by the hour, for comparison
    place: ClassVar[str]  # the market in a sentence, such as `on demand`
    bought: ClassVar[str]  # the market in the first line of a bill, such as `spot`
    counts: ClassVar[str] = "{number} {name} node{s}"  # a number of its nodes in a sentence
    has_block: ClassVar[bool] = False  # whether the section `fleet.block` is used
    is_sold_to_all: ClassVar[bool] = True  # whether a comparison ranks every type in it
    is_interrupted: ClassVar[bool] = False  # whether AWS interrupts nodes
    replaces: ClassVar[bool] = True  # whether the fleet launches another node in place of a lost one
    least_share: ClassVar[Decimal] = Decimal(1)  # a run costs at least this share of its uninterrupted cost
    stands_by: ClassVar[tuple[str, ...]] = ()  # other markets in which the run has a fleet of size 0
    quotas: ClassVar[tuple[str, ...]] = ()  # markets whose vCPU quotas its nodes use
    # the service-linked roles that its fleet needs
    roles: ClassVar[Mapping[str, str]] = {"AWSServiceRoleForEC2Fleet": "ec2fleet.amazonaws.com"}
    never: ClassVar[tuple[str, ...]] = ()  # interruptions of a rehearsal that do not exist in this market
    # the cause of the fleet's end, for messages
    keep_ends: ClassVar[str] = "limits.deadline, or limits.max_hours + 24 h from its start"
    delete_timeout: ClassVar[str] = "30m"  # the provider's default of 10 is too short, because it sleeps for 5 of them

    @property
    def fleets(self) -> tuple[str, ...]:
        """The markets of all fleets of a run."""
        return (self.name, *self.stands_by)

    @property
    def moves_elsewhere(self) -> bool:
        """Whether the work can be done on another type instead."""
        return self.nodes == 1

    def check(self, findings: ProblemList, fleet: FleetKeys, beside: Beside) -> None:
        """Adds the definition's problems with this market."""

    def not_ready(self) -> Iterator[str]:
        """Yields what `pulumi up` still needs before it can use this market."""
        yield from ()

    def require(self, catalog: Catalog, type_: str, fleet: FleetKeys) -> None:
        """Raises PriceMissing if the price of such a node is unknown."""
        catalog.on_demand(type_, fleet.region)

    def offer(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal | None) -> Offer:
        """The price of a node of the type. `ceiling`: limits.usd_per_hour."""
        price = catalog.on_demand_prices.get((type_, fleet.region))
        above = price is not None and ceiling is not None and price.amount > ceiling
        reason = f"{type_} on demand costs {price.amount} USD an hour, above {ceiling}" if price and above else ""
        return Offer(price=price, left_out=reason)

    def zones_below(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal) -> tuple[str, ...]:
        """The fleet's zones in which a node of the type is known to cost at most `ceiling`. Prices are known by zone
        id. For zones given by name, whose ids differ between accounts, the dearest zone of the region decides.
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
        """The time from which nodes can be had."""
        return max(now, self.block.start) if self.block else now

    @property
    def last(self) -> datetime | None:
        """The time until which a node may train; None if only the run's limits end it."""
        return self.block.last if self.block else None

    def due_by(self, due: datetime | None) -> str:
        """The key of the definition file that sets this time."""
        return END if self.block and self.last == due else DEADLINE

    def each_hours(self, max_hours: Decimal) -> float:
        """Hours for which each node may run, by the limit on all nodes' hours, and by how long nodes can be had."""
        hours = float(max_hours) / self.nodes
        return min(hours, self.block.hours) if self.block else hours

    def node_hours(self, max_hours: Decimal, max_usd: Decimal, price: Price | None) -> float:
        """Node-hours that the limits pay for at this price."""
        if self.block:
            return min(float(max_hours), self.block.hours * self.nodes)
        return float(min(max_hours, max_usd / price.amount) if price else max_hours)

    def lives_hours(self, max_hours: Decimal) -> float:
        """Hours that a fleet without a deadline lives."""
        return float(max_hours) / self.nodes + WAITING_TIME / timedelta(hours=1)

    def timer_hours(self, max_hours: Decimal) -> float:
        """Hours after which a node ends itself, whatever the job reports. With several nodes, some wait for the others,
        so that the limit on the hours of all is used up later; each node gets half as much time in addition.
        """
        return float(max_hours) / self.nodes * (1.5 if self.nodes > 1 else 1)

    def ends(self) -> Iterator[tuple[str, str, Decimal, str]]:
        """Yields the market's own limit, besides those in the file: key, text, hours of each node, unit."""
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
        if self.block and now > self.block.start:  # before the start, the whole block was compared with the p50
            allowed = f"{need}; {max(left_h, 0):.2f} are left until 30 minutes before the block's end"
            yield stamp(self.block.end), allowed, "Take a longer block, or shorten the run."

    def not_begun(self, now: datetime) -> Iterator[str]:
        """Yields the reason why a first `up` comes too early, if it does."""
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
        """The fleet's arguments, by the provider's names, in addition to those that all markets share."""
        return {"type": "maintain", "terminate_instances_with_expiration": True, "valid_until": valid_until}

    def template_arguments(self) -> dict[str, Any]:
        """The launch template's arguments, in addition to those that all markets share."""
        return {}

    def filled_in(self, text: str) -> str:
        """The text for this number of nodes: `{number} {name} node{s} take{es}` becomes `one spot node takes`."""
        n = self.nodes
        number, times, s, es = ("one", "", "", "s") if n == 1 else (str(n), f"{n} x ", "s", "")
        return text.format(number=number, times=times, name=self.name, s=s, es=es)

    @property
    def hours_of(self) -> str:
        """The name of the hours that the bill counts."""
        return "node-hours" if self.nodes == 1 else "hours of each node"

    def at_price(self, usd: Decimal) -> str:
        """The price of a node, in the bill's first line."""
        return f"at {usd} USD/h"

    def price_age(self, days: int) -> str:
        """The age of the price of compute, in words."""
        return f"compute is {days} days old" if days >= 0 else f"compute is of {-days} days from now, which cannot be"

    def uninterrupted(self, hours: Decimal) -> str:
        """The bill's sentence about interruptions for a run of `hours` hours, if this market has none; else empty."""
        return f"Interruptions: none {self.place}."
