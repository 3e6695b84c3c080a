"""Stacks that a released version has declared: this one's program takes them for its own, begins the next run in them
and destroys them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpufleet._training_run import TYPE
from gpufleet.infra.cli import main
from gpufleet.infra.program import plan
from gpufleet.infra.program.previous import previous, previous_of_component
from gpufleet.rehearsal import provider
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Pulumi, Result, settings
from tests.released.recorded import RECORDS, RELEASES, RecordedRun, RecordedState, place

every_record = pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
RUNS = [RecordedRun(each / "growth") for each in RECORDS] + [RecordedRun(each / "command") for each in RELEASES]
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} of {run.folder.parent.name}")
REAL = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
NOW = datetime.now(UTC).replace(microsecond=0)
STACKS = {"growth": "growth", "command": "dev"}


@every_run
def test_a_run_goes_on_until_its_fleet_expires(run: RecordedRun, tmp_path: Path) -> None:
    project, name = run.project(tmp_path / "project"), run.name
    for state in (run.state("up"), run.state("ended")):
        if name == "growth":
            was = previous(STACKS[name], state.invoke)
        else:
            was = previous_of_component(STACKS[name], TYPE, ["training"], "command", state.invoke)
        began, until = (datetime.fromisoformat(state.run[key]) for key in ("began", "valid_until"))
        for now, over in ((began + timedelta(minutes=30), False), (until, True)):
            verdict = plan.make(project, run.definition, now=now, previous=was, preview=False).verdict
            assert (verdict.continues, verdict.over, verdict.runs) == (True, over, ("r1",))
            said = [warning for warning in verdict.warnings if "The job code has changed" not in warning]
            assert len(said) == over


@contextmanager
def account(
    run: RecordedRun, state: str, folder: Path, *, days_ago: int = 0
) -> Iterator[tuple[Cloud, Path, RecordedState]]:
    """An account with all that the stack has, as if its run had begun so long ago, and the project beside it."""
    project, began = run.project(folder / "project"), NOW - timedelta(days=days_ago)
    clock = ManualClock(began)
    with Cloud(folder / "cloud", clock=clock) as cloud:
        restored = run.state(state).begun(began).restored(cloud, project)
        clock.advance((NOW - began).total_seconds())
        cloud.tick()
        yield cloud, project, restored


@every_record
def test_commands_find_and_end_a_run_that_is_up(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(record / "growth")
    with account(run, "up", tmp_path) as (cloud, project, state):
        monkeypatch.chdir(project)
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        bucket = state.one("aws:s3/bucket:Bucket")["id"]

        def put(objects: dict[str, bytes]) -> None:
            for key, content in objects.items():
                cloud.client("s3").put_object(Bucket=bucket, Key=key, Body=content)

        put(run.interrupted)
        assert main(["status", "growth"]) == 0
        assert f"checkpoint  steps {run.restored}," in capsys.readouterr().out
        assert main(["stop", "growth"]) == 0
        assert "asked: s3://" in capsys.readouterr().out
        put(run.ended)
        assert main(["stop", "growth"]) == 0
        assert "is over already: finished" in capsys.readouterr().out
        assert main(["results", "growth"]) == 0
        assert (project / "results" / "growth" / "r1" / "results.json").is_file()
        assert main(["sweep", "growth"]) == 1
        assert bucket in capsys.readouterr().out


@contextmanager
def stack(run: RecordedRun, state: str, folder: Path, *, days_ago: int = 0) -> Iterator[tuple[Cloud, Path, Pulumi]]:
    """The stack, imported into a backend of its own."""
    with (
        account(run, state, folder, days_ago=days_ago) as (cloud, project, restored),
        provider.serve(cloud.environment()) as port,
    ):
        engine = Pulumi(
            project, {**cloud.environment(), **settings(project, port)}, STACKS[run.name], lambda line: None
        )
        file = place({"state.json": restored.content}, folder) / "state.json"
        engine._run(["pulumi", "stack", "import", "--stack", STACKS[run.name], "--file", str(file)])
        yield cloud, project, engine


def assert_left_alone(result: Result, state: RecordedState, *, over: bool = False) -> None:
    """A later version may add something beside a run, and mend its rights; what else the run has stays as it is. Where
    it is `over`, the fleet is gone, and what belonged to it goes.
    """
    assert result.ok, result.text
    had = {(each["type"], each["urn"].rpartition("::")[2]) for each in state.resources}
    for each in result.steps:
        if each.operation not in ("same", "refresh"):
            new = each.operation == "create" and (each.type, each.name) not in had
            mended = (each.operation, each.type) == ("update", "aws:iam/rolePolicy:RolePolicy")
            followed = (
                over and each.operation == "delete" and each.name.startswith(("training-fleet-", "training-stop-"))
            )
            assert new or mended or followed, result.text


@REAL
@every_record
def test_a_stack_that_is_up_is_left_alone_then_takes_a_new_run_and_is_destroyed(record: Path, tmp_path: Path) -> None:
    run = RecordedRun(record / "growth")
    with stack(run, "up", tmp_path) as (cloud, project, engine):
        assert_left_alone(engine.up(), run.state("up"))
        file = project / run.definition
        file.write_text(file.read_text().replace("id: r1", "id: r2"))
        renewed = engine.up()
        assert renewed.ok, renewed.text
        replaced = {each.type.rpartition(":")[2] for each in renewed.steps if "replace" in each.operation}
        assert replaced >= {"Fleet", "RolePolicy"}, renewed.text
        assert not replaced & {"Bucket", "LogGroup", "Role", "Vpc", "Subnet"}, renewed.text
        assert not {each.operation for each in renewed.steps if each.operation in ("create", "delete")}, renewed.text
        assert engine.outputs()["runs"] == ["r1", "r2"]
        assert engine.destroy().ok
        assert {kind for kind, _ in cloud.leftovers()} == {"bucket"}


@REAL
@every_release
def test_a_component_whose_run_is_over_is_left_alone_and_destroyed(release: Path, tmp_path: Path) -> None:
    run = RecordedRun(release / "command")
    with stack(run, "ended", tmp_path, days_ago=30) as (cloud, _, engine):
        again = engine.up()
        assert "Run r1 is over" in again.diagnostics
        assert_left_alone(again, run.state("ended"), over=True)
        assert engine.destroy().ok
        assert {kind for kind, _ in cloud.leftovers()} == {"bucket"}
