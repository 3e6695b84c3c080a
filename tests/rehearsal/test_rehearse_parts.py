"""What a rehearsal is made of: the plan of interruptions, the timeline, the scratch project."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import Interruptions
from gpufleet.rehearsal import environment, scratch
from gpufleet.rehearsal.timeline import Timeline, clock
from gpufleet.rehearsal.watch import plan, possible
from tests.repository import ROOT

GROWTH = ROOT / "stacks" / "tinystories-growth.yaml"


@pytest.mark.parametrize("seed", range(20))
def test_interruptions_fall_inside_the_run_after_the_first_phase_and_apart(seed: int) -> None:
    planned = plan(Interruptions(seed=seed, with_notice=2, without_notice=1), [30, 30, 30])
    steps = [p.step for p in planned]
    assert [p.kind for p in planned] == ["notice", "notice", "loss"]
    assert steps == sorted(steps)
    assert all(after - before >= 10 for before, after in itertools.pairwise(steps))
    assert steps[0] > 30
    assert steps[-1] <= 90 - 6


def test_the_seed_fixes_the_schedule() -> None:
    first, same, other = (plan(Interruptions(seed=seed), [30, 30, 30]) for seed in (7, 7, 8))
    assert first == same != other


def test_a_run_of_one_phase_is_interrupted_too() -> None:
    assert 20 <= plan(Interruptions(with_notice=1, without_notice=0), [100])[0].step <= 60


def test_a_boundary_is_the_last_step_of_a_phase_and_a_stage_comes_after_the_last() -> None:
    between = Interruptions(notice_at="boundary", loss_at="step")
    notice, loss = plan(between, [30, 30, 30, 0])
    assert (notice.kind, notice.place, notice.step) == ("notice", "boundary", 30)
    assert (loss.kind, loss.place) == ("loss", "step")
    assert 30 < loss.step <= 90
    saved, staged = plan(Interruptions(notice_at="stage", loss_at="save"), [40, 0, 0])
    assert (saved.kind, saved.place) == ("loss", "save")
    assert (staged.kind, staged.place, staged.step) == ("notice", "stage", 40)


def test_the_first_phase_can_be_interrupted_too() -> None:
    notice, loss = plan(Interruptions(notice_at="first", loss_at="step"), [100, 100])
    assert (notice.kind, loss.kind) == ("notice", "loss")
    assert 30 <= notice.step <= 70
    assert loss.step > 100


@pytest.mark.parametrize(("capacity", "kinds"), [("spot", ["notice", "loss"]), ("on-demand", ["loss"])])
def test_a_node_on_demand_is_taken_away_without_a_notice_alone(capacity: str, kinds: list[str], tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(GROWTH.read_text().replace("capacity: spot", f"capacity: {capacity}").replace("3.00", "30.00"))
    definition = load(file, now=datetime(2026, 11, 21, tzinfo=UTC), rehearsal=True)
    assert sorted(each.kind for each in plan(possible(definition), [30, 30, 30])) == sorted(kinds)


def test_a_stage_on_the_node_of_another_loses_it_between_the_two_first() -> None:
    between, notice, loss = plan(Interruptions(without_notice=2), [100], stays=True)
    assert (between.kind, between.place, between.step) == ("loss", "hand_over", 0)
    assert {each.place for each in (notice, loss)} == {"step"}
    assert plan(Interruptions(with_notice=0, without_notice=0), [100], stays=True) == ()


def test_no_interruptions_are_none() -> None:
    assert plan(Interruptions(with_notice=0, without_notice=0), [30, 30]) == ()


def test_the_timeline_is_on_disk_as_it_grows(tmp_path: Path) -> None:
    printed: list[str] = []
    timeline = Timeline(tmp_path / "timeline.jsonl", out=printed.append)
    now = datetime.now().astimezone()
    timeline.add("notice", "node 1: AWS will take it back", node="i-1")
    timeline.add("seen", "seen", at=now + timedelta(seconds=65), quiet=True, seconds=1.5)
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(line["what"], line["facts"]) for line in lines] == [
        ("notice", {"node": "i-1"}),
        ("seen", {"seconds": 1.5}),
    ]
    assert lines[1]["t"] == pytest.approx(65, abs=2)
    assert printed == ["  0:00  node 1: AWS will take it back"]
    assert [moment.what for moment in timeline.select("seen", "notice")] == ["notice", "seen"]


def test_what_is_learned_late_is_printed_in_its_turn_and_sorted_into_the_log(tmp_path: Path) -> None:
    printed: list[str] = []
    timeline = Timeline(tmp_path / "timeline.jsonl", out=printed.append)
    timeline._began -= 17
    timeline._epoch -= 17
    began = datetime.fromtimestamp(timeline._epoch).astimezone()
    timeline.add("up", "up: 36 create")
    timeline.add("launched", "node 1: launched", at=began + timedelta(seconds=15.5))
    assert printed == ["  0:17  up: 36 create", "  0:17  node 1: launched (at 0:15)"]
    timeline.sort()
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["launched", "up"]


def test_a_clock_reads_minutes_and_seconds() -> None:
    assert clock(65.9) == "  1:05"


def test_a_scratch_project_takes_nothing_of_the_users_aws_or_pulumi_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("PULUMI_ACCESS_TOKEN", "pul-1")
    monkeypatch.setenv("GPUFLEET_REGISTRY_ENDPOINT", "https://elsewhere")
    monkeypatch.setenv("EDITOR", "ed")
    found = environment.scratch({"AWS_ACCESS_KEY_ID": "dummy"})
    assert found["AWS_ACCESS_KEY_ID"] == "dummy"
    assert found["EDITOR"] == "ed"
    assert not {"AWS_PROFILE", "PULUMI_ACCESS_TOKEN", "GPUFLEET_REGISTRY_ENDPOINT"} & set(found)
    project = scratch.make(tmp_path / "project", {"a": "run: {}\n"})
    assert (project / "stacks" / "a.yaml").read_text() == "run: {}\n"
    assert (project / "Pulumi.yaml").is_file()
