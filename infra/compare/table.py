"""A comparison as text: scenarios beside their claims, the ranked options; and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill.answer import figures_within
from gpufleet.infra.bill.record import plain
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.compare.columns import number, number_of_hours, sheet
from gpufleet.infra.compare.comparison import Comparison
from gpufleet.infra.compare.ranking import LEAST, SURE
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.risk import deadline
from gpufleet.infra.risk.deadline import DeadlinePlan
from gpufleet.infra.text import about_hours, table, wrap

WIDTH = 120
SAME = (
    "scenario", "region", "type", "capacity", "nodes", "reference", "tokens", "steps", "hours", "wall_hours", "usd",
    "dearest_usd", "inputs_usd", "free_usd", "fits", "launchable", "over_limit", "late", "basis", "why", "nearest",
    "lost",
)  # of a row, under the same name for programs  # fmt: skip
SHOWN = 10  # options of an answer
REGIONS = 4  # whose prices stand beside each other


def scenarios(rows: Sequence[Row]) -> str:
    """Each scenario of the file: what was claimed, what it comes to; then its compute in each region."""
    names = ("scenario", "type", "capacity", "claim h", "claim USD", "h p50", "h p90", "USD p50", "USD p90")
    found = sheet(rows, *names, "basis", "marks")
    lines = [
        *found.text("claim h", "claim USD", "basis", "h p90", "USD p90"),
        "",
        *wrap(
            "h and USD: node-hours and everything the bill counts, to the end, interruptions included, at the dearest"
            " zone, whatever the limits. basis: claim = somebody's word, target = a share of the roofline, measured,"
            " declared = as the file says, guessed = from either, of other GPUs."
        ),
        *wrap(_counted(rows)),
        *(line for row in rows if (text := _note(row)) for line in wrap(f"{row.scenario}: {text}")),
        "",
        *_rates([row for row in rows if row.rates]),
    ]
    return "\n".join(lines) + "\n"


def _rates(rows: Sequence[Row]) -> Iterator[str]:
    """The compute of each scenario at every region's prices."""
    if not rows:
        return
    regions = _shown_regions(rows)
    names = [known_regions()[region].short for region in regions]
    heads = ("scenario", "compute h", *(f"OD {n}" for n in names), *(f"spot {n}" for n in names), "GPU-h", "used")
    cells = []
    for row in rows:
        rates = {rate.region: rate for rate in row.rates}
        cells.append(
            (
                row.scenario,
                number_of_hours(row.compute_h),
                *(number(rates[region].on_demand) for region in regions),
                *(number(rates[region].spot) for region in regions),
                number_of_hours(row.billed_gpu_h),
                number_of_hours(row.used_gpu_h),
            )
        )
    yield from table(heads, cells, right=range(1, len(heads)))
    yield ""
    yield from wrap(
        "compute h: optimizer steps alone, or the hours a node is held; OD and spot: those hours at the region's"
        f" on-demand and median-zone spot price ({', '.join(map(' '.join, zip(names, regions, strict=True)))}: the"
        " file's, then those with the lowest; --json has every one). GPU-h: every GPU of the node, as billed (p50);"
        " used: those the job works on, without set-up and idling."
    )


def _shown_regions(rows: Sequence[Row]) -> list[str]:
    """The file's own region, and of the others those with the least compute dollars; what has no price comes last."""
    own, *others = (rate.region for rate in rows[0].rates)
    of_region = {region: [r for row in rows for r in row.rates if r.region == region] for region in others}

    def dollars(region: str) -> tuple[int, Decimal]:
        least = [min((usd for usd in (rate.on_demand, rate.spot) if usd), default=None) for rate in of_region[region]]
        return sum(usd is None for usd in least), sum((usd for usd in least if usd), Decimal(0))

    return [own, *sorted(others, key=dollars)[: REGIONS - 1]]


def _counted(rows: Sequence[Row]) -> str:
    """Whose counts the rows stand on; nothing where no dataset is prepared."""
    prepared = list(dict.fromkeys(row.dataset for row in rows if row.dataset))
    if not prepared:
        return ""
    own = [row.scenario for row in rows if not row.dataset and not row.reference]
    but = f", but for {', '.join(own)}" if own else ""
    return f"Counted from {', '.join(prepared)} as prepared, not as job.parameters.data expects{but}."


