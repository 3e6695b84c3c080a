"""What a canary really costs, in drawn canaries: `python bench/canary_cost.py [CANARIES]`, 200 by default.

Each canary draws a region, whether its nodes have a GPU, one of the types and zones that `gpufleet canary` itself
chooses there, prices that differ from the known ones and rise, the time its nodes boot, train and wait for capacity
(the command gives up after stacks.AWS.patience_s), the two losses that it makes and up to two an hour of AWS's own, a
script that overruns to the cap, and services that do not answer for a while. What decides are the meter, the
timer and the schedule's hour themselves (bench/stops.py). The cost is counted from what the nodes have lived, at the
true prices. Writes bench/results/canary.md to standard output.
"""

from __future__ import annotations

import io
import platform
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import stops

from gpufleet.infra.canary import stacks
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.errors import AwsRefused
from gpufleet.job.supervisor.meter import Meter
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.cloud import Cloud

CHECKPOINT_S = stacks.AWS.pace_s * stacks.AWS.every
WORK_S = stacks.AWS.pace_s * stacks.AWS.steps
OVERRUNS = 0.2  # the share of runs whose script does not end
STOPPED = f"{stacks.CAP}, stopped"
RUNS = {stacks.RUN: stacks.RUN, STOPPED: stacks.CAP, stacks.CAP: stacks.CAP}  # in their order, with the stack of each


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightPlace:
    """A region, and what a canary flies on there."""

    region: str
    gpus: int
    chosen: stacks.Chosen
    by_name: dict[str, stops.PricedStack]  # both stacks


