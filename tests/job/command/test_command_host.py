"""The host of a command, for real: the miniature script of each convention, from its first step to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_world import FORMATS, CommandJob, of_format, wrong
from repository import ROOT

CLOCK = """
import pathlib, sys, time
real, ahead = time.time, pathlib.Path({ahead!r})
if "gpufleet.job.command" in sys.orig_argv:
    time.time = lambda: real() + (float(ahead.read_text() or 0) if ahead.exists() else 0)
"""


@pytest.mark.parametrize("by_s", [7200.0, -7200.0])
def test_a_clock_that_is_set_ends_no_command_and_changes_no_checkpoint(tmp_path: Path, by_s: float) -> None:
    """Ahead by two hours, the command had been silent for two hours."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(ahead=str(tmp_path / "ahead")))
    job = CommandJob(tmp_path / "w", of_format("hf-trainer", "--steps 40 --every 10 --step-s 0.1", work={"steps": 40}))
    job.environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    process = job.start()

    def set_clock() -> None:
        job.wait_for(lambda: job.metrics() and job.metrics()[-1]["step"] >= 5, process)
        (tmp_path / "ahead").write_text(str(by_s))

    assert job.finish(process, set_clock) == 0, job.log
    assert "was ended" not in job.log
    assert job.steps()[-1] == 40
    times = [each["ts"] for each in job.metrics()]
    assert max(times) - min(times) < 3600


@pytest.mark.parametrize("name", FORMATS)
def test_a_script_of_each_convention_runs_to_its_end_and_leaves_whole_checkpoints(tmp_path: Path, name: str) -> None:
    job = CommandJob(tmp_path / "w", of_format(name, "--steps 20 --every 5", work={"steps": 20}))
    assert job.run() == 0, job.log
    assert job.commits(), job.log
    # Of a file that is overwritten the step is the one that was told by then: its last line may be read after it.
    assert job.commits()[-1].step in (range(15, 21) if name == "file" else [20])
    left = [path for path in (job.workdir / "final").rglob("*") if path.is_file()]
    assert left, "its outputs are empty, and its newest checkpoint is not what the run leaves"
    for each in job.commits():
        assert wrong(job.workdir / "ckpt" / each.folder, each.step) == []
    assert job.metrics()[-1]["step"] == 20
