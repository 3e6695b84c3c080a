"""What a rehearsal says at its end: true counts, validation under its name, and no praise where a bar was missed."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import GpufleetError
from gpufleet.rehearsal import evidence as evidence_module
from gpufleet.rehearsal import own, rehearse, report
from gpufleet.rehearsal.evidence import Evidence, Promise
from tests.receipt_tree import receipt
from tests.repository import ROOT

STACKS = ROOT / "stacks"
BROKEN = Promise(name="steps", figure="89 of 90", held=False)


def line(phase: str, step: int, loss: float, val_loss: float | None = None) -> dict[str, Any]:
    return {"phase": phase, "step": step, "loss": loss, "val_loss": val_loss}


# The folds may take 150 steps and took 120; the refit's steps are counted from where the folds' plan ends.
TOWERS = [
    line("folds", 1, 4.9),
    line("folds", 110, 3.5, 0.34),
    line("folds", 120, 3.4, 0.3392),
    line("refit", 151, 4.8),
    line("refit", 290, 3.5496),
]
GROWTH = [line("dense", 1, 5.0), line("dense", 30, 2.0, 1.9), line("moe", 31, 2.5, 2.4)]


def make_evidence(tmp_path: Path, stack: str, metrics: list[dict[str, Any]]) -> Evidence:
    """Of a run of `stack` that left these metrics and little else."""
    results = tmp_path / "results"
    results.mkdir()
    for name in ("done", "results"):
        (results / f"{name}.json").write_text("{}")
    (results / "receipt.json").write_text(json.dumps(receipt("0.0200", attempts=[])))
    (results / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    definition = load(STACKS / f"{stack}.yaml", now=datetime(2026, 11, 21, tzinfo=UTC), rehearsal=True)
    rehearsal: Any = SimpleNamespace(
        folder=tmp_path,
        project=tmp_path,
        definition=definition,
        name=stack,
        watch=SimpleNamespace(views={}),
        engine=SimpleNamespace(name="none"),
        timeline=SimpleNamespace(seconds=75.0),
        until=None,
    )
    return Evidence(rehearsal)


def summary(evidence: Evidence, *checks: Promise) -> dict[str, Any]:
    return report.summary(evidence.rehearsal, [evidence], evidence.receipt, checks)


def test_steps_are_those_that_were_done_not_those_that_were_planned(tmp_path: Path) -> None:
    evidence = make_evidence(tmp_path, "two-tower", TOWERS)
    assert evidence.total_steps == 300
    assert evidence.steps_done() == {"folds": 120, "refit": 140}
    assert summary(evidence)["steps"] == 260


def test_a_validation_figure_stands_under_its_own_name_and_only_where_something_is_held_out(tmp_path: Path) -> None:
    folds, refit = list(report.losses([make_evidence(tmp_path, "two-tower", TOWERS)]))[2:]
    assert folds.split()[-4:] == ["4.9000", "3.4000", "1-nDCG@10", "0.3392"]
    assert refit.split()[-4:] == ["140", "4.8000", "3.5496", "-"]


def test_the_summary_names_the_newest_validation_figure(tmp_path: Path) -> None:
    evidence = make_evidence(tmp_path, "two-tower", TOWERS)
    found = summary(evidence)
    assert (found["validation"], found["val_loss"]) == ("1-nDCG@10", 0.3392)


def test_a_loss_that_is_held_out_is_called_val(tmp_path: Path) -> None:
    evidence = make_evidence(tmp_path, "tinystories-growth", GROWTH)
    assert [row.split()[-2:] for row in report.losses([evidence])][2:4] == [["val", "1.9000"], ["val", "2.4000"]]
    assert summary(evidence)["validation"] == "val"


@pytest.mark.parametrize(("seconds", "held"), [(299.9, True), (300.0, True), (326.0, False)])
def test_a_whole_rehearsal_has_five_minutes(seconds: float, held: bool) -> None:
    check = report.duration_check(seconds)
    assert (check.held, check.required) == (held, False)
    assert report.closing([check], seconds).startswith("Everything held, in ") == held


def test_the_closing_line_names_each_bar_that_was_missed() -> None:
    started = Promise(name="new node to first new step", figure="14.0 s (bar 10)", held=False, required=False)
    fine = Promise(name="nodes", figure="3 launched", held=True)
    assert report.closing([fine], 80) == "Everything held, in 80 s."
    assert report.closing([fine, started, report.duration_check(326)], 326) == (
        "Everything held except the time, 326 s in all. Slower than allowed: new node to first new step, 14.0 s (bar"
        " 10); the whole rehearsal, 326 s (bar 300)."
    )


def test_what_failed_is_never_called_slow(tmp_path: Path) -> None:
    found = summary(make_evidence(tmp_path, "two-tower", TOWERS), BROKEN, report.duration_check(326))
    assert (found["failed"], found["slow"]) == (["steps"], ["the whole rehearsal"])


@pytest.mark.parametrize(("slow", "held"), [([], "yes"), (["the whole rehearsal"], "slow")])
def test_the_table_of_all_says_slow_where_a_bar_was_missed(tmp_path: Path, slow: list[str], held: str) -> None:
    evidence = make_evidence(tmp_path, "two-tower", TOWERS)
    checks = [Promise(name=name, figure="", held=False, required=False) for name in slow]
    folder = tmp_path / "rehearsals" / "two-tower" / "r1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary(evidence, *checks)))
    row = rehearse._row(tmp_path, STACKS / "two-tower.yaml", 0, 75.0)
    assert (row[1], row[3], row[8]) == (held, "260", "1-nDCG@10 0.3392")


@pytest.mark.parametrize(
    ("printed", "what", "reason"),
    [
        ("a\ngpufleet: mine.yaml: 1 problem\n  - line 3\n", "$ gpufleet cost mine", "mine.yaml: 1 problem\n  - line 3"),
        ("in us-east-2\n  ok      roles: 2\n  PROBLEM quota: 0\n          Ask.\n", "$ x", "quota: 0\n          Ask."),
        ("  0:01 a\nThe run has no receipt.json.\n", "$ gpufleet results mine", "The run has no receipt.json."),
        ("the bill\nerror: no such zone\nerror: update failed\n", "", "no such zone\nerror: update failed"),
        ("", "$ gpufleet wait mine", "$ gpufleet wait mine"),
    ],
)  # fmt: skip
def test_of_what_a_command_prints_the_reason_is_told_and_all_of_it_kept(printed: str, what: str, reason: str) -> None:
    error = rehearse.AnswerError(printed, what)
    assert str(error) == reason
    assert error.printed == f"{what}\n{printed}".strip()


def test_a_failure_ends_with_its_reason_after_all_that_is_known(tmp_path: Path) -> None:
    answer = rehearse.AnswerError("downloading\ngpufleet: no such role", "$ gpufleet up")
    failed = rehearse.StepFailedError("up", str(answer))
    failed.__cause__ = answer
    (tmp_path / "scratch").mkdir()
    said = list(rehearse._end(failed, 7.2, tmp_path / "scratch", tmp_path))
    assert said[0] == "\n$ gpufleet up\ndownloading\ngpufleet: no such role"
    assert said[-1] == "FAILED: no such role (at up, after 7 s)"


@pytest.mark.parametrize(
    ("stages", "check", "destroys", "why"),
    [
        ([""], BROKEN, True, "steps: 89 of 90"),
        ([""], Promise(name="steps", figure="90 of 90", held=True), False, "destroy: no such fleet"),
        ([""], BROKEN, False, "steps: 89 of 90; destroy: no such fleet"),
        (["data", "train"], BROKEN, True, "data: steps: 89 of 90; train: steps: 89 of 90"),
    ],
)
def test_what_did_not_hold_takes_no_report_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str], check: Promise, destroys: bool, why: str
) -> None:
    kept = Promise(name="nodes", figure="3 launched", held=True)
    written: list[Promise] = []
    for place, name, instead in (
        (rehearse, "command", lambda *_: "all of it\n"),
        (rehearse, "_follow", lambda *_: None),
        (rehearse, "_is_own", lambda _: True),
        (rehearse, "Evidence", lambda part: SimpleNamespace(rehearsal=part)),
        (evidence_module, "checks", lambda _: iter([kept])),
        (evidence_module, "leftovers", lambda _: kept),
        (own, "listing", lambda *_: {}),
        (own, "checks", lambda *_: iter([check])),
        (report, "write", lambda *_, checks: written.extend(checks)),
    ):
        monkeypatch.setattr(place, name, instead)
    done = SimpleNamespace(ok=True, changes={}, diagnostics="", text="")
    refused = SimpleNamespace(ok=False, changes={}, diagnostics="error: no such fleet\n", text="")
    rehearsal: Any = SimpleNamespace(
        name="mine",
        definition=SimpleNamespace(parts=[]),
        parts=[SimpleNamespace(definition=SimpleNamespace(stage=stage), until=None) for stage in stages],
        root=tmp_path,
        folder=tmp_path,
        project=tmp_path,
        until=None,
        timeline=SimpleNamespace(add=lambda *_, **__: None, seconds=1.0),
        engine=SimpleNamespace(preview=lambda: done, up=lambda: done, destroy=lambda: done if destroys else refused),
    )
    with pytest.raises(GpufleetError) as failed:
        rehearse.run_steps(rehearsal, lambda _: None, lambda _: None)
    assert str(failed.value) == why
    count = 2 * len(stages)
    assert [each.name.rpartition(": ")[2] for each in written[:count]] == ["nodes", "steps"] * len(stages)
    assert [each.name for each in written[count:]] == (["nodes", "sweep"] if destroys else ["destroy"])


def test_a_file_that_cannot_be_read_does_not_keep_the_next_stack_from_its_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "broken.yaml").write_text("run: {id: r1}\n")
    shutil.copy(STACKS / "two-tower.yaml", tmp_path / "stacks")
    monkeypatch.setattr(rehearse, "rehearse", lambda name, **_: load(Path(name), now=datetime.now(UTC)) and 1)
    said: list[str] = []
    assert rehearse.rehearse_all(root=tmp_path, out=said.append) == 1
    assert said[0].startswith(f"{tmp_path}/stacks/broken.yaml: ")
    assert [line.split()[:2] for line in said[-2:]] == [["broken", "NO"], ["two-tower", "NO"]]


def test_where_there_is_no_stack_none_is_said_to_have_held(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match="no stacks/ folder"):
        rehearse.rehearse_all(root=tmp_path)
