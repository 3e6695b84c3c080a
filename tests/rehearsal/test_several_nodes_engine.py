"""Two nodes over all their network cards: made, found, and gone again, on the embedded AWS."""

from __future__ import annotations

from pathlib import Path

from gpufleet.infra.definition.model import SUPERVISOR_IMAGE
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import InProcess
from tests import forked
from tests.infra.command_files import FLEET, IMAGE, command_file
from tests.rehearsal.engine_world import AMI


def test_two_nodes_come_up_behind_a_nat_gateway_and_a_destroy_leaves_neither(tmp_path: Path) -> None:
    nodes = {**FLEET, "ami": AMI, "instance_types": ["g6e.24xlarge"], "nodes": 2, "cards": "all"}
    file = command_file(
        tmp_path / "file",
        fleet=nodes,
        image=f"{IMAGE}@sha256:{'1' * 64}",
        supervisor_image=f"{SUPERVISOR_IMAGE}@sha256:{'2' * 64}",
        command="torchrun --node-rank {node_rank} --master-addr {master} --master-port {port} train.py",
        work={"steps": 1000, "step_ms": {"L40S": 100}},
    )
    text = file.read_text()
    scratch.make(tmp_path / "project", {"mine": text})
    lines: list[str] = []
    with forked.programs(tmp_path), Cloud(tmp_path / "cloud") as cloud:
        engine = InProcess(tmp_path / "project", cloud.environment(), "mine", lines.append)
        created = engine.up()
        assert created.ok, created.text
        cloud.tick()
        made = cloud.client("ec2").describe_instances()["Reservations"]
        public = [each.get("PublicIpAddress") for reservation in made for each in reservation["Instances"]]
        (nat,) = cloud.client("ec2").describe_nat_gateways()["NatGateways"]
        assert (len(cloud.instances()), nat["State"]) == (2, "available")
        assert public == [None, None]
        destroyed = engine.destroy()
        assert destroyed.ok, destroyed.text
        assert not cloud.client("ec2").describe_addresses()["Addresses"]
        assert {each["State"] for each in cloud.client("ec2").describe_nat_gateways()["NatGateways"]} <= {"deleted"}
        assert not [each for each in cloud.client("ec2").describe_vpcs()["Vpcs"] if not each["IsDefault"]]
