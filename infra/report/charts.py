"""Draws charts as SVG in the page's colours: matplotlib draws, and then each of its colours is replaced by a named
colour of the page. Charts are small, so that their text can be read at the width of a phone.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any

from gpufleet.infra.report.page import COLOURS

LACKING = "Its charts need matplotlib: pip install 'gpufleet[report]'"
SIZE = (5.2, 2.9)  # width and height in inches of 72 points; a phone is as wide
POINTS = 400  # the most points of a line, because more could not be distinguished
COLOUR_CYCLE = ("blue", "orange", "green", "purple")
# The colours with which matplotlib draws. They are replaced in its output.
SENTINELS = {name: f"#0102{number:02x}" for number, name in enumerate(COLOURS)}

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line of a chart; if `dots`, only points. The caller leaves out points without a value. The name may be
    empty.
    """

    name: str
    points: Sequence[Point]
    colour: str
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A moment to be marked in a chart over time or steps."""

    at: float
    name: str
    colour: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A part of a lane, from one time to another."""

    lane: int
    begin: float
    end: float
    kind: str


def lines(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    marks: Sequence[Mark] = (),
    level: tuple[float, str] | None = None,
    from_zero: bool = False,
) -> str:
    """Lines over `x`, each with its name at its end if there are several. `level`: a bound and its name. Returns '' if
    there are no points, or matplotlib is not installed.
    """
    series = [line for line in series if line.points]
    if not series or not drawable():
        return ""
    with style():
        drawn = figure()
        axes = drawn.subplots()
        ends = [(level[0], level[1], "red")] if level else []
        for line in series:
            xs, ys = zip(*thinned(line.points), strict=True)
            shape = {"ls": "", "marker": "o", "ms": 4} if line.dots or len(xs) == 1 else {"lw": 1.6}
            axes.plot(xs, ys, color=SENTINELS[line.colour], **shape)
            if len(series) > 1 and line.name:
                ends.append((ys[-1], line.name, line.colour))
        if from_zero:
            axes.set_ylim(bottom=0)
        for mark in marks:
            axes.axvline(mark.at, color=SENTINELS[mark.colour], lw=1, ls=(0, (4, 2)))
        if level:
            axes.axhline(level[0], color=SENTINELS["red"], lw=1)
        _name_ends(axes, ends)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        return svg(drawn, f"{y} over {x}")


def _name_ends(axes: Any, ends: Iterable[tuple[float, str, str]]) -> None:
    """Writes each (height, name, colour) at the right edge; names at similar heights are moved apart."""
    low, high = axes.get_ylim()
    line_height, free_from = 0.075 * (high - low), low
    for height, name, colour in sorted(ends):
        at = max(height, free_from)
        free_from = at + line_height
        place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
        axes.annotate(name, (1.02, at), color=SENTINELS[colour], **place)


