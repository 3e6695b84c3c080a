"""Sets how long this node may go on: its own timer, and the schedule by which AWS ends the fleet. Both depend on the
job's meter. The hour of a schedule is the time at which it fires. A node sets the hour to the time at which the run's
limits will be reached. When AWS takes a node, the node sets the hour back to the fleet's expiry, because waiting costs
nothing. If no later node sets it again, the fleet ends at the hour that was set last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gpufleet.job.contract.messages import Spent
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.spent import Means
from gpufleet.job.node.outside import say
from gpufleet.job.node.schedule import Schedule

LOOK_S = 10  # seconds between two looks at the meter's file
# Seconds from the time at which the allowance is used up. The job's own meter stops the run first, with a save. Then
# the timer does, which gives the job 115 s to save. At last AWS does.
TIMER_S, STOP_S = 120, 300
MOVE_S, AGAIN_S = 300, 60  # seconds between two moves of the hour; the second number is for a move to an earlier hour
LEAST_S = 300  # with fewer seconds than this, a node would cost money without training
# hours that differ by fewer seconds are treated as equal, because EventBridge Scheduler is exact to a minute
NEAR_S = 45
OPEN_S = 1200  # longer than a node waits until AWS ends it
SOON_S = 90  # the earliest hour is this many seconds ahead, because AWS refuses a time that has passed


class Allowance:
    """The time that one node may use. Before `begin`, its timer depends only on the limit on the run's hours."""

    def __init__(self, schedule: Schedule, clock: Callable[[], float], timer_s: float) -> None:
        self._schedule, self._clock = schedule, clock
        self.timer_at = clock() + timer_s
        # The fleets that the schedule ends: only the node's own fleet if the run has a fallback, otherwise all known
        # fleets.
        self.fleets: list[str] = []
        self._means: Means | None = None
        self._workdir = Path()
        self._began = 0.0
        self._word: Spent | None = None  # the newest report of the meter
        self._heard_at = 0.0
        # The time at which the allowance was used up. After that, the allowance does not grow.
        self._spent_at: float | None = None
        self._stands: float | None = None  # the hour to which this node last set the schedule
        self._again_at = self._open_until = float("-inf")
        self._ending = False
        self._moving = threading.RLock()

    def begin(self, means: Means, workdir: Path, *, moves: bool = True) -> tuple[float, str]:
        """The moment when the allowance is used up, and the limit that sets it. The hour has been moved when this
        returns; not if `moves` is False, as for a machine whose last stage has set an earlier hour: `watch` moves it.
        """
        self._means, self._workdir, self._began = means, workdir, self._clock()
        self.look(moves=moves)
        return means.when_over(None)

    def watch(self, noticed: Callable[[], bool], recount: Callable[[], Means | None]) -> None:
        """Follows the meter until the process ends. `noticed`: whether AWS is about to take this machine. `recount`:
        returns the limits on what may still be spent, if more is known about other nodes than before.
        """
        counted_at = self._clock()
        self.look()
        while True:
            time.sleep(LOOK_S)
            if self._clock() >= counted_at + MOVE_S:
                counted_at, self._means = self._clock(), recount() or self._means
            if self._open_until == float("-inf") and noticed():
                self.open()
            self.look()

    def look(self, *, moves: bool = True) -> None:
        """Sets the timer by the current allowance, and `moves` the hour if the allowance has changed."""
        with self._moving:
            if self._means is not None and not self._ending:
                self._look(self._means, self._clock(), moves)

    def open(self) -> None:
        """Sets the hour back to the fleet's expiry, because no node of the run spends money for a while. If there are
        several nodes, the others go on.
        """
        if self._means is not None and self._means.terms.is_gang:
            return
        with self._moving:
            self._open_until, self._again_at = self._clock() + OPEN_S, float("-inf")
            self.look()

    def hold(self) -> None:
        """Waits for a move of the hour that is under way, and lets no other one begin."""
        self._moving.acquire()

    def end_fleets(self, fleets: Sequence[str]) -> bool:
        """Ends the fleets by the schedule, within a minute or two. Returns False if the schedule could not be moved."""
        with self._moving:
            self._ending = True
            self.fleets = [*fleets] if self.fleets else []
            return self._move(self._clock() + SOON_S)

    def _look(self, means: Means, now: float, moves: bool) -> None:
        over, _ = means.when_over(self._meter_told(now))
        if self._spent_at is None and over <= now:
            self._spent_at = over
        over = over if self._spent_at is None else self._spent_at
        # if the allowance is already used up at boot, the node ends the run itself
        self.timer_at = max(over, self._began) + TIMER_S
        expires = means.terms.limits.expires or over + STOP_S
        # If less time is left, no other node should start.
        waits = now < self._open_until and over > now + LEAST_S
        hour = expires if waits else min(over + STOP_S, expires)
        soonest = max(hour, now + SOON_S)
        later = self._stands is not None and hour > self._stands + NEAR_S
        differs = self._stands is None or later or soonest < self._stands - NEAR_S
        if moves and differs and now >= self._again_at:
            self._again_at = now + (AGAIN_S if self._move(soonest) and not later else MOVE_S)

    def _move(self, hour: float) -> bool:
        moved = self._schedule.move(hour, self.fleets)
        if moved:
            self._stands = hour
            say(f"AWS ends the fleet at {iso(hour)}, unless a node moves that hour")
        else:
            say("the hour at which AWS ends the fleet cannot be moved and stays")
        return moved

    def _meter_told(self, now: float) -> Spent | None:
        """The meter's newest record, with its times converted to this process's clock."""
        spent = Spent.read(self._workdir)
        if spent is not None and spent != self._word:
            self._word, self._heard_at = spent, now
        return self._word and replace(self._word, at=self._heard_at)
