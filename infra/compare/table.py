"""Shows a comparison as text (scenarios beside their claims, then the ranked options) and as an object for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill.answer import figures_within
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.compare import columns
from gpufleet.infra.compare.columns import COLUMNS, number, record_row, sheet
from gpufleet.infra.compare.comparison import Comparison
from gpufleet.infra.compare.ranking import LEAST, SURE
from gpufleet.infra.compare.rows import Row, in_phases
from gpufleet.infra.show.sheet import Column, Sheet
from gpufleet.infra.text import about_hours, wrap

WIDTH = 120
SHOWN = 10  # number of options in an answer
REGIONS = 4  # number of regions side by side


def scenarios(rows: Sequence[Row]) -> Iterator[str]:
    """Yields two tables: the file's scenarios with their claims and costs, and the cost of their compute in each
    region.
    """
    yield from sheet(rows, columns.SCENARIOS).text()
    yield ""
    yield from wrap(
        "h and USD: node-hours, and everything that the bill counts, until the work is done, with interruptions, at "
        "the dearest zone, as if no limit stopped the run. basis: claim = stated by a plan, target = a share of the "
        "roofline, measured, declared = stated by the file, guessed = from a measured or stated time on other GPUs."
    )
    yield from wrap(_counted(rows))
    for row in rows:
        if note := _note(row):
            yield from wrap(f"{row.scenario}: {note}")
    yield ""
    yield from _rates([row for row in rows if row.rates])


def _rates(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the table of each scenario's compute at the prices of several regions."""
    if not rows:
        return
    regions = _shown_regions(rows)
    names = [known_regions()[region].short for region in regions]
    prices = [
        Column(f"{head} {name}", None, "USD", number, _rate(region, market))
        for head, market in (("OD", "on_demand"), ("spot", "spot"))
        for region, name in zip(regions, names, strict=True)
    ]
    first, last = [COLUMNS[key] for key in ("scenario", "compute_hours")], ("gpu_hours", "gpu_hours_used")
    yield from Sheet.build([*first, *prices, *(COLUMNS[key] for key in last)], rows).text()
    yield ""
    yield from wrap(
        "compute h: optimizer steps only, or the hours for which a node is held; OD and spot: these hours at the "
        "region's on-demand price and at the spot price of its median zone "
        f"({', '.join(map(' '.join, zip(names, regions, strict=True)))}: the"
        " file's, then those with the lowest; --json has every one). GPU-h: every GPU of the node, as billed (p50);"
        " used: those the job works on, without set-up and idling."
    )


def _rate(region: str, market: str) -> Callable[[Row], Decimal | None]:
    """A function that returns the cost of a row's compute at the price of this region and market."""
    return lambda row: next(getattr(rate, market) for rate in row.rates if rate.region == region)


def _shown_regions(rows: Sequence[Row]) -> list[str]:
    """The file's own region, then the regions with the lowest cost of compute; those without a price come last."""
    own, *others = (rate.region for rate in rows[0].rates)
    of_region = {region: [r for row in rows for r in row.rates if r.region == region] for region in others}

    def dollars(region: str) -> tuple[int, Decimal]:
        least = [min((usd for usd in (rate.on_demand, rate.spot) if usd), default=None) for rate in of_region[region]]
        return sum(usd is None for usd in least), sum((usd for usd in least if usd), Decimal(0))

    return [own, *sorted(others, key=dollars)[: REGIONS - 1]]


def _counted(rows: Sequence[Row]) -> str:
    """A line that names the prepared datasets from which the rows have their sizes; empty if there is none."""
    prepared = list(dict.fromkeys(row.dataset for row in rows if row.dataset))
    if not prepared:
        return ""
    own = [row.scenario for row in rows if not row.dataset and not row.reference]
    but = f", but for {', '.join(own)}" if own else ""
    return f"Counted from {', '.join(prepared)} as prepared, not as job.parameters.data expects{but}."


