"""`gpufleet results` brings a run's files to this machine."""

from __future__ import annotations

import errno
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.account import results, run_folder
from gpufleet.infra.cli import main
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.command_files import command_file
from tests.infra.commands_world import declare_bucket, finished, put
from tests.waiting import wait_for

NOW = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)


def downloaded(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_a_full_disk_is_the_one_that_is_written_to(tmp_path: Path) -> None:
    def full(*_: str, Callback: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder: Any = SimpleNamespace(bucket="b", run="r1", s3=SimpleNamespace(download_file=full))
    weights = run_folder.StoredObject(name="final/model.safetensors", bytes=5000, written=NOW)
    with pytest.raises(OSError, match="No space left") as failed:
        results._download(folder, weights, tmp_path / "to" / weights.name, lambda count: None)
    assert failed.value.filename == str(tmp_path / "to" / "final")


def test_results_brings_everything_but_checkpoints_and_earlier_weights(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(cloud)
    assert main(["results", "small-growth"]) == 0
    folder = path.parents[1] / "results" / "small-growth" / "r1"
    assert downloaded(folder) == [
        "exports/phase1_end/meta.json",
        "exports/scores.npz",
        "final/model.safetensors",
        "heartbeat/i-1.jsonl",
        "metrics.jsonl",
        "receipt.json",
        "results.json",
    ]
    assert (folder / "final" / "model.safetensors").read_bytes() == b"m" * 5000
    out = capsys.readouterr().out
    assert "7 files, 5.4 kB; transfer out of AWS costs about $0.00" in out
    assert "left in the bucket: 3.0 kB of weights (--exports brings them)" in out
    assert main(["results", "small-growth", "--exports"]) == 0
    assert (folder / "exports" / "phase1_end" / "model.safetensors").read_bytes() == b"e" * 3000


def test_a_second_download_leaves_the_models_alone(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(cloud)
    main(["results", "small-growth"])
    capsys.readouterr()
    assert main(["results", "small-growth"]) == 0
    assert "safetensors" not in capsys.readouterr().out


def test_models_of_another_run_with_the_same_id_are_replaced(cloud: Cloud, path: Path) -> None:
    """After a destroy nothing remembers r1, and its models have the same size."""
    first, written = finished(cloud), int(time.time())
    main(["results", "small-growth"])
    cloud.client("s3").delete_bucket_tagging(Bucket=first)  # the stack counts as destroyed
    wait_for("another second, as S3 tells whole ones", lambda: int(time.time()) > written)
    put(cloud, declare_bucket(cloud, "1b2c3d4"), "final/model.safetensors", b"n" * 5000)
    main(["results", "small-growth"])
    model = path.parents[1] / "results" / "small-growth" / "r1" / "final" / "model.safetensors"
    assert model.read_bytes() == b"n" * 5000


def test_of_two_people_with_one_file_the_owner_chooses(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = finished(cloud)
    theirs = declare_bucket(cloud, "1b2c3d4", owner="bob")
    put(cloud, theirs, "results.json", {"loss": 9})
    main(["results", "small-growth"])
    said = capsys.readouterr().out
    assert said.startswith(f"s3://{mine}/r1/ to ")
    assert (
        f"lies elsewhere too: s3://{theirs}/r1/ (owner bob); this command uses the newest bucket of run.owner, you.\n"
        in said
    )
    path.write_text(path.read_text().replace("owner: you", "owner: bob"))
    main(["results", "small-growth"])
    assert capsys.readouterr().out.startswith(f"s3://{theirs}/r1/ to ")
    path.write_text(path.read_text().replace("owner: bob", "owner: carol"))
    main(["results", "small-growth"])  # a user without such a run learns whose run it is
    assert re.match(r"s3://[a-z0-9-]+/r1/ \(owner (you|bob)\) to ", capsys.readouterr().out)


def test_light_leaves_the_models_in_the_bucket(cloud: Cloud, path: Path, tmp_path: Path) -> None:
    finished(cloud)
    assert main(["results", "small-growth", "--light", "--to", str(tmp_path / "out")]) == 0
    assert downloaded(tmp_path / "out") == [
        "exports/phase1_end/meta.json",
        "exports/scores.npz",
        "heartbeat/i-1.jsonl",
        "metrics.jsonl",
        "receipt.json",
        "results.json",
    ]


def test_an_earlier_run_can_be_named(cloud: Cloud, path: Path) -> None:
    finished(cloud, run="r0")
    assert main(["results", "small-growth"]) == 2
    assert main(["results", "small-growth", "--run", "r0"]) == 0
    assert (path.parents[1] / "results" / "small-growth" / "r0" / "results.json").is_file()


def test_a_run_without_receipt_is_downloaded_but_not_complete(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cloud, declare_bucket(cloud), "metrics.jsonl", b"{}\n")
    assert main(["results", "small-growth"]) == 1
    assert "no results.json and no receipt.json: it is not done" in capsys.readouterr().out


@pytest.mark.parametrize(("reason", "code"), [("stopped", 0), ("deadline", 0), ("failed", 1), ("finished", 1)])
def test_a_run_ended_early_is_complete_without_results_json_and_a_failed_one_is_not(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], reason: str, code: int
) -> None:
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "receipt.json", {"usd": "0.42"})
    put(cloud, bucket, "done.json", {"reason": reason})
    assert main(["results", "small-growth"]) == code
    said = capsys.readouterr().out
    assert f"ended with {reason}" in said
    assert ("The run left no final/ either" in said) is (code == 0)
    put(cloud, bucket, "final/model.safetensors", b"m")
    assert main(["results", "small-growth"]) == code
    assert "no final/" not in capsys.readouterr().out


@pytest.mark.parametrize(("reason", "code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_a_command_leaves_no_results_json_and_is_complete_with_its_receipt(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], reason: str, code: int
) -> None:
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "receipt.json", {"usd": "0.42"})
    put(cloud, bucket, "done.json", {"reason": reason})
    written = command_file(path.parents[1], name="small-growth")
    written.write_text(written.read_text().replace("owner: me", "owner: you"))

    assert main(["results", "small-growth"]) == code
    assert ("Complete" in capsys.readouterr().out) is (code == 0)


@pytest.mark.parametrize("again", [True, False])
def test_a_log_that_grew_since_it_was_listed_comes_as_it_is_now(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    bucket, listed = declare_bucket(cloud), run_folder.RunFolder.objects
    put(cloud, bucket, "job.log", b"step 1\n")

    def objects(folder: run_folder.RunFolder, prefix: str = "") -> list[run_folder.StoredObject]:
        if prefix:
            return listed(folder, prefix) if again else []
        found = listed(folder)
        put(cloud, bucket, "job.log", b"step 1\nstep 2\n")
        return found

    monkeypatch.setattr(run_folder.RunFolder, "objects", objects)
    if again:
        assert main(["results", "small-growth"]) == 1  # the run is not done
        assert (path.parents[1] / "results/small-growth/r1/job.log").read_text() == "step 1\nstep 2\n"
    else:
        assert main(["results", "small-growth"]) == 2
        assert "came with 14 bytes instead of 7: it changed meanwhile" in capsys.readouterr().err


RUN_UNASKED = (
    *("final/.git/config", "final/.GIT/hooks/x", ".git", "exports/a/.git/HEAD", "final/.envrc", "final/.env", ".netrc"),
    *("final/.vscode/tasks.json", "final/.idea/x", "final/.exrc", "final/.direnv/x", "final/.hg/hgrc", "final/.bashrc"),
    *(
        "final/HEAD",
        "final/head",
        "final/Makefile",
        "final/GNUmakefile",
        "final/a/CMakeLists.txt",
        "final/package.json",
    ),
    *("final/conftest.py", "final/test_x.py", "final/x_test.py", "final/sitecustomize.py", "final/pyproject.toml"),
    *("final/gulpfile.js", "final/eslint.config.mjs", "final/jupyter_server_config.py", "final/pylintrc", "mise.toml"),
    *("final/desktop.ini", "final/x.lnk", "final/my.code-workspace", "final/.metadata/x", "final/x/.metadata.py"),
)
DATA = (
    *("final/tokenizer.json", "final/config.json", "final/model.safetensors", "final/model.safetensors.index.json"),
    *("final/head/weights.pth", "final/generation_config.json", "final/modeling_mine.py", "final/requirements.txt"),
    *("final/step-2/__0_0.distcp", "final/step-2/.metadata", "final/a b/model 1.bin", "final/model.config.json"),
    *("final/makefiles.csv", "final/a.b.c", "tb/events.out.tfevents.1", "attempts/i-1.json", "final/README.md"),
    *("final/\u6a21\u578b.bin", "final/setup.json", "final/protest_x.py", "final/Head.png", "exports/a/meta.json"),
)


@pytest.mark.parametrize("name", RUN_UNASKED)
def test_what_a_user_s_tools_run_by_its_being_there_stays_in_the_bucket_and_is_said(name: str) -> None:
    said: list[str] = []
    assert not results._is_file(name, said.append)
    (line,) = said
    assert line.startswith(f"left in the bucket: an object whose name is {name!r}: git, shells, editors or tests run")


@pytest.mark.parametrize("name", DATA)
def test_data_comes_whatever_it_is_called(name: str) -> None:
    assert results._is_file(name, pytest.fail)


def test_no_object_can_be_written_outside_the_folder(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cloud, finished(cloud), "../../../evil", b"x")
    assert main(["results", "small-growth"]) == 0
    said = "left in the bucket: an object whose name is '../../../evil', not a file's name below its folder"
    assert said in capsys.readouterr().out
    assert not list(path.parents[1].rglob("evil"))
