"""A user's script once more without interruptions: what is compared, and what a limit must leave."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.errors import GpufleetError
from gpufleet.rehearsal import rehearse, undisturbed
from tests.repository import ROOT

TEXT = """
run: {id: r1, owner: you}
job:
  image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023
  code: {folder: ../mine}
  command: python train.py
  checkpoint: {each: ckpt.pt, rewritten: true, every: {steps: 10}, size_gb: 0.1}
  progress: {stdout: 'step (?P<step>[0-9]+)'}
  work: {steps: 100, step_ms: {L40S: 10}}
  stop: {grace_s: 20}
fleet: {region: us-east-2, zones: [us-east-2a], instance_types: [g6e.2xlarge]}
storage: {keep: {days: 7}}
limits: {max_usd: 5, max_hours: 3}
rehearsal: {job: {device: cpu, gpus: 1}, estimate: {step_ms: [10]}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / "stacks").mkdir(parents=True)
    (tmp_path / "project" / "stacks" / "mine.yaml").write_text(TEXT)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("")
    return tmp_path / "project"


def left(folder: Path, *losses: tuple[int, float | None]) -> Path:
    """What a rehearsal leaves: a step of 400 ms each, the first one 12 s after its launch."""
    (folder / "results").mkdir(parents=True)
    lines = [{"ts": 100.0 + 0.4 * step, "phase": "train", "step": step, "loss": loss} for step, loss in losses]
    (folder / "results" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    moments = [{"t": 5.0, "what": "launched"}, {"t": 17.0, "what": "training"}, {"t": 40.0, "what": "launched"}]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(each) + "\n" for each in moments))
    return folder


def test_the_limit_comes_when_half_of_the_training_is_done(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "stacks" / "mine.yaml"
    definition = load(path, now=datetime.now(UTC), rehearsal=True)
    monkeypatch.setattr("gpufleet.rehearsal.pace.step_ms", lambda lines, otherwise: 400.0)
    changed = undisturbed.limited(definition, left(project / "held", (100, 1.0)), None)
    text = rehearsal_text(path, project, changed=changed)
    (project / "stacks" / "limited.yaml").write_text(text)
    found = load(project / "stacks" / "limited.yaml", now=datetime.now(UTC), rehearsal=True).limits.max_hours
    at_s = 12 + 20  # its start, and 50 of 100 steps
    assert float(found) * 3600 == pytest.approx(at_s + 60 + 2 + 20, abs=0.5)  # and what an end takes


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            [(100, 1.25), (100, 1.25)],
            "1.25 interrupted, 1.25 undisturbed: as far as its output shows, your script resumes bit",
        ),
        ([(100, 1.25), (100, 1.5)], "1.25 interrupted, 1.5 undisturbed, differs by 0.25: your script does not resume"),
        ([(100, None), (100, 1.5)], "not shown: the script's lines contain no loss"),
        ([(90, 1.25), (100, 1.5)], "not shown: its last losses are of step 90 and of step 100"),
    ],
)
def test_how_far_apart_two_runs_have_ended_is_said(
    tmp_path: Path, ends: list[tuple[int, float | None]], said: str
) -> None:
    lines: list[str] = []
    undisturbed.compare(left(tmp_path / "a", ends[0]), left(tmp_path / "b", ends[1]), lines.append)
    assert said in lines[0].replace("loss of step 100: ", "")


@pytest.mark.parametrize(
    ("reason", "manifests", "files", "said"),
    [
        ("max_hours", {50: "stop"}, 1, ""),
        ("finished", {50: "stop"}, 1, "ended by its limit: finished"),
        ("max_hours", {}, 1, "a whole checkpoint in the bucket: none"),
        ("max_hours", {50: "stop"}, 0, "downloaded by results: 0 files"),
    ],
)
def test_a_limit_must_leave_a_checkpoint_and_what_results_brings(
    tmp_path: Path, reason: str, manifests: dict[int, str], files: int, said: str
) -> None:
    for number in range(files):
        (tmp_path / "final").mkdir()
        (tmp_path / "final" / str(number)).write_text("x")
    evidence: Any = SimpleNamespace(
        rehearsal=SimpleNamespace(watch=SimpleNamespace(manifests=manifests)),
        done=SimpleNamespace(reason=reason),
        metrics=[{"step": 52}],
        total_steps=100,
        folder=tmp_path,
        receipt=SimpleNamespace(actual=Decimal("0.02")),
    )
    checks = list(undisturbed.limit_checks(evidence))
    assert [f"{each.name}: {each.figure}" for each in checks if each.is_broken] == [said] * bool(said)
    assert said or checks[1].figure == "of step 50, at step 52 of 100"


@pytest.mark.parametrize(("codes", "asked"), [((0, 0, 0), 3), ((0, 1), 2), ((1,), 1)])
def test_it_runs_again_only_after_what_has_held(
    project: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], asked: int
) -> None:
    tries: list[tuple[object, str]] = []

    def attempt(path: Path, _: object, folder: Path, *__: object, until: str | None = None, **options: object) -> int:
        left(folder, (100, 1.0))
        tries.append((until, folder.name))
        return codes[len(tries) - 1]

    monkeypatch.setattr("gpufleet.rehearsal.rehearse._attempt", attempt)
    said: list[str] = []
    assert rehearse.rehearse("mine", root=project, out=said.append, again=("end", "limit")) == codes[-1]
    assert tries == [(None, "r1.unfinished"), ("end", "end"), ("limit", "limit")][:asked]
    assert any(line.startswith("exact: ") for line in said) == (codes[:2] == (0, 0))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"again": ("end",)}, "two-tower is a ready-made job: leave out --exact and --limit"),
        ({"image": True}, "two-tower is a ready-made job, rehearsed without its image: leave out --image"),
        ({"stand_in": True}, "two-tower is a ready-made job, which trains on a CPU: leave out --plumbing"),
    ],
)
def test_what_only_a_command_has_is_refused_for_a_ready_made_job(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(GpufleetError, match=f"^{said}$"):
        rehearse.rehearse("two-tower", root=ROOT, **asked)
