"""`gpufleet replay`: its answer, its exit code, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.evidence.traces import Trace
from tests.infra.traces import GAP_H, markov
from tests.receipt_tree import node, place, receipt
from tests.repository import ROOT

STACK = str(ROOT / "stacks" / "tinystories-growth.yaml")


def written(folder: Path, trace: Trace, **about: str) -> str:
    """The trace as a JSON file."""
    samples = [0] * round(trace.hours / GAP_H)
    for start, end in zip(trace.up_from_h, trace.up_to_h, strict=True):
        for index in range(round(start / GAP_H), round(end / GAP_H)):
            samples[index] = 1
    path = folder / trace.source
    path.write_text(json.dumps({"gap_s": GAP_H * 3600, "available": samples, **about}))
    return str(path)


@pytest.fixture(autouse=True)
def _inside_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_usual_zone_holds_and_a_terrible_one_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = written(tmp_path, markov(0.15, seed=1, zone="usual"))
    assert main(["replay", usual, STACK, "--work-hours", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The bill's range held" in said
    assert "Plan with the bill's p90." in said
    assert "8.00 h of work" in said
    terrible = written(tmp_path, markov(3.0, seed=1, zone="terrible"))
    assert main(["replay", terrible, STACK, "--work-hours", "8"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "The bill's range did not hold" in said
    assert "Do not plan with this range if your nodes are interrupted as often" in said


def test_a_calm_zone_shows_the_interval_wider_than_it_has_to_be_and_says_what_that_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = written(tmp_path, markov(0.03, seed=1, zone="calm"))
    assert main(["replay", calm, STACK, "--work-hours", "8"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.partition("The bill's range")[2].splitlines())) <= 100
    said = " ".join(printed.split())
    assert "It is wider than needed: replayed bills vary less than it says, so its p90 is on the safe side." in said
    assert "Later bills learn from traces kept in traces/" in said
    assert "From that many independent runs the true share is likely between 9" in said


def test_several_traces_are_graded_together_and_shown_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        written(tmp_path, markov(hazard, seed=2, zone=zone), type="g5.2xlarge", zone=zone)
        for zone, hazard in (("a", 0.1), ("b", 0.2))
    ]
    assert main(["replay", *paths, STACK, "--work-hours", "8", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    first, second = tree["traces"]
    assert tree["held"] is True
    assert tree["contained"] == pytest.approx(
        (first["forecasts"][0]["contained"] + second["forecasts"][0]["contained"]) / 2, abs=1e-3
    )
    assert first["hazard"]["p10"] < 0.1 < first["hazard"]["p90"]
    assert first["hazard"]["median"] < second["hazard"]["median"]
    assert first["independent_windows"] < first["windows"]
    assert [forecast["name"] for forecast in first["forecasts"]] == ["stated", "fixed 0.2"]
    low, high = tree["contained_likely"]
    assert low < tree["contained"] < high


def test_the_runs_own_hours_are_replayed_unless_others_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, markov(0.3, seed=1))
    main(["replay", path, STACK, "--json"])
    own = json.loads(capsys.readouterr().out)
    main(["replay", path, STACK, "--json", "--work-hours", "20"])
    asked = json.loads(capsys.readouterr().out)
    assert own["work_hours"] < 5
    assert asked["work_hours"] == 20
    assert asked["traces"][0]["usd"]["p50"] > own["traces"][0]["usd"]["p50"]
    main(["replay", path, STACK, "--work-hours", "0.02"])
    assert ": 0.02 h of work, stated" in " ".join(capsys.readouterr().out.split())


def test_the_same_traces_give_the_same_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, markov(0.3, seed=1))
    main(["replay", path, STACK])
    first = capsys.readouterr().out
    main(["replay", path, STACK])
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("hours", ["0", "-1", "nan", "inf"])
def test_impossible_hours_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], hours: str) -> None:
    path = written(tmp_path, markov(0.3, hours=100))
    assert main(["replay", path, STACK, "--work-hours", hours]) == 2
    assert "allowed: hours above 0" in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused_before_anything_is_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert main(["replay", str(path), "no-such-stack"]) == 2
    assert "gpufleet docs risk" in capsys.readouterr().err


def test_a_trace_shorter_than_the_run_proves_nothing_and_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.json"
    path.write_text(json.dumps({"gap_s": 300, "available": [1]}))
    assert main(["replay", str(path), STACK]) == 2
    assert "short.json: it is 0.083 h long and the run takes" in capsys.readouterr().err


def test_a_trace_of_another_type_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, markov(0.3, seed=1), type="p3.2xlarge")
    main(["replay", path, STACK])
    assert "The bill is for g5.2xlarge; of another type: a.json (p3.2xlarge)." in capsys.readouterr().out


def test_the_interval_is_the_one_that_the_projects_receipts_make_the_bill_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "growth.yaml").write_text(Path(STACK).read_text())
    taken = node("i-1", seconds="360000", interrupted=True)
    place(tmp_path, receipt(stack="growth", attempts=[taken]), stack="growth")
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, markov(0.3, seed=1))
    main(["replay", path, "growth"])
    out = capsys.readouterr().out
    assert "1 interruption in 100 node-hours seen" in out
    assert "prior " in out  # the changed trace is graded beside the first
    main(["cost", "growth", "--json"])
    bill = json.loads(capsys.readouterr().out)
    alone = {share: float(usd) for share, usd in bill["unknown"]["interruptions"].items()}
    assert f"stated ${alone['p10']:.2f} to ${alone['p90']:.2f}" in out


def test_a_trace_does_not_grade_what_it_taught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("stacks", "traces"):
        (tmp_path / folder).mkdir()
    (tmp_path / "stacks" / "growth.yaml").write_text(Path(STACK).read_text())
    monkeypatch.chdir(tmp_path)
    mine = written(tmp_path / "traces", markov(0.1, seed=1, zone="mine"), type="g5.2xlarge", zone="us-east-2a")
    main(["cost", "growth", "--json"])
    assert "node-hours seen" in json.loads(capsys.readouterr().out)["hazard"]["source"]
    main(["replay", mine, "growth"])
    assert "log-normal of public traces" in capsys.readouterr().out
    other = written(tmp_path, markov(0.1, seed=2, zone="other"), type="g5.2xlarge", zone="us-east-2b")
    main(["replay", other, "growth"])
    assert "node-hours seen" in capsys.readouterr().out
