"""User-data: its text, that any value survives the shell, and EC2's size limit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import STACK_NAME
from gpufleet.infra.definition.model import Job, Run
from gpufleet.infra.definition.rules import RULES
from gpufleet.infra.program.boot import user_data
from gpufleet.job.node.settings import Settings

KNOWN: dict[str, Any] = {
    "stack": "tinystories-growth",
    "run_id": "r1",
    "region": "us-east-2",
    "image": "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023@sha256:" + "1" * 64,
    "timer_seconds": 9000,
    "device": "cuda",
    "container_options": "",
    "data_volume": None,
}
VALUES = KNOWN | {
    "bucket": "gpufleet-tinystories-growth-1a2b3c4",
    "log_group": "gpufleet-tinystories-growth-5d6e7f8",
    "schedule": "gpufleet-tinystories-growth-9a0b1c2/stop",
    "archive_sha256": "2" * 64,
    "run_config_sha256": "3" * 64,
}


def test_the_header_is_what_the_node_reads() -> None:
    header = user_data.render(**VALUES).split("# The node of one run")[0]

    shown = subprocess.run(["bash"], input=header + "exec env -0", capture_output=True, text=True)
    settings = Settings.from_environment(dict(line.split("=", 1) for line in shown.stdout.split("\0") if line))

    assert (settings.run, settings.image, settings.bucket) == ("r1", KNOWN["image"], VALUES["bucket"])
    assert (settings.timer_s, settings.device, settings.container_options) == (9000, "cuda", "")
    assert (settings.data_volume, settings.root) == ("", Path("/"))
    assert settings.schedule == VALUES["schedule"]


def test_what_the_shell_does_stays_small() -> None:
    assert len(user_data.render(**VALUES).encode()) < 4096


def test_the_script_parses() -> None:
    parsed = subprocess.run(["bash", "-n"], input=user_data.render(**VALUES), capture_output=True, text=True)

    assert (parsed.returncode, parsed.stderr) == (0, "")


@pytest.mark.parametrize(
    "odd",
    ["it's", "$(touch broken)", "`touch broken`", 'a"b', "two\nlines; touch broken", "\\", "$HOME", "ünï", "-n", ""],
)
def test_any_value_reaches_the_script_as_it_is_and_runs_nothing(tmp_path: Path, odd: str) -> None:
    script = user_data.render(**VALUES | {"stack": odd, "run_id": odd, "image": odd})
    header = script.split("# The node of one run")[0]

    shown = subprocess.run(
        ["bash"],
        input=header + 'printf \'%s|%s|%s\' "$STACK" "$RUN_ID" "$IMAGE"',
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    assert shown.stdout == f"{odd}|{odd}|{odd}"
    assert list(tmp_path.iterdir()) == []


def test_a_value_with_a_nul_character_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        user_data.render(**VALUES | {"run_id": "r\0"})


def test_an_unknown_kind_of_data_volume_is_refused() -> None:
    with pytest.raises(ValueError, match="'formatted' is not one of"):
        user_data.render(**VALUES | {"data_volume": "formatted"})


def test_the_longest_values_that_a_definition_and_aws_allow_fit_ec2s_limit() -> None:
    image = "registry.example/" + "x" * 107 + ":" + "t" * 58 + "@sha256:" + "1" * 64
    longest = {"stack": "s" * 40, "run_id": "r" * 32, "image": image, "job_image": image}
    allowed = (
        STACK_NAME.pattern,
        RULES[Run, "id"].pattern,
        RULES[Job, "image"].pattern,
        RULES[Job, "supervisor_image"].pattern,
    )
    for pattern, value in zip(allowed, longest.values(), strict=True):
        assert re.fullmatch(pattern, value)
        assert not re.fullmatch(pattern, f"{value[0]}{value}")
    names = {"bucket": "b" * 63, "log_group": "g" * 512, "schedule": "s" * 129}

    size = len(user_data.render(**VALUES | longest | names).encode())

    assert size < 16 * 1024  # before base64 (EC2 User Guide, user data, 2026-11-21)


@pytest.mark.parametrize("secret", ["AKIA", "BEGIN", "password"])
def test_user_data_holds_no_secret(secret: str) -> None:
    assert secret not in user_data.render(**VALUES)
