"""Which disks the node formats, and which it must never touch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.infra.boot_stubs import StubNode

STORE = "Amazon EC2 NVMe Instance Storage"
DISK_CALLS = ("mkfs.xfs", "mount", "systemctl restart docker")


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    node = StubNode(tmp_path)
    (node.root / "dev").mkdir()
    return node


def devices(node: StubNode, *rows: tuple[str, str]) -> None:
    (node.world / "lsblk").write_text("".join(f"{node.root}/dev/{name} {model}\n" for name, model in rows))


def test_instance_store_is_told_from_ebs_by_its_model(node: StubNode) -> None:
    devices(node, ("nvme0n1", "Amazon Elastic Block Store"), ("nvme1n1", STORE))

    outcome = node.boot()

    disk = f"{node.root}/dev/nvme1n1"
    assert f"mkfs.xfs -q -f {disk}" in outcome.calls
    assert f"mount {disk} {node.root}/scratch" in outcome.calls
    assert f"-v {node.root}/scratch/run:/gpufleet/run" in "\n".join(outcome.calls)


def test_what_the_ami_has_mounted_is_used_and_not_formatted(node: StubNode) -> None:
    devices(node, ("nvme1n1", STORE), ("nvme2n1", STORE))
    (node.world / "mounted").touch()

    outcome = node.boot()

    assert outcome.calls_starting("mkfs.xfs", "mount", "systemctl start dlami-nvme") == ["systemctl start dlami-nvme"]
    assert f"-v {node.root}/opt/dlami/nvme/gpufleet/run:/gpufleet/run" in "\n".join(outcome.calls)


def test_docker_moves_to_instance_store_and_keeps_its_other_settings(node: StubNode) -> None:
    devices(node, ("nvme1n1", STORE))
    config = node.root / "etc/docker/daemon.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')

    outcome = node.boot()

    assert json.loads(config.read_text()) == {
        "data-root": f"{node.root}/scratch/docker",
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}},
    }
    calls = outcome.calls_starting("systemctl restart docker", "docker pull")
    assert calls == ["systemctl restart docker", "docker pull"]


def test_docker_stays_on_a_root_disk_that_came_with_images(node: StubNode) -> None:
    devices(node, ("nvme1n1", STORE))
    (node.world / "images").write_text(f"{node.image}\n")

    outcome = node.boot()

    assert outcome.calls_starting("systemctl restart docker", "docker pull") == []
    assert not (node.root / "etc/docker/daemon.json").exists()
    assert f"-v {node.root}/scratch/run:/gpufleet/run" in "\n".join(outcome.calls)


def test_docker_that_does_not_restart_there_goes_back(node: StubNode) -> None:
    devices(node, ("nvme1n1", STORE))
    node.fails("systemctl")

    outcome = node.boot()

    assert json.loads((node.root / "etc/docker/daemon.json").read_text()) == {}
    assert outcome.calls_starting("docker run") == ["docker run"]


@pytest.mark.parametrize("broken", ["mkfs.xfs", "mount"])
def test_instance_store_that_cannot_be_used_leaves_the_root_disk(node: StubNode, broken: str) -> None:
    devices(node, ("nvme1n1", STORE))
    node.fails(broken)

    outcome = node.boot()

    assert "checkpoints go to the root disk" in outcome.log
    assert f"-v {node.root}/opt/gpufleet/run:/gpufleet/run" in "\n".join(outcome.calls)


def test_disks_outside_the_nodes_own_root_are_never_touched(node: StubNode) -> None:
    (node.world / "lsblk").write_text(f"/dev/nvme1n1 {STORE}\n")

    assert node.boot().calls_starting(*DISK_CALLS) == []


def test_a_blank_data_volume_is_formatted_and_mounted(node: StubNode) -> None:
    node.data_volume = "blank"
    (node.root / "dev/sdf").touch()

    outcome = node.boot()

    assert outcome.calls_starting("mkfs.xfs", "mount", "docker run") == ["mkfs.xfs", "mount", "docker run"]
    assert f"-v {node.root}/data:/data" in "\n".join(outcome.calls)


def test_a_data_volume_with_something_on_it_is_not_formatted(node: StubNode) -> None:
    node.data_volume = "blank"
    (node.root / "dev/sdf").touch()
    (node.world / "has-filesystem").touch()

    assert node.boot().calls_starting("mkfs.xfs", "mount") == ["mount"]


def test_a_snapshot_is_never_formatted_even_when_it_looks_blank(node: StubNode) -> None:
    node.data_volume = "snapshot"
    (node.root / "dev/sdf").touch()

    assert node.boot().calls_starting("mkfs.xfs", "mount") == ["mount"]


def test_a_snapshot_that_cannot_be_mounted_is_a_failed_attempt(node: StubNode) -> None:
    node.data_volume = "snapshot"
    (node.root / "dev/sdf").touch()
    node.fails("mount")

    assert node.boot().calls_starting("mkfs.xfs", "docker run", "shutdown -h now") == ["shutdown -h now"]
