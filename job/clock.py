"""A clock that never goes back, for money and limits. The clock of a machine may be set while a run goes on, but the
number of seconds since its boot cannot be set. This number also grows while the machine is suspended. The first process
of a run reads the clock once, and all processes add the seconds that have passed since then. The node's own Python
reads this file, so it must work with Python 3.9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gpufleet.job.contract.environment import BOOTED_AT

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)  # exists on Linux only


def uptime() -> float:
    """Seconds since the machine booted, the same number in all its containers. On systems other than Linux, the seconds
    since some fixed moment.
    """
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


class SteadyClock:
    """Gives epoch seconds. The machine's clock is read only once, when the object is made."""

    def __init__(
        self, earliest: float = 0.0, *, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = uptime
    ) -> None:
        """`earliest`: a time that has certainly passed, whatever the machine's clock says."""
        self._uptime, self.booted = uptime, max(wall(), earliest) - uptime()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SteadyClock:
        """The clock of the parent process, if the environment has it; otherwise a new one."""
        booted_at = environment.get(BOOTED_AT)
        return cls() if booted_at is None else cls(wall=lambda: float(booted_at) + uptime())

    def __call__(self) -> float:
        return self.booted + self._uptime()

    def moment(self, written: float) -> float:
        """Converts the time of a file, which the machine's clock has set a short time ago, to the time of this
        clock.
        """
        return self() - (time.clock_gettime(time.CLOCK_REALTIME) - written)
