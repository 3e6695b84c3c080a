"""Models how often AWS takes a spot node away, as a distribution, because nobody knows next week's hazard of a zone.

Three ways to know it, each a `Hazard`:

- nothing is known: a log-normal from public traces, by the number of GPUs of a node (`prior`);
- a figure of the definition (`estimate.hazard_per_hour`): that figure, exactly;
- learned (`learn`) from node-hours and interruptions that were seen, in traces or in the user's own receipts.

Learning is a two-level model on ln hazard, solved on a grid: a type has a median, its zones spread around it, and each
zone's interruptions are Poisson in its node-hours. So a zone's own history decides once it is long, a zone without
history gets the hazard of its type, and a type without history gets the prior. Three constants describe what real
traces do beyond that: interruptions come in clusters, so a history says less than its count (`DISPERSION`); next week
is not last month (`DRIFT`); and some nodes live for days and others for minutes in the same zone (`UNEVENNESS`).

AWS publishes a monthly share of reclaimed instances per type. That share is no hazard per hour of a node that must
finish, and is never converted into a hazard.
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

# Losses per hour of a node with one GPU, as zones of public traces have them: nine of 2023 (p3.2xlarge) 0.10 to 1.39,
# geometric mean 0.31, sigma 0.88; thirteen of 2025 (one H100, GCP) 0.00 to 1.78, 0.14, 1.5; eight others of 2022 and
# 2023 0.23 to 0.74. How well the prior covers each trace if that trace is left out: bench/results/risk.md. Sources:
# github.com/skypilot-org/spot-traces at 221da1a, github.com/andylizf/skynomad-artifact at 62b9aaa (read 2026-11).
# The power of a node's GPUs is an assumption until a second source stands behind it: nodes with 8 (p3.16xlarge,
# p2.16xlarge, 2022, the first source) lost 0.64 to 1.32 where such with one lost 0.23 to 0.62, a factor of 2.7; 4 x L4
# lost 0.41 (six AWS zones, 2025-12, the second), a factor of 1.3.
HAZARD_MEDIAN, SIZE_POWER = 0.3, 0.5
HAZARD_SIGMA = 1.2
TRACES = "log-normal of public traces of 2022 to 2025"
MOST_SIGMAS = 2.0  # highest hazard: above it nothing was measured, and runs that never end would dominate every mean
HAZARD_WORDS = (("calm", 0.05), ("usual", 0.2), ("rough", 0.5))

# Zones of one type spread by 0.9 to 1.5 in ln hazard, nearly all of the spread; the rest is left to types.
ZONE_SIGMA = 1.0
TYPE_SIGMA = 0.66  # together with ZONE_SIGMA it gives HAZARD_SIGMA

# Three constants from the same authors' eight traces of 2022-10-26 (two zones, K80 and V100, 27 days), none of them
# among the nine zones on which the result is measured: bench/results/risk.md.
DISPERSION = 5.0  # variance over mean of interruptions per day
DRIFT = 0.7  # standard deviation of ln hazard between the halves of a trace, minus the noise of counting
# Sigma of ln hazard between nodes, log-normal factors assumed: 1.3 is the most likely value for the lives of those
# nodes; 1.2 covers newer traces better.
UNEVENNESS = 1.2

_GRID = np.linspace(math.log(1e-4), math.log(1e2), 401)  # ln hazard per node-hour

# Nodes that run together are lost together. The power of their number is an assumption, too: from 1 to 16 of them the
# rate of losses grew as the 0.35th power in fourteen zones (H100s of 2025, V100s of 2023, with a GPU each), between
# zones give or take 0.28; from 1 to 4 as the 0.16th in sixteen; and 23 to 91 % of the losses of four took all four. The
# same zones as in bench/results/risk.md.
GANG_POWER, GANG_POWER_SIGMA, ALL_AT_ONCE = 0.35, 0.3, 0.5
# Hours until a node is there again, log-normal, from those traces: in one zone medians of 0.2 to 0.75 and sigma 0.8 to
# 1.4 of their logarithm; 0.38 and 1.2 where any of two to four zones of 2023 will do; until all of several nodes are
# there 0.2 to 0.9 and 1.0 to 1.6.
ZONE_WAIT_H, ZONE_WAIT_SIGMA = 0.45, 1.3
ZONES_WAIT_H, ZONES_WAIT_SIGMA = 0.38, 1.2
GANG_WAIT_H, GANG_WAIT_SIGMA = 0.5, 1.4

# Two fifths of the median: a wait that is longer than this is mostly far longer, and billed for every waiting node.
GATHER_SHARE, LEAST_GATHER_H, MOST_GATHER_H = 0.4, 1 / 12, 0.5

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """Interruptions per node-hour, log-normal between runs. `median` 0 means never, `sigma` 0 a known figure."""

    median: float = HAZARD_MEDIAN
    sigma: float = HAZARD_SIGMA  # standard deviation of ln hazard
    unevenness: float = UNEVENNESS  # standard deviation of ln hazard between the nodes of one run
    source: str = TRACES

    @classmethod
    def fixed(cls, per_hour: float) -> Hazard:
        """Returns a hazard of exactly `per_hour`."""
        return cls(median=per_hour, sigma=0.0, unevenness=0.0, source="estimate.hazard_per_hour")

    def quantile(self, share: float) -> float:
        """Returns the hazard below which `share` of the runs stay."""
        return self.median * math.exp(self.sigma * NormalDist().inv_cdf(share))

    def of_gang(self, nodes: int) -> Hazard:
        """Interruptions per hour of a run on `nodes` nodes, any of which interrupts it. The hazard is less certain for
        more nodes; a fixed figure stays fixed.
        """
        sigma = math.hypot(self.sigma, GANG_POWER_SIGMA * math.log(nodes)) if self.sigma else 0.0
        return replace(self, median=self.median * gang(nodes), sigma=sigma)

    def per_run(self, normals: Floats) -> Floats:
        """The hazard of each run, from one standard normal number per run."""
        return self.median * np.exp(self.sigma * np.clip(normals, -MOST_SIGMAS, MOST_SIGMAS))


def prior(gpus: int) -> Hazard:
    """The hazard of a node with `gpus` GPUs when nothing was observed for its type. A node without a GPU gets the
    hazard of a node with one, because no public trace counts nodes without.
    """
    if not gpus:
        return Hazard(source=f"{TRACES}, one GPU's, an assumption for a node without")
    times = gpus**SIZE_POWER
    assumed = "" if gpus == 1 else f", {times:.1f} times one GPU's for {gpus}, an assumption"
    return Hazard(median=HAZARD_MEDIAN * times, source=TRACES + assumed)


def gang(nodes: int) -> float:
    """How many times as often a run on `nodes` nodes is interrupted as a run on one."""
    return float(nodes**GANG_POWER)


def left_share(nodes: int) -> float:
    """The share of the nodes that remain after a loss, on average."""
    return (1 - ALL_AT_ONCE) * (1 - 1 / nodes)


def wait(zones: int, nodes: int) -> tuple[float, float]:
    """Median hours and sigma of the wait for a node in any of `zones` zones, or for all of several in one zone."""
    alone = {1: (ZONE_WAIT_H, ZONE_WAIT_SIGMA), 2: (ZONES_WAIT_H, ZONES_WAIT_SIGMA)}  # by number of zones
    return {1: alone[min(zones, 2)]}.get(nodes, (GANG_WAIT_H, GANG_WAIT_SIGMA))


def gather(wait_h: float) -> float:
    """Hours that nodes wait for missing nodes before they end, unless the definition file sets these hours. `wait_h` is
    the median wait.
    """
    return min(max(GATHER_SHARE * wait_h, LEAST_GATHER_H), MOST_GATHER_H)


def of_node(normals: Floats, unevenness: Floats | float, *, first: bool) -> Floats:
    """The factors that turn a run's hazard into the hazard of one of its nodes, from one standard normal number per
    run.

    Nodes differ by a log-normal factor; the run's hazard is interruptions per node-hour over all of them. Long-lived
    nodes fill most of the time although they are few. So the first node, which is taken at any hour, is calmer than a
    node after an interruption: half the variance below the run's ln hazard instead of above.
    """
    shift = unevenness**2 / 2
    return np.asarray(np.exp(unevenness * normals + (-shift if first else shift)))


def word(per_hour: float) -> str:
    """Returns the word of HAZARD_WORDS whose hazard is nearest to `per_hour`, by their ratio."""
    return min(HAZARD_WORDS, key=lambda pair: abs(math.log(max(per_hour, 1e-9) / pair[1])))[0]


class Key(NamedTuple):
    """The type and zone to which a learned hazard applies. `zone` is None for every zone of the type without
    history.
    """

    type: str
    zone: str | None


Hazards = Mapping[Key, Hazard]  # the result of learn()


def learn(observations: Iterable[Observation]) -> dict[Key, Hazard]:
    """A hazard for each (type, zone) seen, and for each type (`zone` None) in a zone without history.

    Several observations of one zone add up. Raises ValueError for negative or infinite numbers, and for interruptions
    without node-hours.
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
    """Returns the most specific hazard that is known: that of the zone, else of the type, else the prior of nodes with
    so many GPUs.
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
    """The Poisson log likelihood of the zone's hazard at each point of the grid, with interruptions and node-hours
    divided by DISPERSION.
    """
    count = sum(observation.interruptions for observation in seen) / DISPERSION
    hours = sum(observation.node_hours for observation in seen) / DISPERSION
    return count * _GRID - hours * np.exp(_GRID)


def _of_median(of_zone: Floats) -> Floats:
    """ln likelihood of the type's median, from the likelihood of one zone's hazard."""
    peak = of_zone.max()
    return np.asarray(np.log(_spread() @ np.exp(of_zone - peak) + 1e-300))


def _of_a_zone(of_median: Floats) -> Floats:
    """ln density of a zone's hazard, given the type's median (ln density, not normalised)."""
    weights = np.exp(of_median - of_median.max())
    return np.asarray(np.log(_spread() @ (weights / weights.sum()) + 1e-300))


@cache
def _spread() -> Floats:
    """Density of a zone's ln hazard (column) around its type's median (row); symmetric."""
    return np.exp(_normal(_GRID[:, None], _GRID[None, :], ZONE_SIGMA))


def _normal(x: Floats, mean: Floats | float, sigma: float) -> Floats:
    return np.asarray(-0.5 * ((x - mean) / sigma) ** 2)


def _summary(log_density: Floats, source: str) -> Hazard:
    """Returns the log-normal that has the same mean and variance of ln hazard, widened by DRIFT."""
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
