"""The embedded AWS's time: the machine's own, or one that a test moves by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The clock from which the embedded AWS reads the time."""

    def now(self) -> datetime:
        """The present time in UTC, with its time zone."""
        ...


class SystemClock:
    """The machine's clock. A Cloud with this clock goes on by itself."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock that stands still until a test advances it; call `cloud.tick()` afterwards."""

    def __init__(self, start: datetime = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)) -> None:
        self._now = start

    def now(self) -> datetime:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now += timedelta(seconds=seconds)
