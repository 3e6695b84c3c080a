"""two-tower whose folds are shared by two processes, rehearsed with both interruptions of its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.rehearse import rehearse
from tests.repository import ROOT


@pytest.mark.slow
def test_folds_on_two_ranks_survive_their_interruptions(tmp_path: Path) -> None:
    file = (ROOT / "stacks" / "two-tower.yaml").read_text()
    assert file.count("      device: cpu\n") == 1
    text = file.replace("      device: cpu\n", "      device: cpu\n      gpus: 2\n")
    project = scratch.make(tmp_path / "project", {"two-tower": text})
    said: list[str] = []
    assert rehearse("two-tower", root=project, out=said.append) == 0, "\n".join(said)
    folder = project / "rehearsals" / "two-tower" / "r1"
    summary = json.loads((folder / "summary.json").read_text())
    assert sorted(each.split()[0] for each in summary["interruptions"]) == ["loss", "notice"]
    assert "| 2 ranks" in (folder / "results" / "job.log").read_text()
