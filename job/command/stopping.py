"""Decides whether and when a command is asked to stop by a signal, and how long the host waits for its end."""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.job.contract import done as ends
from gpufleet.job.contract.messages import Stop
from gpufleet.job.kind.command import CommandConfig

LAST_S = 3.0  # the host stops waiting for an unfinished save this many seconds before the machine is taken away
BY_HAND_S = 1740.0  # seconds to wait if a stop has no deadline; one minute less than the supervisor waits


class Leaving:
    """One stop of the command. `signalled`: whether the signal was sent. `ended`: why the command was killed; empty if
    it was not.
    """

    def __init__(self, config: CommandConfig, stop: Stop, now: float, newest: int) -> None:
        self.signalled, self.ended = False, ""
        self._config, self._stop, self._asked_at, self._newest = config, stop, now, newest
        saves, rules = config.saves_on_signal, config.stop
        by_hand = stop.reason == ends.STOPPED
        # If the command does not save on a signal, or not in time, no signal is sent to it, because it may still save
        # by itself.
        late = stop.deadline is not None and not stop.save
        self._waits = late or (saves is False and (stop.deadline is not None or by_hand))
        if stop.deadline is not None:
            self._until = stop.deadline - LAST_S
        elif by_hand and saves is not None:
            self._until = now + BY_HAND_S
        else:
            self._until = now + rules.grace_s

    @property
    def plan(self) -> str:
        """The plan for the stop, as a line for the log."""
        request = (
            "no signal: the command would save nothing in time" if self._waits else f"SIG{self._config.stop.signal}"
        )
        return f"stop ({self._stop.reason}): {request}, until {self._until - self._asked_at:.0f} s from now"

    def look(
        self,
        now: float,
        *,
        saving: Callable[[], bool],
        committed: int,
        on_signal: bool,
        send: Callable[[str], None],
        say: Callable[[str], None],
    ) -> str:
        """Sends the signal when it is time. Returns the reason to kill the command now; empty if there is none yet.
        `saving`: whether a checkpoint is being written. `committed`: the newest commit. `on_signal`: whether the
        command made that commit because of the signal.
        """
        if not self.signalled and not self._waits and not saving():
            self.signalled = True
            send(self._config.stop.signal)
        new = committed > self._newest
        if new and self._waits and self._stop.deadline is None:
            self.ended = "stopped after a whole checkpoint"
        elif new and on_signal and self._stop.deadline is not None:
            self.ended = "its checkpoint is whole, and the machine goes away"
        elif now >= self._until:
            gone = "the machine goes away" if self._stop.deadline is not None else "its save took too long"
            self.ended = "it did not stop in time" if self.signalled else gone
        return self.ended
