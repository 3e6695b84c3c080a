"""Checks whether a run can end within its limits, on the dearest listed type and on every other, because the fleet may
pick any. The bill checks max_usd and max_hours; callers that know the time check the deadline.

The dollars in this module include interrupted first hours. AWS does not charge these, but the meter that stops a run
counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Decimal

from gpufleet.infra.bill import options
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.side import Side, reserve_h
from gpufleet.infra.definition.model import StackDefinition, deadline_text
from gpufleet.infra.errors import Problem
from gpufleet.infra.market.market import DEADLINE, WAITING_TIME
from gpufleet.infra.risk.simulation import MINIMUM_H
from gpufleet.job.kind import batch

_HALF = "half of the simulated runs need this or more"
AS_COUNTED = "as limits.max_usd counts it"  # the dollars include interrupted first hours, which AWS does not charge


def problems(definition: StackDefinition, bill: Bill) -> Iterator[Problem]:
    """Yields two kinds of problems. The first: a limit is below p50 plus what the job needs to stop cleanly. The
    second: on another listed type, even an uninterrupted run exceeds a limit.
    """
    if batch.is_endless(definition.job.parameters):  # such a run trains until a limit stops it, so no limit is too low
        yield from _first_save(definition, bill)
        return
    (stop_usd, stop_h), side = bill.chosen.reserve, bill.chosen
    max_usd, max_hours, nodes = definition.limits.max_usd, definition.limits.max_hours, definition.nodes
    all_hours = side.needed_hours.times(nodes)
    needs = [
        ("limits.max_usd", str(max_usd), max_usd, side.metered_usd, stop_usd, f"USD: {_HALF} {AS_COUNTED}"),
        ("limits.max_hours", str(max_hours), max_hours, all_hours, nodes * stop_h, f"node-hours: {_HALF}"),
    ]
    for key, written, hours, unit in definition.fleet.market.ends():
        needs.append((key, written, hours, side.needed_hours, stop_h, f"{unit}: {_HALF}"))
    for path, written, limit, need, stop, unit in needs:
        if limit >= need.p50 + stop:
            continue
        clean = f"including {side.exposure.reserve_h * 3600:.0f} s for a clean stop"
        allowed = f"at least {enough(need.p50 + stop)} {unit}, {clean}"
        hint = f"{enough(need.p90 + stop)} is enough for nine runs in ten."
        hint = f"{hint} {_own(definition, path)}".strip()
        yield definition.problem(path, written, allowed, hint)
    yield from _types(definition, bill)


def _first_save(definition: StackDefinition, bill: Bill) -> Iterator[Problem]:
    """A problem for a limit that stops the run before its first checkpoint."""
    exposure, (by_money, by_hours) = bill.chosen.exposure, bill.chosen.exposure.hours_at_cap()
    limits = definition.limits
    needed_h = exposure.setup_h + (exposure.interval_h if definition.job.parameters.saves else 0.0)
    hours = Decimal(needed_h + exposure.reserve_h)
    usd = enough(Decimal(exposure.metered(needed_h + exposure.reserve_h)))
    key, written, nodes, unit = definition.fleet.market.time_limit(limits.max_hours, exposure.max_hours)
    by_time = (key, written, f"{enough(hours * nodes)} {unit}")
    by_usd = ("limits.max_usd", str(limits.max_usd), f"{usd} USD")
    for (key, written, least), by_h in ((by_usd, by_money), (by_time, by_hours)):
        if by_h < needed_h:
            allowed = f"at least {least}: set-up, one interval between checkpoints, and a stop"
            yield definition.problem(key, written, allowed)


def _own(definition: StackDefinition, key: str) -> str:
    """A sentence to add to a message, which says how to give the scenario its own limit; empty if it has one."""
    path = f"scenarios.{definition.scenario}.{key}"
    if not definition.scenario or definition.problem(key, "", "").path == path:
        return ""
    return f"A scenario may have its own limits: {path}."


def deadline_problems(definition: StackDefinition, bill: Bill, now: datetime) -> list[Problem]:
    """A problem if a listed type cannot meet the deadline even with a node that comes now and is never interrupted.

    Unlike max_hours, the deadline is not compared with p50: a user who moves the run to on demand in time
    (`gpufleet compare`) meets a deadline that most runs on spot alone would miss.
    """
    due, left_h, key = definition.due(now), definition.hours_left(now), definition.due_by(now)
    needs = {
        option.type: max(option.runtime.total_s / 3600, MINIMUM_H) + reserve_h(definition.job.parameters, option)
        for option in bill.types
        if option.runtime and option.holds_the_job and not option.why and not option.offers[bill.capacity].left_out
    }
    if bill.only_priced or due is None or left_h is None or not needs:
        return []
    slowest_type = max(needs, key=lambda type_: needs[type_])
    if needs[slowest_type] <= left_h:
        return []
    hours_needed = f"{needs[slowest_type]:.2f} hours that {slowest_type} needs"
    need = f"at least the {hours_needed} without interruptions, including the stop"
    deadline = definition.limits.deadline
    if key != DEADLINE:
        return [definition.problem(key, *message) for message in definition.fleet.market.too_short(need, left_h, now)]
    assert deadline is not None
    first = due + timedelta(hours=needs[slowest_type] - left_h, minutes=1)
    allowed = f"{need}: {first:%Y-%m-%dT%H:%MZ} or later; this is {left_h:.2f} hours from {_begin(definition, now)}"
    hint = "Write a later deadline, or list faster types: `gpufleet compare` ranks types for it."
    return [definition.problem(key, deadline_text(deadline), allowed, hint)]


def _begin(definition: StackDefinition, now: datetime) -> str:
    return "the block's start" if definition.begins_at(now) > now else "now"


def deadline_warnings(definition: StackDefinition, bill: Bill, now: datetime) -> Iterator[str]:
    """Warns if at least 1 % of simulated runs, with waits for capacity, miss the deadline. If the deadline comes before
    the other limits, also warns of the speed at which every run would miss it.
    """
    left_h, exposure, key = definition.hours_left(now), bill.chosen.exposure, definition.due_by(now)
    whole = definition.begins_at(now) > now and key != DEADLINE  # the limit is the end of a Capacity Block
    if bill.only_priced or left_h is None or whole:
        return
    late = float((bill.chosen.needed.wall_hours + exposure.reserve_h > left_h).mean())
    hint = definition.fleet.market.late_hint(definition.argument)
    if late >= 0.01 and hint is not None:
        yield (
            f"{late:.0%} of runs miss {key}, {left_h:.1f} h from {_begin(definition, now)}: p50 is"
            f" {bill.chosen.wall_hours.p50:.2f} h{hint}"
        )
    by_h = left_h - exposure.reserve_h
    if by_h < min(exposure.hours_at_cap()) and (slow := too_slow(bill, by_h, key)):
        yield slow


def too_slow(bill: Bill, by_h: float, limit: str) -> str:
    """A warning for a speed that was assumed and never measured. The warning says below which share of this speed
    `limit` ends the run before the work is done. `by_h`: the hours after which the limit begins to stop the run. Empty
    if that share is below one half.
    """
    share = slowest(bill.chosen, by_h)
    if bill.calibrated or not 0.5 < share < 1:
        return ""
    drawn = ", even uninterrupted" if bill.market.is_interrupted else ""
    return (
        f"uncalibrated: below about {share:.0%} of the assumed speed (set-up apart) {limit} stops the run"
        f" before it is done{drawn}"
    )


def expiry_warning(bill: Bill) -> str:
    """If no deadline is set: a warning with the share of simulated runs whose fleet expires before they end; empty
    below 1 %. Only waits for capacity can make a run last that long, because max_hours stops nodes that work.
    """
    cap, needed, stop_h = bill.cap, bill.chosen.needed, bill.chosen.exposure.reserve_h
    if cap is None or cap.deadline is not None:
        return ""
    lives_h = bill.market.lives_hours(cap.max_hours)
    unstopped = needed.hours <= min(bill.chosen.exposure.hours_at_cap())
    late = float((unstopped & (needed.wall_hours + stop_h > lives_h)).mean())
    if late < 0.01:
        return ""
    formula = f"limits.max_hours / {bill.market.nodes}".removesuffix(" / 1")
    return (
        f"{late:.0%} of runs wait so long for capacity that they are not done when their fleet expires,"
        f" {formula} + {WAITING_TIME / timedelta(hours=1):.0f} h after `up`; limits.deadline sets another time"
    )


def enough(needed: Decimal) -> Decimal:
    """`needed`, rounded up to a hundredth, so that as a limit it is enough."""
    return needed.quantize(Decimal("0.01"), rounding=ROUND_CEILING)


def least_usd(definition: StackDefinition, bill: Bill) -> Decimal:
    """The limits.max_usd within which nine simulated runs in ten end by themselves. If the definition's own limit is
    lower, or the run trains until a limit stops it, that limit.
    """
    own = definition.limits.max_usd
    if batch.is_endless(definition.job.parameters):
        return own
    return min(own, enough(bill.chosen.metered_usd.p90 + bill.chosen.reserve[0]))


def slowest(side: Side, by_h: float) -> float:
    """The share of the bill's speed at which an uninterrupted run of the dearest type takes `by_h` hours."""
    exposure = side.exposure
    room_h = by_h - exposure.setup_h
    return exposure.phase_ends_h[-1] / room_h if room_h > 0 else math.inf


