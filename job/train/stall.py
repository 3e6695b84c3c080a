"""What a checkpoint beside training costs it: seconds that it waits, and those by which its steps are slower.

Steps are timed from one read-back to the next (metrics.StepClock), where the device has nothing left to do; a stretch
counts as beside a save when one was on its way at any time in it.
"""

from __future__ import annotations


class Stall:
    """How long the newest save of a phase held training up."""

    def __init__(self) -> None:
        self._busy = False  # a save was on its way since the last stretch
        self._blocked_s = 0.0
        self._beside = [0.0, 0]  # seconds, steps: since that save began
        self._alone = [0.0, 0]  # since the phase began

    def begin(self, blocked_s: float) -> None:
        """A save begins, for which training waited `blocked_s`."""
        self._busy, self._blocked_s, self._beside = True, blocked_s, [0.0, 0]

    def see(self, step_s: float | None, steps: int, *, busy: bool) -> None:
        """A stretch of `steps` steps ends, each of `step_s` (None: none was timed). `busy`: a save is on its way."""
        stretch = self._beside if self._busy else self._alone
        stretch[0] += steps * (step_s or 0.0)
        stretch[1] += steps
        self._busy = busy

    @property
    def seconds(self) -> float:
        """0 before the first save; what steps lost is unknown, and not in it, before any was timed alone."""
        (beside_s, beside), (alone_s, alone) = self._beside, self._alone
        return self._blocked_s + (max(0.0, beside_s - beside * alone_s / alone) if alone else 0.0)