def answer(comparison: Comparison, command: str, today: date) -> Iterator[str]:
    """At most twenty lines: the cheapest way to do the chosen work, the ten cheapest options, and what to do. `command`
    shows all options, scenarios, regions and batches.
    """
    definition, able = comparison.definition, [row for row in comparison.own_rows if row.ranked]
    name = (
        definition.name if comparison.scenario in ("", definition.name) else f"{definition.name}, {comparison.scenario}"
    )
    if definition.stages:
        yield from _stages(comparison, command)
    elif not able:
        yield from wrap(f"{name}: no type of the catalog can run this in {definition.fleet.region}.")
        for row in comparison.own_rows[:SHOWN]:
            yield from wrap(
                f"  {row.place} {row.capacity}: {row.reason}{f'; {row.nearest}' if row.nearest else ''}", indent=4
            )
    else:
        best, own = _best(comparison, comparison.scenario, able)
        least = "costs least" if best is able[0] else "is the cheapest option within the limits"
        yield from wrap(f"{name}: {_figures(best)}, {least}{_against(best, own)}.")
        yield from sheet(able[:SHOWN], columns.ANSWER, comparison.own_frontier).text()
        yield from wrap("* nothing is cheaper and sooner; less: how likely it costs less than the file's own fleet")
        if not own or (own[0].place, own[0].capacity) != (best.place, best.capacity):
            yield from wrap(
                f"To take {best.type}, write fleet.instance_types: [{best.type}] and fleet.capacity: {best.capacity}"
                f" into {definition.source.name}, then run `gpufleet doctor {definition.argument} --pin`."
            )
    shown = comparison.rows if definition.stages else comparison.own_rows
    yield from ages(shown, today, definition.estimate.max_price_age_days)
    yield from policy(comparison)
    more = len(able) - SHOWN
    others = f"{more} more can be run. " if more > 0 and not definition.stages else ""
    yield from wrap(f"{others}Every option, scenario and region: `{command} --all`")


def _stages(comparison: Comparison, command: str) -> Iterator[str]:
    """The cheapest way to do the work of each stage, and what they cost together."""
    best, own = list[Row](), list[Row]()
    for name in (stage.stage for stage in comparison.definition.stages):
        able = [row for row in comparison.rows if row.ranked and name in row.scenario.split(", ")]
        if not able:
            yield from wrap(f"{name}: no type of the catalog can run this in {comparison.definition.fleet.region}.")
            continue
        cheapest, file = _best(comparison, name, able)
        best.append(cheapest)
        own += file[:1]
    if not best:
        return
    usd, theirs = (sum((row.usd.p50 for row in rows if row.usd), Decimal(0)) for rows in (best, own))
    yield from wrap(
        f"{comparison.definition.name}: with the cheapest type for each stage about {usd:.2f} USD in all; with the"
        f" types of the file about {theirs:.2f} USD."
    )
    yield from sheet(best, columns.STAGES).text()
    yield from wrap(
        "less: how likely it costs less than the file's own fleet. A stage's fleet.instance_types and fleet.capacity"
        f" take it. One stage's options: `{command} --scenario {comparison.definition.stages[-1].stage}`"
    )


def _best(comparison: Comparison, name: str, able: Sequence[Row]) -> tuple[Row, list[Row]]:
    """Returns two values: the best option for this work, and the rows of the file's own fleet that have costs."""
    fitting = [row for row in able if not row.over_limit and row.late <= SURE]
    work = comparison.variant(name)
    own = work.fleet.instance_types[0], work.nodes, work.fleet.capacity
    same = [row for row in able if (row.type, row.nodes, row.capacity) == own]
    return (fitting or able)[0], same or [row for row in (comparison.as_listed(work),) if row.usd is not None]


def _figures(row: Row) -> str:
    assert row.usd is not None  # a ranked row always has this figure
    assert row.wall_hours is not None
    low, middle, high = figures_within(row.usd)
    usd = f"about {middle} USD ({low} to {high} in eight runs of ten)"
    return f"{row.place} {row.capacity.replace('-', ' ')}, {usd} and {about_hours(row.wall_hours.p50)} h"


def _against(best: Row, own: Sequence[Row]) -> str:
    """Words about the cost of the file's own fleet, to add to a sentence."""
    if not own:
        return ""
    if (own[0].place, own[0].capacity) == (best.place, best.capacity):
        return ", as the file has it"
    assert own[0].usd is not None
    return (
        f"; the file's {own[0].place} {own[0].capacity.replace('-', ' ')} costs about {figures_within(own[0].usd)[1]}"
    )


