"""One observation of interruptions."""

from __future__ import annotations

from datetime import date
from typing import NamedTuple


class Observation(NamedTuple):
    """Observed interruptions in one zone: `interruptions` in `node_hours` of nodes that ran or were wanted."""

    type: str
    zone: str | None  # None: not known
    node_hours: float
    interruptions: float
    source: str  # the source, for people: a trace's file, or a run's receipt
    as_of: date | None
    gpus: int = 1  # per node
