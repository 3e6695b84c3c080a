"""When the run's nodes began and ended, as AWS answers again and again: a fleet's history is late by a minute or so,
and tells of the last two days.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

KEPT_S = 48 * 3600.0  # AWS keeps a fleet's events for two days (EC2 API reference, DescribeFleetHistory)
LATE_S = 300.0  # an event that has not come by then does not come


@dataclass(frozen=True)
class Lives:
    """In epoch seconds: when each node ended, when one was still there; and which are gone, since when is not told."""

    ended: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)
    gone: Collection[str] = ()


UNTOLD = Lives()


class Sightings:
    """What AWS has said so far of the run's other nodes, to the node `own`."""

    def __init__(self, own: str) -> None:
        self.launched: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.is_asked = False  # and has answered
        self._own, self._now = own, 0.0
        self._seen: dict[str, float] = {}
        self._missing: dict[str, float] = {}  # since when, of those without an end

    def know(self, launched: Mapping[str, float], ended: Mapping[str, float]) -> None:
        """What AWS has said to an earlier node."""
        self.launched.update({name: at for name, at in launched.items() if name != self._own})
        self.ended.update(ended)

    def untold(self, names: Collection[str]) -> dict[str, float]:
        """When nodes were launched that are none of these."""
        return {name: at for name, at in self.launched.items() if name not in names}

    @property
    def lives(self) -> Lives:
        gone = {name for name, since in self._missing.items() if self._now - since >= LATE_S}
        return Lives(self.ended, self._seen, gone)

    def doubtful(self, names: Collection[str]) -> set[str]:
        """Those of these and of its own nodes of which AWS may have more to say."""
        known = {self._own, *self.ended, *self.lives.gone}
        return {*names, *self.launched} - known

    def take(
        self,
        names: Collection[str],
        launched: Mapping[str, float],
        ended: Mapping[str, float],
        there: Collection[str] | None,
        now: float,
    ) -> None:
        """An answer, of these nodes and those that it names. `there`: which have not ended; None: it is not told."""
        self.is_asked, self._now = True, now
        self.know(launched, ended)
        for name in self.doubtful(names) if there is not None else ():
            if name in (there or ()):
                self._seen[name] = now
            elif name not in self._missing:
                self._missing[name] = now
                if name in self._seen:  # it was there until now at most
                    self._seen[name] = now
