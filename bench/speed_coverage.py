"""Tests how well the table of measured speeds predicts a source that it does not contain: `python
bench/speed_coverage.py`.

Each source of infra/evidence/speeds.csv is left out in turn, and each of its speeds is compared with what the other
sources predict for the same GPU and kind of work. Writes bench/results/speed.md to standard output and
bench/results/speed.svg.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpufleet.infra.evidence.speeds import Expected, Speed, SpeedGroup, Speeds, shipped
from gpufleet.infra.risk.unknown import P90

BAR = (0.75, 0.90)
PICTURE = Path(__file__).parent / "results" / "speed.svg"


class Judged(NamedTuple):
    """A speed, and what the other sources predict for it."""

    figure: Speed
    expected: Expected

    @property
    def error_of(self) -> float:
        """ln of measured over expected."""
        return math.log(self.figure.share / self.expected.share)

    @property
    def share_inside(self) -> bool:
        return abs(self.error_of) <= P90 * self.expected.sigma


def main() -> None:
    figures = shipped().figures
    judged = list(left_out(figures))
    words = [Judged(each, Expected(share=0.45, sigma=0.4, shared=0.0)) for each in figures]
    say = sys.stdout.write
    say("# Measured speeds, each source predicted from the others\n\n")
    say(f"{datetime.now(UTC):%Y-%m-%d}, `python bench/speed_coverage.py`: {len(figures)} figures of ")
    say(
        f"{len({each.place.source for each in figures})} sources (infra/evidence/speeds.csv). A figure is the share of "
    )
    say(
        "its GPUs' dense bf16 peak that the model's own FLOP take. *Inside*: between the p10 and p90 that a bill would "
    )
    say("state for a job of which it knows neither code nor machine. A cluster is one source's figures of one GPU and ")
    say("kind, by their mean; a source all of its figures, by their mean error. Figures of one source err alike, and ")
    say(f"few sources have most of them: the bar, {BAR[0]:.0%} to {BAR[1]:.0%}, is for sources.\n\n")
    say("![predicted against published](speed.svg)\n\n")
    say("| Prediction | figures inside | clusters | sources | pinball loss of ln share | bar |\n")
    say("|---|---|---|---|---|---|\n")
    for name, some in (("the fit, this source left out", judged), ("one share of 0.45, sigma 0.4", words)):
        kept = [[each.share_inside for each in some], [each.share_inside for each in clusters(some)], sources(some)]
        cells = [f"{sum(inside) / len(inside):.1%} of {len(inside)}" for inside in kept]
        met = BAR[0] <= sum(kept[2]) / len(kept[2]) <= BAR[1]
        say(f"| {name} | {' | '.join(cells)} | {loss(some):.3f} | {'met' if met else 'missed'} |\n")
    say("\n## By GPU and kind\n\n| | figures | inside | median of measured / predicted |\n|---|---|---|---|\n")
    for name, some in (*grouped(judged, 0), *grouped(judged, 1)):
        ratio = math.exp(statistics.median(each.error_of for each in some))
        say(f"| {name} | {len(some)} | {share_inside(some):.0%} | {ratio:.2f} |\n")
    say("\n## What a bill expects\n\nShare of the peak, and sigma of its logarithm, of a shipped job and of one that ")
    say("nobody has measured.\n\n| GPU | shipped: from scratch, 8 GPUs | adapter, one GPU | another's: adapter |\n")
    say("|---|---|---|---|\n")
    for gpu in ("H100", "H200", "B200", "A100 80GB", "A100 40GB", "L40S", "L4", "A10G"):
        cells = []
        for kind, source, several in (
            ("from scratch", "gpufleet", True),
            ("adapter", "gpufleet", False),
            ("adapter", "new", False),
        ):
            found = shipped().expect(SpeedGroup(gpu, kind, source, several))
            cells.append(f"{found.share:.2f}, {found.sigma:.2f}")
        say(f"| {gpu} | {' | '.join(cells)} |\n")
    say("\n## Every figure\n\n| source | what | measured | predicted, p10 to p90 | |\n|---|---|---|---|---|\n")
    for each in sorted(judged, key=lambda one: (one.figure.place.source, one.figure.name)):
        low, high = (each.expected.share * math.exp(sign * P90 * each.expected.sigma) for sign in (-1, 1))
        outside = "" if each.share_inside else "outside"
        say(f"| {each.figure.place.source} | {each.figure.name} | {each.figure.share:.2f} | ")
        say(f"{each.expected.share:.2f}, {low:.2f} to {high:.2f} | {outside} |\n")
    draw(judged)


def left_out(figures: Sequence[Speed]) -> Iterator[Judged]:
    """Each speed with what the other sources predict for it."""
    for source in dict.fromkeys(each.place.source for each in figures):
        others = Speeds(each for each in figures if each.place.source != source)
        for each in figures:
            if each.place.source == source:
                yield Judged(each, others.expect(each.place))


def clusters(some: Sequence[Judged]) -> list[Judged]:
    """The mean error of each group of speeds: one source, one GPU, one kind of work, either one GPU or several."""
    by_place: dict[SpeedGroup, list[Judged]] = defaultdict(list)
    for each in some:
        by_place[each.figure.place].append(each)
    return [
        Judged(Speed(place, math.exp(statistics.fmean(math.log(each.figure.share) for each in own))), own[0].expected)
        for place, own in by_place.items()
    ]


def sources(some: Sequence[Judged]) -> list[bool]:
    """For each source, whether its mean error lies within the mean width."""
    found = []
    for _, own in grouped(some, 2):
        error, sigma = (statistics.fmean(of) for of in zip(*((e.error_of, e.expected.sigma) for e in own), strict=True))
        found.append(abs(error) <= P90 * sigma)
    return found


def share_inside(some: Sequence[Judged]) -> float:
    return sum(each.share_inside for each in some) / len(some)


def loss(some: Sequence[Judged]) -> float:
    """The pinball loss, as the mean over speeds and over p10, p50 and p90."""
    found = []
    for each in some:
        for share, at in ((0.1, -P90), (0.5, 0.0), (0.9, P90)):
            over = each.error_of - at * each.expected.sigma
            found.append(max(share * over, (share - 1) * over))
    return float(np.mean(found))


def grouped(some: Sequence[Judged], at: int) -> Iterator[tuple[str, list[Judged]]]:
    for name in dict.fromkeys(str(each.figure.place[at]) for each in some):
        yield name, [each for each in some if each.figure.place[at] == name]


def draw(judged: Sequence[Judged]) -> None:
    """Draws a point for each speed, published against predicted, with the diagonal and the usual width."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gpufleet"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 4.2))
    for gpu, some in grouped(judged, 0):
        axes.scatter([e.expected.share for e in some], [e.figure.share for e in some], s=16, label=gpu)
    low, high = 0.15, 0.75
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    usual = statistics.median(each.expected.sigma for each in judged)
    for sign in (-1, 1):
        axes.plot([low, high], [at * math.exp(sign * P90 * usual) for at in (low, high)], "k:", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(0.2, 0.6), ylim=(low, high))
    ticks = [0.2, 0.3, 0.4, 0.5, 0.6]
    for axis, values in ((axes.xaxis, ticks), (axes.yaxis, [*ticks, 0.7])):
        axis.set_major_locator(mpl.ticker.FixedLocator(values))
        axis.set_major_formatter(mpl.ticker.FormatStrFormatter("%.1f"))
        axis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xlabel("share of peak predicted from other sources")
    axes.set_ylabel("share of peak published")
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
