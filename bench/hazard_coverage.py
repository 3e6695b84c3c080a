"""Tests how often the stated interval holds on traces that were not used for it: `python bench/hazard_coverage.py SPOT
H100`.

SPOT is a checkout of github.com/skypilot-org/spot-traces, H100 one of github.com/andylizf/skynomad-artifact; this
repository has no copy of these. Each trace is left out once: the median of the prior is computed from all other traces
of single nodes, and everything else is as in the code. The program writes bench/results/risk.md to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from gpufleet.infra.evidence.traces import Trace
from gpufleet.infra.risk import hazard, replay
from gpufleet.infra.risk.hazard import Hazard, find, gang, learn, wait
from gpufleet.infra.risk.simulation import Exposure, SimulatedRuns

WORK_H = (2.0, 8.0, 24.0)
TYPE = "p3.2xlarge"
BAR = (0.75, 0.90)
STARTS = 1_000
FITTED = 16  # the largest number of nodes behind GANG_POWER
# A run on P types: set-up and restart take a quarter of an hour each; a checkpoint every 300 s, whose save fits into
# the notice.
RUN = Exposure(
    setup_h=0.25,
    restart_h=0.25,
    phase_ends_h=(1.0,),
    saves_fit=(True,),
    interval_h=300 / 3600,
    compute_usd_h=1.0,
    extras_usd_h=0.02,
    fixed_usd=0.0,
    hazard=None,
)


class Group(NamedTuple):
    """Traces of one kind: up while all `nodes` were available."""

    name: str
    gpus: int  # GPUs of a node
    nodes: int
    traces: list[Trace]
    alone: Mapping[str | None, Trace] = {}  # for several nodes: by zone, when one node was available

    def power(self, trace: Trace) -> float:
        """The power of the number of nodes with which interruptions grew in the trace's zone."""
        several, one = (max(each.interruptions, 0.5) / each.node_hours for each in (trace, self.alone[trace.zone]))
        return math.log(several / one) / math.log(self.nodes)

    def of_one(self, trace: Trace) -> float:
        """The trace's hazard, converted to one node with one GPU."""
        per_hour = max(trace.interruptions, 0.5) / trace.node_hours
        return float(per_hour / (self.gpus**hazard.SIZE_POWER * gang(self.nodes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spot", metavar="SPOT", type=Path, help="a checkout of skypilot-org/spot-traces")
    parser.add_argument("h100", metavar="H100", type=Path, help="a checkout of andylizf/skynomad-artifact")
    args = parser.parse_args()
    groups = list(read(args.spot, args.h100))
    say = sys.stdout.write
    say("# Coverage of the stated interval on public spot traces\n\n")
    say(f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, numpy {np.__version__}; ")
    say(f"github.com/skypilot-org/spot-traces at {_commit(args.spot)}, github.com/andylizf/skynomad-artifact at ")
    say(f"{_commit(args.h100)}. `python bench/hazard_coverage.py` wrote this.\n\n")
    say("A run of 2, 8 or 24 h of work, 15 min of set-up and restart, 1 USD/h and 0.02 for the disk, is begun at ")
    say(f"{STARTS} hours of each trace; replayed dollars / hours by the wall that lie between the p10 and p90 stated ")
    say("before. The median that a trace is judged by is that of all other traces of single nodes, by GPUs, ")
    say("and of 16 nodes the power that of all other zones; all else is the code's. Mean over a group's traces. ")
    say(f"Bar: {BAR[0]:.0%} to {BAR[1]:.0%}.\n\n")
    say("| Traces | number | hazard, geometric mean |" + "".join(f" {hours:g} h |" for hours in WORK_H) + "\n")
    say("|---|---|---|" + "---|" * len(WORK_H) + "\n")
    judged: dict[str, list[list[tuple[float, float]]]] = {}
    for group in groups:
        shares = [covered(group, groups, hours) for hours in WORK_H]
        rate = math.exp(fmean(math.log(max(t.interruptions, 0.5) / t.node_hours) for t in group.traces))
        say(f"| {group.name} | {len(group.traces)} | {rate:.2f} |")
        say("".join(f" {_both(some)} |" for some in shares) + "\n")
        kind = (
            "nodes with 8 GPUs"
            if group.gpus == 8
            else "one node, one GPU"
            if group.nodes == 1
            else f"{group.nodes} nodes at once"
        )
        for at, some in enumerate(shares):
            judged.setdefault(kind, [[] for _ in WORK_H])[at] += some
    for kind, by_hours in judged.items():
        say(f"| **all: {kind}** | {len(by_hours[0])} | |")
        say("".join(f" **{_both(some)}** |" for some in by_hours) + "\n")
    nine = groups[0].traces
    say("\n## Learned from other zones, the nine of 2023\n\n| Forecast | Replayed on |")
    say("".join(f" {hours:g} h |" for hours in WORK_H) + "\n|---|---|" + "---|" * len(WORK_H) + "\n")
    for name, where in (("learned, other zones", "whole trace"), ("learned, own first half", "second half")):
        cells = [_both([_learned(nine, at, hours, own="own" in name) for at in range(len(nine))]) for hours in WORK_H]
        say(f"| {name} | {where} | " + " | ".join(cells) + " |\n")
    say("\n## Waits until a node is there again\n\n| Traces | median h | sigma of ln h | mean h |\n|---|---|---|---|\n")
    for group in groups:
        waits = np.concatenate([trace.up_from_h[1:] - trace.up_to_h[:-1] for trace in group.traces])
        logs = np.log(waits)
        say(f"| {group.name} | {np.exp(np.median(logs)):.2f} | {logs.std():.2f} | {waits.mean():.2f} |\n")
    old = groups[1].traces + groups[4].traces
    say("\n## Constants, from the eight traces of 2022-10-26\n\n")
    say("| Constant | In the code | Those traces |\n|---|---|---|\n")
    say(f"| DISPERSION | {hazard.DISPERSION:g} | {dispersion(old):.2f} |\n")
    say(f"| DRIFT | {hazard.DRIFT:g} | {drift(old):.2f} |\n")
    say(f"| UNEVENNESS | {hazard.UNEVENNESS:g} | {unevenness(old):.2f} |\n")
    say(f"\n## Of {FITTED} nodes, by zone\n\n| Constant | In the code | {len(powers(groups))} zones |\n|---|---|---|\n")
    say(f"| GANG_POWER | {hazard.GANG_POWER:g} | {fmean(powers(groups)):.2f} |\n")
    say(f"| GANG_POWER_SIGMA | {hazard.GANG_POWER_SIGMA:g} | {statistics.stdev(powers(groups)):.2f} |\n")


def read(spot: Path, h100: Path) -> Iterator[Group]:
    """Every group of traces. Exits with a sentence if a folder has no traces."""

    def some(name: str, pattern: str, *, gpus: int = 1, nodes: int = 1, counted: int = 1) -> Group:
        """`counted`: the nodes whose number the files have."""
        found = sorted(spot.glob(pattern))
        if not found:
            sys.exit(f"no traces at {spot / pattern}; SPOT is a checkout of skypilot-org/spot-traces")
        alone = {each.zone: each for each in (_spot(path, 1) for path in found)} if counted > 1 else {}
        return Group(name, gpus, nodes, [_spot(path, nodes) for path in found], alone)

    yield some("1 x V100, AWS 2023-02", "availability/1-node/aws-02-15-2023/*_v100_1.json")
    yield some("1 x V100 or K80, AWS 2022-10", "availability/1-node/aws-10-26-2022/*_1.json")
    yield some("1 x V100, AWS 2023-04", "preemption/1-node/aws-04-22-2023/*_v100_1.json")
    rounds = [json.loads(path.read_bytes()) for path in sorted((h100 / "data" / "h100_16_runs").glob("*.json"))]
    if not rounds:
        sys.exit(f"no probes in {h100 / 'data' / 'h100_16_runs'}; H100 is a checkout of andylizf/skynomad-artifact")
    yield Group("1 x H100, GCP 2025-10", 1, 1, _h100(rounds, 1))
    yield some("8 x V100 or K80, AWS 2022-10", "availability/1-node/aws-10-26-2022/*_8.json", gpus=8)
    yield some("4 nodes, V100, AWS 2023-08, kept", "preemption/4-node/*/*.json", nodes=4)
    yield some("4 nodes, V100, AWS 2023-08", "availability/16-node/*/*.json", nodes=4, counted=16)
    yield Group("4 nodes, H100, GCP 2025-10", 1, 4, _h100(rounds, 4))
    yield some("16 nodes, V100, AWS 2023-08", "availability/16-node/*/*.json", nodes=16, counted=16)
    alone = {each.zone: each for each in _h100(rounds, 1)}
    yield Group("16 nodes, H100, GCP 2025-10", 1, 16, _h100(rounds, 16), alone)


def covered(group: Group, groups: Sequence[Group], hours: float) -> list[tuple[float, float]]:
    """For each trace that is long enough, the shares of dollars and of hours inside the interval of a prior made
    without this trace.
    """
    found = []
    for trace in group.traces:
        if trace.hours < hours + 1 or trace.node_hours < 1:
            continue
        seen = [of.of_one(each) for of in groups if of.nodes == 1 for each in of.traces if each is not trace]
        median = statistics.median(seen)
        if group.nodes == FITTED:
            median *= group.nodes ** (fmean(powers(groups, but=trace)) - hazard.GANG_POWER)
        stated = replace(hazard.prior(group.gpus), median=median * group.gpus**hazard.SIZE_POWER)
        found.append(_score(trace, hours, stated, group.nodes))
    return found


def powers(groups: Sequence[Group], but: Trace | None = None) -> list[float]:
    """The power of each zone with FITTED nodes up for at least a day; without the zone of the trace `but`."""
    fitted = [group for group in groups if group.nodes == FITTED]
    return [group.power(each) for group in fitted for each in group.traces if each is not but and each.node_hours >= 24]


def _score(trace: Trace, hours: float, stated: Hazard, nodes: int = 1) -> tuple[float, float]:
    wait_h, wait_sigma = wait(1, nodes)
    run = replace(RUN, phase_ends_h=(hours,), hazard=stated, nodes=nodes, wait_h=wait_h, wait_sigma=wait_sigma)
    outcome: SimulatedRuns = replay.run(run, trace, starts=STARTS)
    score = replay.score("stated", run, outcome)
    return score.contained, score.contained_hours


def _learned(nine: Sequence[Trace], at: int, hours: float, *, own: bool) -> tuple[float, float]:
    """The score of a forecast for the zone of trace `at`. It is learned from the other zones, or with `own` from the
    first halves of all traces; then it is scored on this trace's second half.
    """
    trace, half = nine[at], nine[at].hours / 2
    others = [each for each in nine if each is not trace]
    if own:
        seen = learn(each.part(0, half).observation() for each in nine)
        return _score(trace.part(half, trace.hours), hours, find(seen, TYPE, trace.zone))
    return _score(trace, hours, find(learn(each.observation() for each in others), TYPE, trace.zone))


def _both(shares: Sequence[tuple[float, float]]) -> str:
    return f"{fmean(usd for usd, _ in shares):.0%} / {fmean(wall for _, wall in shares):.0%}"


def _spot(path: Path, nodes: int) -> Trace:
    tree = json.loads(path.read_bytes())
    return _trace(tree["data"], tree["metadata"]["gap_seconds"], nodes, path.name.partition("_")[0])


def _h100(rounds: Sequence[Any], nodes: int) -> list[Trace]:
    """A trace for each zone, sampled every ten minutes: up where AWS made at least `nodes` of the 16 requested
    instances.
    """
    zones = sorted({zone for each in rounds for zone in each["zone_results"]})
    made = {zone: [each["zone_results"].get(zone, {}).get("instances_created", 0) for each in rounds] for zone in zones}
    found = [_trace(counts, 600, nodes, zone) for zone, counts in made.items()]
    return [trace for trace in found if trace.node_hours >= 1]


def _trace(counts: Sequence[int], gap_s: float, nodes: int, zone: str) -> Trace:
    up = np.asarray(counts) >= nodes
    change = np.diff(np.concatenate(([0], up.astype(np.int8), [0])))
    edges = np.arange(len(up) + 1) * gap_s / 3600
    return Trace(
        up_from_h=edges[np.flatnonzero(change == 1)],
        up_to_h=edges[np.flatnonzero(change == -1)],
        hours=float(edges[-1]),
        type=TYPE,
        zone=zone,
        start=date(2023, 2, 15),
        source=zone,
    )


def dispersion(traces: Sequence[Trace]) -> float:
    """The variance of a day's interruptions divided by their mean, given the day's node-hours, as the mean over
    traces.
    """
    ratios = []
    for trace in traces:
        days = [trace.part(24.0 * day, 24.0 * day + 24) for day in range(int(trace.hours // 24))]
        counts = np.array([day.interruptions for day in days])
        expected = np.array([day.node_hours for day in days]) * counts.sum() / sum(day.node_hours for day in days)
        ratios.append(((counts - expected) ** 2).sum() / expected.sum())
    return float(np.mean(ratios))


def drift(traces: Sequence[Trace]) -> float:
    """Root mean square of ln hazard between halves, less what counting clustered interruptions adds by itself.

    Only traces with at least 20 interruptions in each half are used, because the logarithm of fewer interruptions is
    mostly noise.
    """
    between, noise = [], []
    for trace in traces:
        first, second = trace.part(0, trace.hours / 2), trace.part(trace.hours / 2, trace.hours)
        if min(first.interruptions, second.interruptions) >= 20:
            ratio = (second.interruptions / second.node_hours) / (first.interruptions / first.node_hours)
            between.append(math.log(ratio) ** 2)
            noise.append(hazard.DISPERSION * (1 / first.interruptions + 1 / second.interruptions))
    return math.sqrt(max(0.0, float(np.mean(between) - np.mean(noise))))


def unevenness(traces: Sequence[Trace]) -> float:
    """The unevenness that makes the lives of nodes most likely, given each trace's hazard."""
    tried = np.arange(0.0, 2.3, 0.1)
    z = np.linspace(-4, 4, 81)
    weights = np.exp(-z * z / 2) / np.exp(-z * z / 2).sum()
    total = np.zeros(len(tried))
    for trace in traces:
        lives = trace.up_to_h - trace.up_from_h
        ended = trace.up_to_h < trace.hours
        gap = float(lives.min())  # a life is known to within the sampling interval
        for index, sd in enumerate(tried):
            rates = trace.interruptions / trace.node_hours * np.exp(sd * sd / 2 + sd * z)
            outlives = np.exp(-rates * lives[:, None]) @ weights
            before = np.exp(-rates * (lives - gap)[:, None]) @ weights
            total[index] += np.log(np.where(ended, before - outlives, outlives) + 1e-300).sum()
    return float(tried[total.argmax()])


def _commit(folder: Path) -> str:
    """The commit of the checkout; a plain copy has none."""
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:7] or "an unknown commit"


if __name__ == "__main__":
    main()
