"""One observation of interruptions."""

from __future__ import annotations

from datetime import date
from typing import NamedTuple


class Observation(NamedTuple):
    """What was observed in one zone: the interruptions, and the node-hours in which they came."""

    type: str
    zone: str | None  # None if the zone is not known
    node_hours: float
    interruptions: float
    source: str  # where the observation comes from, for people: the file of a trace, or the receipt of a run
    as_of: date | None
    gpus: int = 1  # GPUs per node
