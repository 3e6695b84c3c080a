"""A comparison as a page: dollars against hours, the frontier, and every option with what it costs."""

from __future__ import annotations

from collections.abc import Iterable

from gpufleet.infra.compare import plot
from gpufleet.infra.compare.columns import sheet
from gpufleet.infra.compare.comparison import Comparison
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.report import charts, page


def html(found: Comparison) -> str:
    """The page."""
    definition, frontier = found.definition, found.own_frontier
    return page.page(
        f"{definition.name}, {found.scenario}: cost against time",
        f"{definition.fleet.region}; p50, and p10 to p90 in the picture; hours by the wall, with waits for capacity",
        (
            "" if charts.drawable() else page.paragraph(charts.LACKING),
            page.charts([("The cheapest that can be run, and the frontier", _picture(found))]),
            page.section("Frontier: nothing is cheaper and sooner", _options(frontier)),
            page.section("All options for this work", _options(row for row in found.own_rows if row.usd)),
            page.section("What cannot be run or priced", _refused(found.own_rows)),
        ),
    )


def _picture(found: Comparison) -> str:
    if not charts.drawable():
        return ""
    with charts.style():
        figure, axes = charts.figure(height=4.2)
        colours = {"spot": "blue", "on_demand": "orange", "ink": "ink"}
        shades = {name: charts.SENTINELS[colour] for name, colour in colours.items()}
        plot.fill(axes, found.own_rows, found.own_frontier, **shades)
        return charts.svg(figure, found.title)


def _options(rows: Iterable[Row]) -> str:
    names = ("type", "capacity", "GPU", "used", "USD p50", "USD p90", "wall p50", "wall p90", "lost")
    found = sheet([row for row in rows if row.usd and row.wall_hours], *names)
    return page.table(found.heads, found.rows, right=found.right)


def _refused(rows: Iterable[Row]) -> str:
    found = sheet([row for row in rows if not row.usd], "type", "capacity", "why", "nearest")
    return page.table(found.heads, found.rows)
