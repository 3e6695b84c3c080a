"""The one-time schedules of EventBridge Scheduler, which fire at a set hour if no node moves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpufleet.job.contract.reading import epoch
from gpufleet.job.node.outside import aws

# The fields of GetSchedule's answer that are passed to UpdateSchedule. UpdateSchedule replaces all fields, and a
# missing field gets its default.
KEPT = (
    "ActionAfterCompletion",
    "Description",
    "FlexibleTimeWindow",
    "GroupName",
    "KmsKeyArn",
    "Name",
    "ScheduleExpression",
    "ScheduleExpressionTimezone",
    "State",
    "Target",
)


class Schedule:
    """One schedule, named `GROUP/NAME`; an empty name means that there is none."""

    def __init__(self, name: str, folder: Path) -> None:
        self._group, _, self._name = name.partition("/")
        self._folder = folder
        self._known: dict[str, Any] | None = None

    def move(self, at: float, fleets: Sequence[str] = ()) -> bool:
        """Moves the schedule to this moment (epoch seconds), for `fleets` if given. Returns whether that succeeded."""
        changed: dict[str, Any] = {"ScheduleExpression": f"at({_hour(at)})"}
        if fleets and self._ask():
            request = json.dumps({"FleetIds": list(fleets), "TerminateInstances": True})
            changed["Target"] = {**(self._known or {})["Target"], "Input": request}
        return self._update(**changed)

    def stands(self) -> tuple[float, bool] | None:
        """The time when the schedule fires, and whether it is enabled; None if AWS does not answer."""
        if not self._ask():
            return None
        assert self._known is not None
        at = epoch(self._known["ScheduleExpression"][3:-1] + "Z")
        return (at or 0.0), self._known.get("State") != "DISABLED"

    def change(self, at: float, *, enabled: bool) -> bool:
        """Makes the schedule fire at this moment (epoch seconds), or never. Returns whether that succeeded."""
        return self._update(ScheduleExpression=f"at({_hour(at)})", State="ENABLED" if enabled else "DISABLED")

    def disable(self) -> bool:
        return self._update(State="DISABLED")

    def _ask(self) -> bool:
        """Reads the schedule. Returns whether AWS answered."""
        if self._name and self._known is None:
            output = aws(
                "scheduler", "get-schedule", "--group-name", self._group, "--name", self._name, "--output", "json"
            )
            if output is not None:
                answer = json.loads(output)
                self._known = {key: answer[key] for key in KEPT if answer.get(key) is not None}
        return self._known is not None

    def _update(self, **changed: Any) -> bool:
        if not self._ask():
            return False
        asked = {**(self._known or {}), **changed}
        file = self._folder / f"schedule-{self._name}.json"
        file.write_text(json.dumps(asked))
        if aws("scheduler", "update-schedule", "--cli-input-json", f"file://{file}") is None:
            return False
        self._known = asked
        return True


def _hour(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
