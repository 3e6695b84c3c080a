"""Runs rehearsed nodes: each launched instance runs its user-data with bash, in a folder of its own.

The script, the AWS CLI, curl and Python are real. Stand-ins for programs that a laptop must not really run come first
on the PATH, and a stand-in for curl comes last, for machines without curl (rehearsal/standins/README.md). As on EC2, a
node has no keys in its environment; it gets those of its role from the metadata service. When an instance is ended, all
processes of its node are killed at once, as if the machine were lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moto.ec2.models.instance_types import INSTANCE_TYPES

from gpufleet.infra.errors import GpufleetError
from gpufleet.job.contract.environment import COMMAND, USER_PATH
from gpufleet.job.kind import EXPERIMENTS
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.images import Docker
from gpufleet.rehearsal.launch import CloudInstance

STANDINS = Path(__file__).parent / "standins"
AWS = STANDINS / "warm" / "cli.py"
NEEDED = ("bash", "tar")
POLL_S = 0.05
DISK = ("etc", "opt", "root", "var")  # the folders on a machine's root disk
# Runs what cloud-init runs at a machine's first boot: scripts that are on its disk, and then its user-data.
BOOT = """
for each in "$GPUFLEET_ROOT"/var/lib/cloud/scripts/per-boot/*; do [ ! -e "$each" ] || bash "$each"; done
exec bash "$0"
"""


@dataclass(kw_only=True, slots=True)
class RehearsalNode:
    """A running node. The node's folder stands for the root folder of the machine."""

    instance: CloudInstance
    root: Path
    process: subprocess.Popen[bytes]
    aws: subprocess.Popen[bytes]  # the process that runs the node's calls of the AWS CLI

    @property
    def log(self) -> Path:
        """The output of the user-data script, as cloud-init keeps it."""
        return self.root / "var" / "log" / "cloud-init-output.log"

    @property
    def container_log(self) -> Path:
        return self.root / "opt" / "gpufleet" / "container.log"


class NodeRunner:
    """Runs a node for every instance that the cloud launches, until `close`."""

    def __init__(
        self, cloud: Cloud, folder: Path, programs: Callable[[Path], Path] | None = None, docker: Docker | None = None
    ) -> None:
        """`programs` returns, for the node's root folder, the folder that comes first on the PATH of a user's command.
        `docker` runs the containers; if it is None, a stand-in does.
        """
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            raise GpufleetError(
                f"a rehearsal runs the node's real script, which needs {', '.join(missing)}: please install"
            )
        self.cloud = cloud
        self.folder = folder
        self._programs, self._docker = programs, docker
        self.nodes: dict[str, RehearsalNode] = {}
        self._watchers: list[threading.Thread] = []
        self._closed = threading.Event()
        cloud.launch, cloud.end, cloud.copy = self.launch, self.end, self.copy

    def launch(self, instance: CloudInstance) -> None:
        root = self.folder / instance.id
        if (baked := self.folder / instance.image).is_dir():
            shutil.copytree(baked, root, symlinks=True)
        for name in ("dev", "etc", "run", "root", "tmp", "var/log", "var/lib/cloud/instance"):
            (root / name).mkdir(parents=True, exist_ok=True)
        _disks(root, instance)
        script = root / "var/lib/cloud/instance/user-data.txt"
        script.write_text(instance.user_data, encoding="utf-8")
        script.chmod(0o755)
        environment = self._environment(instance, root)
        aws = _aws(root / "run", environment)
        with (root / "var/log/cloud-init-output.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", BOOT, str(script)],
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = RehearsalNode(instance=instance, root=root, process=process, aws=aws)
        self.nodes[instance.id] = node
        watcher = threading.Thread(target=self._watch, args=(node,), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def copy(self, image: str, instance: CloudInstance) -> None:
        """Copies the instance's root disk, as it is now, as the disk of an AMI. Files may appear and disappear during
        the copy.
        """
        instance_store = shutil.ignore_patterns("dlami")
        for name in DISK:
            here, there = self.folder / instance.id / name, self.folder / image / name
            with contextlib.suppress(shutil.Error, FileNotFoundError):
                shutil.copytree(here, there, symlinks=True, ignore=instance_store)

    def end(self, instance: CloudInstance) -> None:
        """Ends the machine. When the method returns, none of its processes runs any more."""
        node = self.nodes.get(instance.id)
        if node is None:  # the node was never started
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(node.process.pid, signal.SIGKILL)
        for pid in _marked(instance.id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._docker is not None:
            self._docker.remove(instance.id)
        node.process.wait()
        with node.aws:  # closes the pipes and waits, even if another thread does this at the same time
            node.aws.kill()

    def hold(self, instance: CloudInstance) -> None:
        """Stops only the trainer's processes, until `go` is called. This works only on Linux; on other systems training
        goes on.
        """
        if self._docker is not None:
            return self._docker.hold(instance.id)
        self._signal_trainer(instance, signal.SIGSTOP)

    def go(self, instance: CloudInstance) -> None:
        """Lets the trainer's processes continue."""
        if self._docker is not None:
            return self._docker.go(instance.id)
        self._signal_trainer(instance, signal.SIGCONT)

    def close(self) -> None:
        self._closed.set()
        for node in self.nodes.values():
            self.end(node.instance)
        for watcher in self._watchers:
            watcher.join()
        if self._docker is not None and self.nodes:
            self._docker.give_back(self.folder)

    def cpu_s(self, instance: CloudInstance) -> dict[tuple[int, str], float]:
        """Seconds of CPU that each process of the node's trainer, with its children that have ended, has used, by
        process id and program. Empty with Docker, and except on Linux.
        """
        used = {}
        for pid in _trainers(instance.id):
            with contextlib.suppress(OSError):
                name, _, fields = (Path("/proc") / str(pid) / "stat").read_text().partition(" (")[2].rpartition(") ")
                used[pid, name] = sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")
        return used

    def _signal_trainer(self, instance: CloudInstance, number: signal.Signals) -> None:
        for pid in _trainers(instance.id):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _watch(self, node: RehearsalNode) -> None:
        """Tells the cloud when the node's operating system has shut down."""
        request = node.root / "run" / "shutdown"
        while not self._closed.wait(POLL_S) and node.instance.ended_at is None:
            if request.exists():
                self.cloud.shut_down(node.instance.id)
                return

    def _environment(self, instance: CloudInstance, root: Path) -> dict[str, str]:
        python = Path(sys.executable)
        path = (STANDINS, AWS.parent, python.parent, os.environ.get("PATH", os.defpath), STANDINS / "absent")
        return {
            **({USER_PATH: str(self._programs(root))} if self._programs else {}),
            **(self._docker.environment() if self._docker else {}),
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(root / "root"),
            "TMPDIR": str(root / "tmp"),
            "LANG": "C.UTF-8",
            "GPUFLEET_ROOT": str(root),
            "GPUFLEET_NODE": instance.id,
            "GPUFLEET_PYTHON": str(python),
            "GPUFLEET_HOPS": str(instance.hops),
            # torchrun then uses this name instead of the host's
            "PET_LOCAL_ADDR": self.cloud.metadata(instance.id).address,
            "AWS_ENDPOINT_URL": self.cloud.endpoint,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.cloud.metadata(instance.id).endpoint,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


def _aws(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that runs a node's calls of the AWS CLI, listening in `folder`; it ends with this one."""
    words = [sys.executable, str(AWS), "serve"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, cwd=folder, env=environment, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _disks(root: Path, instance: CloudInstance) -> None:
    """Makes the node's disks as empty files: instance store by the type, the data volume by its device name."""
    store = INSTANCE_TYPES[instance.type].get("InstanceStorageInfo") or {}
    lines = []
    for number in range(1, 1 + sum(disk["Count"] for disk in store.get("Disks", []))):
        device = root / "dev" / f"nvme{number}n1"
        device.touch()
        lines.append(f"{device} Amazon EC2 NVMe Instance Storage\n")
    (root / "etc" / "disks").write_text("".join(lines))
    for name, snapshot in instance.volumes.items():
        device = root / name.lstrip("/")
        device.touch()
        if snapshot:
            device.with_name(device.name + ".fs").write_text("xfs\n")


def _marked(instance_id: str) -> list[int]:
    """Ids of processes whose environment names the node, because some of them may have left its group. Empty on systems
    other than Linux.
    """
    processes = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"GPUFLEET_NODE={instance_id}\0".encode() in entry.read_bytes():
                processes.append(int(entry.parent.name))
    return processes


def _trainers(instance_id: str) -> Iterator[int]:
    """Ids of the processes that train on the node: a command's, or a ready-made job's."""
    modules = {f"\0{config.module}\0".encode() for config in EXPERIMENTS.values()}
    for pid in _marked(instance_id):
        with contextlib.suppress(OSError):
            here = Path("/proc") / str(pid)
            of_command = f"{COMMAND['checkpoints']}=".encode() in (here / "environ").read_bytes()
            words = (here / "cmdline").read_bytes()
            if of_command or any(module in words for module in modules):
                yield pid
