"""What a command is given, and what stays secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpufleet.job.command.given import Folders, secrets
from tests.job.command_world import CommandJob, parameters

VALUE = "s3cr3t-value-of-a-token"


def test_the_environment_says_where_everything_is(tmp_path: Path) -> None:
    told = parameters(
        "env | sort; pwd",
        env={"CACHE": "{state}/cache", "BRACES": '{{"a": 1}}'},
        progress={"file": "{outputs}/progress.jsonl"},
    )
    job = CommandJob(tmp_path / "w", told)
    (job.workdir / "user" / "inputs" / "open-text").mkdir(parents=True)
    job.environment = {"PYTHONPATH": "/ours", "AWS_SECRET_ACCESS_KEY": "x", "GPUFLEET_USER_PATH": "/theirs/bin"}
    assert job.run() == 0, job.log
    user = job.workdir / "user"
    assert {
        f"GPUFLEET_CHECKPOINTS={user}/checkpoints",
        f"GPUFLEET_OUTPUTS={user}/outputs",
        f"GPUFLEET_STATE={user}/state",
        f"GPUFLEET_INPUT_OPEN_TEXT={user}/inputs/open-text",
        f"GPUFLEET_PROGRESS={user}/outputs/progress.jsonl",
        f"GPUFLEET_STOP_FILE={user}/stop.json",
        "GPUFLEET_ATTEMPT=1",
        "GPUFLEET_GPUS=1",
        "GPUFLEET_RANKS=1",
        "GPUFLEET_RUN=r1",
        f"CACHE={user}/state/cache",
        'BRACES={"a": 1}',
        "PYTHONUNBUFFERED=1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90",
        "WANDB_RESUME=allow",
        "WANDB_RUN_ID=tinystories-growth-r1",
        str(user / "code"),
    } <= set(job.log.splitlines())
    assert "/ours" not in job.log
    assert "AWS_SECRET" not in job.log
    assert "\nPATH=/theirs/bin:" in job.log


def test_a_secret_is_in_the_command_s_environment_and_in_no_file(tmp_path: Path) -> None:
    told = parameters(
        'echo "it is $TOKEN"; test "$TOKEN" = "' + VALUE + '" && echo it is right',
        secrets={"TOKEN": "ssm:/me/token"},
    )
    told["command"] = told["command"].replace(VALUE, "$(printf %s s3cr3t-value-)of-a-token")
    job = CommandJob(tmp_path / "w", told)
    job.environment = {"GPUFLEET_SECRET_TOKEN": VALUE}
    assert job.run() == 0, job.log
    assert "it is ***" in job.log
    assert "it is right" in job.log
    for path in job.workdir.rglob("*"):
        if path.is_file() and not stat.S_ISFIFO(path.stat().st_mode):
            assert VALUE.encode() not in path.read_bytes(), path


def test_a_secret_that_cannot_be_read_ends_the_run_and_says_which(tmp_path: Path) -> None:
    def refused(kind: str, place: str) -> str:
        raise LookupError(f"AccessDeniedException: {kind} {place}")

    with pytest.raises(ValueError, match=r"job.secrets.TOKEN: ssm:/me/token cannot be read: AccessDenied"):
        secrets({"TOKEN": "ssm:/me/token"}, refused)


def test_ranks_are_those_of_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_NODES", "2")
    assert Folders.from_workdir(tmp_path).values("r1", 8)["ranks"] == 16


@pytest.mark.parametrize("text", ["/etc", "{checkpoints}/../..", "{state}/../../control", "../.."])
def test_a_folder_that_is_not_the_command_s_own_is_refused(tmp_path: Path, text: str) -> None:
    folders = Folders.from_workdir(tmp_path)
    folders.make()
    with pytest.raises(ValueError, match="is not below one of the run's folders"):
        folders.resolve_path(text, folders.values("r1", 1))


def test_the_folders_are_everybody_s(tmp_path: Path) -> None:
    """An image that does not run as root writes there. That it does, no test here can show: who runs it is root."""
    folders = Folders.from_workdir(tmp_path)
    before = os.umask(0o077)
    try:
        folders.make()
    finally:
        os.umask(before)
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o777 for each in (folders.code, *folders.written))


def test_inputs_are_looked_for_in_the_command_s_own_folder(tmp_path: Path) -> None:
    (tmp_path / "outside" / "secret-name").mkdir(parents=True)
    folders = Folders(user=tmp_path / "user")
    folders.make()
    (folders.user / "inputs").symlink_to(tmp_path / "outside")
    assert not [name for name in folders.values("r1", 1) if "secret-name" in name]