def answer(found: Comparison, command: str, today: date) -> Iterator[str]:
    """In at most twenty lines: what does the chosen work for least, the ten cheapest, and what to do. `command` shows
    all options, scenarios, regions and batches.
    """
    definition, able = found.definition, [row for row in found.own_rows if row.ranked]
    name = definition.name if found.scenario in ("", definition.name) else f"{definition.name}, {found.scenario}"
    if not able:
        yield from wrap(f"{name}: no type of the catalog can run this in {definition.fleet.region}.")
        for row in found.own_rows[:SHOWN]:
            yield from wrap(
                f"  {row.place} {row.capacity}: {row.why}{f'; {row.nearest}' if row.nearest else ''}", indent=4
            )
    else:
        fitting = [row for row in able if not row.over_limit and row.late <= SURE]
        best = (fitting or able)[0]
        own = [row for row in found.listed if row.scenario == found.scenario]
        same = [row for row in able for mine in own if (row.place, row.capacity) == (mine.place, mine.capacity)]
        own = [row for row in same or own if row.usd is not None]
        least = "costs least" if best is able[0] else "costs least of what keeps the limits"
        yield from wrap(f"{name}: {_figures(best)}, {least}{_against(best, own)}.")
        names = ("*", "type", "capacity", "used", "h p50", "USD p50", "USD p90", "less", "marks")
        shown = sheet(able[:SHOWN], *names, edge=found.own_frontier)
        yield from shown.text("used", "USD p90", "h p50")
        yield from wrap("* nothing is cheaper and sooner; less: how likely it costs less than the file's own fleet")
        if not own or (own[0].place, own[0].capacity) != (best.place, best.capacity):
            yield from wrap(
                f"To take {best.type}, write fleet.instance_types: [{best.type}] and fleet.capacity: {best.capacity}"
                f" into {definition.source.name}, then run `gpufleet doctor {definition.argument} --pin`."
            )
    yield from ages(found.rows, today, definition.estimate.max_price_age_days).splitlines()
    if found.policy:
        yield from policy(*found.policy).splitlines()
    more = len(able) - SHOWN
    others = f"{more} more can be run. " if more > 0 else ""
    yield from wrap(f"{others}Every option, scenario and region: `{command} --all`")


def _figures(row: Row) -> str:
    assert row.usd is not None  # of a ranked one
    assert row.wall_hours is not None
    low, middle, high = figures_within(row.usd)
    usd = f"about {middle} USD ({low} to {high} in eight runs of ten)"
    return f"{row.place} {row.capacity.replace('-', ' ')}, {usd} and {about_hours(row.wall_hours.p50)} h"


def _against(best: Row, own: Sequence[Row]) -> str:
    """What the file's own fleet costs beside it."""
    if not own:
        return ""
    if (own[0].place, own[0].capacity) == (best.place, best.capacity):
        return ", as the file has it"
    assert own[0].usd is not None
    return (
        f"; the file's {own[0].place} {own[0].capacity.replace('-', ' ')} costs about {figures_within(own[0].usd)[1]}"
    )


def ranked(rows: Sequence[Row], frontier: Sequence[Row]) -> str:
    """Each option on a line of its own, by work, the cheapest first; below it why it is not the first, or cannot be
    run.
    """
    bases = len({row.basis for row in rows if row.ranked}) > 1  # what is guessed says so
    order = list(dict.fromkeys(row.scenario for row in rows))
    picked = sorted(rows, key=lambda row: order.index(row.scenario))
    names = ("*", "type", "GPU", "used", "capacity", "h p50", "h p90", "USD p50", "USD p90", "mean", "less", "dear")
    found = sheet(picked, *names, "free", "stops", *(("basis",) if bases else ()), edge=frontier)
    head, rule, *shown_rows = found.text("free", "dear", "mean", "stops", "h p90", "GPU", "used")
    lines = [head, rule]
    for index, (row, line) in enumerate(zip(picked, shown_rows, strict=True)):
        if index == 0 or row.scenario != picked[index - 1].scenario:
            lines += wrap(f"the work of {row.scenario}:")
        lines.append(line)
        if why := row.lost + (" (over limit)" if row.over_limit else ""):
            lines += textwrap.wrap(why.strip(), WIDTH, initial_indent="     ", subsequent_indent="     ")
    lines.append("")
    lines += wrap(
        "* nothing does the same work for fewer mean dollars in fewer hours by the wall. Below an option: why it is not"
        " the first of its work. less: probability that it costs less than the file's own fleet. free: mean dollars of"
        " interrupted first hours, which AWS does not charge, already left out of USD. stops: interruptions, p50."
        " USD is at what a fleet that picks by price may expect over the zones; dear: p50 in the dearest, by which"
        " limits are held."
    )
    return "\n".join(lines) + "\n"


