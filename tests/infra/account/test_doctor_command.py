"""`gpufleet doctor` and `prepare` check a command's images, secrets and inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.command_files import IMAGE, command_file
from tests.infra.commands_world import account

SECRETS = {"HF_TOKEN": "ssm:/team/hf", "WANDB_API_KEY": "secretsmanager:team/wandb"}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as patch, account(tmp_path_factory.mktemp("doctor"), patch) as cloud:
        cloud.client("s3").create_bucket(
            Bucket="theirs", CreateBucketConfiguration={"LocationConstraint": cloud.region}
        )
        yield cloud


@pytest.fixture
def stack(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A definition with secrets, code, an input of this machine and an input in a bucket, in the current folder."""
    for name in ("mine/train.py", "text/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    places = {"text": "../text", "more": "s3://theirs/some/data"}
    path = command_file(
        tmp_path / "project",
        fleet={"ami": "unpinned", "region": "us-east-2", "zones": ["us-east-2a"], "instance_types": ["g5.2xlarge"]},
        code={"folder": "../mine"},
        secrets=SECRETS,
        storage={"inputs": places},
    )
    path.write_text(path.read_text().replace('fleet: {"ami": "unpinned", ', "fleet: {ami: unpinned, "))
    monkeypatch.chdir(tmp_path / "project")
    return path


def test_doctor_pins_both_images_and_finds_what_is_not_there_yet(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "mine", "--pin"]) == 1

    said = capsys.readouterr().out
    text = stack.read_text()
    assert f'image: "{IMAGE}@sha256:' in text
    assert "\n  supervisor_image: public.ecr.aws/docker/library/python:3.13-slim@sha256:" in text
    assert "PROBLEM secret: ssm:/team/hf does not exist" in said
    assert "PROBLEM secret: secretsmanager:team/wandb does not exist" in said
    assert "PROBLEM inputs.more: s3://theirs/some/data/(any file) is not there" in said
    assert "PROBLEM inputs: storage.inputs.more, s3://theirs/some/data, is not listed" in said


def test_the_first_line_answers_and_what_is_in_order_is_only_counted(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "mine"]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    problems, warnings = (sum(line.startswith(f"  {mark} ") for line in lines) for mark in ("PROBLEM", "warning"))
    assert problems > 1
    assert first.startswith(f"mine in us-east-2: {problems} problems to put right first: with them `pulumi up` would")
    assert first.endswith(f"node, and {warnings} warning{'s' * (warnings != 1)}." if warnings else "node.")
    marks = [line.split()[0] for line in lines if not line.startswith("    ")]
    assert marks == sorted(marks, key=["PROBLEM", "warning", "ok"].index)
    assert marks.count("ok") == 1
    assert main(["doctor", "mine", "--all"]) == 1
    every = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ok ")]
    assert lines[-1] == f"  ok      {len(every)} checks: `gpufleet doctor mine --all`"


def test_all_is_in_place_once_it_is_there_and_listed(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.client("ssm").put_parameter(Name="/team/hf", Value="of hf", Type="SecureString", Overwrite=True)
    cloud.client("secretsmanager").create_secret(Name="team/wandb", SecretString="of wandb")
    cloud.client("s3").put_object(Bucket="theirs", Key="some/data/x.bin", Body=b"xyz")

    assert main(["prepare", "mine"]) == 0
    assert main(["doctor", "mine", "--pin", "--all"]) == 0

    said = capsys.readouterr().out
    assert "code: 1 file, 0.0 MB of" in said
    assert "more: 1 file, 0.0 MB of s3://theirs/some/data" in said
    assert "text: 1 file, 0.0 MB of" in said
    assert "secret: ssm:/team/hf is there" in said
    assert "secret: secretsmanager:team/wandb is there" in said
    assert "inputs.more: s3://theirs/some/data/x.bin is there" in said
    assert "of hf" not in said
    assert "of wandb" not in said


def test_a_secret_under_a_key_of_one_s_own_is_read_only_where_the_file_names_the_key(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = cloud.client("kms").create_key()["KeyMetadata"]
    cloud.client("ssm").put_parameter(
        Name="/team/hf", Value="x", Type="SecureString", Overwrite=True, KeyId=key["KeyId"]
    )

    main(["doctor", "mine"])
    assert f"ssm:/team/hf is encrypted with {key['KeyId']}, but nodes may only use account.kms_key" in (
        capsys.readouterr().out
    )
    stack.write_text(stack.read_text() + f"account: {{kms_key: '{key['Arn']}'}}\n")
    main(["doctor", "mine", "--all"])
    assert "secret: ssm:/team/hf is there" in capsys.readouterr().out


def test_a_command_takes_no_text_to_prepare(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "mine", "text.txt"]) == 2

    assert "a command reads its data from storage.inputs" in capsys.readouterr().err
