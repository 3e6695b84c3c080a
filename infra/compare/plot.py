"""The comparison as a picture: dollars against hours by the wall, p10 to p90 both ways, the frontier marked."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from gpufleet.infra.compare.rows import Row
from gpufleet.infra.errors import GpufleetError

SHOWN = 40  # the cheapest; more cannot be told apart


KINDS = (".png", ".svg")


def drawn(rows: Sequence[Row], frontier: Sequence[Row], title: str, kind: str) -> bytes:
    """The picture, of one of KINDS. Raises GpufleetError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it would choose a backend for a whole notebook
    except ImportError as error:
        raise GpufleetError(f"a picture needs matplotlib ({error}): pip install 'gpufleet[report]'") from error
    figure, into = Figure(figsize=(10, 6.2), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    fill(axes, rows, frontier, spot="#1f77b4", on_demand="#d62728", ink="black")
    axes.set_title(title)
    figure.savefig(into, dpi=130, format=kind.removeprefix("."))
    return into.getvalue()


def fill(axes: Any, rows: Sequence[Row], frontier: Sequence[Row], *, spot: str, on_demand: str, ink: str) -> None:
    """Draws into matplotlib's `axes`, in three colours."""
    from matplotlib import ticker

    able = [row for row in rows if row.ranked][:SHOWN]
    able += [row for row in frontier if row not in able]
    for market, colour in (("spot", spot), ("on-demand", on_demand)):
        own = [row for row in able if market == row.capacity and row.usd and row.wall_hours]
        if not own:
            continue
        hours, usd = [row.wall_hours for row in own if row.wall_hours], [row.usd for row in own if row.usd]
        axes.errorbar(
            [float(h.p50) for h in hours],
            [float(u.p50) for u in usd],
            xerr=[[float(h.p50 - h.p10) for h in hours], [float(h.p90 - h.p50) for h in hours]],
            yerr=[[float(u.p50 - u.p10) for u in usd], [float(u.p90 - u.p50) for u in usd]],
            fmt="o",
            color=colour,
            ecolor=colour,
            elinewidth=0.8,
            alpha=0.75,
            markersize=4,
            label=market,
        )
    edge = sorted(
        ((float(row.wall_hours.p50), float(row.usd.p50), row) for row in frontier if row.wall_hours and row.usd),
        key=lambda point: point[0],
    )
    axes.plot([x for x, _, _ in edge], [y for _, y, _ in edge], color=ink, linewidth=1, label="frontier")
    for x, y, row in edge:
        axes.annotate(f"{row.type} {row.capacity}", (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.set_xlabel("hours by the wall, waits for capacity included (p50, p10 to p90)")
    axes.set_ylabel("USD to finish (p50, p10 to p90)")
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend()
