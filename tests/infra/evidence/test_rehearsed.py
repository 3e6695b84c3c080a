"""A preview warns if a definition declares a save on the signal that no rehearsal has shown."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.evidence.rehearsed import saves_doubt
from gpufleet.infra.program.plan import make
from gpufleet.infra.program.run_guard import Previous
from tests.infra.command_files import command_file

NOW = datetime(2026, 11, 26, tzinfo=UTC)
JOB: dict[str, Any] = {
    "command": "python train.py",
    "checkpoint": {"each": ["ckpt-{step}.pt"], "every": {"steps": 100}, "size_gb": 1},
    "progress": {"stdout": "step (?P<step>[0-9]+)"},
    "work": {"steps": 20_000, "step_ms": {"A10G": 900}},
}


@pytest.mark.parametrize(
    ("told", "saves", "said"),
    [
        ([], True, "no rehearsal here has shown it"),
        ([None], True, "no rehearsal here has shown it"),
        ([False], True, "in the newest rehearsal it saved nothing"),
        ([True, False], True, "in the newest rehearsal it saved nothing"),
        ([False, True, None], True, ""),
        ([], False, ""),
        ([], "unknown", ""),
    ],
)
def test_a_save_that_is_declared_is_doubted_until_a_rehearsal_has_shown_it(
    tmp_path: Path, told: list[bool | None], saves: bool | str, said: str
) -> None:
    path = command_file(tmp_path, **JOB, stop={"saves": saves})
    definition = load(path, now=NOW)
    for number, each in enumerate(told):
        summary = tmp_path / "rehearsals" / definition.name / f"r{number}" / "summary.json"
        summary.parent.mkdir(parents=True)
        summary.write_text(json.dumps({"saves_on_signal": each}))
        os.utime(summary, (number, number))
    found = saves_doubt(definition, tmp_path)
    assert said in found
    assert bool(found) == bool(said)
    warnings = make(tmp_path, definition.name, now=NOW, previous=Previous(outputs={}), preview=True).warnings
    assert [each for each in warnings if "job.stop.saves is true" in each] == ([found] if said else [])