def regions(rows: Sequence[Row]) -> str:
    """A table of the work in every region with prices."""
    if not rows:
        return ""
    names = ("region", "type", "capacity", "h p50", "USD p50", "USD p90", "dear", "inputs", "marks")
    found = sheet(rows, *names)
    said = (
        "The same work in each region whose prices are known, on what costs least there. inputs: of USD, what brings"
        " those in a bucket from the file's region; an upload is free. Quotas are each region's own."
    )
    return "\n".join([*found.text("inputs", "dear", "USD p90"), "", *wrap(said)]) + "\n"


def batches(rows: Sequence[Row]) -> str:
    """A table of the work with the file's batch and with larger ones, where one of these saves anything."""
    means = [row.usd.mean for row in rows if row.usd]
    if not rows or min(means) > (1 - LEAST) * means[0]:
        return "A larger batch, which more GPUs could share, would save nothing.\n" if rows else ""
    names = ("batch", "steps", "type", "used", "capacity", "h p50", "USD p50", "USD p90", "dear", "basis", "marks")
    found = sheet(rows, *names)
    said = (
        "The same tokens in larger batches, each on what costs least for it: more GPUs can share a step. It is another"
        " training: fewer optimizer steps, at the file's learning rate, and losses that nobody has compared."
    )
    return "\n".join([*found.text("dear", "steps", "basis", "USD p90"), "", *wrap(said)]) + "\n"


def ages(rows: Sequence[Row], today: date, most_days: int) -> str:
    """How old the prices of the ranked nodes are, where one is older than `most_days`; else nothing."""
    days = [(today - row.prepared.price.as_of).days for row in rows if row.ranked and row.prepared]
    if max(days, default=0) <= most_days:
        return ""
    span = f"{min(days)} to {max(days)}" if min(days) < max(days) else f"{max(days)}"
    return "\n".join(wrap(f"These nodes' prices are {span} days old: `gpufleet prices refresh` reads new ones.")) + "\n"


def policy(found: DeadlinePlan, type_: str) -> str:
    """Spot until slack runs out, then on demand, on that type."""
    return "\n".join(wrap(f"With the deadline, on {type_}: {found.sentence()}.")) + "\n"


def _note(row: Row) -> str:
    parts = [part for part in (row.note, row.work, row.why, f"nearest: {row.nearest}" if row.nearest else "") if part]
    if row.tokens and not row.reference:
        parts.append(f"{row.tokens / 1e6:,.0f} M tokens" if row.tokens >= 10_000_000 else f"{row.tokens:,} tokens")
    return "; ".join(parts)


def record(
    definition: StackDefinition,
    listed: list[Row],
    rows: list[Row],
    edge: list[Row],
    switch: deadline.DeadlinePlan | None,
) -> dict[str, Any]:
    """Keys as documented in docs/compare.md."""
    front = {id(row) for row in edge}
    return {
        "schema": 1,
        "stack": definition.name,
        "region": definition.fleet.region,
        "scenarios": [record_row(row) for row in listed],
        "options": [{**record_row(row), "frontier": id(row) in front} for row in rows],
        "deadline_policy": None if switch is None else asdict(switch),
    }


def record_row(row: Row) -> Any:
    """One scenario or option, as an object."""
    return plain(row, *SAME) | {
        "claim": plain(row.claim, "hours", "usd"),
        "gpus_used": row.ranks,
        "dataset": row.dataset or None,
        "gpu_hours": plain(row.billed_gpu_h),
        "gpu_hours_used": plain(row.used_gpu_h),
        "compute_hours": plain(row.compute_h, digits=6),
        "rates": {rate.region: plain(rate, "on_demand", "spot") for rate in row.rates},
        "interruptions": None if row.interruptions is None else round(float(row.interruptions.mean), 3),
        "interruptions_p50": None if row.interruptions is None else round(float(row.interruptions.p50)),
        "cheaper": plain(row.cheaper, digits=3),
    }
