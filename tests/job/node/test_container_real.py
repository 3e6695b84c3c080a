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
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.clock import uptime
from gpufleet.job.contract.environment import RUN_URI
from gpufleet.job.kind import EXPERIMENTS
from gpufleet.job.node import container
from gpufleet.job.node.jobs import Jobs
from gpufleet.job.node.settings import InstanceIdentity, Settings
from tests.job import hostile_world, runs
from tests.job.command_world import PYTHON, parameters, run_of
from tests.repository import ROOT
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(
        shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0,
        reason="no docker answers here",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="a node's files become another user's"),
]

IMAGE = f"gpufleet-test-empty-{os.getpid()}:1"  # of this worker alone
MACHINE = InstanceIdentity("i-1", "g5.2xlarge", "us-east-2a", "2026-11-26T00:00:00Z")
HERE = [
    path
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", sys.prefix, sys.base_prefix, str(ROOT))
    if Path(path).exists()
]
ESCAPES = "tests/job/experiments/kernel/test_escapes.py"
REPLACED = ("--name", "--network", "--pid", "--log-driver", "--log-opt", "--ulimit")
# linux/capability.h
CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}
CAPABILITIES["LEASE"] = 28
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
    "sees": sum(name.isdigit() for name in os.listdir("/proc")),
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
OPENS_BY_NUMBER = """
import ctypes, json, os, platform, struct, sys
number = {"x86_64": 304, "aarch64": 265}[platform.machine()]
mount, handle = os.open(sys.argv[1], os.O_RDONLY), struct.pack("IiII", 8, 1, 2, 0)
ctypes.CDLL(None, use_errno=True).syscall(number, mount, handle, os.O_RDONLY)
print(json.dumps(os.strerror(ctypes.get_errno())))
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


@pytest.fixture(scope="module")
def users(image: str) -> Iterator[None]:
    """The same image with each user that commands here are of."""
    names = {user: f"{IMAGE}-{user}" for user in ("0", "1000")}
    for user, name in names.items():
        text = f"FROM {IMAGE}\nUSER {user}\n"
        subprocess.run(["docker", "build", "-q", "-t", name, "-"], input=text.encode(), capture_output=True, check=True)
    yield
    subprocess.run(["docker", "rmi", *names.values()], capture_output=True, check=True)


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
NO_RIGHTS = {"new_rights": False, "filter": True, "processes": "30000", "socket": False, "keys": [], "sees": 1}


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


def test_the_supervisor_of_a_command_sees_no_other_process_and_has_rights_over_files_alone(
    settings: Settings, tmp_path: Path
) -> None:
    settings = replace(settings, job_image=settings.image)

    is_ = json.loads(printed(container.command(settings, MACHINE, tmp_path, 1.0), "-c", SAYS_WHAT_IT_IS))

    rights = capability_mask("DAC_OVERRIDE", "FOWNER", "LEASE")
    assert is_ == {**NO_RIGHTS, "user": "0", "rights": [rights, rights], "writes": []}


@pytest.mark.parametrize("who", ["supervisor", "command", "watcher", "job"])
def test_none_of_a_node_s_containers_opens_a_file_of_the_machine_by_its_number(
    settings: Settings, who: str, tmp_path: Path
) -> None:
    """Past all mounts: 2 is the root of a disk's file system. The kernel lets who has DAC_READ_SEARCH."""
    settings = replace(settings, job_image="" if who == "job" else settings.image)
    jobs = Jobs(settings, MACHINE, tmp_path)
    commands = {
        "supervisor": lambda: container.command(settings, MACHINE, tmp_path, 1.0),
        "command": jobs.command,
        "watcher": jobs.watcher,
        "job": jobs.command,
    }
    assert json.loads(printed(commands[who](), "-c", OPENS_BY_NUMBER, str(ROOT))) == "Operation not permitted"


# The node's own command lines, with this machine's programs in the empty image, without what another daemon refuses.
SHIM = """#!{python} -SE
import os, sys
words = sys.argv[1:]
if words[0] == "run":
    at = next(index for index, word in enumerate(words) if word.startswith({image!r}))
    options, kept = iter(words[1:at]), []
    for word in options:
        if word in ("--log-driver", "--log-opt", "--ulimit"):
            next(options)
        elif word == "bridge":
            kept.append("none")
        else:
            kept.append(word)
    words = ["run", *kept, *{added!r}, *words[at:]]
os.execv({docker!r}, ["docker", *words])
"""


