"""Containers as a node starts them, in a real docker: what a process has in them, and what an untrusted program in the
job's has. The image is empty; this machine's programs, Python and gpufleet lie read-only in it.

Three options are others here: the network, but for what has none anyway (a daemon without a bridge does too), the log's
driver (AWS's), and the limit of locked memory (which a daemon in a virtual machine may not raise).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from repository import ROOT

from gpufleet.job.kind import EXPERIMENTS
from gpufleet.job.node import container
from gpufleet.job.node.jobs import Jobs
from gpufleet.job.node.settings import InstanceIdentity, Settings

pytestmark = [
    pytest.mark.skipif(
        shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0,
        reason="no docker answers here",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="a node's files become another user's"),
]

IMAGE = "gpufleet-test-empty:1"
MACHINE = InstanceIdentity("i-1", "g5.2xlarge", "us-east-2a", "2026-11-26T00:00:00Z")
HERE = [
    path
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(ROOT))
    if Path(path).exists()
]
ESCAPES = "tests/job/experiments/kernel/test_escapes.py"
REPLACED = ("--name", "--network", "--log-driver", "--log-opt", "--ulimit")
# linux/capability.h
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
SAYS_WHAT_IT_IS = """
import json, os, pathlib, socket, sys
status = dict(line.split(":\\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
counts = [*pathlib.Path("/sys/fs/cgroup").glob("pids.max"), *pathlib.Path("/sys/fs/cgroup").glob("pids/pids.max")]
print(json.dumps({
    "user": status["Uid"].split()[0], "rights": sorted(status[kind] for kind in ("CapEff", "CapBnd")),
    "new_rights": status["NoNewPrivs"] == "0", "filter": status["Seccomp"] == "2",
    "processes": counts[0].read_text().strip(), "socket": pathlib.Path("/var/run/docker.sock").exists(),
    "keys": [name for name in os.environ if name.startswith("AWS_")],
    "writes": [path for path in sys.argv[1:] if os.access(path, os.W_OK)],
}))
"""
LOOKS_AROUND = """
import json, socket
try:
    metadata = socket.create_connection(("169.254.169.254", 80), 2)
except OSError as error:
    metadata = error.strerror
own = socket.gethostbyname(socket.getfqdn())
print(json.dumps({"interfaces": [name for _, name in socket.if_nameindex()], "metadata": metadata, "itself": own}))
"""


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        files.addfile(folder)
    subprocess.run(["docker", "import", "-", IMAGE], input=packed.getvalue(), capture_output=True, check=True)
    yield IMAGE
    subprocess.run(["docker", "rmi", IMAGE], capture_output=True, check=True)


@pytest.fixture
def settings(tmp_path: Path, image: str) -> Settings:
    (tmp_path / "opt/gpufleet").mkdir(parents=True)
    (tmp_path / "opt/gpufleet/app").symlink_to(ROOT)
    (tmp_path / "run").mkdir()
    return Settings(
        stack="s", run="r1", region="us-east-2", image=image, job_image="", bucket="b", log_group="g",
        run_config_sha256="", timer_s=3600, schedule="", device="cpu", container_options="", data_volume="",
        data_device="sdf", root=tmp_path, metadata="",
    )  # fmt: skip


def printed(command: Sequence[str], *program: str) -> str:
    """What the program prints in the container of this command; the command's own program is another."""
    words, options = iter(command[2 : command.index(IMAGE)]), ["docker", "run", "--rm", "--network", "none"]
    for word in words:
        if word in REPLACED:
            next(words)
        else:
            options.append(word)
    mounted = [word for path in HERE for word in ("-v", f"{path}:{path}:ro")]
    ran = subprocess.run(
        [*options, *mounted, "-w", str(ROOT), "--entrypoint", sys.executable, IMAGE, "-B", *program],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def capability_mask(*names: str) -> str:
    """These capabilities, as the kernel says them."""
    return f"{sum(1 << CAPABILITIES[name] for name in names):016x}"


RUN = "/gpufleet/run"
PARTS = [f"{RUN}/{name}" for name in ("", "user", "control", "control/job", "packages")]
NO_RIGHTS = {"new_rights": False, "filter": True, "processes": "30000", "socket": False, "keys": []}


@pytest.mark.parametrize("volume", ["", "blank"])
def test_a_job_has_the_rights_that_are_said_and_gets_no_others(settings: Settings, volume: str, tmp_path: Path) -> None:
    settings = replace(settings, data_volume=volume)
    (tmp_path / "run/packages").mkdir()
    container.give(settings, tmp_path / "run")
    training = Jobs(settings, MACHINE, tmp_path).command()
    supervising = container.command(settings, MACHINE, tmp_path, 1.0)

    trains, supervises = (
        json.loads(printed(command, "-c", SAYS_WHAT_IT_IS, *PARTS)) for command in (training, supervising)
    )

    written = [f"{RUN}/{name}" for name in ("", "control", "packages")]
    user, none = "0" if volume else "1000", capability_mask()
    rights = capability_mask("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID") if volume else none
    assert trains == {**NO_RIGHTS, "user": user, "rights": [rights, rights], "writes": [f"{RUN}/"]}
    assert supervises == {**NO_RIGHTS, "user": user, "rights": [none, none], "writes": written}


def test_a_command_s_container_has_the_rights_that_are_said_and_gets_no_others(
    settings: Settings, tmp_path: Path
) -> None:
    jobs = Jobs(replace(settings, job_image=settings.image), MACHINE, tmp_path)

    is_ = json.loads(printed(jobs.command(), "-c", SAYS_WHAT_IT_IS, *PARTS))

    rights = capability_mask("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
    seen = [f"{RUN}/{name}" for name in ("", "user", "control", "control/job")]  # what lies above is the container's
    assert is_ == {**NO_RIGHTS, "user": "0", "rights": [rights, rights], "writes": seen}


def test_a_job_reaches_nothing_and_its_ranks_each_other(settings: Settings, tmp_path: Path) -> None:
    """Not by a limit of hops either: there is no way to the metadata service."""
    container.give(settings, tmp_path / "run")

    said = printed(Jobs(settings, MACHINE, tmp_path).command(), "-c", LOOKS_AROUND)

    assert json.loads(said) == {"interfaces": ["lo"], "metadata": "Network is unreachable", "itself": "127.0.0.1"}


@pytest.mark.parametrize("volume", ["", pytest.param("blank", marks=pytest.mark.slow)])
def test_no_way_leads_out_of_a_candidate_s_process_in_a_node_s_container(
    settings: Settings, volume: str, tmp_path: Path
) -> None:
    """All of test_escapes.py's, which that file counts."""
    settings = replace(settings, data_volume=volume, container_options=EXPERIMENTS["kernel-sft"].container_options)
    container.give(settings, tmp_path / "run")
    jobs = Jobs(settings, MACHINE, tmp_path)
    asked = [
        "test_none_leads_out_of_a_candidate_s_process",
        "test_a_candidate_is_another_user_without_rights_of_any_kind",
    ]

    said = printed(
        jobs.command(),
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *(f"{ESCAPES}::{name}" for name in asked)),
    )

    assert "3 passed" in said
    assert "skipped" not in said
