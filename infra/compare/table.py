"""A comparison as text: scenarios beside their claims, the ranked options; and for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill.record import quantiles
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.compare.ranking import LEAST
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.risk import deadline
from gpufleet.infra.risk.deadline import DeadlinePlan
from gpufleet.infra.text import hours, table, wrap

WIDTH = 120
REGIONS = 4  # whose prices stand beside each other
BEST = 3  # options of each work, when there are many
_REASONS = 12  # groups of losers that are named


def scenarios(rows: Sequence[Row]) -> str:
    """Each scenario of the file: what was claimed, what it comes to; then its compute in each region."""
    heads = ("scenario", "type", "capacity", "claim h", "USD", "h p50", "h p90", "USD p50", "USD p90", "basis", "")
    cells = [
        (
            row.scenario,
            row.place,
            "" if row.reference else row.capacity,
            _number(row.claim.hours),
            _number(row.claim.usd),
            *_pair(row.hours),
            *_pair(row.usd),
            row.basis,
            ", ".join(_marks(row)),
        )
        for row in rows
    ]
    lines = [
        *table(heads, cells, right=range(3, 9)),
        "",
        *_wrap(
            "h and USD: node-hours and everything the bill counts, to the end, interruptions included, at the dearest"
            " zone, whatever the limits. basis: claim = somebody's word, target = a share of the roofline, measured,"
            " declared = as the file says, guessed = from either, of other GPUs."
        ),
        *_wrap(_counted(rows)),
        *(line for row in rows if (text := _note(row)) for line in _wrap(f"{row.scenario}: {text}")),
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
                _hours(row.compute_h),
                *(_number(rates[region].on_demand) for region in regions),
                *(_number(rates[region].spot) for region in regions),
                _hours(row.billed_gpu_h),
                _hours(row.used_gpu_h),
            )
        )
    yield from table(heads, cells, right=range(1, len(heads)))
    yield ""
    yield from _wrap(
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


def ranked(rows: Sequence[Row], *, shown: int | None, frontier: Sequence[Row]) -> str:
    """The options that can be run, by work, the cheapest first, then why the others cannot. At most `shown`, and of one
    work no more than its share, so that small work does not hide the rest; None: each on its own line.
    """
    able = [row for row in rows if row.ranked]
    works = len({row.scenario for row in able})
    edge = {id(row) for row in frontier}
    bases = len({row.basis for row in able}) > 1  # what is guessed says so
    heads = (
        "", "type", "GPU", "used", "capacity", "h p50", "h p90", "USD p50", "USD p90", "mean", "less", "dear", "free",
        "stops", *(("basis",) if bases else ()),
    )  # fmt: skip
    picked = list(rows if shown is None else _share(able, max(BEST, shown // max(1, works))))
    order = list(dict.fromkeys(row.scenario for row in picked))
    picked.sort(key=lambda row: order.index(row.scenario))
    cells = [
        (
            "*" if id(row) in edge else "",
            row.place,
            row.gpus,
            str(row.ranks) if row.ranks else "-",
            row.capacity,
            *_pair(row.hours),
            *_pair(row.usd),
            f"{row.usd.mean:.2f}" if row.usd else "-",
            "-" if row.cheaper is None else f"{row.cheaper:.0%}",
            f"{row.dearest_usd:.2f}" if row.dearest_usd is not None else "-",
            f"{row.free_usd:.2f}" if row.free_usd is not None else "-",
            "-" if row.interruptions is None else f"{row.interruptions.p50:.0f}",
            *((row.basis,) if bases else ()),
        )
        for row in picked
    ]
    head, rule, *shown_rows = table(heads, cells, right=(3, *range(5, 14)))
    lines = [head, rule]
    for index, (row, line) in enumerate(zip(picked, shown_rows, strict=True)):
        if index == 0 or row.scenario != picked[index - 1].scenario:
            lines += _wrap(f"the work of {row.scenario}:")
        lines.append(line)
        if why := row.lost + (" (over limit)" if row.over_limit else ""):
            lines += textwrap.wrap(why.strip(), WIDTH, initial_indent="     ", subsequent_indent="     ")
    lines.append("")
    lines += _wrap(
        "* nothing does the same work for fewer mean dollars in fewer hours by the wall. Below an option: why it is not"
        " the first of its work. less: probability that it costs less than the file's own fleet. free: mean dollars of"
        " interrupted first hours, which AWS does not charge, already left out of USD. stops: interruptions, p50."
        " USD is at what a fleet that picks by price may expect over the zones; dear: p50 in the dearest, by which"
        " limits are held."
    )
    if shown is not None:
        if len(able) > len(picked):
            # Where all rows are of one scenario, --scenario would show them again.
            one = "--scenario NAME shows more of one scenario, " if works > 1 else ""
            lines += _wrap(f"{len(able) - len(picked)} more options could be run; {one}--all shows every one.")
        lines += _losers([row for row in rows if not row.ranked])
    return "\n".join(lines) + "\n"


def regions(rows: Sequence[Row]) -> str:
    """A table of the work in every region with prices."""
    if not rows:
        return ""
    heads = ("region", "type", "capacity", "h p50", "USD p50", "USD p90", "dear", "inputs", "")
    cells = [
        (
            row.region,
            row.place,
            row.capacity,
            _pair(row.hours)[0],
            *_pair(row.usd),
            _number(row.dearest_usd),
            f"{row.inputs_usd:.2f}" if row.inputs_usd else "-",
            ", ".join(_marks(row)),
        )
        for row in rows
    ]
    said = (
        "The same work in each region whose prices are known, on what costs least there. inputs: of USD, what brings"
        " those in a bucket from the file's region; an upload is free. Quotas are each region's own."
    )
    return "\n".join([*table(heads, cells, right=range(3, 8)), "", *_wrap(said)]) + "\n"


def batches(rows: Sequence[Row]) -> str:
    """A table of the work with the file's batch and with larger ones, where one of these saves anything."""
    means = [row.usd.mean for row in rows if row.usd]
    if not rows or min(means) > (1 - LEAST) * means[0]:
        return "A larger batch, which more GPUs could share, would save nothing.\n" if rows else ""
    heads = ("batch", "steps", "type", "used", "capacity", "h p50", "USD p50", "USD p90", "dear", "basis", "")
    cells = [
        (
            row.scenario,
            f"{row.steps:,}",
            row.type,
            str(row.ranks),
            row.capacity,
            _pair(row.hours)[0],
            *_pair(row.usd),
            _number(row.dearest_usd),
            row.basis,
            ", ".join(_marks(row)),
        )
        for row in rows
    ]
    said = (
        "The same tokens in larger batches, each on what costs least for it: more GPUs can share a step. It is another"
        " training: fewer optimizer steps, at the file's learning rate, and losses that nobody has compared."
    )
    return "\n".join([*table(heads, cells, right=(1, 3, *range(5, 9))), "", *_wrap(said)]) + "\n"


