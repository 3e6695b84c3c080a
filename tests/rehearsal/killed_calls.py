"""One command of the engine, killed at one of its calls to AWS or left without an answer from there on; then `pulumi
cancel`, `pulumi destroy` and one `gpufleet sweep --delete`, in an account in which others have something too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import SUPERVISOR_IMAGE
from gpufleet.job.node.outside import Objects
from gpufleet.job.text import stamp
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.account import Resource
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Pulumi
from gpufleet.rehearsal.gate import NODE_KEY, SECRET
from gpufleet.rehearsal.handlers import compute
from gpufleet.rehearsal.launch import Reservation
from tests.infra.command_files import FLEET, command_file
from tests.infra.command_files import IMAGE as COMMAND_IMAGE
from tests.rehearsal.declared import fleet, template
from tests.rehearsal.engine_world import AMI, STACK, edit, pinned, project
from tests.rehearsal.killed import Mode, killed_engine

Tags = dict[str, str]
WAYS = ("spot", "fallback", "block", "two nodes")  # of buying
RESERVED = "cr-0123456789abcdef0"
OWN: Tags = {"gpufleet:stack": STACK, "gpufleet:owner": "you"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KilledCall:
    """What came of it."""

    fired: bool  # False: the command has fewer calls, and was over
    action: str  # at which it was killed
    calls: int  # that it made until then
    destroyed: bool  # destroy's exit code was 0
    running: int  # nodes of the stack after destroy
    known: int  # of those, the ones whose fleet the bucket names: the others end themselves
    swept: int  # the exit code of sweep --delete
    left: set[Resource]  # of the stack
    forgotten: bool  # a destroy after the sweep, where the first one failed, ends with 0
    others: str  # what happened to things of others; empty: nothing

    @property
    def holds(self) -> bool:
        """Nothing billable is left, nothing of others was touched, and no node runs on behind an exit code 0."""
        return self.forgotten and not (self.left or self.others or self.swept or (self.destroyed and self.running))


class SharedAccount:
    """An account in which others have something too, and a project whose stack is empty between two kills."""

    def __init__(self, folder: Path, cloud: Cloud, way: str = "spot") -> None:
        file = pinned(project(folder / "project")) if way == "spot" else _command(folder / "project", cloud, way)
        if way == "spot":
            edit(file, "bucket: true", "bucket: false")
        self.root, self.cloud, self.others = file.parents[1], cloud, _others(cloud)

    def kill(self, command: str, mode: Mode, at: int | str) -> KilledCall:
        """At the `at`th call of `up`, or of a `destroy` after a whole `up`; reads count."""
        cloud = self.cloud
        if command == "destroy":
            with self._engine() as engine:
                made = engine.up()
                assert made.ok, made.text
            cloud.tick()
        killer = killed_engine(cloud, self.root, at, command=command, reads=True, mode=mode)
        with self._engine() as engine:
            engine._run(["pulumi", "cancel", "--yes", "--non-interactive", "--stack", STACK])
            destroyed = engine.destroy()
            cloud.tick()
            running = [node for node in cloud.instances() if not node.ended_at and OWN.items() <= node.tags.items()]
            known = sum(node.fleet_id in (fleets_that_a_node_sees(cloud, node.id) or ()) for node in running)
            swept = self._sweep()
            left = {each for each in set(cloud.leftovers()) - set(self.others) if not is_empty(cloud, each)}
            return KilledCall(
                fired=killer.fired,
                action=killer.calls[-1],
                calls=len(killer.calls),
                destroyed=destroyed.ok,
                running=len(running),
                known=known,
                swept=swept,
                left=left,
                forgotten=destroyed.ok or engine.destroy().ok,
                others=_changed(cloud, self.others),
            )

    @contextmanager
    def _engine(self) -> Iterator[Pulumi]:
        with Engine.open(self.root, self.cloud.environment(), STACK, real=True) as engine:
            assert isinstance(engine, Pulumi)
            yield engine

    def _sweep(self) -> int:
        """The exit code of `gpufleet sweep --delete`."""
        here = Path.cwd()
        os.chdir(self.root)
        try:
            with mock.patch.dict(os.environ, self.cloud.environment()):
                return main(["sweep", STACK, "--delete", "--yes"])
        finally:
            os.chdir(here)
            self.cloud.tick()


@contextmanager
def shared_account(folder: Path, way: str = "spot") -> Iterator[SharedAccount]:
    """One, for any number of kills of a stack that buys in one of WAYS. The provider waits a second, not ten minutes,
    for an instant fleet that never says it is deleted.
    """
    waits = mock.patch.dict(compute._DELETE_S, instant=1.0)
    with waits, Cloud(folder / "cloud", clock=ManualClock()) as cloud:
        yield SharedAccount(folder, cloud, way)


def _command(folder: Path, cloud: Cloud, way: str) -> Path:
    """The definition file of a command that is bought in that way, in a new scratch project."""
    type_, zone, start = "g6e.24xlarge", "us-east-2a", datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    end = start + timedelta(days=2)
    fleets: dict[str, dict[str, Any]] = {
        "fallback": {"fallback": "on-demand"},
        "block": {
            "capacity": "block",
            "block": {"reservation": RESERVED, "start": stamp(start), "end": stamp(end), "fee_usd": 2},
        },
        "two nodes": {"nodes": 2, "cards": "all"},
    }
    file = command_file(
        folder / "file",
        fleet={**FLEET, "ami": AMI, "instance_types": [type_], **fleets[way]},
        storage={"keep": {"bucket": False}},
        image=f"{COMMAND_IMAGE}@sha256:{'1' * 64}",
        supervisor_image=f"{SUPERVISOR_IMAGE}@sha256:{'2' * 64}",
        command="torchrun --node-rank {node_rank} --master-addr {master} --master-port {port} train.py",
        work={"steps": 1000, "step_ms": {"L40S": 100}},
    )
    text = file.read_text().replace("owner: me", "owner: you")
    scratch.make(folder, {STACK: text.replace('"max_hours": 10', '"max_hours": 10, "deadline": "in 6 h"')})
    if way == "block":
        cloud.has_block(Reservation(id=RESERVED, type=type_, zone=zone, count=1, start=start, end=end))
    return folder / "stacks" / f"{STACK}.yaml"


def fleets_that_a_node_sees(cloud: Cloud, instance: str) -> list[str] | None:
    """What job/node reads of the state, with the node's own rights."""
    buckets = [name for kind, name in cloud.leftovers(OWN) if kind == "bucket"]
    environment = {
        **cloud.environment(),
        "AWS_ACCESS_KEY_ID": NODE_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": instance,
    }
    with mock.patch.dict(os.environ, environment):
        return Objects(buckets[0] if buckets else "gone", "r1").fleets()


