"""Decides when to save a checkpoint before the end of a phase: after an improvement, after an interval, or on a request
of the supervisor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpufleet.job.contract.commit import Reason
from gpufleet.job.experiments.engine.experiment import Session


class Stall:
    """How long the newest save of a phase delayed training."""

    def __init__(self) -> None:
        self._busy = False  # whether a save was being written since the last report of steps
        self._blocked_s = 0.0
        self._beside = [0.0, 0]  # seconds and steps since that save began
        self._alone = [0.0, 0]  # seconds and steps since the phase began, in which no save was being written

    def begin(self, blocked_s: float) -> None:
        """Notes that a save begins, for which training waited `blocked_s`."""
        self._busy, self._blocked_s, self._beside = True, blocked_s, [0.0, 0]

    def see(self, step_s: float | None, steps: int, *, busy: bool) -> None:
        """Notes the end of `steps` steps of `step_s` seconds each (None if they were not timed). `busy`: whether a save
        is being written.
        """
        stretch = self._beside if self._busy else self._alone
        stretch[0] += steps * (step_s or 0.0)
        stretch[1] += steps
        self._busy = busy

    @property
    def seconds(self) -> float:
        """The delay; 0 before the first save. The delay does not include the slower steps beside a save as long as no
        step without a save was timed.
        """
        (beside_s, beside), (alone_s, alone) = self._beside, self._alone
        return self._blocked_s + (max(0.0, beside_s - beside * alone_s / alone) if alone else 0.0)


STALL = 0.01  # an improvement is saved if the last save cost at most this share of the time since


class Cadence:
    """Decides once per optimizer step whether to save. The answer of rank 0 is used. Only one save is written at a
    time. An improvement is saved at exactly its step, unless the last save cost more than the share STALL of the time
    since then. In that case the save waits for the next improvement or the interval, so that a run with frequent
    evaluations does not spend all its time on saves.
    """

    def __init__(self, session: Session, *, improvements: bool, event: Callable[[str], None]) -> None:
        """`improvements`: whether improvements are saved. `event` is called with a line for each improvement that is
        not saved.
        """
        self._session, self._improvements, self._event = session, improvements, event
        self._keeps_best = session.config.delivers_best
        self._phase = ""
        self._best = math.inf  # lowest validation loss in this phase with a checkpoint
        # lowest validation loss in this phase with a checkpoint anywhere, including those of earlier nodes
        self._to_beat = math.inf
        self._wished = False  # whether the supervisor has asked for a save that has not begun yet
        self.begin("")

    def begin(self, phase: str) -> None:
        """Begins a phase, or continues it after `resume`."""
        if phase != self._phase:
            self._phase, self._best, self._to_beat = phase, math.inf, math.inf
        self._saved_at, self.stall = time.monotonic(), Stall()

    def resume(self, phase: str, best: float | None) -> None:
        """`best`: the loss to beat in `phase` when the checkpoint was saved."""
        self._phase = phase
        # If improvements are exported, the checkpoint must be on this disk; otherwise the best loss that was ever saved
        # is used.
        if best is not None and not self._keeps_best:
            self._to_beat = best
        self.recall()

    @property
    def best(self) -> float | None:
        """The validation loss to beat; None if any loss would be an improvement."""
        return None if self._best == math.inf else self._best

    def improve(self, val_loss: float) -> None:
        """Notes that a checkpoint with this validation loss is being saved."""
        self._best = min(self._best, val_loss)

    def recall(self) -> None:
        """Forgets losses whose checkpoint did not reach the disk."""
        saved = self._session.checkpoints.committed.best(self._phase)
        self._best = min(self._to_beat, math.inf if saved is None or saved.val_loss is None else saved.val_loss)

    def due(self, val_loss: float | None) -> Reason | None:
        """Why this step is to be saved; None if it is not. `val_loss`: that of the step's evaluation, if there
        was one.
        """
        since = time.monotonic() - self._saved_at
        improved = self._improvements and val_loss is not None and val_loss < self._best
        self._wished |= self._session.requests.save()
        if improved and self._keeps_best:
            return "best"  # worth waiting for the save that is being written, because the run exports these weights
        if self._session.checkpoints.busy:
            if self._wished:
                self._event("a save is still being written")
            self._wished = False
            return None
        timed = self._wished or since >= self._session.config.save_interval_s(0.0)
        if improved and (timed or self.stall.seconds <= STALL * since):
            return "best"
        if improved:
            self._event(f"an improvement not saved: {self.stall.seconds:.2f} s of a save {since:.1f} s ago")
        return "timed" if timed else None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context whose duration is added to the cost of the save."""
        began = time.monotonic()
        yield
        self._saved_at, self._wished = time.monotonic(), False
        self.stall.begin(self._saved_at - began)
