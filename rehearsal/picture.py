"""loss.png: the loss over the steps, with phases and interruptions marked, above what the nodes did over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, FAINT, GRID = "#22272e", "#8b949e", "#e6e8eb"
PHASES = ("#3b7dd8", "#c4622d", "#2f8f6b", "#8a5cc2")  # also right for red-green blindness beside their labels
BOOT, NOTICE, LOST = "#b4bbc5", "#f2b134", "#cc3d3d"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase: its steps are `first` to `last`, counted over the whole run."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An interruption, at the step that was the last before it."""

    step: int
    kind: str  # notice | loss
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A node's life in seconds of the rehearsal. `trains` None: it never came to a step."""

    name: str
    launched: float
    trains: float | None
    notice: float | None
    ended: float
    how: str  # notice | loss | done


def draw(
    target: Path,
    *,
    title: str,
    metrics: Sequence[dict[str, Any]],
    phases: Sequence[Phase],
    marks: Sequence[Mark],
    lanes: Sequence[Lane],
    checkpoints: Sequence[float],
    validation: str = "validation",
) -> None:
    """Writes the picture. `metrics` are the lines of metrics.jsonl; `checkpoints` seconds of the rehearsal;
    `validation`: what their val_loss is.
    """
    figure = Figure(figsize=(10, 5.8), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(3.2, 1 + 0.22 * len(lanes)))
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    _loss(above, metrics, phases, marks, validation)
    _lanes(below, lanes, checkpoints)
    figure.savefig(target)


def _loss(
    axes: Axes, metrics: Sequence[dict[str, Any]], phases: Sequence[Phase], marks: Sequence[Mark], validation: str
) -> None:
    _bare(axes)
    for number, phase in enumerate(phases):
        color = PHASES[number % len(PHASES)]
        axes.axvspan(phase.first - 0.5, phase.last + 0.5, color=color, alpha=0.06, lw=0)
        inside = [m for m in metrics if phase.first <= m["step"] <= phase.last]
        points = [(m["step"], m["loss"]) for m in inside if m.get("loss") is not None]
        held = [(m["step"], m["val_loss"]) for m in inside if m.get("val_loss") is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, lw=1.8, solid_capstyle="round")
        if held:
            axes.plot(*zip(*held, strict=True), "o", ms=4.5, mfc="white", mec=color, mew=1.4, zorder=3)
        middle = (phase.first + phase.last) / 2
        axes.text(middle, 1.02, phase.name, transform=axes.get_xaxis_transform(), ha="center", fontsize=9, color=color)
    for number, mark in enumerate(marks):
        color = NOTICE if mark.kind == "notice" else LOST
        axes.axvline(mark.step, color=color, lw=1.6, ls=(0, (4, 2)), zorder=2)
        axes.annotate(
            mark.text,
            (mark.step, 0.93 - 0.12 * (number % 3)),
            xycoords=axes.get_xaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
            bbox={"boxstyle": "round,pad=0.25", "fc": "white", "ec": color, "lw": 1},
            zorder=4,
        )
    axes.set_ylabel("loss", fontsize=9, color=INK)
    axes.set_xlabel(f"step  (line: training, circles: {validation})", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)


def _lanes(axes: Axes, lanes: Sequence[Lane], checkpoints: Sequence[float]) -> None:
    _bare(axes)
    for row, lane in enumerate(lanes):
        trains = lane.trains if lane.trains is not None else lane.ended
        told = lane.notice if lane.notice is not None else lane.ended
        _bar(axes, row, lane.launched, min(trains, told), BOOT)
        _bar(axes, row, trains, told, PHASES[0])
        _bar(axes, row, told, lane.ended, NOTICE)
        if lane.how == "loss":
            axes.plot([lane.ended], [row], "X", ms=9, mfc=LOST, mec="white", mew=1, zorder=4)
        elif lane.how == "done":
            axes.plot([lane.ended], [row], "D", ms=6, mfc=PHASES[2], mec="white", mew=1, zorder=4)
    axes.plot(checkpoints, [len(lanes) - 0.35] * len(checkpoints), "|", ms=7, mew=1.3, color=FAINT)
    axes.set_yticks(
        [*range(len(lanes)), len(lanes) - 0.35], [*(lane.name for lane in lanes), "checkpoints"], fontsize=9, color=INK
    )
    axes.set_ylim(len(lanes), -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the rehearsal began", fontsize=9, color=INK)
    for number, (text, color) in enumerate(
        (("boot", BOOT), ("training", PHASES[0]), ("under notice", NOTICE), ("gone", LOST), ("done", PHASES[2]))
    ):
        axes.text(
            0.005 + 0.105 * number, 1.04, "■ " + text, transform=axes.transAxes, fontsize=8.5, color=color, va="bottom"
        )


def _bar(axes: Axes, row: int, begin: float, end: float, color: str) -> None:
    if end > begin:
        axes.barh(row, end - begin, left=begin, height=0.52, color=color, lw=0)


def _bare(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(color=GRID, lw=0.8)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)