def ages(rows: Sequence[Row], today: date, most_days: int) -> str:
    """How old the prices of the ranked nodes are, where one is older than `most_days`; else nothing."""
    days = [(today - row.prepared.price.as_of).days for row in rows if row.ranked and row.prepared]
    if max(days, default=0) <= most_days:
        return ""
    span = f"{min(days)} to {max(days)}" if min(days) < max(days) else f"{max(days)}"
    return (
        "\n".join(_wrap(f"These nodes' prices are {span} days old: `gpufleet prices refresh` reads new ones.")) + "\n"
    )


def policy(found: DeadlinePlan, type_: str) -> str:
    """Spot until slack runs out, then on demand, on that type."""
    return "\n".join(_wrap(f"With the deadline, on {type_}: {found.sentence()}.")) + "\n"


def _share(rows: Sequence[Row], each: int) -> list[Row]:
    """The first `each` of every work, in order."""
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[row.scenario] += 1
        if seen[row.scenario] <= each:
            kept.append(row)
    return kept


def _losers(rows: Sequence[Row]) -> Iterator[str]:
    """Grouped by reason, the commonest first."""
    if not rows:
        return
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        reason = row.lost.replace(f"{row.type}: ", "").replace(row.type, "it")
        groups.setdefault(reason, Counter())[row.place] += 1
    yield f"Cannot be run ({len(rows)} options):"
    for reason, types in sorted(groups.items(), key=lambda pair: -sum(pair[1].values()))[:_REASONS]:
        names = ", ".join(sorted(types))
        yield from _wrap(f"  {sum(types.values())} x {textwrap.shorten(names, 60, placeholder=' ...')}: {reason}", 4)
    if len(groups) > _REASONS:
        yield f"  and {len(groups) - _REASONS} more reasons; --all shows each"


