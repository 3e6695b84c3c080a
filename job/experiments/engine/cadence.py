"""When a checkpoint is saved before its phase ends: for an improvement, the interval, or a wish of the supervisor's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpufleet.job.contract.commit import Reason
from gpufleet.job.experiments.engine.experiment import Session


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


STALL = 0.01  # of the time since a save: what it may have cost when an improvement asks for the next one


class Cadence:
    """Asked once per optimizer step; rank 0's word counts. One save at a time.

    An improvement is saved at exactly its step, unless the last save cost more than STALL of the time since: then the
    next improvement or the interval has its turn, so that frequent evaluations never make a run that only saves.
    """

    def __init__(self, session: Session, *, improvements: bool, event: Callable[[str], None]) -> None:
        """`improvements`: whether they are a reason at all. `event`: told what is not saved, and why."""
        self._session, self._improvements, self._event = session, improvements, event
        self._keeps_best = session.config.delivers_best
        self._phase = ""
        self._best = math.inf  # lowest validation loss of the phase that has a checkpoint
        self._to_beat = math.inf  # and that of earlier nodes, wherever its checkpoint is
        self._wished = False  # by the supervisor, and not begun yet
        self.begin("")

    def begin(self, phase: str) -> None:
        """A phase begins, or goes on after `resume`."""
        if phase != self._phase:
            self._phase, self._best, self._to_beat = phase, math.inf, math.inf
        self._saved_at, self.stall = time.monotonic(), Stall()

    def resume(self, phase: str, best: float | None) -> None:
        """`best`: what was to be beaten in `phase` when the checkpoint was saved."""
        self._phase = phase
        # What is exported must be on this disk; elsewhere the best that was ever saved is what is to be beaten.
        if best is not None and not self._keeps_best:
            self._to_beat = best
        self.recall()

    @property
    def best(self) -> float | None:
        """The validation loss to be beaten; None: any."""
        return None if self._best == math.inf else self._best

    def improve(self, val_loss: float) -> None:
        """A checkpoint with this validation loss is on its way."""
        self._best = min(self._best, val_loss)

    def recall(self) -> None:
        """Forgets what reached no disk."""
        saved = self._session.checkpoints.committed.best(self._phase)
        self._best = min(self._to_beat, math.inf if saved is None or saved.val_loss is None else saved.val_loss)

    def due(self, val_loss: float | None) -> Reason | None:
        """Why this step is to be saved. `val_loss`: of its evaluation, if there was one."""
        since = time.monotonic() - self._saved_at
        improved = self._improvements and val_loss is not None and val_loss < self._best
        self._wished |= self._session.requests.save()
        if improved and self._keeps_best:
            return "best"  # what the run leaves are these very weights: worth waiting for a save under way
        if self._session.checkpoints.busy:
            if self._wished:
                self._event("a save is on its way already")
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
        """What training waits for within it is the save's cost."""
        began = time.monotonic()
        yield
        self._saved_at, self._wished = time.monotonic(), False
        self.stall.begin(self._saved_at - began)
