"""Defines each column of a comparison once. The tables on a terminal, on a page and in a notebook, the JSON and the
public record select these columns by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from gpufleet.infra.compare.rows import Row
from gpufleet.infra.show.sheet import Column, Sheet, plain, record
from gpufleet.infra.text import hours

# For each table: the keys of its columns (`*` marks the frontier); then the columns that a narrow terminal leaves out,
# in this order.
ANSWER = ("* place market gpus_used hours_p50 usd_p50 usd_p90 cheaper marks", "gpus_used usd_p90 hours_p50")
STAGES = (f"scenario {ANSWER[0].removeprefix('* ')}", ANSWER[1])
SCENARIOS = (
    "scenario place market claim_h claim_usd hours_p50 hours_p90 usd_p50 usd_p90 basis marks",
    "claim_h claim_usd basis hours_p90 usd_p90",
)
RANKED = (
    "* place gpus gpus_used market hours_p50 hours_p90 usd_p50 usd_p90 mean cheaper dearest_usd free_usd"
    " interruptions_p50",
    "free_usd dearest_usd mean interruptions_p50 hours_p90 gpus gpus_used",
)
REGIONS = (
    "region place market hours_p50 usd_p50 usd_p90 dearest_usd inputs_usd marks",
    "inputs_usd dearest_usd usd_p90",
)
BATCHES = (
    "batch steps place gpus_used market hours_p50 usd_p50 usd_p90 dearest_usd basis marks",
    "dearest_usd steps basis usd_p90",
)
CHEAPER = ("* place market gpus gpus_used usd_p50 usd_p90 hours_p50 cheaper", "gpus usd_p90")
PAGE = ("place market gpus gpus_used usd_p50 usd_p90 wall_p50 wall_p90 beaten", "")
REFUSED = ("place market why nearest", "")
NOTEBOOK = ("* scenario place market gpus_used hours_p50 hours_p90 usd_p50 usd_p90 mean", "")


def sheet(rows: Sequence[Row], table: tuple[str, str], edge: Sequence[Row] = ()) -> Sheet:
    """One of the tables above, for these rows; `*` marks the rows in `edge`."""
    keys, spare = (words.split() for words in table)
    marked = {id(row) for row in edge}
    mark = Column("*", "", of=lambda row: "*" if id(row) in marked else "")
    return Sheet.build([mark if key == "*" else COLUMNS[key] for key in keys], rows, spare=spare)


def record_row(row: Row) -> dict[str, Any]:
    """One scenario or option, as an object with the keys documented in docs/compare.md."""
    return record(FIGURES, row)


def number(value: Decimal) -> str:
    """The number with two decimals, or with two digits if it is small."""
    return f"{value:.2f}" if value >= Decimal("0.1") else f"{float(value):.2g}"


def marks(row: Row) -> Iterator[str]:
    """Yields the marks that show a row's drawbacks."""
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


def _or_dash(form: str) -> Any:
    return lambda value: format(value, form) if value else "-"


def _part(key: str, head: str, unit: str, figure: str, part: str) -> Column:
    """The column with one quantile, or with the mean, of a quantity."""

    def value(row: Row) -> Decimal | None:
        whole = getattr(row, figure)
        return None if whole is None else getattr(whole, part)

    return Column(key, head, unit, 2, value)


# In the order of the JSON; tables for people show some of these columns.
FIGURES = (
    *map(Column, ("scenario", "region", "type", "capacity", "nodes", "reference", "tokens")),
    Column("steps", unit="steps", digits="{:,}".format),
    *map(Column, ("hours", "wall_hours", "usd")),
    Column("dearest_usd", "dear", "USD", number),
    Column("inputs_usd", "inputs", "USD", _or_dash(".2f")),
    Column("free_usd", "free", "USD", 2),
    *map(Column, ("fits", "launchable", "over_limit", "late", "basis")),
    Column("why", of=lambda row: row.reason),
    Column("nearest", "what would help"),
    Column("lost"),
    Column("claim", of=lambda row: plain(row.claim, "hours", "usd")),
    Column("gpus_used", "used", "GPUs", _or_dash(""), lambda row: row.ranks),
    Column("dataset", of=lambda row: row.dataset or None),
    Column("gpu_hours", "GPU-h", "h", hours, lambda row: row.billed_gpu_h),
    Column("gpu_hours_used", "used", "h", hours, lambda row: row.used_gpu_h),
    Column("compute_hours", "compute h", "h", hours, lambda row: row.compute_h, 6),
    Column("rates", of=lambda row: {rate.region: plain(rate, "on_demand", "spot") for rate in row.rates}),
    Column("interruptions", of=lambda row: row.interruptions and float(row.interruptions.mean), places=3),
    Column(
        "interruptions_p50", "stops", "times", of=lambda row: row.interruptions and round(float(row.interruptions.p50))
    ),
    Column("cheaper", "less", "share", "{:.0%}".format, places=3),
)
COLUMNS = {
    column.key: column
    for column in (
        *FIGURES,
        Column("batch", of=lambda row: row.scenario),
        Column("place", "type"),
        Column("gpus", "GPU"),
        Column("market", "capacity", of=lambda row: "" if row.reference else row.capacity),
        Column("claim_h", "claim h", "h", number, lambda row: row.claim.hours),
        Column("claim_usd", "USD", "USD", number, lambda row: row.claim.usd),
        _part("hours_p50", "h p50", "h", "hours", "p50"),
        _part("hours_p90", "h p90", "h", "hours", "p90"),
        _part("wall_p50", "hours p50", "h", "wall_hours", "p50"),
        _part("wall_p90", "p90", "h", "wall_hours", "p90"),
        _part("usd_p50", "USD p50", "USD", "usd", "p50"),
        _part("usd_p90", "USD p90", "USD", "usd", "p90"),
        _part("mean", "mean", "USD", "usd", "mean"),
        Column("marks", "", of=lambda row: ", ".join(marks(row))),
        Column("beaten", "", of=lambda row: "over a limit of the file" if row.over_limit else row.lost),
    )
}
