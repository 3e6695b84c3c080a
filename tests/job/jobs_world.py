"""The loop of a rehearsed node that starts the container that trains, with the stand-in for docker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpufleet.job.node.jobs import Jobs
from gpufleet.job.node.settings import InstanceIdentity, Settings
from gpufleet.rehearsal.node import STANDINS
from tests.repository import ROOT

IDENTITY = InstanceIdentity(instance="i-1", type="g5.2xlarge", zone="us-east-2a", launched_at="")


@contextmanager
def serving(root: Path, monkeypatch: pytest.MonkeyPatch, *, job_image: str) -> Iterator[Path]:
    """The run's folder on a machine with this root, whose loop serves what is asked."""
    monkeypatch.setenv("GPUFLEET_ROOT", str(root))
    monkeypatch.setenv("GPUFLEET_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", f"{STANDINS}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/bin:/bin")
    folder = root / "opt" / "gpufleet"
    folder.mkdir(parents=True)
    (folder / "app").symlink_to(ROOT)
    settings = Settings(
        **dict.fromkeys(["stack", "run", "region", "image", "bucket", "log_group", "run_config_sha256"], "x"),
        **dict.fromkeys(["container_options", "data_volume", "data_device", "metadata"], ""),
        job_image=job_image,
        timer_s=1,
        schedule="",
        device="cpu",
        root=root,
    )
    with Jobs(settings, IDENTITY, folder):
        yield folder / "run"