def steady(series: Iterable[Series]) -> float | None:
    """The value of all points, if they are equal to within a hundredth; None if they differ, or if there are no
    points.
    """
    heights = [height for line in series for _, height in line.points]
    if not heights or max(heights) - min(heights) > 0.01 * max(map(abs, heights)):
        return None
    return heights[len(heights) // 2]


def parallel(axes: Mapping[str, Sequence[str | None]], colours: Sequence[str]) -> str:
    """A line for each run across upright axes. `axes`: for each axis, the runs' values; `colours`: the runs' colours.
    An axis of numbers goes from the lowest to the highest, on a logarithmic scale if the highest number is at least a
    hundred times the lowest. On an axis of texts, the texts are one above the other. If a run has no value, its line
    has a gap. Returns '' if there are fewer than two axes, or matplotlib is not installed.
    """
    if len(axes) < 2 or not colours or not drawable():
        return ""
    with style():
        drawn = figure()
        plot = drawn.subplots()
        heights = []
        for at, values in enumerate(axes.values()):
            own, marked = _axis(values)
            heights.append(own)
            plot.axvline(at, color=SENTINELS["line"], lw=1)
            for height, text in marked.items():
                place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
                plot.annotate(text, (at, height), fontsize=8, color=SENTINELS["faint"], zorder=3, **place)
        for run, colour in enumerate(colours):
            line = [own[run] for own in heights]
            width = {"lw": 2.0, "zorder": 2} if colour == "blue" else {"lw": 0.9}
            plot.plot(range(len(axes)), line, color=SENTINELS[colour], **width)
        plot.set_xticks(range(len(axes)), [*axes])
        plot.set_yticks([])
        plot.set_ylim(-0.05, 1.05)
        plot.set_xlim(-0.1, len(axes) - 0.7)
        plot.grid(visible=False)
        return svg(drawn, f"runs over {', '.join(axes)}")


def _axis(values: Sequence[str | None]) -> tuple[list[float], dict[float, str]]:
    """The height of each value from 0 to 1 (NaN if there is no value), and the texts at the axis with their heights."""
    known = [text for text in values if text is not None]
    try:
        numbers = {text: float(text) for text in known}
    except ValueError:
        numbers = {}
    if not numbers:
        names = sorted({*known})
        at = {name: index / max(1, len(names) - 1) for index, name in enumerate(names)}
        return [math.nan if text is None else at[text] for text in values], {at[name]: name for name in names}
    low, high = (of(numbers, key=numbers.__getitem__) for of in (min, max))
    is_wide = numbers[low] > 0 and numbers[high] >= 100 * numbers[low]
    scale: Callable[[float], float] = math.log if is_wide else float
    first, last = scale(numbers[low]), scale(numbers[high])
    ratio = 1 / (last - first) if last > first else 0.0
    heights = [math.nan if text is None else (scale(numbers[text]) - first) * ratio for text in values]
    return heights, {0.0: low, **({1.0: high} if ratio else {})}


def unit_of(seconds: float) -> tuple[str, float]:
    """A unit that suits a duration, and the seconds of this unit."""
    return ("hours", 3600.0) if seconds >= 7200 else ("minutes", 60.0) if seconds >= 180 else ("seconds", 1.0)


def steps_to(
    start: tuple[str, float], changes: Mapping[str, float], end: tuple[str, float], *, unit: str, digits: int
) -> str:
    """A waterfall chart from one sum to another, with the changes that are large enough to be seen; empty if there are
    none.
    """
    changes = {name: change for name, change in changes.items() if abs(change) >= 0.005 * max(start[1], end[1])}
    if not changes or not drawable():
        return ""
    with style():
        drawn = figure(height=0.7 + 0.3 * (len(changes) + 2))
        axes = drawn.subplots()
        at, bars = start[1], [(0.0, start[1], "blue", f"{start[1]:.{digits}f}")]
        for change in changes.values():
            bars.append((at, change, "red" if change > 0 else "green", f"{change:+.{digits}f}"))
            at += change
        bars.append((0.0, end[1], "purple", f"{end[1]:.{digits}f}"))
        for row, (begin, width, colour, text) in enumerate(bars):
            axes.barh(row, width, left=begin, height=0.6, color=SENTINELS[colour])
            axes.annotate(
                text, (max(begin, begin + width), row), xytext=(4, 0), textcoords="offset points", va="center"
            )
            if row + 1 < len(bars):
                axes.plot([begin + width] * 2, [row, row + 1], color=SENTINELS["faint"], lw=0.8, zorder=0.5)
        axes.set_yticks(range(len(bars)), [start[0], *changes, end[0]])
        axes.invert_yaxis()
        axes.set_xlim(right=1.18 * max(begin + max(width, 0.0) for begin, width, _, _ in bars))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        return svg(drawn, f"from {start[0]} to {end[0]}")


def lanes(names: Sequence[str], bars: Sequence[Bar], marks: Sequence[tuple[int, float, str]], *, x: str) -> str:
    """A lane for each name, with periods of the kinds in KINDS. `marks`: moments, each as (lane, time, kind)."""
    if not drawable():
        return ""
    with style():
        drawn = figure(height=0.8 + 0.28 * max(2, len(names)))
        axes = drawn.subplots()
        for bar in bars:
            axes.barh(bar.lane, max(0.0, bar.end - bar.begin), left=bar.begin, height=0.6, color=_kind(bar.kind))
        for lane, at, kind in marks:
            shape = {"marker": "|"} if kind == "save" else {"marker": "X", "mec": SENTINELS["back"]}
            axes.plot([at], [lane], ms=7, color=_kind(kind), ls="", **shape)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x)
        return svg(drawn, "nodes over time")


KINDS = {
    **{"start": "grey", "training": "blue", "after a notice": "orange", "gone": "red"},
    **{"waiting for a node": "line", "save": "green"},
}


def thinned(points: Sequence[Point]) -> list[Point]:
    """About POINTS of the points, including the first and the last. The points are split into groups, and the point
    with the median height of each group is kept.
    """
    if len(points) <= POINTS:
        return list(points)
    size = -(-(len(points) - 2) // (POINTS - 2))
    inner = [points[at : min(at + size, len(points) - 1)] for at in range(1, len(points) - 1, size)]
    return [points[0], *(sorted(stretch, key=lambda p: p[1])[len(stretch) // 2] for stretch in inner), points[-1]]


def _kind(kind: str) -> str:
    return SENTINELS[KINDS[kind]]


def drawable() -> bool:
    """Whether matplotlib is installed. If not, a page shows the text LACKING instead of charts."""
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
            **{"svg.hashsalt": "gpufleet"},
        }
    )


def figure(height: float = SIZE[1]) -> Any:
    """A matplotlib figure, for use inside `style`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(SIZE[0], height), layout="constrained")


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
