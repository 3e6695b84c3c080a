"""The node's disks: the fastest for the work folder and docker's images, and the data volume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from gpufleet.job import atomic
from gpufleet.job.node.outside import answer, bounded, call, code, retry, say

# the model name of an instance store's disk; EBS disks are /dev/nvme* too
INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
NOTHING_THERE = 2  # blkid's exit code for an empty disk


def scratch(root: Path, own: Path) -> Path:
    """The folder for the job's files: on the instance store if the machine has one, otherwise `own` on the root disk.
    Docker uses it too, unless the root disk came with images.
    """
    disks = [
        line.split()[0]
        for line in (answer("lsblk", "-dnp", "-o", "NAME,MODEL") or "").splitlines()
        if INSTANCE_STORE in line and line.startswith(f"{root / 'dev'}/")
    ]
    if not disks:
        return own
    made, folder = root / "opt/dlami/nvme", root / "scratch"
    # this service of the AMI joins all instance-store disks into one mount
    call(*bounded(120, "systemctl", "start", "dlami-nvme"))
    if call("findmnt", "-n", str(made)):
        folder = made / "gpufleet"
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if not (call("mkfs.xfs", "-q", "-f", disks[0]) and call("mount", disks[0], str(folder))):
            say("instance store cannot be used: checkpoints go to the root disk")
            return own
    if answer(*bounded(120, "docker", "images", "-q")):
        say("docker stays on the root disk, which has images")
    else:
        _docker_on(folder / "docker", root / "etc/docker/daemon.json")
    return folder


def _docker_on(folder: Path, config: Path) -> None:
    """Moves docker's images to this folder: because 15 to 20 GB are unpacked faster there."""
    folder.mkdir(parents=True, exist_ok=True)
    config.parent.mkdir(parents=True, exist_ok=True)
    if not config.exists():
        config.write_text("{}\n")
    before = config.with_name(f"{config.name}.before")
    shutil.copy2(config, before)
    settings = {"data-root": str(folder), **(atomic.read_object(config) or {})}
    config.write_text(json.dumps(settings, sort_keys=True))
    if not call(*bounded(120, "systemctl", "restart", "docker")):
        say("docker stays on the root disk")
        shutil.copy2(before, config)
        call(*bounded(120, "systemctl", "restart", "docker"))


def mount_data(root: Path, name: str, *, blank: bool) -> str | None:
    """Mounts the data volume; formats it first if it is `blank` and empty. Returns None, or the reason of the
    failure.
    """
    device, folder = root / name.lstrip("/"), root / "data"
    if not retry(10, device.exists):
        return f"{name} did not appear"
    nothing_there = blank and code("blkid", "-p", str(device)) == NOTHING_THERE
    if nothing_there and not call("mkfs.xfs", "-q", str(device)):
        return f"{name} cannot be formatted"
    folder.mkdir(parents=True, exist_ok=True)
    return None if call("mount", str(device), str(folder)) else f"{name} cannot be mounted"
