"""`python -m gpufleet.job`: its help, a file that is no run config, and the trainer that waits for the downloads."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.job.__main__ import main, supervise
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.node.container import command
from gpufleet.job.node.settings import InstanceIdentity, Settings
from tests.job import runs

SETTINGS = Settings(
    **dict.fromkeys(["stack", "run", "region", "image", "bucket", "log_group", "run_config_sha256"], "x"),
    **dict.fromkeys(["container_options", "data_volume", "data_device", "metadata", "job_image"], ""),
    timer_s=1,
    schedule="",
    device="cpu",
    root=Path("/"),
)
MACHINE = InstanceIdentity(instance="i-1", type="g5.2xlarge", zone="us-east-2a", launched_at="")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_what_it_reads(said: str) -> None:
    given = set(re.findall(r"GPUFLEET_[A-Z_]+(?==)", " ".join(command(SETTINGS, MACHINE, Path("/scratch"), 1.0))))
    assert len(given) == 8
    assert given <= set(re.findall(r"GPUFLEET_[A-Z_]+", said))
    assert said.startswith("usage: python -m gpufleet.job [-h] RUN_JSON\n")


def test_help_explains_every_exit_code_that_the_node_script_is_given(said: str) -> None:
    explained = set(map(int, re.findall(r"^  (\d+) +\S", said, re.MULTILINE)))
    assert explained == {AttemptExit.FINISHED, AttemptExit.FAILED, AttemptExit.REFUSED, AttemptExit.INTERRUPTED}
    assert "any other: a crash" in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"cannot be read \(No such file or directory\); name the run.json of a run"),
        ("", r"cannot be read \(Is a directory\); name the run.json of a run"),
        ("{", "it is not JSON .*it is cut or damaged"),
        ("{}", "JSON, but not a run config, because it has no `schema`"),
        ("[1]", "it is a list, not an object of keys"),
        ('{"schema": 2}', "a run config of schema 2, but this code reads 1"),
    ],
)
def test_what_is_no_run_config_is_told_apart_and_leaves_nothing(
    content: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    before = list(tmp_path.iterdir())
    assert supervise(path) == AttemptExit.FAILED
    assert re.search(f"fatal: {re.escape(str(path))}: {reason}", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == before


def test_a_second_attempt_in_the_same_folder_ends_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs.place(tmp_path, runs.tree())
    (tmp_path / "metrics.jsonl").write_text("of the one at work")
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert supervise(path) == AttemptExit.CRASHED
    assert "is already being run" in capsys.readouterr().out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def test_without_a_run_config_it_says_what_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "required: RUN_JSON" in capsys.readouterr().err


@pytest.mark.parametrize("trains", [True, False])
def test_a_trainer_that_died_while_it_waited_is_started_anew_and_one_not_needed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    children: list[Any] = []

    class Waiting:
        def __init__(self, *_: object) -> None:
            self.code, self.said = None if children or not trains else -9, list[object]()
            children.append(self)

        def poll(self) -> int | None:
            return self.code

        def go(self, rung: int) -> None:
            self.said.append(rung)

        def kill(self) -> None:
            self.said.append("killed")

    def attempt(run: object, node: object, workdir: Path, world: Any) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: 0 if trains and world.start(2) else 75)

    monkeypatch.setattr("gpufleet.job.supervisor.child.Child", Waiting)
    monkeypatch.setattr("gpufleet.job.supervisor.attempt.Supervisor", attempt)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    assert supervise(runs.place(tmp_path, runs.tree())) == (0 if trains else 75)
    assert [child.said for child in children] == ([[], [2]] if trains else [["killed"]])