def is_empty(cloud: Cloud, resource: Resource) -> bool:
    """A bucket that was killed before it got its tags: sweep shows it as perhaps ours, and it costs nothing."""
    kind, name = resource
    if kind != "bucket" or cloud.inventory()[resource]:
        return False
    return not cloud.client("s3").list_objects_v2(Bucket=name).get("KeyCount")


def _others(cloud: Cloud) -> dict[Resource, Any]:
    """What others have in the account: the same stack of another owner, a stack whose name begins as this one's, and
    things without a tag. Each with what must stay of it.
    """
    ec2, s3, iam, logs = (cloud.client(service) for service in ("ec2", "s3", "iam", "logs"))
    before = set(cloud.inventory())
    place = {"LocationConstraint": cloud.region}
    for name, tags in (
        (f"gpufleet-{STACK}-0123abc", {**OWN, "gpufleet:run": "r1", "gpufleet:owner": "another"}),
        (f"gpufleet-{STACK}-large-0123abc", {**OWN, "gpufleet:run": "r1", "gpufleet:stack": f"{STACK}-large"}),
        ("nobody-said-whose", {}),
    ):
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        specification = [{"ResourceType": "instance", "Tags": listed}] if listed else []
        made = template(cloud, TagSpecifications=specification)
        fleet(cloud, made, TagSpecifications=[{"ResourceType": "fleet", "Tags": listed}] if listed else [])
        s3.create_bucket(Bucket=name, CreateBucketConfiguration=place)
        s3.put_object(Bucket=name, Key="r1/run.json", Body=b"{}")
        s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": listed})
        iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}", Tags=listed)
        iam.create_instance_profile(InstanceProfileName=name, Tags=listed)
        logs.create_log_group(logGroupName=name, tags=tags)
        cloud.client("scheduler").create_schedule_group(Name=name, Tags=listed)
        volume = ec2.create_volume(AvailabilityZone=f"{cloud.region}a", Size=7)["VolumeId"]
        address = ec2.allocate_address(Domain="vpc")["AllocationId"]
        vpc, subnet = (ec2.describe_subnets()["Subnets"][-1][key] for key in ("VpcId", "SubnetId"))
        if listed:
            ec2.create_tags(Resources=[volume, address, vpc, subnet, made], Tags=listed)
    cloud.tick()
    return _state(cloud, set(cloud.inventory()) - before)


def _state(cloud: Cloud, resources: set[Resource]) -> dict[Resource, Any]:
    """Tags, and what a fleet wants and a bucket holds."""
    inventory, s3 = cloud.inventory(), cloud.client("s3")
    wants = {each.id: (each.state, each.target) for each in cloud.fleets.fleets.values()}
    return {
        (kind, name): (
            inventory.get((kind, name)),
            wants.get(name),
            [each["Key"] for each in s3.list_objects_v2(Bucket=name)["Contents"]]
            if kind == "bucket" and (kind, name) in inventory
            else None,
        )
        for kind, name in resources
    }


def _changed(cloud: Cloud, others: dict[Resource, Any]) -> str:
    now = _state(cloud, set(others))
    return "; ".join(f"{each}: {others[each]}, now {now[each]}" for each in others if now[each] != others[each])
