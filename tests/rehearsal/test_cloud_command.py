"""`gpufleet cloud`: the embedded AWS for another shell."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import boto3
import pytest

from tests.repository import ROOT


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """In a project with a file that is not UTF-8, and a folder that is called like a file."""
    (tmp_path / "stacks" / "folder.yaml").mkdir(parents=True)
    shutil.copy(ROOT / "stacks" / "tinystories-growth.yaml", tmp_path / "stacks")
    (tmp_path / "stacks" / "latin.yaml").write_bytes(b"# caf\xe9\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpufleet.infra.cli", "cloud", "--timeout", "5000"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def printed(out: IO[str] | None) -> tuple[dict[str, str], Path]:
    """(exported variables, the folder to change to)."""
    assert out is not None
    variables = {}
    for line in out:
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            name, _, value = words[1].partition("=")
            variables[name] = value
        if words[:1] == ["cd"]:
            return variables, Path(words[1])
    raise AssertionError("no cd line")


def test_the_printed_lines_lead_to_a_scratch_backend_and_dummy_credentials(
    cloud: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, project = printed(cloud.stdout)
    assert variables["AWS_ENDPOINT_URL"].startswith("http://127.0.0.1:")
    assert variables["PULUMI_BACKEND_URL"].startswith("file://")
    assert str(project) in variables["PULUMI_BACKEND_URL"]
    assert variables["PULUMI_DEBUG_PROVIDERS"].startswith("aws:")
    assert {"PULUMI_CONFIG_PASSPHRASE", "AWS_SECRET_ACCESS_KEY", "GPUFLEET_REGISTRY_ENDPOINT"} <= set(variables)
    assert (project / "stacks" / "tinystories-growth.yaml").is_file()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert boto3.session.Session().client("ec2").describe_fleets()["Fleets"] == []

    assert cloud.stdin is not None
    cloud.stdin.close()  # its parent is gone
    assert cloud.wait() == 0
    assert not project.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_ends_it_and_removes_the_folder(cloud: subprocess.Popen[str], number: signal.Signals) -> None:
    _, project = printed(cloud.stdout)
    assert project.exists()
    os.kill(cloud.pid, number)
    assert cloud.wait() == 0
    assert not project.exists()
