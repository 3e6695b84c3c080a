"""`gpufleet calibrate` on a command of the user's own: the real host and script, on this machine's processor."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import measurement
from tests.infra.command_files import command_file

# This script saves every 40 steps, which takes 0.3 s, and also writes beside its inputs and its code.
SCRIPT = """
import os, pathlib, signal, sys, time
inputs, out = pathlib.Path(os.environ["GPUFLEET_INPUT_TEXT"]), pathlib.Path(sys.argv[1])
assert (inputs / "a.txt").read_text() == "a"
(inputs / "cache").write_text("x"); pathlib.Path("made").write_text("x")
asked = []
if "--catch" in sys.argv: signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
for step in range(1, 100_000):
    time.sleep(0.01)
    print(f"step {step}", flush=True)
    if asked or step % 40 == 0:
        time.sleep(0.3)
        (out / f"ckpt-{step}.txt").write_text("y" * 5000)
        if asked: sys.exit()
"""
JOB: dict[str, Any] = {
    "code": {"folder": "../mine"},
    "device": "cpu",
    "checkpoint": {"each": ["ckpt-{step}.txt"], "every": {"steps": 40}},
    "progress": {"stdout": "^step (?P<step>[0-9]+)"},
    "work": {"steps": 90_000},
    "storage": {"inputs": {"text": "text"}},
}


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = SCRIPT, **job: Any) -> Path:
    """The definition file of a project whose stack runs the script. The project is the current directory."""
    for name, content in (("mine/train.py", script), ("project/text/a.txt", "a")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    monkeypatch.chdir(folder / "project")
    return command_file(folder / "project", **{**JOB, **job})


@pytest.mark.parametrize(("words", "stops"), [("", False), (" --catch", True)])
def test_steps_a_save_and_what_a_stop_does_are_measured_and_nothing_is_written_beside_the_users_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, stops: bool
) -> None:
    own(tmp_path, monkeypatch, command=f"python train.py {{checkpoints}}{words}")
    assert main(["calibrate", "mine", "--steps", "120"]) == 0
    (file,) = (tmp_path / "project" / "calibrations" / "mine").iterdir()
    tree = json.loads(file.read_text())
    (phase,) = tree["phases"]
    assert 10 <= phase["step_ms"]["median"] < 1000 * tree["seconds"] / 60  # half of the steps take at least as long
    assert phase["save"]["bytes"] == 5000
    assert 0 <= phase["save"]["blocks_s"] <= tree["seconds"]  # test_command_times checks how exact this is
    assert (tree["stop_s"] is not None) == stops
    assert tree["image"] is None
    assert tree["versions"]["python"]
    assert sorted(each.name for each in (tmp_path / "mine").iterdir()) == ["train.py"]
    assert [each.name for each in (tmp_path / "project" / "text").iterdir()] == ["a.txt"]


def test_its_python_is_its_environments_and_never_this_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(tmp_path, monkeypatch)
    definition = load(path, now=datetime.now(UTC))
    programs, python = measurement.own_programs(definition, tmp_path / "project", tmp_path)
    assert (programs / "python").exists()
    assert python.parent != Path(sys.executable).parent
    own_python = tmp_path / "mine" / ".venv" / "bin" / "python"
    own_python.parent.mkdir(parents=True)
    own_python.write_text("")
    (tmp_path / "other").mkdir()
    assert measurement.own_programs(definition, tmp_path / "project", tmp_path / "other")[1].samefile(own_python)


@pytest.mark.parametrize(
    ("script", "job", "why"),
    [
        ("import nothing_there", {}, "No module named 'nothing_there'"),
        ("print('step 1')", {}, "ended by itself at step 1 of 90,000"),
        (SCRIPT, {"storage": {"inputs": {"text": "s3://elsewhere/text"}}}, r"storage\.inputs\.text: .* copy it"),
        (
            SCRIPT,
            {"work": {"epochs": 90}, "checkpoint": {**JOB["checkpoint"], "every": {"epochs": 1}}},
            r"job\.work\.steps_per_epoch beside epochs",
        ),
    ],
)
def test_a_command_that_cannot_be_measured_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, job: dict[str, Any], why: str
) -> None:
    path = own(tmp_path, monkeypatch, script, **job)
    with pytest.raises(GpufleetError, match=why):
        measurement.measure(load(path, now=datetime.now(UTC)), tmp_path / "project", steps=60, gpus=())
