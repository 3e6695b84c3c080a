"""`gpufleet sweep --delete`: which resources it deletes, in which order, which it leaves, and when it gives up."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, leftovers, removal, sweep
from gpufleet.infra.account.leftovers import Left
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import TAGS, declare_bucket, declare_fleet, put


def list_leftovers(cloud: Cloud, stack: StackDefinition) -> list[Left]:
    return list(leftovers.look(stack, aws.client, cloud.clock.now()))


def fail_if_called(seconds: float) -> None:
    raise AssertionError("there was nothing to wait for")


def network(cloud: Cloud, owner: str = "you") -> dict[str, str]:
    """The ids of the fleet's tagged VPC and subnet, and of a gateway, a route table and a group in this VPC."""
    ec2, tags = cloud.client("ec2"), [{"Key": key, "Value": value} for key, value in TAGS.items()]
    declare_fleet(cloud, owner=owner)
    cloud.tick()
    vpc = ec2.describe_vpcs(Filters=[{"Name": "tag:gpufleet:stack", "Values": [TAGS["gpufleet:stack"]]}])["Vpcs"][0]
    vpc_id = vpc["VpcId"]
    subnet = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc_id]}])["Subnets"][0]["SubnetId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc_id)
    table = ec2.create_route_table(VpcId=vpc_id)["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc_id)["GroupId"]
    ec2.create_tags(Resources=[vpc_id, subnet, gateway, table, group], Tags=tags)
    return {"vpc": vpc_id, "subnet": subnet}


def test_the_commands_stand_in_the_order_in_which_aws_takes_them(cloud: Cloud, stack: StackDefinition) -> None:
    network(cloud)
    for left in list_leftovers(cloud, stack):
        for step in left.steps:
            if cloud.instances()[0].ended_at and left.kind in ("instance", "volume"):
                continue  # the nodes end with their fleet
            step.do(lambda service: cloud.client(service))
        cloud.tick()
    assert list_leftovers(cloud, stack) == []


@pytest.mark.parametrize(
    ("step", "command"),
    [
        (removal.end_fleet("fleet-1"), "aws ec2 delete-fleets --terminate-instances --fleet-ids fleet-1"),
        (
            removal.ec2("detach_internet_gateway", InternetGatewayId="igw-1", VpcId="vpc-1"),
            "aws ec2 detach-internet-gateway --internet-gateway-id igw-1 --vpc-id vpc-1",
        ),
        (
            removal.Call(service="logs", operation="delete_log_group", arguments={"logGroupName": "a b"}),
            "aws logs delete-log-group --log-group-name 'a b'",
        ),
        (removal.Bucket(name="b"), "aws s3 rb --force s3://b"),
        (
            removal.UnfinishedUpload(bucket="b", key="k", id="u"),
            "aws s3api abort-multipart-upload --bucket b --key k --upload-id u",
        ),
    ],
)
def test_a_step_is_the_command_that_the_aws_cli_takes(step: removal.Step, command: str) -> None:
    assert step.command == command


@pytest.mark.parametrize("answer", ["", "y\n", "small-grow\n"])
def test_nothing_is_deleted_before_the_stack_s_name_is_typed(
    cloud: Cloud, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    network(cloud)
    before = cloud.leftovers()
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["sweep", "small-growth", "--delete"]) == 2
    assert "nothing was deleted" in capsys.readouterr().err
    assert cloud.leftovers() == before
    monkeypatch.setattr("sys.stdin", io.StringIO("small-growth\n"))
    assert main(["sweep", "small-growth", "--delete"]) == 0
    assert cloud.leftovers() == {}


def test_a_fallback_s_state_machine_goes_and_no_other(cloud: Cloud, path: Path) -> None:
    states, role = cloud.client("stepfunctions"), f"arn:aws:iam::{cloud.account}:role/r"
    owned = [{"key": key, "value": value} for key, value in TAGS.items()]
    for name, tags in (("gpufleet-small-growth-1", owned), ("gpufleet-small-growth-2", []), ("other", owned)):
        states.create_state_machine(name=name, definition="{}", roleArn=role, tags=tags)
    assert main(["sweep", "small-growth", "--delete", "--yes"]) == 0
    assert sorted(name for _, name in cloud.leftovers()) == ["gpufleet-small-growth-2", "other"]


def test_with_nothing_to_delete_nothing_is_asked(cloud: Cloud, path: Path) -> None:
    declare_bucket(cloud)  # kept
    assert main(["sweep", "small-growth", "--delete"]) == 0
    assert [kind for kind, _ in cloud.leftovers()] == ["bucket"]


def test_what_bears_no_tag_of_the_stack_is_shown_and_never_touched(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ec2, made = cloud.client("ec2"), network(cloud)
    group = ec2.create_security_group(GroupName="managed", Description="by a guard", VpcId=made["vpc"])["GroupId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=made["vpc"],
        VpcEndpointType="Interface",
        ServiceName="com.amazonaws.us-east-2.guardduty-data",
        SubnetIds=[made["subnet"]],
        SecurityGroupIds=[group],
    )["VpcEndpoint"]["VpcEndpointId"]
    bucket = "gpufleet-small-growth-1234567"
    cloud.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": cloud.region})
    monkeypatch.setattr("time.sleep", fail_if_called)
    assert main(["sweep", "small-growth", "--delete", "--yes"]) == 1
    said = capsys.readouterr().out
    assert f"VPC endpoint       {endpoint}, com.amazonaws.us-east-2.guardduty-data\n" in said
    assert f"aws ec2 delete-vpc-endpoints --vpc-endpoint-ids {endpoint} --region us-east-2" in said
    assert f"security group     {group}, managed, by a guard\n" in said
    assert f"bucket             {bucket}, named like ours\n" in said
    assert re.search(r"\n.* \d parts of others in its VPC, perhaps billed\.", said)
    assert f"stays: VPC {made['vpc']}: AWS answered DependencyViolation" in said
    assert {"vpc-endpoint", "bucket", "vpc", "subnet"} <= {kind for kind, _ in cloud.leftovers()}
    assert not {"instance", "fleet", "internet-gateway"} & {kind for kind, _ in cloud.leftovers()}


def test_an_unfinished_upload_costs_and_goes_though_its_bucket_is_kept(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3, bucket = cloud.client("s3"), declare_bucket(cloud)
    put(cloud, bucket, "receipt.json", {})
    upload = s3.create_multipart_upload(Bucket=bucket, Key="r1/model")["UploadId"]
    s3.upload_part(Bucket=bucket, Key="r1/model", UploadId=upload, PartNumber=1, Body=b"m" * 5_000_000)
    assert main(["sweep", "small-growth"]) == 1
    assert f"s3://{bucket}/r1/model, 0.005 GB, of " in capsys.readouterr().out
    assert main(["sweep", "small-growth", "--delete", "--yes"]) == 0
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_another_owner_s_is_left_alone_but_for_what_is_in_the_stack_s_own_vpc(
    cloud: Cloud, stack: StackDefinition, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An `up` under a new owner that was cut short has retagged the VPC and not yet replaced the fleet."""
    made = network(cloud, owner="bob")
    assert {left.owner for left in list_leftovers(cloud, stack) if left.kind in ("fleet", "instance", "volume")} == {""}
    cloud.client("ec2").create_tags(Resources=[made["vpc"]], Tags=[{"Key": "gpufleet:owner", "Value": "bob"}])
    assert {left.owner for left in list_leftovers(cloud, stack)} == {"bob"}
    before = cloud.leftovers()
    assert main(["sweep", "small-growth", "--delete", "--yes"]) == 0
    assert cloud.leftovers() == before


class Stubborn:
    """A step that AWS refuses as often as `codes` says."""

    command = "aws"

    def __init__(self, *codes: str) -> None:
        self.codes = list(codes)
        self.done = False

    def do(self, client: removal.Client) -> None:
        if self.codes:
            raise ClientError({"Error": {"Code": self.codes.pop(0), "Message": "no"}}, "DeleteVpc")
        self.done = True


def swept(step: Stubborn, **left: Any) -> list[float]:
    """The seconds that `delete` has waited, for each resource and each time."""
    waits: list[float] = []
    part = Left(kind="VPC", id="vpc-1", steps=(step,))
    others = [Left(kind="security group", id="sg-1", foreign=True)] if left.get("foreign") else []
    sweep.delete(lambda: others if step.done else [part, *others], lambda service: None, pause=waits.append)
    return waits


def test_what_is_still_in_use_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept(Stubborn("DependencyViolation", "DependencyViolation")) == [sweep.POLL_S] * 2
    assert capsys.readouterr().out == "deleted: VPC vpc-1\n"


@pytest.mark.parametrize(
    ("step", "foreign", "waits"),
    [
        (Stubborn("UnauthorizedOperation"), False, 0),
        (Stubborn("DependencyViolation"), True, 0),
        (Stubborn(*["DependencyViolation"] * 1000), False, sweep.TIMEOUT_S // sweep.POLL_S),
    ],
    ids=["no right to it", "somebody else's is in it", "for half an hour"],
)
def test_what_does_not_become_free_is_told_with_aws_s_reason(
    capsys: pytest.CaptureFixture[str], step: Stubborn, foreign: bool, waits: int
) -> None:
    assert len(swept(step, foreign=foreign)) == waits
    assert capsys.readouterr().out.startswith("stays: VPC vpc-1: AWS ")