@contextmanager
def run_on_a_node(
    settings: Settings, root: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], user: str
) -> Iterator[tuple[subprocess.Popen[bytes], InstanceIdentity]]:
    """The supervisor of a command in its container, and a node that starts the others: the docker client, and who it
    is. The run's folder is `root`/run, where all that it keeps lies in bucket/r1.
    """
    added = ["-e", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"]
    added += [word for path in HERE for word in ("-v", f"{path}:{path}:ro")]
    shim = SHIM.format(python=sys.executable, image=IMAGE.partition(":")[0], added=added, docker=shutil.which("docker"))
    (root / "bin").mkdir()
    (root / "bin" / "docker").write_text(shim)
    (root / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name, value in runs.environment_of(Path("/gpufleet/run/bucket"), "i-1").items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    now, name = runs.launched(seconds_ago=1), f"i-{os.getpid()}-{user}"
    machine = replace(MACHINE, instance=name, launched_at=now, uptime=uptime())
    runs.place(root / "run", run_of(root / "run", told))
    settings = replace(settings, job_image=f"{IMAGE}-{user}")
    with Jobs(settings, machine, root):
        command = container.command(settings, machine, root, 1.0)
        uri = f"{RUN_URI}=/gpufleet/run/bucket/r1"
        command = [uri if word.startswith(RUN_URI) else word for word in command]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            yield process, machine
        finally:
            subprocess.run(["docker", "rm", "-f", container.name(machine.instance)], capture_output=True)
            process.communicate()


def log_of(root: Path) -> str:
    path = root / "run" / "job.log"
    return path.read_text() if path.exists() else ""


def test_a_hostile_command_in_its_container_leads_the_supervisor_in_another_nowhere(
    settings: Settings, users: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = tmp_path / "run"
    hostile_world.private(workdir)
    with run_on_a_node(settings, tmp_path, monkeypatch, hostile_world.run_parameters(), "0") as (process, _):
        wait = partial(wait_for, process=process, log=lambda: log_of(tmp_path))
        hostile_world.go_on(workdir, lambda: log_of(tmp_path), wait)
        wait("its end", lambda: process.poll() is not None)
    assert process.returncode == 0, log_of(tmp_path)
    assert hostile_world.wrong(workdir, workdir / "bucket" / "r1", log_of(tmp_path)) == [], log_of(tmp_path)


OF_ANOTHER_USER = """
import os, signal, time
from pathlib import Path
K, go = Path(os.environ["GPUFLEET_CHECKPOINTS"]), Path(os.environ["GPUFLEET_STATE"]) / "go"
def save(step, body):
    (K / f"step-{step}").mkdir(mode=0o700)
    with open(K / f"step-{step}" / "w.bin", "w", opener=lambda *words: os.open(*words, 0o600)) as file:
        (K / f"step-{step}" / "done").touch()
        body(file)
    print("step", step, "loss 1", flush=True)
def leave(*_):
    save(3, lambda file: file.write("of the signal"))
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
print("user", os.getuid(), flush=True)
def slowly(file):
    file.write("half")
    file.flush()
    save(1, lambda other: other.write("one"))
    while not go.exists():
        time.sleep(0.05)
    file.write(" and half")
save(2, slowly)
while True:
    time.sleep(0.05)
"""


def test_files_of_another_user_s_that_are_being_written_are_waited_for_and_signals_reach_its_processes(
    settings: Settings, users: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor has neither the command's processes nor its user."""
    script = OF_ANOTHER_USER.replace("{", "{{").replace("}", "}}")
    checkpoint = {"each": ["step-{step}/"], "complete": "done", "heartbeat_s": 0.5}
    told = parameters(f"{PYTHON} -c '{script}'", checkpoint=checkpoint, stop={"saves": "true"}, exit={"restarts": 0})
    with run_on_a_node(settings, tmp_path, monkeypatch, told, "1000") as (process, machine):
        wait = partial(wait_for, process=process, log=lambda: log_of(tmp_path))
        wait("step 1", lambda: "published step 1" in log_of(tmp_path))  # the host has seen both
        assert "checkpoint of step 2 is whole" not in log_of(tmp_path)
        (tmp_path / "run" / "user" / "state" / "go").touch()
        wait("step 2", lambda: "published step 2" in log_of(tmp_path))
        subprocess.run(["docker", "kill", "-s", "TERM", container.name(machine.instance)], capture_output=True)
        wait("its end", lambda: process.poll() is not None)
    assert process.returncode == 75, log_of(tmp_path)
    assert "user 1000" in log_of(tmp_path)
    saved = (tmp_path / "run" / "bucket" / "r1" / "ckpt").rglob("w.bin")
    contents = {path.parents[2].name: path.read_text() for path in saved}
    assert contents == {"step_00000002": "half and half", "step_00000003": "of the signal"}


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
    settings = replace(
        settings, data_volume=volume, container_options=EXPERIMENTS["kernel-sft"]().demands.container_options
    )
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
