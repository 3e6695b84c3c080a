"""A node's own pull against real docker daemons: on a copy of a disk that has the image, nothing is asked of the
registry. The copy stands for the AMI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.job.node import container
from tests.rehearsal.own_images import daemon as no_daemon
from tests.rehearsal.own_registry import OwnRegistry, daemon

WHY_NOT = no_daemon() if sys.platform == "linux" else "needs Docker Engine on Linux"
WHY_NOT = WHY_NOT or ("" if os.geteuid() == 0 and shutil.which("dockerd") else "needs root, for daemons of its own")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture
def registry() -> Iterator[OwnRegistry]:
    made = OwnRegistry()
    yield made
    made.close()


def start(disk: Path, run: Path, image: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with this disk pulls the image, as a node does; gives the id under which docker then has it."""
    with daemon(disk, run) as address, monkeypatch.context() as patched:
        patched.setenv("DOCKER_HOST", address)
        patched.setenv("DOCKER_CONFIG", str(run / "login"))
        assert container.pull(image, run / "login") is None
        look = ["docker", "image", "inspect", "-f", "{{.Id}}", image]
        return subprocess.run(look, capture_output=True, text=True, check=True).stdout


def test_a_second_start_from_the_disk_of_the_first_asks_the_registry_for_nothing(
    registry: OwnRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path / "builder", tmp_path / "1", registry.image, monkeypatch)
    assert len([each for each in registry.asked if "/blobs/" in each]) == 2
    registry.asked.clear()
    device = shutil.ignore_patterns("backingFsBlockDev")  # docker makes it at each start
    shutil.copytree(tmp_path / "builder", tmp_path / "baked", symlinks=True, ignore=device)
    assert start(tmp_path / "baked", tmp_path / "2", registry.image, monkeypatch) == first
    assert registry.asked == []
    assert start(tmp_path / "empty", tmp_path / "3", registry.image, monkeypatch) == first
    assert registry.asked  # the disk of the Deep Learning AMI has no image
