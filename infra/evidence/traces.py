"""Reads availability traces: the periods in which a spot node was available in a zone. docs/risk.md has the formats."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.observation import Observation
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields

LONGEST_H = 1e6  # a trace has at most this many hours

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The periods [up_from_h, up_to_h) in which nodes were available, within `hours` hours. The periods are in order,
    and do not overlap.
    """

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
        """The number of periods that end before the trace ends."""
        return int((self.up_to_h < self.hours).sum())

    def observation(self) -> Observation:
        """What the trace shows about the hazard of its zone."""
        return Observation(self.type, self.zone, self.node_hours, self.interruptions, self.source, self.start)

    def part(self, from_h: float, to_h: float) -> Trace:
        """The part of the trace between these two times, in hours."""
        meets = (self.up_to_h > from_h) & (self.up_from_h < to_h)
        return replace(
            self,
            up_from_h=np.maximum(self.up_from_h[meets], from_h) - from_h,
            up_to_h=np.minimum(self.up_to_h[meets], to_h) - from_h,
            hours=to_h - from_h,
        )


def read(path: Path) -> Trace:
    """The trace in a .csv or .json file. Raises GpufleetError if the file has none."""
    if path.suffix not in (".csv", ".json"):
        raise GpufleetError(f"{path}: a trace is a .csv or .json file (`gpufleet docs risk`); write STACK after traces")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise GpufleetError(f"{path}: cannot be read ({why}); give a trace as in `gpufleet docs risk`") from None
    try:
        trace = _csv(text, path) if path.suffix == ".csv" else _json(text, path)
    except (ValueError, csv.Error) as error:
        raise GpufleetError(f"{path}: no trace: {error}. The formats are in `gpufleet docs risk`.") from None
    if not trace.up_from_h.size:
        raise GpufleetError(f"{path}: no node was available in any of its {trace.hours:.0f} h; nothing can be replayed")
    return trace


def _json(text: str, path: Path) -> Trace:
    fields = Fields(reading.parse(text.encode()))
    tree = fields.tree
    public = "metadata" in tree and "gap_s" not in tree  # the form of github.com/skypilot-org/spot-traces
    gap_s = fields.section("metadata").need("gap_seconds", _gap_s) if public else fields.need("gap_s", _gap_s)
    counts = fields.need("data" if public else "available", _counts)
    about = {key: fields.take(key, reading.text, "") for key in ("type", "zone")} | {"start": tree.get("start")}
    return _trace(np.arange(len(counts)) * gap_s / 3600, counts > 0, len(counts) * gap_s / 3600, path, about)


def _gap_s(value: Any) -> float:
    with suppress(DoubtError):
        if (gap_s := reading.number(value)) > 0:
            return gap_s
    raise DoubtError(f"is {reading.show(value)}; allowed: seconds above 0")


def _counts(value: Any) -> Floats:
    """The numbers of nodes that were available."""
    with suppress(DoubtError):
        counts = np.asarray(reading.listed(reading.number)(value), dtype=np.float64)
        if counts.size and (counts >= 0).all():
            return counts
    raise DoubtError("is not a list of numbers of nodes, 0 or more, at least one")


def _csv(text: str, path: Path) -> Trace:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    notes = (part for line in text.splitlines() if line.startswith("#") for part in line[1:].split(","))
    about = {name.strip(): value.strip() for name, sign, value in (note.partition("=") for note in notes) if sign}
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
    """The numbers in the column with this name. Raises ValueError, which names the row, if a value is not a number."""
    numbers = np.zeros(len(rows))
    for number, row in enumerate(rows):
        try:
            numbers[number] = float(row[key] or "")
        except ValueError:
            raise ValueError(f"row {number + 1} below the names: {key} is {row[key] or ''!r}, not a number") from None
    return numbers


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
    """The trace. `up`: for each time in `at_h`, whether nodes were available from this time on."""
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
