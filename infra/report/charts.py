"""Charts as SVG in the page's own colours: matplotlib draws, and each of its colours becomes one that the page names.

Small on purpose: at the width of a telephone the text keeps its size.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any

from gpufleet.infra.report.page import COLOURS

LACKING = "Its charts need matplotlib: pip install 'gpufleet[report]'"
SIZE = (5.2, 2.9)  # inches at 72 points: as wide as a telephone
POINTS = 400  # of one line: more cannot be told apart
COLOUR_CYCLE = ("blue", "orange", "green", "purple")
# What matplotlib is told, and looked for again in what it wrote.
SENTINELS = {name: f"#0102{number:02x}" for number, name in enumerate(COLOURS)}

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line of a chart; `dots`: points alone. Points without a figure are left out by the caller."""

    name: str
    points: Sequence[Point]
    colour: str
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A moment to be seen in a chart over time or steps."""

    at: float
    name: str
    colour: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A stretch of a lane."""

    lane: int
    begin: float
    end: float
    kind: str


def lines(
    found: Sequence[Series], *, x: str, y: str, marks: Sequence[Mark] = (), level: tuple[float, str] | None = None
) -> str:
    """Lines over `x`; `level`: a bound, and what it is. Empty without a point, as all are without matplotlib."""
    found = [line for line in found if line.points]
    if not found or not drawable():
        return ""
    with style():
        drawn, axes = figure()
        for line in found:
            xs, ys = zip(*thinned(line.points), strict=True)
            shape = {"ls": "", "marker": "o", "ms": 4} if line.dots or len(xs) == 1 else {"lw": 1.6}
            axes.plot(xs, ys, color=SENTINELS[line.colour], label=line.name, **shape)
        if min(y for line in found for _, y in line.points) == 0:  # nothing is below none
            axes.set_ylim(bottom=0)
        for mark in marks:
            axes.axvline(mark.at, color=SENTINELS[mark.colour], lw=1, ls=(0, (4, 2)))
        named: dict[str, str] = {mark.name: mark.colour for mark in marks}
        for name, colour in named.items():
            axes.plot([], [], color=SENTINELS[colour], lw=1, ls=(0, (4, 2)), label=name)
        if level:
            axes.axhline(level[0], color=SENTINELS["red"], lw=1, label=level[1])
        if len(found) + len(named) + bool(level) > 1:
            axes.legend(loc="best")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        return svg(drawn, f"{y} over {x}")


def unit_of(seconds: float) -> tuple[str, float]:
    """In what a stretch of time is told, and how many seconds that has."""
    return ("hours", 3600.0) if seconds >= 7200 else ("minutes", 60.0) if seconds >= 180 else ("seconds", 1.0)


def steps_to(start: tuple[str, float], changes: Mapping[str, float], end: tuple[str, float], *, unit: str) -> str:
    """From one sum to another by what lies between: bars that begin where the one before ends."""
    if not drawable():
        return ""
    with style():
        drawn, axes = figure()
        names, at = [start[0], *changes, end[0]], start[1]
        axes.bar(0, start[1], color=SENTINELS["blue"])
        for number, change in enumerate(changes.values(), start=1):
            axes.bar(number, change, bottom=at, color=SENTINELS["red" if change > 0 else "green"])
            at += change
        axes.bar(len(names) - 1, end[1], color=SENTINELS["purple"])
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel(unit)
        return svg(drawn, f"from {start[0]} to {end[0]}")


def lanes(names: Sequence[str], bars: Sequence[Bar], marks: Sequence[tuple[int, float, str]], *, x: str) -> str:
    """A lane per name with stretches of `kind`, by KINDS; `marks`: moments, as (lane, when, kind)."""
    if not drawable():
        return ""
    with style():
        drawn, axes = figure(height=1.1 + 0.28 * max(2, len(names)))
        for bar in bars:
            axes.barh(bar.lane, max(0.0, bar.end - bar.begin), left=bar.begin, height=0.6, color=_kind(bar.kind))
        for lane, at, kind in marks:
            shape = {"marker": "|"} if kind == "save" else {"marker": "X", "mec": SENTINELS["back"]}
            axes.plot([at], [lane], ms=7, color=_kind(kind), ls="", **shape)
        for kind in dict.fromkeys([*(bar.kind for bar in bars), *(kind for _, _, kind in marks)]):
            axes.plot([], [], marker="s", ls="", color=_kind(kind), label=kind)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x)
        drawn.legend(loc="outside upper left", ncols=3)
        return svg(drawn, "nodes over time")


KINDS = {
    **{"start": "grey", "training": "blue", "after a notice": "orange", "gone": "red"},
    **{"waiting for a node": "line", "save": "green"},
}


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about POINTS of them, first and last among them: the middle one of each stretch by height."""
    if len(points) <= POINTS:
        return list(points)
    size = -(-(len(points) - 2) // (POINTS - 2))
    inner = [points[at : min(at + size, len(points) - 1)] for at in range(1, len(points) - 1, size)]
    return [points[0], *(sorted(each, key=lambda p: p[1])[len(each) // 2] for each in inner), points[-1]]


def _kind(kind: str) -> str:
    return SENTINELS[KINDS[kind]]


def drawable() -> bool:
    """Whether matplotlib is there; without it a page has no charts, and says so with LACKING."""
    return find_spec("matplotlib") is not None


def style() -> AbstractContextManager[Any]:
    import matplotlib as mpl

    ink, faint, line = (SENTINELS[name] for name in ("ink", "faint", "line"))
    return mpl.rc_context(
        {
            **{"svg.fonttype": "none", "font.size": 9, "text.color": ink, "axes.labelcolor": faint},
            **{"xtick.color": line, "ytick.color": line, "xtick.labelcolor": faint, "ytick.labelcolor": faint},
            **{"axes.edgecolor": line, "axes.facecolor": "none", "axes.grid": True, "grid.color": line},
            **{"grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False},
            **{"legend.frameon": False, "legend.fontsize": 8, "svg.hashsalt": "gpufleet"},
        }
    )


def figure(height: float = SIZE[1]) -> tuple[Any, Any]:
    """matplotlib's figure and its axes, inside of `style`."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(SIZE[0], height), layout="constrained")
    return drawn, drawn.subplots()


def svg(figure: Any, name: str) -> str:
    """The figure's SVG element, in the page's colours and its font."""
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font: \1 system-ui, sans-serif", text)
    for colour, sentinel in SENTINELS.items():
        text = text.replace(sentinel, f"var(--{colour})")
    return text
