"""A clock that never goes back, for money and limits.

Somebody may set a machine's clock while a run goes on. Nobody can set the count of seconds since its boot, which also
runs while the machine is suspended. All processes of a run add that count to one time that the first of them has read.

The node's own Python reads this file: nothing newer than 3.9 here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gpufleet.job.contract.environment import BOOTED_AT

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)  # Linux


def uptime() -> float:
    """Seconds since the machine booted, the same in all its containers; outside Linux, since some fixed moment."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


class SteadyClock:
    """Epoch seconds; the machine's clock is read only once, when the object is made."""

    def __init__(
        self, earliest: float = 0.0, *, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = uptime
    ) -> None:
        """`earliest`: a time that has certainly passed, whatever the machine's clock says."""
        self._uptime, self.booted = uptime, max(wall(), earliest) - uptime()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SteadyClock:
        """The clock of the parent process, if the environment names it."""
        booted_at = environment.get(BOOTED_AT)
        return cls() if booted_at is None else cls(wall=lambda: float(booted_at) + uptime())

    def __call__(self) -> float:
        return self.booted + self._uptime()

    def moment(self, written: float) -> float:
        """This clock's time for a file time that the machine's clock set a short while ago."""
        return self() - (time.clock_gettime(time.CLOCK_REALTIME) - written)
