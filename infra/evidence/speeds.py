"""How much of a GPU's dense peak training reaches, by GPU and kind of work: public measurements, and this project's.

`speeds.csv` beside this module has the public ones and the shipped jobs' own, each with source and date. Their
logarithm is fitted as a mean, an effect of the GPU, of the kind of work, of the source (whose code, on whose machines),
one of the cell that all three and several GPUs make, and a rest; every effect is drawn towards none by its own sigma.
So a GPU with many figures has its own efficiency, one without any the mean and a wide interval, and each receipt or
calibration of a project moves what it is told of other GPUs and other jobs. What the same code reaches on two GPUs
comes from the same fit: source and kind are then the same, and drop out. bench/speed_coverage.py leaves each source out
in turn.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpufleet.infra.catalog import SHIPPED, read_catalog

OURS = "gpufleet"  # the source of the shipped jobs
NOBODY = ""  # of a job of which no figure is in the table
MEAN = math.log(0.42)  # of ln share, before any figure
# Sigmas of ln share: mean, GPU, kind, source, cell, rest. Near the most likely ones; bench/results/speed.md.
MEAN_SIGMA, GPU_SIGMA, KIND_SIGMA, SOURCE_SIGMA, CELL_SIGMA, REST_SIGMA = 0.15, 0.16, 0.1, 0.3, 0.12, 0.14

Floats = NDArray[np.float64]


class SpeedGroup(NamedTuple):
    """What a share of the peak is of."""

    gpu: str
    kind: str  # of work: PhaseSize.kind
    source: str
    several: bool  # GPUs


class Speed(NamedTuple):
    """One figure of the table."""

    place: SpeedGroup
    share: float  # of the dense peak
    name: str = ""  # for people


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What is to be expected at a place: log-normal, `share` its median."""

    share: float
    sigma: float
    shared: float  # part of sigma that the same job has on every GPU
    whose: str = ""  # who has measured that, for the bill


class Speeds:
    """The figures that count, fitted; `setup_s`: seconds to the first step of this stack's nodes, by family."""

    def __init__(self, figures: Iterable[Speed], setup_s: Mapping[str, float] | None = None) -> None:
        self.figures = tuple(figures)
        self.setup_s = dict(setup_s or {})
        self._places = [each.place for each in self.figures]
        among = _covariance(self._places, self._places) + REST_SIGMA**2 * np.eye(len(self._places))
        self._inverse = np.linalg.inv(among)
        self._weights = self._inverse @ np.array([math.log(each.share) - MEAN for each in self.figures])
        self._told: dict[SpeedGroup, Expected] = {}

    def expect(self, place: SpeedGroup) -> Expected:
        """At a place, whether or not anything was measured there."""
        if place not in self._told:
            self._told[place] = self._expect(place)
        return self._told[place]

    def ratio(self, measured: SpeedGroup, asked: SpeedGroup) -> tuple[float, float]:
        """How many times the share that code reaches at `measured` it reaches at `asked`: the median, and the sigma of
        its logarithm.
        """
        both = [measured, asked]
        to_known = _covariance(both, self._places)
        left = _covariance(both, both) - to_known @ self._inverse @ to_known.T
        here, there = to_known @ self._weights
        variance = float(left[0, 0] + left[1, 1] - 2 * left[0, 1]) + 2 * REST_SIGMA**2
        return math.exp(there - here), math.sqrt(variance)

    def _expect(self, place: SpeedGroup) -> Expected:
        elsewhere = place._replace(gpu="")  # a GPU that nobody has measured: what it shares with this one is the job's
        both = [place, elsewhere]
        to_known = _covariance(both, self._places)
        left = _covariance(both, both) - to_known @ self._inverse @ to_known.T
        variance = float(left[0, 0]) + REST_SIGMA**2
        return Expected(
            share=math.exp(MEAN + float(to_known[0] @ self._weights)),
            sigma=math.sqrt(variance),
            shared=math.sqrt(min(max(float(left[0, 1]), 0.0), variance)),
            whose=self._whose(place),
        )

    def _whose(self, place: SpeedGroup) -> str:
        on_it = {each.place for each in self.figures if each.place.gpu == place.gpu}
        if place in on_it and place.source == OURS:
            return f"as this project measured on the {place.gpu}"
        public = "from public measurements" + ("" if on_it else " of other GPUs")
        return f"{public} and this project's on one {place.gpu}" if place._replace(several=False) in on_it else public


@cache
def shipped() -> Speeds:
    """The table's, by the peaks of the shipped catalog."""
    gpus = {each.gpu.name: each.gpu for each in read_catalog(SHIPPED, None).instances.values()}
    with Path(__file__).with_name("speeds.csv").open(encoding="utf-8", newline="") as lines:
        return Speeds(_figure(row, gpus[row["gpu"]].bf16_tflops or math.nan) for row in csv.DictReader(lines))


def _figure(row: Mapping[str, str], peak: float) -> Speed:
    count = int(row["gpus"])
    share = float(row["tokens_per_s"]) * float(row["gflop_per_token"]) / 1e3 / (peak * count)
    place = SpeedGroup(row["gpu"], row["kind"], row["source"], count > 1)
    return Speed(place, share, f"{row['job']} on {count} x {row['gpu']}")


def _covariance(rows: Sequence[SpeedGroup], columns: Sequence[SpeedGroup]) -> Floats:
    """The covariance of ln share, without the rest."""
    found = np.full((len(rows), len(columns)), MEAN_SIGMA**2)
    for at, sigma in ((0, GPU_SIGMA), (1, KIND_SIGMA), (2, SOURCE_SIGMA)):
        left, right = (np.array([each[at] for each in some], dtype=object) for some in (rows, columns))
        found += sigma**2 * (left[:, None] == right[None, :])
    left, right = (np.array([hash(each) for each in some]) for some in (rows, columns))
    found += CELL_SIGMA**2 * (left[:, None] == right[None, :])
    return found


def family(type_: str) -> str:
    """`p` or `g`, by which nodes take about as long to start."""
    return "p" if type_.startswith("p") else "g"
