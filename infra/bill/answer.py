"""The bill in a dozen lines: first what the run costs, then its range as a picture, the largest charges, and what to do
before the launch. infra.bill.table shows the whole bill.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.bill.table import goals, interruptions_usd, stale_prices
from gpufleet.infra.errors import BeforeLaunch
from gpufleet.infra.text import about_hours, columns, wrap
from gpufleet.job.text import counted

if TYPE_CHECKING:
    from gpufleet.infra.bill.fallback import Fallback

LINES = 12
CHARGES = 3  # the most charges that get their own line
SHARE = Decimal("0.05")  # a charge below this share of p50 gets no line of its own
_RUN = re.compile(r"(.*): run (`[^`]+`)\.")  # a warning that names its command


def answer(
    bill: Bill, command: str, *, today: date, cheaper: str = "", fallbacks: Sequence[Fallback] = ()
) -> Iterator[str]:
    """The lines. `command`: the command that shows the whole bill. `cheaper`: the line of infra.compare.cheaper, or
    empty.
    """
    usd = next((fallback.usd for fallback in fallbacks), bill.usd)
    lines = [*wrap(f"{bill.title}: {headline(bill, fallbacks)}"), *picture(usd, bill.cap.max_usd if bill.cap else None)]
    lines += _charges(bill, usd)
    lines += [*goals(bill), *(wrap(cheaper) if cheaper else [])]
    to_do = [warning for warning in bill.warnings if isinstance(warning, BeforeLaunch)]
    rest, old = len(bill.warnings) - len(to_do), stale_prices(bill, today)
    actions = [*grouped(to_do), *([f"`gpufleet prices refresh`: {old}"] if old else [])]
    yield from lines
    if actions:
        shown = actions[: max(1, LINES - len(lines) - 2)]
        of = "" if len(shown) == len(actions) else f", the first {len(shown)} of {len(actions)}"
        yield f"Before you launch{of}:"
        for action in shown:
            yield f"  - {textwrap.shorten(action, columns() - 4, placeholder=' ...')}"
    worth = f"Worth knowing: {rest} more. " if rest else ""
    yield from wrap(f"{worth}The whole bill, with every warning: `{command} --all`")


def headline(bill: Bill, fallbacks: Sequence[Fallback] = ()) -> str:
    """One sentence about what the run costs, how long it takes, on which type, and where it stops."""
    side, cap = bill.chosen, bill.cap
    dearest = f", the dearest of {len(bill.types)} types," if len(bill.types) > 1 else ""
    late = "".join(fallback.in_brief for fallback in fallbacks)
    place = f"on {bill.market.filled_in('{times}')}{side.type} {bill.market.bought}{dearest}{late} in {bill.region}"
    if cap is None:
        stops = f"it cannot be launched: it {bill.only_priced}"
    else:
        stops = f"stops at {cap.max_usd.normalize():f} USD"
        if cap.first != "limits.max_usd":
            hours = counted(f"{cap.max_hours.normalize():f}", "node-hour")
            first = hours if cap.first == "limits.max_hours" else "the block's end"
            stops = f"stops at {first}, or {cap.max_usd.normalize():f} USD"
        if bill.buys is None and cap.probability >= 0.01:
            stops += f", {cap.probability:.0%} of runs before they are done"
    if bill.buys is not None and cap is not None:
        low, middle, high = figures_within(bill.buys)
        money = (
            f"{cap.max_usd.normalize():f} USD buy about {middle} h of training ({low} to {high} in eight runs of ten)"
        )
        return f"{money}, {place}; {stops}."
    low, middle, high = figures_within(next((fallback.usd for fallback in fallbacks), bill.usd))
    wall = next((fallback.wall_hours for fallback in fallbacks), side.wall_hours).p50
    return f"about {middle} USD ({low} to {high} in eight runs of ten), {about_hours(wall)} h, {place}; {stops}."


def picture(usd: Quantiles, most: Decimal | None) -> Iterator[str]:
    """A picture of the range between 0 and the limit, in characters: `[` is at p10, `|` at p50, `]` at p90."""
    end = max(usd.p90 * Decimal("1.1"), Decimal(most or 0))
    if end <= 0:
        return
    start, right = "  0 ", f" {end:.0f} USD" if end >= 10 else f" {end:.2f} USD"
    if most:
        right += " (limit)" if end == most else " (! limit)"
    width = min(columns(), 80) - len(start) - len(right)
    at = [min(width - 1, int(value / end * width)) for value in (usd.p10, usd.p50, usd.p90)]
    low, high = min(at[0], width - 3), max(at[2], at[0] + 2)
    middle = min(max(at[1], low + 1), high - 1)
    bar = ["."] * width
    bar[low : high + 1] = ["="] * (high + 1 - low)
    if most is not None and end > most:
        bar[min(width - 1, int(most / end * width))] = "!"  # `!` marks the limit
    bar[low], bar[middle], bar[high] = "[", "|", "]"
    yield f"{start}{''.join(bar)}{right}"


def grouped(warnings: Iterable[str]) -> list[str]:
    """The warnings, in which those that ask for the same command share one line."""
    reasons: dict[str, list[str]] = {}
    for warning in warnings:
        match = _RUN.fullmatch(warning)
        reasons.setdefault(match[2] if match else warning, []).extend([match[1]] if match else [])
    return [f"{task}: {', and '.join(why)}" if why else task for task, why in reasons.items()]


def _charges(bill: Bill, usd: Quantiles) -> Iterator[str]:
    """Yields the largest charges, and one line for all others. Together they add up to p50."""
    charges = [
        (line.name, line.amount, f"{amount_within(line.quantity)} x {line.unit_price:f} USD per {line.unit}")
        for line in bill.chosen.lines
    ]
    if bill.buys is None:
        charges.append(("interruptions", interruptions_usd(bill), f"{bill.chosen.interruptions.mean:.2g} expected"))
    matter = sorted((charge for charge in charges if charge[1] >= SHARE * usd.p50), key=lambda charge: -charge[1])[
        :CHARGES
    ]
    rest = usd.p50 - sum((amount for _, amount, _ in matter), Decimal(0))
    other = f"{counted(len(charges) - len(matter), 'smaller charge')}, uncertain speed and price"
    if usd.p50 == bill.usd.p50 != bill.chosen.needed_usd.p50:
        other += ", less what a limit cuts off"
    rows = [(name, amount_within(amount, usd), why) for name, amount, why in matter] + [
        ("everything else", amount_within(rest, usd), other)
    ]
    names, amounts = (max(len(row[at]) for row in rows) for at in (0, 1))
    for name, amount, why in rows:
        shown = textwrap.shorten(why, columns() - names - amounts - 6, placeholder=" ...")
        yield f"  {name:<{names}}  {amount:>{amounts}}  {shown}"


def figures_within(values: Quantiles) -> tuple[str, str, str]:
    """p10, p50 and p90 as text. The wider their range is, the fewer decimals they have."""
    return amount_within(values.p10, values), amount_within(values.p50, values), amount_within(values.p90, values)


def amount_within(value: Decimal, within: Quantiles | None = None) -> str:
    """The amount as text. The text has three significant digits, or the digits up to the third one of the range
    `within`. An amount of at least 0.1 has at most two decimals; a smaller one has two digits of the range.
    """
    span = abs(value) if within is None else max(within.p90 - within.p10, within.p90 / 100)
    if not span:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(span)))
    if (span if within is None else within.p90) >= Decimal("0.1"):
        return f"{value:.{min(decimals, 2)}f}"
    return f"{value:.{decimals - (within is not None)}f}"
