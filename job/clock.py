"""Time that never goes back: money and limits are counted by it.

A machine's clock may be set while a run goes on. Its own count of seconds since it booted may not, and goes on through
a suspension. All processes of a run count from the moment of that boot that the first of them has read.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gpufleet.job.contract.environment import BOOTED_AT

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
        self._uptime, self.booted = uptime, max(wall(), earliest) - uptime()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SteadyClock:
        """The clock of the process that has started this one, if it has told it."""
        told = environment.get(BOOTED_AT)
        return cls() if told is None else cls(wall=lambda: float(told) + uptime())

    def __call__(self) -> float:
        return self.booted + self._uptime()

    def moment(self, written: float) -> float:
        """The time by this clock of a file's time, which the machine's clock has given it a short while ago."""
        return self() - (time.clock_gettime(time.CLOCK_REALTIME) - written)
