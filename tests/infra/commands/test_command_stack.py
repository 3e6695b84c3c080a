"""Every command of gpufleet on a stack with a command of the user's own, which is measured and billed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence.calibration import code_now
from gpufleet.job import measured
from tests.infra.command_files import command_file
from tests.infra.commands_world import account
from tests.infra.traces import GAP_H, markov
from tests.receipt_tree import place, receipt

NOW = datetime(2026, 11, 26, tzinfo=UTC)
JOB: dict[str, Any] = {
    "code": {"folder": "../mine"},
    "command": "python train.py",
    "checkpoint": {"each": ["ckpt-{step}.pt"], "every": {"steps": 100}, "size_gb": 9},
    "progress": {"stdout": "step (?P<step>[0-9]+)"},
    "work": {"steps": 20_000, "step_ms": {"A10G": 900}},
}
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")


def measurement(definition: StackDefinition, root: Path, **changes: Any) -> dict[str, Any]:
    """A probe of the command on an A10G: 500 ms a step, a save of 2 GB that stops it for 3 s."""
    step = {"median": 500.0, "q1": 495.0, "q3": 505.0}
    save = {"bytes": 2_000_000_000, "blocks_s": 3.0, "write_s": None}
    tree = measured.document(
        experiment=definition.job.experiment,
        parameters=asdict(definition.job.parameters),
        device={"kind": "cuda", "name": "NVIDIA A10G", "count": 1, "ranks": 1, "memory_gb": 24.1},
        versions={"python": "3.12.3"},
        source="probe of 200 steps",
        at="2026-11-25T18:00:00Z",
        measured=[{"name": "train", "steps": 190, "step_ms": step, "save": save}],
        start_s=40.0,
        code=code_now(definition, root),
    )
    return {**tree, "image": None, "stop_s": 7.0, **changes}


class OwnProject:
    """A project with the stack `mine`, its code beside it, and the current directory in it."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.root, self.code = folder / "project", folder / "mine"
        self.code.mkdir()
        (self.code / "train.py").write_text("print('step 1')\n")
        self.write(**job)

    def write(self, **job: Any) -> None:
        self.path = command_file(self.root, **{**JOB, **job})

    @property
    def definition(self) -> StackDefinition:
        return load(self.path, now=NOW)

    def measure(self, **changes: Any) -> None:
        path = self.root / "calibrations" / "mine" / "nvidia-a10g.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measurement(self.definition, self.root, **changes)))

    def commit(self) -> None:
        for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
            subprocess.run([*GIT, *words], cwd=self.root, check=True)

    def trace(self) -> str:
        trace = markov(0.3, seed=1, zone="usual")
        samples = [0] * round(trace.hours / GAP_H)
        for start, end in zip(trace.up_from_h, trace.up_to_h, strict=True):
            samples[round(start / GAP_H) : round(end / GAP_H)] = [1] * (round(end / GAP_H) - round(start / GAP_H))
        path = self.root / "trace.json"
        path.write_text(json.dumps({"gap_s": GAP_H * 3600, "available": samples}))
        return str(path)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnProject:
    found = OwnProject(tmp_path)
    monkeypatch.chdir(found.root)
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """The output of a command, its lines joined."""
    assert main(list(words)) == code
    return " ".join(capsys.readouterr().out.split())


def _diff(mine: OwnProject) -> tuple[str, ...]:
    (mine.root / "policy.yaml").write_text("max_usd_per_run: 1\nspot_only: true\n")
    mine.commit()
    mine.write(work={"steps": 40_000, "step_ms": {"A10G": 900}})
    mine.commit()
    return "diff", "HEAD~1", "HEAD"


def _receipts(mine: OwnProject) -> tuple[str, ...]:
    place(mine.root, receipt(stack="mine"), stack="mine")
    return "receipts", "mine"


