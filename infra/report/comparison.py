"""Writes a comparison as a page: dollars against hours, the frontier, and every option with its cost."""

from __future__ import annotations

from collections.abc import Iterable

from gpufleet.infra.compare import columns, plot
from gpufleet.infra.compare.columns import sheet
from gpufleet.infra.compare.comparison import Comparison
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.report import charts, page
from gpufleet.infra.show.html import paragraph


def html(comparison: Comparison) -> str:
    frontier = comparison.own_frontier
    return page.page(
        comparison.title,
        "wall-clock hours: with waits for capacity",
        (
            "" if charts.drawable() else paragraph(charts.LACKING),
            page.charts([(f"The cheapest that can be run ({plot.CAPTION})", _picture(comparison))]),
            page.section("Frontier: nothing is cheaper and sooner", _options(frontier)),
            page.section("All options for this work", _options(row for row in comparison.own_rows if row.usd)),
            page.section("What cannot be run or priced", _refused(comparison.own_rows)),
        ),
    )


def _picture(comparison: Comparison) -> str:
    if not charts.drawable():
        return ""
    with charts.style():
        figure = charts.figure(plot.height(comparison.own_rows, comparison.own_frontier))
        shades = {"spot": charts.SENTINELS["blue"], "on-demand": charts.SENTINELS["orange"]}
        plot.fill(figure, comparison.own_rows, comparison.own_frontier, shades)
        return charts.svg(figure, comparison.title)


def _options(rows: Iterable[Row]) -> str:
    return page.table(sheet([row for row in rows if row.usd and row.wall_hours], columns.PAGE))


def _refused(rows: Iterable[Row]) -> str:
    return page.table(sheet([row for row in rows if not row.usd], columns.REFUSED))
