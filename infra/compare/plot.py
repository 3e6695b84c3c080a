"""Draws the comparison: one option per line, with its dollars and its hours from p10 to p90."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from gpufleet.infra.compare.rows import Row
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.market import WAYS

SHOWN = 20  # number of the cheapest options that are shown, in addition to those of the frontier
LINE_IN = 0.19  # distance in inches from one option to the next
LOG_FROM = 6  # if the largest figure is this many times the smallest, the scale is logarithmic
CAPTION = "dot: p50, line: p10 to p90; bold: nothing is cheaper and sooner"


KINDS = (".png", ".svg")


def drawn(rows: Sequence[Row], frontier: Sequence[Row], title: str, kind: str) -> bytes:
    """The picture's bytes; `kind` is one of KINDS. Raises GpufleetError if matplotlib is not installed."""
    try:
        # pyplot is not used, because it would set the drawing backend of a user's notebook
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GpufleetError(f"a picture needs matplotlib ({error}): pip install 'gpufleet[report]'") from error
    figure, into = Figure(figsize=(10, height(rows, frontier)), layout="constrained"), io.BytesIO()
    fill(figure, rows, frontier, {"spot": "#1f77b4", "on-demand": "#c03a2b"})
    figure.suptitle(f"{title}\n{CAPTION}", fontsize=11)
    figure.savefig(into, dpi=130, format=kind.removeprefix("."))
    return into.getvalue()


def height(rows: Sequence[Row], frontier: Sequence[Row]) -> float:
    """The picture's height in inches."""
    return 1.2 + LINE_IN * len(_shown(rows, frontier))


def fill(figure: Any, rows: Sequence[Row], frontier: Sequence[Row], shades: Mapping[str, str]) -> None:
    """Draws into matplotlib's `figure`: names in the shade of their market, then dollars, then hours."""
    shown, edge = _shown(rows, frontier), {id(row) for row in frontier}
    colours = [shades[WAYS[row.capacity].by_the_hour] for row in shown]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, unit, values in (
        (panels[0], "USD to finish", [row.usd for row in shown]),
        (panels[1], "wall-clock hours", [row.wall_hours for row in shown]),
    ):
        for place, (row, quantiles, colour) in enumerate(zip(shown, values, colours, strict=True)):
            assert quantiles is not None  # for mypy: `_shown` has no other rows
            strength = {"color": colour, "alpha": 1.0 if id(row) in edge else 0.45}
            axes.plot([float(quantiles.p10), float(quantiles.p90)], [place] * 2, lw=2, **strength)
            axes.plot([float(quantiles.p50)], [place], "o", ms=5, **strength)
        _scale(axes, [float(end) for quantiles in values if quantiles for end in (quantiles.p10, quantiles.p90)])
        axes.set_xlabel(unit)
        axes.grid(visible=True, axis="x", linewidth=0.4)
        axes.grid(visible=False, axis="y")
    names = panels[0].set_yticks(range(len(shown)), [f"{row.place} {row.capacity}" for row in shown])
    for tick, row, colour in zip(names, shown, colours, strict=True):
        tick.label1.set(color=colour, fontsize=8, fontweight="bold" if id(row) in edge else "normal")
    panels[0].invert_yaxis()


def _shown(rows: Sequence[Row], frontier: Sequence[Row]) -> list[Row]:
    """The options of the frontier and the cheapest other options, by dollars."""
    able = [row for row in rows if row.ranked and row.usd and row.wall_hours]
    chosen = {id(row): row for row in [*able[:SHOWN], *frontier]}
    return sorted(chosen.values(), key=lambda row: row.usd.p50 if row.usd else 0)


def _scale(axes: Any, figures: Sequence[float]) -> None:
    """Makes the axis begin at 0 if the values have similar sizes, and makes it logarithmic otherwise. Its labels are
    plain numbers.
    """
    from matplotlib import ticker

    ratio = max(figures) / min(figures)
    if ratio < LOG_FROM:
        axes.set_xlim(0, 1.05 * max(figures))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    else:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3) if ratio < 50 else (1,)))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