def _marks(row: Row) -> Iterator[str]:
    if row.reference:
        yield "reference"
        return
    if not row.launchable:
        yield "NOT LAUNCHABLE"
    if not row.fits:
        yield "DOES NOT FIT"
    if row.over_limit:
        yield "over limit"
    if row.late >= 0.005:
        yield f"late in {row.late:.0%}"


def _note(row: Row) -> str:
    parts = [part for part in (row.note, row.work, row.why, f"nearest: {row.nearest}" if row.nearest else "") if part]
    if row.tokens and not row.reference:
        parts.append(f"{row.tokens / 1e6:,.0f} M tokens" if row.tokens >= 10_000_000 else f"{row.tokens:,} tokens")
    return "; ".join(parts)


def _pair(values: Quantiles | None) -> tuple[str, str]:
    return ("-", "-") if values is None else (f"{values.p50:.2f}", f"{values.p90:.2f}")


def _number(value: Decimal | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= Decimal("0.1") else f"{float(value):.2g}"


def _hours(value: float | None) -> str:
    return "-" if value is None else hours(value)


def _wrap(text: str, indent: int = 2) -> list[str]:
    return wrap(text, WIDTH, indent)


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


def record_row(row: Row) -> dict[str, Any]:
    """One scenario or option."""
    return {
        "scenario": row.scenario,
        "region": row.region,
        "type": row.type,
        "capacity": row.capacity,
        "nodes": row.nodes,
        "gpus_used": row.ranks,
        "claim": {
            "hours": None if row.claim.hours is None else str(row.claim.hours),
            "usd": None if row.claim.usd is None else str(row.claim.usd),
        },
        "reference": row.reference,
        "tokens": row.tokens,
        "steps": row.steps,
        "dataset": row.dataset or None,
        "gpu_hours": None if row.billed_gpu_h is None else round(row.billed_gpu_h, 4),
        "gpu_hours_used": None if row.used_gpu_h is None else round(row.used_gpu_h, 4),
        "compute_hours": None if row.compute_h is None else round(row.compute_h, 6),
        "rates": {
            rate.region: {
                "on_demand": None if rate.on_demand is None else str(rate.on_demand),
                "spot": None if rate.spot is None else str(rate.spot),
            }
            for rate in row.rates
        },
        "hours": row.hours and quantiles(row.hours),
        "wall_hours": row.wall_hours and quantiles(row.wall_hours),
        "usd": row.usd and quantiles(row.usd),
        "dearest_usd": None if row.dearest_usd is None else str(row.dearest_usd),
        "inputs_usd": str(row.inputs_usd),
        "free_usd": None if row.free_usd is None else str(row.free_usd),
        "interruptions": None if row.interruptions is None else round(float(row.interruptions.mean), 3),
        "interruptions_p50": None if row.interruptions is None else round(float(row.interruptions.p50)),
        "fits": row.fits,
        "launchable": row.launchable,
        "over_limit": row.over_limit,
        "cheaper": None if row.cheaper is None else round(row.cheaper, 3),
        "late": round(row.late, 4),
        "basis": row.basis,
        "why": row.why,
        "nearest": row.nearest,
        "lost": row.lost,
    }
