"""What a run costs with `fleet.fallback: on-demand`: on spot, and on demand once spot would miss the deadline.

The hour of the switch is the one the resources are declared with and the nodes push (job/supervisor/switch.py): the
deadline less the stop, a start, the rest of the work on demand and a margin. On demand is then taken to be there, and
apart from that the share is shown that an assumption has without: nobody promises capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
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

ON_DEMAND_MISSING = 0.05  # share of switches that find no on-demand capacity: an assumption, no public source

SOONEST = timedelta(minutes=15)  # from the program's start until it has made the schedule: uploads come before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """Hours by the wall from the run's first `up`; shares of simulated runs. Dollars are those to finish."""

    type: str  # on demand
    hours_left: float  # to the deadline
    stop_h: float
    start_h: float  # a node's, on demand
    margin_h: float
    work_h: float  # on demand, all of it
    train_h: float  # of it, training
    switch_h: float  # with nothing done; later by what is done
    usd: Quantiles
    metered_usd: Quantiles  # as limits.max_usd counts it, a clean stop included
    wall_hours: Quantiles
    on_time: float
    switched: float
    missing: float  # switched, and found no on-demand capacity
    paid_from_start: bool  # the limits pay for all of the work on demand
    unpaid: float  # wanted to switch when the limits no longer paid for the rest

    @property
    def needed_h(self) -> float:
        """Before the deadline a run that has done nothing begins on demand."""
        return self.stop_h + self.start_h + self.work_h + self.margin_h

    def row(self) -> tuple[str, Quantiles]:
        """The bill's third column: its name and its figures."""
        return f"USD on spot, on demand when late, {self.type}", self.usd

    def sentence(self) -> str:
        """For people."""
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
        found: dict[str, Any] = plain(self, digits=20)  # that is all of a float's
        return found

    def run_json(self) -> dict[str, Any]:
        """run.json's `fallback`: what a node has to know to push the hour, in seconds, and what a policy asks."""
        parts = {"work": self.work_h, "train": self.train_h, "start": self.start_h, "margin": self.margin_h}
        return {
            "usd_p90": str(self.usd.p90),
            **{f"{part}_s": round(3600 * each, 1) for part, each in parts.items()},
        }


def price_fallback(definition: StackDefinition, bill: Bill, now: datetime) -> Fallback | None:
    """None where the definition has no fallback, is only priced, or has no price of one of the two."""
    left_h, spot, on_demand = definition.hours_left(now), bill.spot, bill.on_demand
    if not definition.fleet.market.stands_by or bill.only_priced or left_h is None or not (spot and on_demand):
        return None
    from gpufleet.infra.risk.deadline import finished  # here: most bills have none

    type_, sure, train_h = _launched(bill, on_demand)
    stop_h = max(spot.exposure.reserve_h, sure.reserve_h)
    by_h, work_h = left_h - stop_h, sure.phase_ends_h[-1]
    start_h = max(sure.setup_h, sure.restart_h)
    margin_h = min(sure.interval_h, work_h) + SWITCH_MARGIN_S / 3600  # without checkpoints all of it is repeated
    switch_h = max(0.0, by_h - start_h - work_h - margin_h)
    most_usd, most_h = float(definition.limits.max_usd), float(definition.limits.max_hours)
    leave = simulation.PlannedEnd(by_h=switch_h + work_h, work_h=work_h)
    begun = simulation.simulate(replace(spot.exposure.unlimited, leave=leave), runs=min(FEW, spot.runs))
    usd, wall = finished(begun, spot.exposure, sure)
    metered = begun.metered_usd + (usd - begun.usd) + stop_h * sure.usd_h
    paid = (metered <= most_usd) & (begun.hours + (wall - begun.wall_hours) + stop_h <= most_h)
    unpaid, in_time = begun.stopped & ~paid, (wall <= by_h + 1e-6) & paid
    missing = ON_DEMAND_MISSING * (begun.stopped & ~unpaid)
    beyond = float(spot.total) - spot.exposure.uninterrupted_usd
    return Fallback(
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


def _launched(bill: Bill, dearest: Side) -> tuple[str, simulation.Exposure, float]:
    """The type that EC2 launches on demand, the cheapest an hour of those listed (a fleet's default, which the provider
    cannot change), with what a run on it puts at risk and its hours of training.
    """
    able = [each for each in bill.types if each.on_demand and each.runtime and each.holds_the_job]
    found = min(able, key=lambda each: each.on_demand.amount if each.on_demand else Decimal(0), default=dearest.option)
    runtime, price = found.runtime or dearest.runtime, found.on_demand or dearest.price
    train_h = sum(phase.seconds for phase in runtime.phases if phase.steps) / 3600
    if found.type == dearest.type:
        return found.type, dearest.exposure, train_h
    ends = [sum(phase.seconds for phase in runtime.phases[: at + 1]) / 3600 for at in range(len(runtime.phases))]
    sure = replace(
        dearest.exposure,
        setup_h=runtime.setup_s / 3600,
        restart_h=runtime.restart_s / 3600,
        phase_ends_h=tuple(ends),
        compute_usd_h=float(price.amount),
    )
    return found.type, sure, train_h


def fallback_problems(definition: StackDefinition, bill: Bill, found: Fallback | None) -> Iterator[Problem]:
    """No price of on demand, and limits that do not pay for half of the runs."""
    if not definition.fleet.market.stands_by or bill.only_priced:
        return
    if bill.on_demand is None:
        yield definition.problem("fleet.fallback", "on-demand", "types with an on-demand price: none of the listed has")
    elif found is not None and definition.limits.max_usd < found.metered_usd.p50:
        allowed = f"at least {enough(found.metered_usd.p50)} USD with fleet.fallback: half of the simulated runs need"
        hint = f"{enough(found.metered_usd.p90)} suffices for nine in ten."
        yield definition.problem("limits.max_usd", str(definition.limits.max_usd), f"{allowed} that {AS_COUNTED}", hint)


def switch_at(found: Fallback, deadline: datetime, now: datetime) -> datetime:
    """The hour to declare: with nothing done, but not before `up` gets there, as AWS takes none that has passed."""
    return max(deadline - timedelta(hours=found.needed_h), now + SOONEST).replace(microsecond=0)
