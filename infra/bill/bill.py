"""The bill of one run as data: what the run costs without interruptions, what interruptions add, and the range of the
sum. infra.bill.estimate makes the bill; infra.bill.record writes it for programs, and infra.bill.table for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from gpufleet.infra.bill.fit import Fit, Notice
from gpufleet.infra.bill.lines import Line
from gpufleet.infra.bill.options import TypeCost
from gpufleet.infra.bill.side import Quantiles, Side
from gpufleet.infra.definition.model import Capacity, Deadline
from gpufleet.infra.market.market import Market
from gpufleet.infra.risk.hazard import Hazard
from gpufleet.infra.risk.save_interval import BestInterval


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """The limits of the definition, and the probability that one of them stops the run."""

    max_usd: Decimal
    max_hours: Decimal
    probability: float  # probability that a limit stops the run before the work is done
    first: str  # the key of the limit that stops the run first
    at_hours: Decimal  # the node-hours at which that limit stops the run
    deadline: Deadline | None = None  # only for display: no amount of the bill depends on the clock


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStorage:
    """What stays in the bucket after `pulumi destroy` until it expires."""

    what: str
    gb: Decimal
    usd_per_month: Decimal
    days: int
    parts: tuple[tuple[str, Decimal], ...]  # (name, GB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chance:
    """A goal, and the share of simulated runs that finish and meet the goal. The share is None if a simulation cannot
    show whether the goal is met.
    """

    name: str
    wanted: Decimal
    share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Everything that a user may want to know about a run before it costs money."""

    stack: str
    scenario: str  # the name of a scenario in the stack's file; empty for the file itself
    only_priced: str  # why this scenario can only be priced; empty if it can also be run
    run: str
    region: str
    zones: tuple[str, ...]  # names of the definition's zones
    market: Market
    lines: tuple[Line, ...]  # priced in the run's market, `interruptions` last; their sum is usd.p50
    usd: Quantiles
    hours: Quantiles
    spot: Side | None
    on_demand: Side | None
    chosen: Side  # the costs in the definition's own market
    hazard: Decimal | None  # the hazard that the definition fixes; None if the hazard is drawn for each simulated run
    chance: Hazard | None  # hazard per node-hour, with its source; None if AWS does not interrupt nodes
    cadence: BestInterval | None  # the checkpoint interval that costs least; None if AWS does not interrupt nodes
    # (word, hazard per node-hour, mean USD); empty if AWS does not interrupt nodes
    usd_at_hazard: tuple[tuple[str, float, Decimal], ...]
    # (p10, p90) of the cost to finish, if only `speed` or only `price` is uncertain
    span_usd: Mapping[str, tuple[Decimal, Decimal]]
    measured_usd: (
        Quantiles | None
    )  # the range of the cost to finish after a calibration; None if there is one already, or if the run has no end
    # the hazard above which on demand is cheaper; None if spot is cheaper at any hazard up to 10, or if a price is
    # missing
    break_even_hazard: float | None
    types: tuple[TypeCost, ...]  # every listed type, in the file's order
    fits: tuple[Fit, ...]
    notice: tuple[Notice, ...]
    cap: Cap | None  # None if the definition can only be priced: then no limit applies
    kept: KeptStorage
    warnings: tuple[str, ...]
    prices_as_of: date  # the date of the oldest price in the lines
    max_price_age_days: int  # from the definition: the bill warns of older prices
    calibrated: bool
    goals: tuple[Chance, ...]
    buys: Quantiles | None  # hours of training that fit within the limits, if the file does not say how long the run is
    hourly_usd: Mapping[str, Decimal]  # USD per node-hour of each hourly line other than compute

    @property
    def capacity(self) -> Capacity:
        """The market's name."""
        return self.market.name

    @property
    def title(self) -> str:
        """The name of the stack, and of the scenario if the bill is that of a scenario."""
        return f"{self.stack}, scenario {self.scenario}" if self.scenario else self.stack
