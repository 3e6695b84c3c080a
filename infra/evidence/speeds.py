"""Estimates the share of a GPU's dense peak that training reaches, by GPU and kind of work, from public measurements
and from those of this project. `speeds.csv` beside this module has the public measurements and those of the shipped
jobs, each with source and date.

The fit writes the logarithm of a share as a sum of a mean, an effect of the GPU, an effect of the kind of work, an
effect of the source (whose code, on whose machines), an effect of the combination of these three and of several GPUs,
and a remainder. Each effect has a prior with a sigma, which pulls the effect towards zero. So a GPU with many
measurements has its own efficiency, a GPU without measurements has the mean and a wide range, and each receipt or
calibration of a project also affects the estimates for other GPUs and jobs. The fit also gives the ratio of the shares
that the same code reaches on two GPUs. In this ratio, source and kind cancel. bench/speed_coverage.py tests the fit by
leaving out each source in turn.
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
NOBODY = ""  # the source of a job that has no measurement in the table
MEAN = math.log(0.42)  # mean of ln share before any measurement is known
# Sigmas of ln share: mean, GPU, kind, source, combination (cell), remainder. They are close to the most likely values
# (bench/results/speed.md).
MEAN_SIGMA, GPU_SIGMA, KIND_SIGMA, SOURCE_SIGMA, CELL_SIGMA, REST_SIGMA = 0.15, 0.16, 0.1, 0.3, 0.12, 0.14

Floats = NDArray[np.float64]


class SpeedGroup(NamedTuple):
    """The GPU and the kind of work to which a share of the peak applies."""

    gpu: str
    kind: str  # the kind of work, PhaseSize.kind
    source: str
    several: bool  # whether there are several GPUs


class Speed(NamedTuple):
    """One measurement of the table."""

    place: SpeedGroup
    share: float  # share of the dense peak
    name: str = ""  # a name for people


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The expected share: a log-normal with the median `share`."""

    share: float
    sigma: float
    shared: float  # the part of sigma that is the same on every GPU for one job
    whose: str = ""  # the source of the measurement, for the bill


class ProvenStartUp(NamedTuple):
    """Seconds from launch to first step, and the canary that showed them."""

    seconds: float
    source: str


class Speeds:
    """The fit to all measurements. `setup_s`: the seconds from launch to first step on this stack's nodes, by family of
    types. `canary_s`: these seconds in the account's newest canary.
    """

    def __init__(
        self,
        figures: Iterable[Speed],
        setup_s: Mapping[str, float] | None = None,
        canary_s: Mapping[str, ProvenStartUp] | None = None,
    ) -> None:
        self.figures = tuple(figures)
        self.setup_s, self.canary_s = dict(setup_s or {}), dict(canary_s or {})
        self._places = [figure.place for figure in self.figures]
        among = _covariance(self._places, self._places) + REST_SIGMA**2 * np.eye(len(self._places))
        self._inverse = np.linalg.inv(among)
        self._weights = self._inverse @ np.array([math.log(figure.share) - MEAN for figure in self.figures])
        self._told: dict[SpeedGroup, Expected] = {}

    def expect(self, place: SpeedGroup) -> Expected:
        """The expected share for a group, even if it was never measured."""
        if place not in self._told:
            self._told[place] = self._expect(place)
        return self._told[place]

    def ratio(self, measured: SpeedGroup, asked: SpeedGroup) -> tuple[float, float]:
        """The ratio of two shares that the same code reaches: the share for `asked`, divided by the share for
        `measured`. Returns the median of this ratio, and the sigma of its logarithm.
        """
        both = [measured, asked]
        to_known = _covariance(both, self._places)
        residual = _covariance(both, both) - to_known @ self._inverse @ to_known.T
        here, there = to_known @ self._weights
        variance = float(residual[0, 0] + residual[1, 1] - 2 * residual[0, 1]) + 2 * REST_SIGMA**2
        return math.exp(there - here), math.sqrt(variance)

    def _expect(self, place: SpeedGroup) -> Expected:
        # The uncertainty that an unmeasured GPU has in common with this one is due to the job.
        elsewhere = place._replace(gpu="")
        both = [place, elsewhere]
        to_known = _covariance(both, self._places)
        residual = _covariance(both, both) - to_known @ self._inverse @ to_known.T
        variance = float(residual[0, 0]) + REST_SIGMA**2
        return Expected(
            share=math.exp(MEAN + float(to_known[0] @ self._weights)),
            sigma=math.sqrt(variance),
            shared=math.sqrt(min(max(float(residual[0, 1]), 0.0), variance)),
            whose=self._whose(place),
        )

    def _whose(self, place: SpeedGroup) -> str:
        on_it = {figure.place for figure in self.figures if figure.place.gpu == place.gpu}
        if place in on_it and place.source == OURS:
            return f"as this project measured on the {place.gpu}"
        public = "from public measurements" + ("" if on_it else " of other GPUs")
        return f"{public} and this project's on one {place.gpu}" if place._replace(several=False) in on_it else public


@cache
def shipped() -> Speeds:
    """The figures of the shipped table, with the peaks of the shipped catalog."""
    gpus = {instance.gpu.name: instance.gpu for instance in read_catalog(SHIPPED, None).instances.values()}
    with Path(__file__).with_name("speeds.csv").open(encoding="utf-8", newline="") as lines:
        return Speeds(_figure(row, gpus[row["gpu"]].bf16_tflops or math.nan) for row in csv.DictReader(lines))


def _figure(row: Mapping[str, str], peak: float) -> Speed:
    count = int(row["gpus"])
    share = float(row["tokens_per_s"]) * float(row["gflop_per_token"]) / 1e3 / (peak * count)
    place = SpeedGroup(row["gpu"], row["kind"], row["source"], count > 1)
    return Speed(place, share, f"{row['job']} on {count} x {row['gpu']}")


def _covariance(rows: Sequence[SpeedGroup], columns: Sequence[SpeedGroup]) -> Floats:
    """The covariance of ln share, without the part of REST_SIGMA, which no two measurements share."""
    covariance = np.full((len(rows), len(columns)), MEAN_SIGMA**2)
    for at, sigma in ((0, GPU_SIGMA), (1, KIND_SIGMA), (2, SOURCE_SIGMA)):
        row_keys, column_keys = (np.array([group[at] for group in some], dtype=object) for some in (rows, columns))
        covariance += sigma**2 * (row_keys[:, None] == column_keys[None, :])
    row_keys, column_keys = (np.array([hash(group) for group in some]) for some in (rows, columns))
    covariance += CELL_SIGMA**2 * (row_keys[:, None] == column_keys[None, :])
    return covariance


def family(type_: str) -> str:
    """The type's family, `p` or `g`: nodes of one family take about the same time to start."""
    return "p" if type_.startswith("p") else "g"
