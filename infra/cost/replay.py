"""Availability traces: when one spot node could be had in a zone, and what a run would have cost there.

A trace is stretches of hours in which a node could be had. A replay begins the run at many hours of it: the run waits
for the next stretch, keeps its node until the stretch ends, and pays by the same rules as the simulation
(`risk.account`); only luck is replaced by what happened. A run that outlasts the trace goes on at its beginning, so
that long runs are not the ones left out. The formats are documented in docs/risk.md.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from infra.cost.hazard import Floats, Hazard, Indices, Observation
from infra.cost.risk import SEED, Exposure, Node, Outcome, account, simulate
from infra.cost.text import hours
from infra.errors import GpufleetError
from job.contract import reading
from job.contract.reading import DoubtError, Fields

STARTS = 2_000  # hours of a trace at which a run is begun, evenly spread
SHARES = (0.1, 0.5, 0.9)
LONGEST_H = 1e6  # of a trace
FIXED_HAZARD = 0.2  # the figure that a stated interval is to beat


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Stretches [up_from_h, up_to_h) of a trace's `hours`, in order and apart from each other."""

    up_from_h: Floats
    up_to_h: Floats
    hours: float
    type: str
    zone: str | None
    start: date | None
    source: str

    @property
    def node_hours(self) -> float:
        return float((self.up_to_h - self.up_from_h).sum())

    @property
    def interruptions(self) -> int:
        """Ends of stretches; the trace's own end is none."""
        return int((self.up_to_h < self.hours).sum())

    def observation(self) -> Observation:
        """What the trace says of its zone's hazard."""
        return Observation(self.type, self.zone, self.node_hours, self.interruptions, self.source, self.start)

    def part(self, from_h: float, to_h: float) -> Trace:
        """The trace between two of its hours."""
        meets = (self.up_to_h > from_h) & (self.up_from_h < to_h)
        return replace(
            self,
            up_from_h=np.maximum(self.up_from_h[meets], from_h) - from_h,
            up_to_h=np.minimum(self.up_to_h[meets], to_h) - from_h,
            hours=to_h - from_h,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A forecast against replayed bills."""

    name: str
    p10_usd: float
    p50_usd: float
    p90_usd: float
    contained: float  # share of replayed bills in p10-p90
    pinball_usd: float  # mean over the three quantiles; less is better


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a trace did to a run, against what was stated before."""

    trace: Trace
    p10_usd: float
    p50_usd: float
    p90_usd: float
    interruptions: float  # mean per run
    windows: int  # runs begun
    independent: float  # runs that fit into the trace one after the other: the sample's real size
    scores: tuple[Score, ...]  # stated first


def read(path: Path) -> Trace:
    """The trace in a .csv or .json file. Raises GpufleetError."""
    if path.suffix not in (".csv", ".json"):
        raise GpufleetError(f"{path}: a trace is a .csv or a .json file, as in docs/risk.md; STACK comes after it")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise GpufleetError(f"{path}: cannot be read ({why}); give a trace as in docs/risk.md") from None
    try:
        found = _csv(text, path) if path.suffix == ".csv" else _json(text, path)
    except (ValueError, csv.Error) as error:
        raise GpufleetError(f"{path}: no trace: {error}. The formats are in docs/risk.md.") from None
    if not found.up_from_h.size:
        raise GpufleetError(f"{path}: no node could be had in any of its {found.hours:.0f} h; nothing can be replayed")
    return found


def run(exposure: Exposure, trace: Trace, *, starts: int = STARTS, seed: int = SEED) -> Outcome:
    """The run begun at `starts` evenly spread hours of the trace. Raises ValueError for a trace without a node."""
    if not trace.up_from_h.size:
        raise ValueError("a trace without availability")
    rng = np.random.default_rng(seed)
    begin_h: Floats = np.arange(starts, dtype=np.float64) * (trace.hours / starts)

    def fate(active: Indices, attempt: int, wall_h: Floats) -> Node:
        life, wait = _next(trace, begin_h[active] + wall_h)
        missed, lost = rng.random((2, starts))[:, active]
        return Node(life_h=life, wait_h=wait, missed=missed, lost=lost)

    return account(exposure, _up_from(trace, begin_h) - begin_h, fate)


def compare(exposure: Exposure, trace: Trace, *, starts: int = STARTS) -> Replayed:
    """Replays without limits (a run that a limit stops is cheap, but not done) and grades the exposure's own hazard,
    a fixed 0.2, and the prior where that is another one. Raises GpufleetError for a trace shorter than the run: going
    round in it, every run would meet the same hours, and its interval would hold or not by construction."""
    exposure = exposure.unlimited
    if trace.hours < exposure.uninterrupted_h:
        raise GpufleetError(
            f"{trace.source}: it is {hours(trace.hours)} h long and the run takes {hours(exposure.uninterrupted_h)} h"
            " without interruptions; give a longer trace, or fewer --work-hours"
        )
    outcome = run(exposure, trace, starts=starts)
    forecasts: list[tuple[str, Hazard | float | None]] = [("stated", exposure.hazard), ("fixed 0.2", FIXED_HAZARD)]
    if exposure.chance != Hazard():
        forecasts.append(("prior", None))
    p10, p50, p90 = np.quantile(outcome.usd, SHARES)
    return Replayed(
        trace=trace,
        p10_usd=float(p10),
        p50_usd=float(p50),
        p90_usd=float(p90),
        interruptions=float(outcome.interruptions.mean()),
        windows=starts,
        independent=max(1.0, trace.hours / float(outcome.wall_hours.mean())),
        scores=tuple(score(name, replace(exposure, hazard=hazard), outcome.usd) for name, hazard in forecasts),
    )


def score(name: str, stated: Exposure, realised_usd: Floats) -> Score:
    """How the simulated p10, p50 and p90 of `stated` did on realised bills."""
    quantiles = np.quantile(simulate(stated).usd, SHARES)
    edge = 1e-9 * max(1.0, float(quantiles[-1]))  # a bill on the edge is inside: many runs meet no interruption at all
    inside = (realised_usd >= quantiles[0] - edge) & (realised_usd <= quantiles[-1] + edge)
    p10, p50, p90 = map(float, quantiles)
    return Score(
        name=name,
        p10_usd=p10,
        p50_usd=p50,
        p90_usd=p90,
        contained=float(inside.mean()),
        pinball_usd=pinball(realised_usd, (p10, p50, p90)),
    )


def pinball(values: Floats, quantiles: Sequence[float]) -> float:
    """Mean pinball loss at SHARES: distance to the quantile, times the share, or 1 less the share for values below."""
    losses = []
    for share, quantile in zip(SHARES, quantiles, strict=True):
        over = values - quantile
        losses.append(float(np.maximum(share * over, (share - 1) * over).mean()))
    return sum(losses) / len(losses)


def _next(trace: Trace, at_h: Floats) -> tuple[Floats, Floats]:
    """Hours the node lives that is launched at `at_h`, and hours until the next one can be had."""
    now = np.mod(at_h + _EDGE_H, trace.hours)
    index = np.searchsorted(trace.up_from_h, now, side="right") - 1
    ends = trace.up_to_h.copy()
    if trace.up_from_h[0] == 0 and ends[-1] == trace.hours:
        ends[-1] = math.inf if len(ends) == 1 else ends[-1] + ends[0]
    life = np.maximum(ends[index] - now, 0.0)
    lost = np.where(np.isfinite(life), at_h + life, 0.0)
    return life, np.where(np.isfinite(life), _up_from(trace, lost + 2 * _EDGE_H) - lost, 0.0)


def _up_from(trace: Trace, at_h: Floats) -> Floats:
    """The first hour from `at_h` on in which a node can be had; hours go on counting past the trace's end."""
    now = np.mod(at_h, trace.hours)
    index = np.searchsorted(trace.up_to_h, now, side="right")
    beyond = index == len(trace.up_to_h)
    starts = np.where(beyond, trace.up_from_h[0] + trace.hours, trace.up_from_h[np.where(beyond, 0, index)])
    return np.asarray(at_h + np.maximum(starts - now, 0.0))


# A third of a millisecond: which side of an edge an hour lies on survives rounding. A life of exactly an hour falls
# short of it by as much: the node was gone at that sample, so it was taken before.
_EDGE_H = 1e-7


def _json(text: str, path: Path) -> Trace:
    fields = Fields(reading.parse(text.encode()))
    tree = fields.tree
    public = "metadata" in tree and "gap_s" not in tree  # as in github.com/skypilot-org/spot-traces
    gap_s = fields.section("metadata").need("gap_seconds", _gap_s) if public else fields.need("gap_s", _gap_s)
    counts = fields.need("data" if public else "available", _counts)
    about = {key: fields.take(key, reading.text, "") for key in ("type", "zone")} | {"start": tree.get("start")}
    return _trace(np.arange(len(counts)) * gap_s / 3600, counts > 0, len(counts) * gap_s / 3600, path, about)


def _gap_s(value: Any) -> float:
    with suppress(DoubtError):
        if (found := reading.number(value)) > 0:
            return found
    raise DoubtError(f"is {reading.show(value)}; allowed: seconds above 0")


def _counts(value: Any) -> Floats:
    """Numbers of nodes that could be had."""
    with suppress(DoubtError):
        counts = np.asarray(reading.listed(reading.number)(value), dtype=np.float64)
        if counts.size and (counts >= 0).all():
            return counts
    raise DoubtError("is not a list of numbers of nodes, 0 or more, at least one")


def _csv(text: str, path: Path) -> Trace:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    notes = (part for line in text.splitlines() if line.startswith("#") for part in line[1:].split(","))
    about = {name.strip(): value.strip() for name, found, value in (note.partition("=") for note in notes) if found}
    rows = list(csv.DictReader(lines))
    if len(rows) < 2 or {"at_h", "available"} - set(rows[0]):
        raise ValueError("needs the columns at_h and available, and two rows at least (the last one ends the trace)")
    at_h, counts = _column(rows, "at_h"), _column(rows, "available")
    if not np.isfinite(at_h).all() or at_h[0] != 0 or (np.diff(at_h) <= 0).any():
        raise ValueError("at_h has to begin at 0 and grow from row to row")
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise ValueError("available is a number of nodes, 0 or more")
    return _trace(at_h[:-1], counts[:-1] > 0, float(at_h[-1]), path, about)


def _column(rows: Sequence[dict[str, str | Any]], key: str) -> Floats:
    """The numbers below a name of the first line. Raises ValueError with the row of what is none."""
    found = np.zeros(len(rows))
    for number, row in enumerate(rows):
        try:
            found[number] = float(row[key] or "")
        except ValueError:
            raise ValueError(f"row {number + 1} below the names: {key} is {row[key] or ''!r}, no number") from None
    return found


def _day(start: object) -> date | None:
    try:
        return None if start is None else datetime.fromisoformat(str(start)).date()
    except ValueError:
        raise ValueError(f"start is {reading.show(start)}; allowed: a date such as 2026-11-01") from None


def _trace(
    at_h: Floats,
    up: np.ndarray[Any, np.dtype[np.bool_]],
    hours: float,
    path: Path,
    about: Mapping[str, Any],
) -> Trace:
    """Stretches from the state `up` that holds from each of `at_h` on."""
    if hours > LONGEST_H:
        raise ValueError(f"it is {hours:.3g} h long; allowed: at most {LONGEST_H:.0f}")
    change = np.diff(np.concatenate(([0], up.astype(np.int8), [0])))
    edges = np.append(at_h, hours)
    return Trace(
        up_from_h=edges[np.flatnonzero(change == 1)],
        up_to_h=edges[np.flatnonzero(change == -1)],
        hours=hours,
        type=str(about.get("type", "")),
        zone=str(about["zone"]) if about.get("zone") else None,
        start=_day(about.get("start")),
        source=path.name,
    )
