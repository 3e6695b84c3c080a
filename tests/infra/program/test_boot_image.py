"""The definition files run the image that job/Dockerfile builds, and every package in it is pinned by hash."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from gpufleet import job

JOB = Path(job.__file__).parent
STACKS = sorted((JOB.parent / "stacks").glob("*.yaml"))
REQUIREMENTS = (JOB / "requirements.txt").read_text()


@pytest.mark.parametrize("stack", STACKS, ids=lambda path: path.stem)
def test_the_dockerfile_starts_from_the_image_of_the_definition(stack: Path) -> None:
    image = yaml.safe_load(stack.read_text())["job"]["image"].partition("@")[0]

    assert f"ARG BASE={image}\n" in (JOB / "Dockerfile").read_text()


def test_every_requirement_has_one_version_and_a_hash_per_platform() -> None:
    pins = re.findall(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", REQUIREMENTS, re.MULTILINE)
    named = [line for line in REQUIREMENTS.splitlines() if line and line[0] not in "# "]

    universal = {"absl-py", "tensorboard"}  # one wheel for every platform
    assert len(pins) == len(named) == 6
    assert all(hashes.count("--hash") == (1 if name in universal else 2) for name, _, hashes in pins)


@pytest.mark.parametrize("name", ["absl-py", "lightgbm", "protobuf", "safetensors", "tensorboard", "tokenizers"])
def test_the_container_and_the_rehearsal_run_the_same_version(name: str) -> None:
    assert f"{name}=={version(name)} " in REQUIREMENTS
