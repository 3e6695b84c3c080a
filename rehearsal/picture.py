"""loss.png: the loss over the steps, with phases and interruptions marked, above what the nodes did over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpufleet.job.text import counted
from gpufleet.rehearsal.evidence import Evidence, Resumption
from gpufleet.rehearsal.timeline import Timeline
from gpufleet.rehearsal.watch import NodeView

INK, FAINT, GRID = "#22272e", "#8b949e", "#e6e8eb"
PHASES = ("#3b7dd8", "#c4622d", "#2f8f6b", "#8a5cc2")  # also right for red-green blindness beside their labels
BOOT, NOTICE, LOST = "#b4bbc5", "#f2b134", "#cc3d3d"
WORDS = {"notice": "notice: {} lost", "loss": "gone: {} repeated"}


def draw(evidence: Evidence, target: Path) -> None:
    """Writes the picture of the run's own metrics and of what the timeline says."""
    rehearsal, watch = evidence.rehearsal, evidence.rehearsal.watch
    assert watch is not None
    timeline, views = rehearsal.timeline, list(watch.views.values())
    resumptions = evidence.resumptions()
    figure = Figure(figsize=(10, 5.8), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(3.2, 1 + 0.22 * len(views)))
    title = f"{rehearsal.name}, run {rehearsal.definition.run.id}: rehearsed with"
    title = f"{title} {counted(len(resumptions), 'interruption')}"
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    _loss(above, evidence, resumptions)
    _lanes(below, views, timeline)
    figure.savefig(target)


def _loss(axes: Axes, evidence: Evidence, resumptions: Sequence[Resumption]) -> None:
    """The loss of each phase, and each interruption at the step that was the last before it."""
    _bare(axes)
    for number, (phase, first, last) in enumerate(evidence.spans()):
        color = PHASES[number % len(PHASES)]
        axes.axvspan(first - 0.5, last + 0.5, color=color, alpha=0.06, lw=0)
        inside = [m for m in evidence.metrics if first <= m["step"] <= last]
        points = [(m["step"], m["loss"]) for m in inside if m.get("loss") is not None]
        held = [(m["step"], m["val_loss"]) for m in inside if m.get("val_loss") is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, lw=1.8, solid_capstyle="round")
        if held:
            axes.plot(*zip(*held, strict=True), "o", ms=4.5, mfc="white", mec=color, mew=1.4, zorder=3)
        name, place = f"{phase.name}, {phase.params_total:,} parameters", axes.get_xaxis_transform()
        axes.text((first + last) / 2, 1.02, name, transform=place, ha="center", fontsize=9, color=color)
    for number, resumption in enumerate(resumptions):
        color = NOTICE if resumption.kind == "notice" else LOST
        axes.axvline(resumption.last_step, color=color, lw=1.6, ls=(0, (4, 2)), zorder=2)
        axes.annotate(
            WORDS[resumption.kind].format(counted(resumption.lost, "step")),
            (resumption.last_step, 0.93 - 0.12 * (number % 3)),
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
    validation = ", ".join(dict.fromkeys(phase.validation for phase in evidence.phases if phase.validation))
    axes.set_xlabel(f"step  (line: training, circles: {validation})", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)


def _lanes(axes: Axes, views: Sequence[NodeView], timeline: Timeline) -> None:
    """Each node's life: boot, training, under notice, and how it ended."""
    _bare(axes)
    for row, view in enumerate(views):
        node = view.node.instance
        assert node.ended_at is not None
        launched, ended = timeline.since_began(node.launched_at), timeline.since_began(node.ended_at)
        trains = ended if view.first_step_at is None else timeline.since_began(view.first_step_at)
        noticed_at = node.notice_at if view.interrupted is not None else None
        told = ended if noticed_at is None else timeline.since_began(noticed_at)
        _bar(axes, row, launched, min(trains, told), BOOT)
        _bar(axes, row, trains, told, PHASES[0])
        _bar(axes, row, told, ended, NOTICE)
        if view.interrupted is None:
            axes.plot([ended], [row], "D", ms=6, mfc=PHASES[2], mec="white", mew=1, zorder=4)
        elif view.interrupted.kind == "loss":
            axes.plot([ended], [row], "X", ms=9, mfc=LOST, mec="white", mew=1, zorder=4)
    checkpoints, last = [moment.t for moment in timeline.select("checkpoint")], len(views) - 0.35
    axes.plot(checkpoints, [last] * len(checkpoints), "|", ms=7, mew=1.3, color=FAINT)
    names = [*(view.name for view in views), "checkpoints"]
    axes.set_yticks([*range(len(views)), last], names, fontsize=9, color=INK)
    axes.set_ylim(len(views), -0.6)
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
