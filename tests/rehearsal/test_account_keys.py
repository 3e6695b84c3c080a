"""What a definition's `account` asks for is what the embedded AWS has after `up`, and what a node finds there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.definition.loader import load
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess
from gpufleet.rehearsal.handlers import handler, table
from tests import forked
from tests.rehearsal.declared import as_node
from tests.rehearsal.engine_world import STACK, pinned, project

KEY = "arn:aws:kms:us-east-2:111122223333:key/0a1b"
OTHER_KEY = KEY.replace("0a1b", "2c3d")
BOUNDARY = "arn:aws:iam::111122223333:policy/boundary"
VPC = "vpc-0123456789abcdef0"
SUBNETS = {f"us-east-2{zone}": f"subnet-0123456789abcde{zone}0" for zone in "abc"}
TAGS = {"CostCenter": "1234", "team:name": "nlp"}
ACCOUNT = f"""
account:
  tags: {{CostCenter: "1234", "team:name": nlp}}
  permissions_boundary: {BOUNDARY}
  vpc: {{id: {VPC}, subnets: {json.dumps(SUBNETS)}}}
  kms_key: {KEY}
"""
UNTAGGED = {"network-interface", "volume"}  # a maintained fleet tags neither


@pytest.fixture(scope="module")
def declared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cloud, InProcess]]:
    """The stack after `up`, with its node."""
    folder = tmp_path_factory.mktemp("account")
    file = pinned(project(folder / "project"))
    file.write_text(file.read_text() + ACCOUNT)
    with (
        forked.programs(folder),
        Cloud(folder / "cloud") as cloud,
        Engine.open(folder / "project", cloud.environment(), STACK, say=lambda line: None, real=False) as engine,
    ):
        cloud.has(load(file, now=datetime.now(UTC)).account)
        assert isinstance(engine, InProcess)
        made = engine.up()
        assert made.ok, made.text
        cloud.tick()
        yield cloud, engine


def test_everything_made_carries_the_tags_but_what_no_fleet_can_tag(declared_stack: tuple[Cloud, InProcess]) -> None:
    cloud, _ = declared_stack
    made = cloud.leftovers()
    untagged = {kind for (kind, _), tags in made.items() if not TAGS.items() <= tags.items()}
    assert untagged == UNTAGGED
    assert {"instance", "fleet", "launch-template", "bucket", "role", "log-group", "security-group"} < {
        k for k, _ in made
    }
    bucket = next(name for kind, name in made if kind == "bucket")
    s3 = cloud.client("s3")
    for each in s3.list_objects_v2(Bucket=bucket)["Contents"]:
        found = s3.get_object_tagging(Bucket=bucket, Key=each["Key"])["TagSet"]
        assert TAGS.items() <= {tag["Key"]: tag["Value"] for tag in found}.items()


def test_nodes_run_in_the_network_that_was_there(declared_stack: tuple[Cloud, InProcess]) -> None:
    cloud, _ = declared_stack
    ec2 = cloud.client("ec2")
    (node,) = ec2.describe_instances(InstanceIds=[cloud.instances()[0].id])["Reservations"][0]["Instances"]
    assert (node["VpcId"], node["SubnetId"]) == (VPC, SUBNETS[node["Placement"]["AvailabilityZone"]])
    assert not {"vpc", "subnet", "internet-gateway", "route-table"} & {kind for kind, _ in cloud.leftovers()}


def test_the_role_has_the_boundary_and_bucket_and_disk_the_key(declared_stack: tuple[Cloud, InProcess]) -> None:
    cloud, _ = declared_stack
    names = dict(cloud.leftovers().keys())
    role = cloud.client("iam").get_role(RoleName=names["role"])["Role"]
    assert role["PermissionsBoundary"]["PermissionsBoundaryArn"] == BOUNDARY
    s3, ec2 = cloud.client("s3"), cloud.client("ec2")
    (rule,) = s3.get_bucket_encryption(Bucket=names["bucket"])["ServerSideEncryptionConfiguration"]["Rules"]
    default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY}
    assert rule == {"ApplyServerSideEncryptionByDefault": default, "BucketKeyEnabled": True}
    (disk,) = ec2.describe_volumes(VolumeIds=[names["volume"]])["Volumes"]
    assert (disk["Encrypted"], disk["KmsKeyId"]) == (True, KEY)


def test_a_node_writes_with_the_file_s_key_and_no_other(declared_stack: tuple[Cloud, InProcess]) -> None:
    cloud, engine = declared_stack
    bucket, s3 = engine.outputs()["bucket"], as_node(cloud, "s3")
    place = {"Bucket": bucket, "Key": "r1/attempts/i-1.json"}
    s3.put_object(**place, Body=b"{}")
    assert s3.get_object(**place)["SSEKMSKeyId"] == KEY
    rule: dict[str, Any] = {
        "ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": OTHER_KEY}
    }
    cloud.client("s3").put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
    asks: list[Callable[[], object]] = [lambda: s3.put_object(**place, Body=b"{}"), lambda: s3.get_object(**place)]
    for ask in asks:
        with pytest.raises(ClientError, match=r"kms:(GenerateDataKey|Decrypt) on arn:aws:kms"):
            ask()


def test_a_boundary_comes_goes_and_is_another_in_place(tmp_path: Path) -> None:
    role = handler("aws:iam/role:Role")
    with Cloud(tmp_path) as cloud:
        aws = table.Aws(environment=cloud.environment(), region=cloud.region)
        inputs: dict[str, Any] = {"name": "node", "assumeRolePolicy": "{}"}
        made = role.create(aws, inputs)
        assert role.update is not None
        for boundary in (BOUNDARY, f"{BOUNDARY}-2", None):
            wanted = {**inputs, **({"permissionsBoundary": boundary} if boundary else {})}
            role.update(aws, made, table.state(role, aws, made, {**inputs, "permissionsBoundary": ""}) or {}, wanted)
            found = role.read(aws, made, {})
            assert found is not None
            assert found["permissionsBoundary"] == boundary
