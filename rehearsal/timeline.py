"""Records what happens in a rehearsal, and when. Each moment is printed at once, and kept as a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def say(line: str) -> None:
    """Prints one line of progress at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One thing that happened, `t` seconds after the rehearsal began."""

    t: float
    at: str
    what: str  # its kind: step, launched, boot, training, notice, seen, lost, ended, checkpoint, done ...
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


class Timeline:
    """The moments of a rehearsal. `log` is written line by line, so that it is complete even if the rehearsal dies."""

    def __init__(self, log: Path, *, out: Callable[[str], None] = say) -> None:
        self._log = log
        self._out = out
        self._began = time.monotonic()
        self._epoch = time.time()
        self.moments: list[Moment] = []

    def add(self, event: str, text: str, *, at: datetime | None = None, quiet: bool = False, **facts: Any) -> Moment:
        """Records and prints a moment, with the present time. `at`: when it happened, if it was noticed later."""
        t = self.seconds if at is None else self.since_began(at)
        when = at or datetime.now(UTC)
        moment = Moment(t=round(t, 3), at=when.isoformat(timespec="milliseconds"), what=event, text=text, facts=facts)
        self.moments.append(moment)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(moment)) + "\n")
        if not quiet:
            now = self.seconds
            late = f" (at {clock(t).strip()})" if now - t >= 1 else ""
            self._out(f"{clock(now)}  {text}{late}")
        return moment

    def sort(self) -> None:
        """Puts the log in time order, when nothing more will come."""
        moments = sorted(self.moments, key=lambda m: m.t)
        self._log.write_text("".join(json.dumps(asdict(moment)) + "\n" for moment in moments), encoding="utf-8")

    def select(self, *kinds: str) -> list[Moment]:
        """The moments of these kinds, in time order."""
        return sorted((m for m in self.moments if m.what in kinds), key=lambda m: m.t)

    @property
    def seconds(self) -> float:
        """Seconds since the rehearsal began."""
        return time.monotonic() - self._began

    def since_began(self, moment: datetime) -> float:
        """A wall-clock time as seconds after the rehearsal began."""
        return moment.timestamp() - self._epoch


def clock(seconds: float) -> str:
    """Minutes and seconds: 1:05 for 65."""
    return f"{int(seconds) // 60:>3}:{int(seconds) % 60:02}"
