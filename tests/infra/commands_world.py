"""The base of the commands' tests: an embedded AWS whose clock stands still, a project, a stack declared by hand."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import aws
from gpufleet.infra.account.wait import WaitLoop
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.pin import pin
from gpufleet.rehearsal.account import AMI_PARAMETERS, ami_id
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.launch import Reservation
from gpufleet.rehearsal.registry import digest

NAME, RUN = "small-growth", "r1"
TAGS = {"gpufleet:stack": NAME, "gpufleet:run": RUN, "gpufleet:owner": "you"}
AMI = next(iter(AMI_PARAMETERS))
EXPIRES = datetime(2126, 11, 23, tzinfo=UTC)
DEFINITION = f"""\
# A small growth. Bound: one hour.
run: {{id: {RUN}, owner: you}}
job: {{experiment: tinystories-growth, image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023}}
fleet:
  region: us-east-2
  zones: [us-east-2a, us-east-2b]
  instance_types: [g5.2xlarge]
  ami: unpinned  # doctor writes it
storage: {{dataset: s3://elsewhere/tokens}}
limits: {{max_usd: 3.00, max_hours: 1}}
"""


def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one stack, and the current directory in it; returns the definition file."""
    stacks = folder / "project" / "stacks"
    stacks.mkdir(parents=True)
    path = stacks / f"{NAME}.yaml"
    path.write_text(DEFINITION)
    monkeypatch.chdir(stacks.parent)
    return path


def pinned(path: Path) -> Path:
    """The file with the changes that `doctor --pin` makes."""
    tag = definition(path).job.image
    name, _, version = tag.partition("/")[2].partition(":")
    pin(path, ami=ami_id("us-east-2", AMI), image=f"{tag}@{digest(name, version)}")
    return path


def definition(path: Path) -> StackDefinition:
    return load(path, now=datetime(2026, 11, 21, tzinfo=UTC))


@contextmanager
def account(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An embedded AWS, and the environment through which every client uses it."""
    with Cloud(folder / "cloud", clock=ManualClock()) as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        yield cloud


def advance(cloud: Cloud, seconds: float) -> None:
    """Moves the cloud's clock; then `cloud.tick()` does the work that is due."""
    assert isinstance(cloud.clock, ManualClock)
    cloud.clock.advance(seconds)


RESERVED = "cr-0123456789abcdef0"


def has_block(cloud: Cloud, count: int = 1, type_: str = "g5.2xlarge", begins_h: float = -1) -> Reservation:
    """A Capacity Block of two days, which the account has bought."""
    start = cloud.clock.now().replace(microsecond=0) + timedelta(hours=begins_h)
    end = start + timedelta(days=2)
    made = Reservation(id=RESERVED, type=type_, zone="us-east-2a", count=count, start=start, end=end)
    cloud.has_block(made)
    return made


def declare_fleet(cloud: Cloud, run: str = RUN, owner: str = "you", capacity: str = "spot", target: int = 1) -> str:
    """Makes VPC, template and fleet with the stack's tags. Nodes launch at the next tick, in a block at once."""
    block = capacity == "capacity-block"
    ec2 = cloud.client("ec2")
    tags = [
        {"Key": key, "Value": value} for key, value in {**TAGS, "gpufleet:run": run, "gpufleet:owner": owner}.items()
    ]
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=[{"ResourceType": "vpc", "Tags": tags}])
    vpc_id = vpc["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc_id, CidrBlock="10.0.0.0/24", AvailabilityZone="us-east-2a")
    data: dict[str, Any] = {
        "ImageId": ami_id(cloud.region, AMI),
        "UserData": base64.b64encode(b"#!/bin/bash\n").decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/xvda",
                "Ebs": {"VolumeSize": 100, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
            }
        ],
    }
    if block:
        data["InstanceMarketOptions"] = {"MarketType": capacity}
        data["CapacityReservationSpecification"] = {"CapacityReservationTarget": {"CapacityReservationId": RESERVED}}
    template = ec2.create_launch_template(
        LaunchTemplateName=f"gpufleet-{NAME}-{run}-{owner}{capacity.removeprefix('spot')}",
        LaunchTemplateData=data,
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
    )["LaunchTemplate"]["LaunchTemplateId"]
    made = ec2.create_fleet(
        Type="instant" if block else "maintain",
        TargetCapacitySpecification={"TotalTargetCapacity": target, "DefaultTargetCapacityType": capacity},
        SpotOptions={"AllocationStrategy": "price-capacity-optimized"},
        ExcessCapacityTerminationPolicy="termination",
        **({} if block else {"ValidUntil": EXPIRES}),
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "1"},
                "Overrides": [{"InstanceType": "g5.2xlarge", "SubnetId": subnet["Subnet"]["SubnetId"]}],
            }
        ],
        TagSpecifications=[{"ResourceType": "fleet", "Tags": tags}],
    )
    return str(made["FleetId"])


def declare_bucket(cloud: Cloud, suffix: str = "0a1b2c3", owner: str = "you") -> str:
    """The stack's bucket."""
    s3, name = cloud.client("s3"), f"gpufleet-{NAME}-{suffix}"
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": cloud.region})
    tags = [{"Key": key, "Value": value} for key, value in {**TAGS, "gpufleet:owner": owner}.items()]
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": tags})
    return name


def put(cloud: Cloud, bucket: str, name: str, content: Any, run: str = RUN) -> None:
    """Writes an object of the run. A value that is not bytes is written as JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    cloud.client("s3").put_object(Bucket=bucket, Key=f"{run}/{name}", Body=body)


def finished(cloud: Cloud, run: str = "r1") -> str:
    """Makes a bucket with the objects of a finished run; returns the bucket's name."""
    bucket = declare_bucket(cloud)
    files: dict[str, Any] = {
        "results.json": {"loss": 2.5},
        "receipt.json": {"usd": "0.42"},
        "metrics.jsonl": b"{}\n",
        "final/model.safetensors": b"m" * 5000,
        "exports/phase1_end/model.safetensors": b"e" * 3000,
        "exports/phase1_end/meta.json": {},
        "exports/scores.npz": b"s" * 400,
        "ckpt/step_00000100/model.pt": b"c" * 9000,
        "heartbeat/i-1.jsonl": b"{}\n",
    }
    for name, content in files.items():
        put(cloud, bucket, name, content, run)
    return bucket


def waited(
    cloud: Cloud, stack: StackDefinition, timeout_s: float = 60, meanwhile: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """The exit code and the output of `wait`. Its sleep moves the cloud's clock, and calls `meanwhile`."""
    clock, said = cloud.clock, list[str]()
    assert isinstance(clock, ManualClock)
    start = clock.now()

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        meanwhile()

    watch = WaitLoop(
        definition=stack,
        ec2=aws.client("ec2", "us-east-2"),
        s3=aws.client("s3", "us-east-2"),
        sleep=sleep,
        clock=lambda: (clock.now() - start).total_seconds(),
        now=clock.now,
        say=said.append,
    )
    return watch.until_node(timeout_s), "\n".join(said)