def ranked(rows: Sequence[Row], frontier: Sequence[Row]) -> Iterator[str]:
    """Yields each option on its own line, grouped by work, the cheapest first. The line below an option says why it is
    not the first, or why it cannot be run.
    """
    keys, spare = columns.RANKED
    if len({row.basis for row in rows if row.ranked}) > 1:  # then each line says where its speed comes from
        keys += " basis"
    order = list(dict.fromkeys(row.scenario for row in rows))
    picked = sorted(rows, key=lambda row: order.index(row.scenario))
    head, rule, *lines = sheet(picked, (keys, spare), frontier).text()
    yield from (head, rule)
    for index, (row, line) in enumerate(zip(picked, lines, strict=True)):
        if index == 0 or row.scenario != picked[index - 1].scenario:
            yield from wrap(f"the work of {row.scenario}:")
        yield line
        if why := row.lost + (" (over limit)" if row.over_limit else ""):
            yield from textwrap.wrap(why.strip(), WIDTH, initial_indent="     ", subsequent_indent="     ")
    yield ""
    yield from wrap(
        "* nothing does the same work for fewer mean dollars in fewer wall-clock hours. Below an option: why it is not"
        " the first of its work. less: probability that it costs less than the file's own fleet. free: mean dollars of"
        " interrupted first hours, which AWS does not charge, already left out of USD. stops: interruptions, p50."
        " USD is at what a fleet that picks by price may expect over the zones; dear: p50 in the dearest, by which"
        " limits are held."
    )


def regions(rows: Sequence[Row]) -> Iterator[str]:
    """A table of the work in every region with prices."""
    if not rows:
        return
    yield from sheet(rows, columns.REGIONS).text()
    yield ""
    yield from wrap(
        "The same work in each region whose prices are known, on the cheapest option there. inputs: the part of USD "
        "for the transfer of inputs from a bucket in the file's region; an upload is free. Each region has quotas of "
        "its own."
    )


def batches(rows: Sequence[Row]) -> Iterator[str]:
    """A table of the work with the file's batch and with larger ones, if one of them is cheaper."""
    if not rows:
        return
    means = [row.mean_usd for row in rows]
    if min(means) > (1 - LEAST) * means[0]:
        yield "A larger batch, which more GPUs could share, would save nothing."
        return
    yield from sheet(rows, columns.BATCHES).text()
    yield ""
    yield from wrap(
        "The same tokens in larger batches, each on the cheapest option for it: more GPUs can share a step. This is a "
        "different training: it has fewer optimizer steps at the file's learning rate, and nobody has compared the "
        "losses."
    )


def ages(rows: Sequence[Row], today: date, most_days: int) -> Iterator[str]:
    """A line with the age of the prices of the ranked options; empty if no price is older than `most_days`."""
    days = sorted({(today - row.prepared.price.as_of).days for row in rows if row.ranked and row.prepared})
    if days and days[-1] > most_days:
        span = " to ".join(map(str, dict.fromkeys((days[0], days[-1]))))
        yield from wrap(f"These nodes' prices are {span} days old: `gpufleet prices refresh` reads new ones.")


def policy(comparison: Comparison) -> Iterator[str]:
    """Lines about the policy (spot until the slack runs out, then on demand) and its type, if there is a deadline."""
    if comparison.policy:
        plan, type_ = comparison.policy
        yield from wrap(f"With the deadline, on {type_}: {plan.sentence()}.")


def full_text(comparison: Comparison, today: date) -> str:
    """The whole comparison, section by section."""
    sections = (
        scenarios(comparison.listed),
        ranked(comparison.rows, comparison.frontier),
        regions(comparison.regions),
        batches(comparison.batches),
        ages(comparison.rows, today, comparison.definition.estimate.max_price_age_days),
        policy(comparison),
    )
    return "\n\n".join(filter(None, map("\n".join, sections)))


def _note(row: Row) -> str:
    work = in_phases(row.runtime, row.option.instance) if row.option and row.runtime else ""
    nearest = f"nearest: {row.nearest}" if row.nearest else ""
    parts = [part for part in (row.work.variant.note, work, row.reason, nearest) if part]
    if row.tokens and not row.reference:
        parts.append(f"{row.tokens / 1e6:,.0f} M tokens" if row.tokens >= 10_000_000 else f"{row.tokens:,} tokens")
    return "; ".join(parts)


def record(comparison: Comparison) -> dict[str, Any]:
    """Keys as documented in docs/compare.md."""
    front = {id(row) for row in comparison.frontier}
    return {
        "schema": 1,
        "stack": comparison.definition.name,
        "region": comparison.definition.fleet.region,
        "scenarios": [record_row(row) for row in comparison.listed],
        "options": [{**record_row(row), "frontier": id(row) in front} for row in comparison.rows],
        "deadline_policy": comparison.policy and asdict(comparison.policy[0]),
        "regions": [record_row(row) for row in comparison.regions],
        "batches": [record_row(row) for row in comparison.batches],
    }
