"""How a command is asked to leave: whether by a signal, when, and how long it is waited for."""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.job.contract import done as ends
from gpufleet.job.contract.messages import Stop
from gpufleet.job.kind.command import CommandConfig

LAST_S = 3.0  # before the machine goes away: what is not whole by then is given up
BY_HAND_S = 1740.0  # a minute less than the supervisor waits where nothing presses


class Leaving:
    """One stop. `signalled`: it was sent to the command; `ended`: it was ended for want of time, in these words."""

    def __init__(self, config: CommandConfig, stop: Stop, now: float, newest: int) -> None:
        self.signalled, self.ended = False, ""
        self._config, self._stop, self._asked_at, self._newest = config, stop, now, newest
        saves, rules = config.saves_on_signal, config.stop
        by_hand = stop.reason == ends.STOPPED
        # Where it saves nothing, or not in time, a signal would only end what may save by itself until then.
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
        """For the log."""
        what = "no signal: it would save nothing in time" if self._waits else f"SIG{self._config.stop.signal}"
        return f"stop ({self._stop.reason}): {what}, until {self._until - self._asked_at:.0f} s from now"

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
        """Sends the signal when its time has come. Why the command is ended now; nothing where it is waited for.

        `saving`: whether a checkpoint is being written; `committed`: the newest; `on_signal`: whether the command made
        that one because of the signal.
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
            self.ended = "it did not leave in time" if self.signalled else gone
        return self.ended
