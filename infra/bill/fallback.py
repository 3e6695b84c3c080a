"""Prices a run with `fleet.fallback: on-demand`, which begins on spot and switches to on demand once spot would miss
the deadline.

`up` declares the hour of the switch, and nodes postpone it as work gets done (job/supervisor/switch.py). The hour is
the deadline minus the time for the stop, a start, the rest of the work on demand and a margin. The dollars assume that
AWS then has on-demand capacity. AWS does not promise this, so the bill also shows the share of runs that find none, if
a fixed share of all switches finds none (ON_DEMAND_MISSING).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.limits import AS_COUNTED, enough
from gpufleet.infra.bill.side import FEW, Quantiles, Side, quantiles_of
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import Problem
from gpufleet.infra.risk import simulation
from gpufleet.infra.show.sheet import plain
from gpufleet.infra.text import hours, share
from gpufleet.job.contract.aws import SWITCH_MARGIN_S

ON_DEMAND_MISSING = 0.05  # share of switches that find no on-demand capacity; an assumption without a public source

SOONEST = timedelta(minutes=15)  # `up` is assumed to finish its uploads and make the schedule within this time


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """The effects of the fallback on a run. Hours are wall-clock hours from the run's first `up`; shares are shares of
    simulated runs; dollars are the cost to finish the work.
    """

    type: str  # the instance type that is launched on demand
    hours_left: float  # hours to the deadline
    stop_h: float
    start_h: float  # hours that a node on demand takes to start
    margin_h: float
    work_h: float  # hours that the whole work takes on demand
    train_h: float  # the part of these hours for training
    switch_h: float  # hours after which a run that has done no work switches; finished work postpones the switch
    usd: Quantiles
    metered_usd: Quantiles  # USD as limits.max_usd counts them, including a clean stop
    wall_hours: Quantiles
    on_time: float
    switched: float
    missing: float  # share of runs that switch and find no on-demand capacity
    paid_from_start: bool  # whether the cost of the whole work on demand fits within the limits
    # share of runs for which the cost of the rest on demand no longer fits within the limits at the time of the switch
    unpaid: float

    @property
    def needed_h(self) -> float:
        """Hours before the deadline at which a run that has done no work must begin on demand."""
        return self.stop_h + self.start_h + self.work_h + self.margin_h

    def row(self) -> tuple[str, Quantiles]:
        """The third column of the bill's table: its name and its figures."""
        return f"USD on spot, on demand when late, {self.type}", self.usd

    @property
    def in_brief(self) -> str:
        """What the bill's first line adds to the market's name."""
        return f", on demand when late ({self.on_time:.0%} are done by the deadline),"

    def sentence(self) -> str:
        """A sentence about the fallback, for people."""
        unpaid = f"; limits forbid the switch in {share(self.unpaid)}" if self.unpaid else ""
        return (
            f"fleet.fallback: on demand from {hours(self.switch_h)} h after the start if nothing is done by then, later"
            f" by the hours of work that are done: {share(self.switched)} of runs switch{unpaid};"
            f" {share(self.on_time)} are done by the deadline, {hours(self.hours_left)} h from now."
            f" {share(self.missing)} find no on-demand capacity, if {ON_DEMAND_MISSING:.0%} of switches do: an"
            " assumption, for nobody promises it."
        )

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        document: dict[str, Any] = plain(self, digits=20)  # 20 digits, which are all digits of a float
        return document

    def run_json(self) -> dict[str, Any]:
        """The section `fallback` of run.json: the seconds from which a node computes the time of the switch, and the
        values that a policy checks.
        """
        parts = {"work": self.work_h, "train": self.train_h, "start": self.start_h, "margin": self.margin_h}
        return {
            "usd_p90": str(self.usd.p90),
            **{f"{part}_s": round(3600 * part_h, 1) for part, part_h in parts.items()},
        }


