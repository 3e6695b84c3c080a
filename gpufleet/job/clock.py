"""Time that never goes back: money and limits are counted by it.

A machine's clock may be set while a run goes on. Its own count of seconds since it booted may not, and goes on through
a suspension.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)  # Linux


def uptime() -> float:
    """Seconds since the machine booted, the same in all its containers; elsewhere than on Linux since some moment."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


class SteadyClock:
    """Epoch seconds, read off the machine's clock once, when it is made."""

    def __init__(
        self, earliest: float = 0.0, *, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = uptime
    ) -> None:
        """`earliest`: what it must be by now, whatever the machine's clock says."""
        self._uptime, self._booted = uptime, max(wall(), earliest) - uptime()

    def __call__(self) -> float:
        return self._booted + self._uptime()