COMMANDS: dict[str, tuple[Callable[[OwnProject], tuple[str, ...]], int, str]] = {
    "cost": (lambda mine: ("cost", "mine", "--all"), 0, r"g5\.2xlarge train [\d.]+ 500\.0"),
    "cost --json": (lambda mine: ("cost", "mine", "--json"), 0, '"step_ms": 500.0'),
    "compare": (lambda mine: ("compare", "mine", "--all"), 0, "mine: train [0-9.]+ h on one GPU scenario"),
    "replay": (lambda mine: ("replay", mine.trace(), "mine"), 0, "The bill's range held"),
    "diff, and the rules": (_diff, 1, r"max_usd_per_run.*p90 is .*`job\.work\.steps` \| `20000` \| `40000`"),
    "receipts": (_receipts, 0, r"mine r1 finished 1\.0000 1\.1000 .*inside"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_takes_a_stack_with_a_command_of_the_users_own(
    name: str, mine: OwnProject, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.measure()
    words, code, expected = COMMANDS[name]
    assert re.search(expected, said(capsys, *words(mine), code=code))


def test_doctor_pins_both_images_and_finds_everything_in_place(
    mine: OwnProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write(image="public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023")
    with account(tmp_path, monkeypatch):
        found = said(capsys, "doctor", "mine", "--pin")
    assert "PROBLEM" not in found
    pinned = mine.definition.job
    assert all("@sha256:" in image for image in pinned.images)
    assert len(pinned.images) == 2


def test_what_a_measurement_holds_goes_before_what_is_declared(
    mine: OwnProject, capsys: pytest.CaptureFixture[str]
) -> None:
    def storage() -> float:
        lines = json.loads(said(capsys, "cost", "mine", "--json"))["lines"]
        return next(float(line["quantity"]) for line in lines if line["name"].startswith("S3 storage"))

    declared = storage()
    assert "as declared, not measured" in said(capsys, "cost", "mine", "--all")
    mine.measure()
    assert storage() < declared / 2  # a checkpoint has the measured 2 GB, not 9
    found = said(capsys, "cost", "mine", "--all")
    assert "measured on NVIDIA A10G on 2026-11-25 (probe of 200 steps" in found
    assert "outside of job.image" in found
    assert "job.stop.saves" not in found  # the probe has shown that a stop saves


def test_other_code_is_told_and_another_image_command_or_number_of_gpus_refuses(
    mine: OwnProject, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.measure()
    assert "the code has changed" not in said(capsys, "cost", "mine", "--all")
    (mine.code / "train.py").write_text("print('step 1')  # a comment\n")
    found = said(capsys, "cost", "mine", "--all")
    assert "measured on NVIDIA A10G" in found
    assert "the code has changed since" in found
    for changes, why in (
        ({"image": "docker.io/other:1"}, "job.image was docker.io/other:1, is docker.io/pytorch/pytorch:2.5.1"),
        ({"device": {"kind": "cuda", "name": "NVIDIA A10G", "ranks": 4}}, "measured with 4 processes"),
        ({"settings": {"command": "python other.py"}}, "job.command was python other.py, is python train.py"),
    ):
        mine.measure(**changes)
        found = said(capsys, "cost", "mine", "--all")
        assert why in found
        assert "as declared, not measured" in found


def test_hours_that_are_declared_stay_theirs_beside_a_measurement(
    mine: OwnProject, capsys: pytest.CaptureFixture[str]
) -> None:
    every = {**JOB["checkpoint"], "every": {"minutes": 10}}
    mine.write(work={"hours": {"low": 1, "likely": 2, "high": 3}}, checkpoint=every)
    before = said(capsys, "cost", "mine", "--json")
    mine.measure()
    after = said(capsys, "cost", "mine", "--json")
    hours = [float(json.loads(each)["hours"]["p50"]) for each in (before, after)]
    assert hours[1] == pytest.approx(hours[0], abs=0.1)
    assert "work as declared" in said(capsys, "cost", "mine", "--all")