def price_fallbacks(definition: StackDefinition, bill: Bill, now: datetime) -> list[Fallback]:
    """The priced fallback as a list of one. The list is empty if the definition has no fallback or can only be priced,
    or if the price in one of the markets is missing.
    """
    left_h, spot, on_demand = definition.hours_left(now), bill.spot, bill.on_demand
    if not definition.fleet.market.stands_by or bill.only_priced or left_h is None or not (spot and on_demand):
        return []
    from gpufleet.infra.risk.deadline import finished  # imported here, because most bills have no fallback

    type_, sure, train_h = _launched(bill, on_demand)
    stop_h = max(spot.exposure.reserve_h, sure.reserve_h)
    by_h, work_h = left_h - stop_h, sure.phase_ends_h[-1]
    start_h = max(sure.setup_h, sure.restart_h)
    margin_h = (
        min(sure.interval_h, work_h) + SWITCH_MARGIN_S / 3600
    )  # a run without checkpoints repeats all of its work
    switch_h = max(0.0, by_h - start_h - work_h - margin_h)
    most_usd, most_h = float(definition.limits.max_usd), float(definition.limits.max_hours)
    leave = simulation.PlannedEnd(by_h=switch_h + work_h, work_h=work_h)
    begun = simulation.simulate(replace(spot.exposure.unlimited, leave=leave), runs=min(FEW, spot.runs))
    usd, wall = finished(begun, spot.exposure, sure)
    metered = begun.metered_usd + (usd - begun.usd) + stop_h * sure.usd_h
    paid = (metered <= most_usd) & (begun.hours + (wall - begun.wall_hours) + stop_h <= most_h)
    unpaid, in_time = begun.stopped & ~paid, (wall <= by_h + 1e-6) & paid
    missing = ON_DEMAND_MISSING * (begun.stopped & ~unpaid)
    beyond = spot.unsimulated_usd
    priced = Fallback(
        type=type_,
        hours_left=left_h,
        stop_h=stop_h,
        start_h=start_h,
        margin_h=margin_h,
        work_h=work_h,
        train_h=train_h,
        switch_h=switch_h,
        usd=quantiles_of(usd + beyond),
        metered_usd=quantiles_of(metered + beyond),
        wall_hours=quantiles_of(wall),
        on_time=float((in_time * (1 - missing)).mean()),
        switched=float((begun.stopped & ~unpaid).mean()),
        missing=float(missing.mean()),
        paid_from_start=sure.metered(whole_h := start_h + work_h + stop_h) <= most_usd and whole_h <= most_h,
        unpaid=float(unpaid.mean()),
    )
    return [priced]


def _launched(bill: Bill, dearest: Side) -> tuple[str, simulation.Exposure, float]:
    """The instance type that EC2 launches on demand, the exposure of a run on it, and its hours of training. EC2 takes
    the listed type with the lowest hourly price. This is the default of a fleet, and the provider has no setting for
    it.
    """
    able = [option for option in bill.types if option.on_demand and option.runtime and option.holds_the_job]
    cheapest = min(
        able, key=lambda option: option.on_demand.amount if option.on_demand else Decimal(0), default=dearest.option
    )
    runtime, price = cheapest.runtime or dearest.runtime, cheapest.on_demand or dearest.price
    train_h = sum(phase.seconds for phase in runtime.phases if phase.steps) / 3600
    if cheapest.type == dearest.type:
        return cheapest.type, dearest.exposure, train_h
    ends = [sum(phase.seconds for phase in runtime.phases[: at + 1]) / 3600 for at in range(len(runtime.phases))]
    sure = replace(
        dearest.exposure,
        setup_h=runtime.setup_s / 3600,
        restart_h=runtime.restart_s / 3600,
        phase_ends_h=tuple(ends),
        compute_usd_h=float(price.amount),
    )
    return cheapest.type, sure, train_h


def fallback_problems(definition: StackDefinition, bill: Bill, fallbacks: Iterable[Fallback]) -> Iterator[Problem]:
    """Problems of a fallback: there is no on-demand price, or fewer than half of the runs fit within the limits."""
    if not definition.fleet.market.stands_by or bill.only_priced:
        return
    if bill.on_demand is None:
        yield definition.problem("fleet.fallback", "on-demand", "types with an on-demand price: no listed type has one")
    most = definition.limits.max_usd
    for usd in (fallback.metered_usd for fallback in fallbacks if most < fallback.metered_usd.p50):
        allowed = f"at least {enough(usd.p50)} USD with fleet.fallback: half of the simulated runs need"
        hint = f"{enough(usd.p90)} is enough for nine runs in ten."
        yield definition.problem("limits.max_usd", str(most), f"{allowed} that {AS_COUNTED}", hint)


def switch_at(fallback: Fallback, deadline: datetime, now: datetime) -> datetime:
    """The time of the switch that the program declares, for a run that has done no work yet. The time is not earlier
    than `up` can make the schedule, because AWS refuses a time that has passed.
    """
    return max(deadline - timedelta(hours=fallback.needed_h), now + SOONEST).replace(microsecond=0)
