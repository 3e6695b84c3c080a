"""A run in a Capacity Block on the embedded AWS, under the real engine: made, lost, made again, and gone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpufleet.infra.definition.model import SUPERVISOR_IMAGE
from gpufleet.job.text import stamp
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine
from gpufleet.rehearsal.handlers import compute
from gpufleet.rehearsal.launch import Reservation
from tests import warm
from tests.infra.command_files import FLEET, IMAGE, command_file
from tests.rehearsal.engine_world import AMI
from tests.repository import ROOT

pytestmark = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")

TYPE, ZONE, RESERVED = "g6e.24xlarge", "us-east-2a", "cr-0123456789abcdef0"


def make(folder: Path, start: datetime, hours: float = 48) -> None:
    """A project with a command on two nodes of a block."""
    block = {
        "reservation": RESERVED,
        "start": stamp(start),
        "end": stamp(start + timedelta(hours=hours)),
        "fee_usd": 2,
    }
    fleet = {**FLEET, "ami": AMI, "zones": [ZONE], "instance_types": [TYPE], "nodes": 2, "capacity": "block"}
    file = command_file(
        folder / "file",
        fleet={**fleet, "block": block},
        image=f"{IMAGE}@sha256:{'1' * 64}",
        supervisor_image=f"{SUPERVISOR_IMAGE}@sha256:{'2' * 64}",
        command="torchrun --node-rank {node_rank} --master-addr {master} --master-port {port} train.py",
        work={"steps": 1000, "step_ms": {"L40S": 100}},
    )
    scratch.make(folder / "project", {"mine": file.read_text()})


def bought(start: datetime, count: int = 2) -> Reservation:
    return Reservation(id=RESERVED, type=TYPE, zone=ZONE, count=count, start=start, end=start + timedelta(hours=48))


@contextmanager
def opened(folder: Path, clock: ManualClock | None = None) -> Iterator[tuple[Cloud, Engine]]:
    """An account, and the real engine on the project in it."""
    with Cloud(folder / "cloud", clock=clock) as cloud:
        environment = {**cloud.environment(), "PYTHONPATH": str(ROOT)}
        with Engine.open(folder / "project", environment, "mine", real=True) as engine:
            yield cloud, engine


def test_lost_nodes_are_launched_again_by_up_and_a_second_destroy_ends_what_aws_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "_DELETE_S", {"maintain": 1800.0, "instant": 1.0})
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    make(tmp_path, start)
    clock = ManualClock(datetime.now(UTC))
    with opened(tmp_path, clock) as (cloud, engine):
        cloud.has_block(bought(start))
        created = engine.up()
        assert created.ok, created.text
        first = {each.id for each in cloud.instances()}
        assert [(each.block, each.spot, each.type) for each in cloud.instances()] == [(RESERVED, False, TYPE)] * 2
        again = engine.up()
        assert set(again.changes) == {"same"}, again.changes

        cloud.kill(min(first))
        clock.advance(3600)
        cloud.tick()
        assert len([each for each in cloud.instances() if not each.ended_at]) == 1  # nothing replaces it
        ec2 = cloud.client("ec2")
        (fleet,) = cloud.fleets.fleets
        ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)  # as `gpufleet wait` says, or a node that fails
        cloud.tick()
        for known in (False, True):  # whether the state has it already that the fleet is gone
            if known:
                (fleet,) = (each.id for each in cloud.fleets.fleets.values() if each.state == "active")
                ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
                cloud.tick()
                assert engine.refresh().ok
            later = engine.up()
            assert later.ok, later.text
            assert ("`up` launches its nodes again" in later.text) is known
            alive = {each.id for each in cloud.instances() if not each.ended_at}
            assert len(alive) == 2
            assert not alive & first
            first |= alive

        cut_short = engine.destroy()  # while it trains: AWS ends the nodes at once, and keeps the fleet's state
        assert not cut_short.ok
        assert "deleted_terminating" in cut_short.text
        cloud.tick()
        assert not [each for each in cloud.instances() if not each.ended_at]
        destroyed = engine.destroy()
        assert destroyed.ok, destroyed.text
        assert {kind for kind, _ in cloud.leftovers()} <= {"bucket"}


def test_before_the_block_begins_up_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    start = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)
    make(tmp_path, start)
    with opened(tmp_path) as (cloud, engine):
        cloud.has_block(bought(start))
        refused = engine.up()
        assert not refused.ok
        assert f"the block begins at {stamp(start)}" in refused.text
        assert not cloud.instances()
        assert not cloud.leftovers()


def test_half_an_hour_before_its_end_aws_ends_the_nodes(tmp_path: Path) -> None:
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    make(tmp_path, start)
    clock = ManualClock(datetime.now(UTC))
    with warm.cold(), opened(tmp_path, clock) as (cloud, engine):  # with this Python, as for users
        cloud.has_block(bought(start, count=1))
        assert engine.up().ok
        (fleet,) = cloud.fleets.fleets.values()
        assert len(cloud.instances()) == 1  # as far as the block goes; the rest is told
        assert [each["ErrorCode"] for each in fleet.errors] == ["InsufficientInstanceCapacity"]
        clock.advance(46.4 * 3600)
        cloud.tick()
        assert not cloud.instances()[0].ended_at
        clock.advance(0.2 * 3600)
        cloud.tick()
        assert cloud.instances()[0].ended_at