def _types(definition: StackDefinition, bill: Bill) -> Iterator[Problem]:
    """Problems of the listed types other than the dearest one. (For the dearest type, `problems` compares p50 with the
    limits.)
    """
    limits = definition.limits
    extras = float(sum(bill.hourly_usd.values()))
    for index, option in enumerate(bill.types):
        hourly, runtime = option.hourly(bill.capacity), option.runtime
        if option.type == bill.chosen.type or option.why or not option.holds_the_job or not hourly or not runtime:
            continue
        hours = max(runtime.total_s / 3600, MINIMUM_H) + reserve_h(definition.job.parameters, option)
        usd = bill.chosen.exposure.fixed_usd + hours * (float(hourly.amount) + extras)
        passed = [
            (key, limit, enough(Decimal(needed)), unit)
            for key, limit, needed, unit in (
                ("limits.max_usd", limits.max_usd, usd, "USD"),
                ("limits.max_hours", limits.max_hours, hours, "node-hours"),
            )
            if needed > limit
        ]
        if passed:
            needs = " and ".join(f"{needed} {unit} where {key} is {limit}" for key, limit, needed, unit in passed)
            allowed = f"types on which the run can end within the limits; without interruptions this one needs {needs}"
            raised = " and ".join(f"{key} to {needed} or more" for key, _, needed, _ in passed)
            yield definition.problem(options.listed(index), option.type, allowed, f"Remove it, or raise {raised}.")