class DrawnCanary(stops.Drawn):
    """One run of a canary. `planned` are its own interruptions, which come once a node has published a checkpoint."""

    def __init__(self, stack: stops.PricedStack, seed: int, *, planned: list[str], work_s: float) -> None:
        super().__init__(stack, seed, stops.STOPS)
        self.losses_per_s = self.draw.choice([0.0, 0.0, 0.1, 0.5, 2.0]) / stops.HOUR
        self.planned, self.work_s, self.trained_s, self.trains_at = planned, work_s, 0.0, 0.0
        self.plan_at = float("inf")

    def _rising(self) -> list[float]:
        top = float(self.stack.run.rates(self.stack.type, self.stack.zone).ceiling)
        other = self.draw.uniform(0.7, 1.6)  # known prices are months old
        return [min(each * other, top) for each in super()._rising()]

    def _launch(self) -> None:
        super()._launch()
        self.trains_at = self.nodes[-1].meters_at + self.stack.setup_s * self.draw.uniform(0.3, 0.8)
        self.plan_at = self.trains_at + self.draw.uniform(12, 60) if self.planned else float("inf")

    def lost_at(self, node: stops.Machine) -> float:
        return min(super().lost_at(node), self.plan_at)

    def how_lost(self) -> str:
        return self.planned.pop(0) if self.now >= self.plan_at else super().how_lost()

    def waits_s(self) -> float:
        return self.draw.uniform(30, 180) if self.draw.random() < 0.8 else super().waits_s()

    def _lost(self, node: stops.Machine) -> None:
        lost, trained = self.now, max(self.now - self.trains_at, 0.0)
        self.trained_s += trained // CHECKPOINT_S * CHECKPOINT_S
        super()._lost(node)
        if not self.ended_by and self.now - lost > stacks.AWS.patience_s:
            self.ended_by = "patience"

    def _has_finished(self, in_s: float = 0.0) -> bool:
        return self.trained_s + self.now + in_s - self.trains_at >= self.work_s

    def _limit(self, meter: Meter, in_s: float = 0) -> bool:
        return self._has_finished(in_s) or super()._limit(meter, in_s)

    def _end(self, node: stops.Machine, by: str, takes: float) -> None:
        super()._end(node, "script" if by == stops.METER and self._has_finished() else by, takes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryCost:
    """What one canary cost, in USD, and what ended its three runs."""

    usd: float
    by_run: dict[str, float]
    ended_by: tuple[str, ...]
    type: str
    region: str


def places(folder: Path, regions: Iterable[str], gpus: Sequence[int] = (1, 0)) -> Iterator[FlightPlace]:
    """The types and zones that a canary chooses in each region, without regions in which it refuses."""
    for region in regions:
        with Cloud(folder / f"{region}-cloud", region=region) as cloud:
            for count in gpus:
                project = scratch.make(folder / f"{region}-{count}", {})
                scale = stacks.AWS if count else stacks.AWS.without_gpu()
                try:
                    chosen = stacks.choose(project, "r1", region, cloud.client, scale, notice=True)
                except AwsRefused:
                    continue
                by_name = {name: stops.stack(project / "stacks" / f"{name}.yaml") for name in stacks.NAMES}
                yield FlightPlace(region=region, gpus=count, chosen=chosen, by_name=by_name)


def drawn(among: Sequence[FlightPlace], seed: int) -> CanaryCost:
    """One canary."""
    draw = random.Random(f"canary {seed}")
    place = draw.choice(among)
    type_ = draw.choice(place.chosen.types)
    rates = place.by_name[stacks.RUN].run.rates
    zone = draw.choice([each for each in place.chosen.zones if rates(type_, each).spot is not None])
    notice = draw.random() < 0.8  # some accounts may not use FIS
    by_run, ended = dict.fromkeys(RUNS, 0.0), dict.fromkeys(RUNS, "left out")
    for name, of in RUNS.items():
        if name == STOPPED and not stacks.affords_stop(Decimal(by_run[stacks.RUN]), notice=notice):
            continue
        endless = name == stacks.CAP or (name == stacks.RUN and draw.random() < OVERRUNS)
        usual_s = WORK_S if name == stacks.RUN else 3 * CHECKPOINT_S  # until somebody asks it to stop
        work_s = float("inf") if endless else usual_s * draw.uniform(0.9, 1.5)
        planned = [*(["notice"] if notice else []), "lost"] if name == stacks.RUN else []
        stack = replace(place.by_name[of], type=type_, zone=zone)
        run = DrawnCanary(stack, seed, planned=planned, work_s=work_s)
        with redirect_stdout(io.StringIO()):  # hides what a node prints
            ended[name] = run.go().ended_by
        by_run[name] = run.cost()[1]
    usd = sum(by_run.values()) + notice * float(stacks.FIS_USD)
    return CanaryCost(usd=usd, by_run=by_run, ended_by=tuple(ended.values()), type=type_, region=place.region)


def main() -> None:
    canaries = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with TemporaryDirectory() as folder:
        among = list(places(Path(folder), known_regions()))
        found = sorted((drawn(among, seed) for seed in range(canaries)), key=lambda each: each.usd)
    say, worst = sys.stdout.write, found[-1]
    say(
        "# What a canary costs\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}. `python bench/canary_cost.py {canaries}` "
        f"wrote this: {canaries} drawn canaries, on {len({each.type for each in found})} types in "
        f"{len({each.region for each in found})} regions.\n\n"
        "| | Median, USD | 95th | Largest | Its limit |\n|---|---|---|---|---|\n"
    )
    rows = {"whole canary, FIS included": ([each.usd for each in found], stacks.MOST_USD)}
    for name, of in RUNS.items():
        limit = among[0].by_name[of].run.limits.max_usd
        rows[name] = (sorted(each.by_run[name] for each in found), limit)
    for name, (usd, limit) in rows.items():
        say(
            f"| {name} | {usd[canaries // 2]:.3f} | {usd[int(0.95 * (canaries - 1))]:.3f} | {usd[-1]:.3f} | {limit} |\n"
        )
    say(f"\nThe most expensive canary ran on {worst.type} in {worst.region}. Above {stacks.MOST_USD} USD: ")
    say(f"{sum(each.usd > stacks.MOST_USD for each in found)}.\n\nEnded by:")
    for index, name in enumerate(RUNS):
        by = Counter(each.ended_by[index] for each in found)
        say(f" `{name}` {', '.join(f'{ended} {count}' for ended, count in by.most_common())};")
    say("\n")


if __name__ == "__main__":
    main()
