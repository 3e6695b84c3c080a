"""The host of a command, for real: the miniature script of each convention, from its first step to its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufleet.job.contract.messages import Alarm, Stop
from tests.job.command_world import FORMATS, PYTHON, CommandJob, kill, of_format, parameters, wrong

CLOCK = """
import pathlib, time
real, ahead = time.time, pathlib.Path({ahead!r})
time.time = lambda: real() + (float(ahead.read_text() or 0) if ahead.exists() else 0)
"""


@pytest.mark.parametrize("by_s", [7200.0, -7200.0])
def test_a_clock_that_is_set_ends_no_command_and_changes_no_checkpoint(tmp_path: Path, by_s: float) -> None:
    """Ahead by two hours, the command had been silent for two hours."""
    told = of_format("hf-trainer", "--steps 40 --every 10 --step-s 0.1", work={"steps": 40})
    job = CommandJob(tmp_path / "w", told, changed=CLOCK.format(ahead=str(tmp_path / "ahead")))
    process = job.start()

    def set_clock() -> None:
        job.wait_for(lambda: job.metrics() and job.metrics()[-1]["step"] >= 5, process, "step 5")
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


def test_a_command_starts_in_the_folder_that_it_asks_for_and_may_save_there(tmp_path: Path) -> None:
    told = of_format("dcp", "--steps 20 --every 5", work={"steps": 20}, workdir="{checkpoints}")
    told["command"] = f"{PYTHON} {{code}}/dcp.py --out . --steps 20 --every 5"
    job = CommandJob(tmp_path / "w", told)
    assert job.run() == 0, job.log
    assert job.steps()[-1] == 20


SAVES_AT_ONCE = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1], "step-1")
folder.mkdir()
for name in ("w.bin", "done"):
    (folder / name).write_text(name)
print("step 1 loss 1", flush=True)
time.sleep(5000)
"""


def test_what_a_command_saves_at_once_counts(tmp_path: Path) -> None:
    """A process that has ended may have left cut what was written meanwhile; of ours none may seem to be such a one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mkdir").write_text('#!/bin/sh\nsleep 1.5\nexec /bin/mkdir "$@"\n')
    (tmp_path / "bin" / "mkdir").chmod(0o755)
    checkpoint = {"each": ["step-{step}/"], "complete": "done"}
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "save.py").write_text(SAVES_AT_ONCE)
    told = parameters(f"exec {PYTHON} save.py {{checkpoints}}", checkpoint=checkpoint)
    job = CommandJob(tmp_path / "w", told, tmp_path / "code")
    job.environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    process = job.start()
    try:
        job.wait_for(lambda: job.steps() or "does not count" in job.log, process, "a save")
    finally:
        kill(process)
    assert job.steps() == [1], job.log


def test_a_command_that_saves_nothing_begins_anew_after_a_crash_and_finishes(tmp_path: Path) -> None:
    once = "if [ -e ../once ]; then echo step 9 loss 1; else touch ../once; exit 9; fi"
    job = CommandJob(
        tmp_path / "w", parameters(f"echo step 1 loss 1; {once}", checkpoint={"format": "none"}, work={"steps": 9})
    )
    assert job.run() == 0, job.log
    assert job.steps() == []
    assert job.log.count("step 1 loss 1") == 2


def test_a_node_that_has_failed_is_held_until_somebody_ends_it(tmp_path: Path) -> None:
    held = {"fatal": [3], "hold_minutes": 600}
    job = CommandJob(tmp_path / "w", parameters("exit 3", exit=held, device="cuda"))  # a rehearsal holds nothing
    process = job.start()

    def end() -> None:
        job.wait_for(lambda: Alarm.read(job.workdir), process, "the alarm")
        job.tell(Stop(reason="stopped", ends=True))

    assert job.finish(process, end) == 65, job.log
    alarm = Alarm.read(job.workdir)
    assert alarm is not None
    assert "exit code 3" in alarm.text
    assert "the node is held for 600 min, until " in alarm.text
