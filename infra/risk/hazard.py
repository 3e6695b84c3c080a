"""Models how often AWS interrupts a spot node, as a distribution, because nobody knows next week's hazard of a zone.

A `Hazard` comes from one of three sources:

- if nothing is known, a log-normal from public traces, by the number of GPUs of a node (`prior`);
- a fixed hazard in the definition (`estimate.hazard_per_hour`), which is taken as exact;
- node-hours and interruptions in traces or in the user's receipts, from which it is learned (`learn`).

Learning uses a two-level model of ln hazard, solved on a grid: a type has a median, its zones spread around this
median, and the interruptions of each zone are Poisson in its node-hours. So a zone with a long history gets the hazard
of this history, a zone without history gets the hazard of its type, and a type without history gets the prior. Three
constants describe how real traces differ from this model: interruptions come in clusters, so that a history has less
information than its number of interruptions suggests (`DISPERSION`); next week differs from last month (`DRIFT`); and
in one zone some nodes run for days and others for minutes (`UNEVENNESS`).

AWS publishes, for each type, the share of instances reclaimed in a month. This is not the hazard per hour of a node
that must finish, and is never converted into one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpufleet.infra.evidence.observation import Observation
from gpufleet.job.text import counted

# Losses per hour of a node with one GPU, by zones of public traces: in nine zones of 2023 (p3.2xlarge), 0.10 to 1.39,
# with geometric mean 0.31 and sigma 0.88; in thirteen zones of 2025 (one H100, GCP), 0.00 to 1.78, with geometric mean
# 0.14 and sigma 1.5; in eight other zones of 2022 and 2023, 0.23 to 0.74. bench/results/risk.md shows how well the
# prior covers each trace if this trace is left out. Sources: github.com/skypilot-org/spot-traces at 221da1a,
# github.com/andylizf/skynomad-artifact at 62b9aaa (read 2026-11). SIZE_POWER, for the number of GPUs of a node, is an
# assumption until a second source confirms it: nodes with 8 GPUs (p3.16xlarge, p2.16xlarge, 2022, first source) lost
# 0.64 to 1.32 per hour while nodes with one lost 0.23 to 0.62, a factor of 2.7; nodes with 4 x L4 (six AWS zones,
# 2025-12, second source) lost 0.41, a factor of 1.3.
HAZARD_MEDIAN, SIZE_POWER = 0.3, 0.5
HAZARD_SIGMA = 1.2
TRACES = "log-normal of public traces of 2022 to 2025"
# the highest hazard, in sigmas above the median; nothing higher was measured, and runs that never end would dominate
# every mean
MOST_SIGMAS = 2.0
HAZARD_WORDS = (("calm", 0.05), ("usual", 0.2), ("rough", 0.5))

# Zones of one type spread by 0.9 to 1.5 in ln hazard, which is nearly the whole spread; the remainder is the spread
# between types.
ZONE_SIGMA = 1.0
TYPE_SIGMA = 0.66  # together with ZONE_SIGMA it gives HAZARD_SIGMA

# Three constants from eight traces by the same authors of 2022-10-26 (two zones, K80 and V100, 27 days). None of these
# traces is from the nine zones with which the result is tested (bench/results/risk.md).
DISPERSION = 5.0  # variance of the interruptions per day, divided by their mean
DRIFT = 0.7  # standard deviation of ln hazard between the halves of a trace, minus the noise of counting
# Sigma of ln hazard between nodes, if nodes differ by log-normal factors: the lives of the nodes in these traces make
# 1.3 the most likely value, but 1.2 covers newer traces better.
UNEVENNESS = 1.2

_GRID = np.linspace(math.log(1e-4), math.log(1e2), 401)  # the grid: ln of the hazard per node-hour

# Nodes that run together are often lost together. The power of their number is an assumption, too. From 1 to 16 nodes,
# the rate of losses grew as the number of nodes to the power 0.35 in fourteen zones (H100s of 2025, V100s of 2023, one
# GPU each), with a sigma of 0.28 between zones. From 1 to 4 nodes, it grew as the power 0.16 in sixteen zones. When one
# of four nodes was lost, all four were lost in 23 to 91 % of cases. The zones are those in bench/results/risk.md.
GANG_POWER, GANG_POWER_SIGMA, ALL_AT_ONCE = 0.35, 0.3, 0.5
# Hours until AWS has a node again, log-normal, from the same traces. In one zone, the median is 0.2 to 0.75, and the
# sigma of the logarithm 0.8 to 1.4. In any of two to four zones of 2023, they are 0.38 and 1.2. Until all of several
# nodes run, they are 0.2 to 0.9 and 1.0 to 1.6.
ZONE_WAIT_H, ZONE_WAIT_SIGMA = 0.45, 1.3
ZONES_WAIT_H, ZONES_WAIT_SIGMA = 0.38, 1.2
GANG_WAIT_H, GANG_WAIT_SIGMA = 0.5, 1.4

# Nodes wait for two fifths of the median. A wait that lasts longer than this usually lasts far longer, and every
# waiting node is billed.
GATHER_SHARE, LEAST_GATHER_H, MOST_GATHER_H = 0.4, 1 / 12, 0.5

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """Interruptions per node-hour, log-normal between runs. A `median` of 0 means that there are no interruptions; a
    `sigma` of 0 means that the hazard is exact.
    """

    median: float = HAZARD_MEDIAN
    sigma: float = HAZARD_SIGMA  # standard deviation of ln hazard
    unevenness: float = UNEVENNESS  # standard deviation of ln hazard between the nodes of one run
    source: str = TRACES

    @classmethod
    def fixed(cls, per_hour: float) -> Hazard:
        """A hazard of exactly `per_hour`."""
        return cls(median=per_hour, sigma=0.0, unevenness=0.0, source="estimate.hazard_per_hour")

    def quantile(self, share: float) -> float:
        """The hazard that is not exceeded in `share` of the runs."""
        return self.median * math.exp(self.sigma * NormalDist().inv_cdf(share))

    def of_gang(self, nodes: int) -> Hazard:
        """The hazard of a run on `nodes` nodes, which the loss of any node interrupts. The more nodes, the less certain
        it is, unless it is exact.
        """
        sigma = math.hypot(self.sigma, GANG_POWER_SIGMA * math.log(nodes)) if self.sigma else 0.0
        return replace(self, median=self.median * gang(nodes), sigma=sigma)

    def per_run(self, normals: Floats) -> Floats:
        """The hazard of each run, from one standard normal number per run."""
        return self.median * np.exp(self.sigma * np.clip(normals, -MOST_SIGMAS, MOST_SIGMAS))


def prior(gpus: int) -> Hazard:
    """The hazard of a node with `gpus` GPUs if nothing was observed for its type. A node without a GPU gets the hazard
    of a node with one, because no public trace has nodes without GPUs.
    """
    if not gpus:
        return Hazard(source=f"{TRACES}, one GPU's, an assumption for a node without")
    times = gpus**SIZE_POWER
    assumed = "" if gpus == 1 else f", {times:.1f} times one GPU's for {gpus}, an assumption"
    return Hazard(median=HAZARD_MEDIAN * times, source=TRACES + assumed)


def gang(nodes: int) -> float:
    """The factor by which a run on `nodes` nodes is interrupted more often than a run on one."""
    return float(nodes**GANG_POWER)


def left_share(nodes: int) -> float:
    """The mean share of nodes that remain after a loss."""
    return (1 - ALL_AT_ONCE) * (1 - 1 / nodes)


def wait(zones: int, nodes: int) -> tuple[float, float]:
    """Median hours and sigma of the wait for a node in any of `zones` zones, or for several nodes in one zone."""
    alone = {1: (ZONE_WAIT_H, ZONE_WAIT_SIGMA), 2: (ZONES_WAIT_H, ZONES_WAIT_SIGMA)}  # by number of zones
    return {1: alone[min(zones, 2)]}.get(nodes, (GANG_WAIT_H, GANG_WAIT_SIGMA))


def gather(wait_h: float) -> float:
    """Hours that nodes wait for missing nodes before they end, if the definition file does not set this time. `wait_h`:
    the median wait.
    """
    return min(max(GATHER_SHARE * wait_h, LEAST_GATHER_H), MOST_GATHER_H)


def of_node(normals: Floats, unevenness: Floats | float, *, first: bool) -> Floats:
    """The factors that turn a run's hazard into that of one of its nodes, from one standard normal number per run.

    Nodes differ by a log-normal factor; the run's hazard is interruptions per node-hour over all of them. Nodes that
    live long fill most of the time although they are few. So the first node, which begins at a random hour, has a lower
    hazard than a node after an interruption: its ln hazard is half the variance below that of the run, and not half the
    variance above.
    """
    shift = unevenness**2 / 2
    return np.asarray(np.exp(unevenness * normals + (-shift if first else shift)))


def word(per_hour: float) -> str:
    """The word of HAZARD_WORDS whose hazard is nearest to `per_hour` as a ratio."""
    return min(HAZARD_WORDS, key=lambda pair: abs(math.log(max(per_hour, 1e-9) / pair[1])))[0]


class Key(NamedTuple):
    """The type and zone to which a learned hazard applies. `zone` is None for all zones of the type without history."""

    type: str
    zone: str | None


Hazards = Mapping[Key, Hazard]  # the learned hazards, which learn() returns


def learn(observations: Iterable[Observation]) -> dict[Key, Hazard]:
    """A hazard for each observed (type, zone), and for each type in zones without history (`zone` None). Observations
    of the same zone are summed. Raises ValueError if a number is negative or infinite, or if there are interruptions
    but no node-hours.
    """
    by_type: dict[str, dict[str | None, list[Observation]]] = defaultdict(lambda: defaultdict(list))
    for observation in observations:
        _check(observation)
        by_type[observation.type][observation.zone].append(observation)
    learned: dict[Key, Hazard] = {}
    for kind, zones in by_type.items():
        gpus = max(observation.gpus for seen in zones.values() for observation in seen)
        before = _normal(_GRID, math.log(prior(gpus).median), TYPE_SIGMA)
        of_zone = {zone: _log_likelihood(seen) for zone, seen in zones.items()}
        of_median = {zone: _of_median(likelihood) for zone, likelihood in of_zone.items()}
        for zone, seen in zones.items():
            if zone is not None:
                others = sum((of_median[other] for other in zones if other != zone), before)
                learned[Key(kind, zone)] = _summary(_of_a_zone(others) + of_zone[zone], _words(seen))
        everything = [observation for of_one in zones.values() for observation in of_one]
        elsewhere = f"{_words(everything)} in {len(zones)} other zones" if len(zones) > 1 else _words(everything)
        learned[Key(kind, None)] = _summary(_of_a_zone(sum(of_median.values(), before)), elsewhere)
    return learned


def find(learned: Hazards, kind: str, zone: str | None, gpus: int = 1) -> Hazard:
    """The most specific known hazard: that of the zone; if it is not known, that of the type; and if this is not known
    either, the prior for this number of `gpus`.
    """
    return learned.get(Key(kind, zone)) or learned.get(Key(kind, None)) or prior(gpus)


def _check(seen: Observation) -> None:
    for name in ("node_hours", "interruptions"):
        value = getattr(seen, name)
        if not (0 <= value < math.inf):
            raise ValueError(f"{seen.source}: {name} is {value}; allowed: 0 or more, finite")
    if seen.interruptions and not seen.node_hours:
        raise ValueError(f"{seen.source}: {seen.interruptions:g} interruptions in no node-hours; allowed: hours > 0")


def _log_likelihood(seen: list[Observation]) -> Floats:
    """The Poisson log likelihood of the zone's hazard at each point of the grid. Interruptions and node-hours are
    divided by DISPERSION.
    """
    count = sum(observation.interruptions for observation in seen) / DISPERSION
    hours = sum(observation.node_hours for observation in seen) / DISPERSION
    return count * _GRID - hours * np.exp(_GRID)


def _of_median(of_zone: Floats) -> Floats:
    """The log likelihood of the type's median, from that of one zone's hazard."""
    peak = of_zone.max()
    return np.asarray(np.log(_spread() @ np.exp(of_zone - peak) + 1e-300))


def _of_a_zone(of_median: Floats) -> Floats:
    """The log density of a zone's hazard, from the density of the type's median. The density is not normalised."""
    weights = np.exp(of_median - of_median.max())
    return np.asarray(np.log(_spread() @ (weights / weights.sum()) + 1e-300))


@cache
def _spread() -> Floats:
    """The density of a zone's ln hazard (column) around its type's median (row); a symmetric matrix."""
    return np.exp(_normal(_GRID[:, None], _GRID[None, :], ZONE_SIGMA))


def _normal(x: Floats, mean: Floats | float, sigma: float) -> Floats:
    return np.asarray(-0.5 * ((x - mean) / sigma) ** 2)


def _summary(log_density: Floats, source: str) -> Hazard:
    """The log-normal with the same mean and variance of ln hazard, widened by DRIFT."""
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = float(weights @ _GRID)
    variance = float(weights @ (_GRID - mean) ** 2)
    return Hazard(median=math.exp(mean), sigma=math.sqrt(variance + DRIFT**2), unevenness=UNEVENNESS, source=source)


def _words(seen: list[Observation]) -> str:
    count, hours = (
        sum(observation.interruptions for observation in seen),
        sum(observation.node_hours for observation in seen),
    )
    return f"{counted(f'{count:g}', 'interruption')} in {counted(f'{hours:.0f}', 'node-hour')} seen"
