"""`gpufleet sweep` shows which resources of a stack are still in the account, and what they cost."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, leftovers, run_folder, sweep
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import EXPIRES, TAGS, declare_bucket, declare_fleet, finished

NOW = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)


def leftovers_by_kind(stack: StackDefinition, now: datetime = NOW) -> dict[str, leftovers.Left]:
    return {found.kind: found for found in leftovers.look(stack, aws.client, now)}


def test_sweep_of_an_empty_account_finds_nothing(cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "small-growth"]) == 0
    assert capsys.readouterr().out == (
        f"us-east-2, account {cloud.account} as user/moto:\nsmall-growth in us-east-2: nothing billable is left over.\n"
    )


def test_sweep_walks_from_a_running_node_to_its_untagged_disk(
    cloud: Cloud, stack: StackDefinition, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    cloud.tick()
    found = leftovers_by_kind(stack)
    assert {"fleet", "instance", "volume", "network interface", "launch template", "VPC"} <= set(found)
    assert found["volume"].usd_per_month == Decimal("8.00")
    assert found["instance"].usd_per_month >= Decimal("1.212") * 730
    assert found["fleet"].bills
    assert main(["sweep", "small-growth"]) == 1
    said = capsys.readouterr().out
    assert "Billed, and not kept by the definition:" in said
    assert re.search(r"aws ec2 terminate-instances --instance-ids i-\w+ --region us-east-2\n", said)
    assert re.search(r"aws ec2 delete-fleets .* --region us-east-2\n", said)
    assert "it can launch a node at any time" in said


def test_a_fleet_that_waits_for_a_node_is_a_leftover_though_it_costs_nothing_yet(stack: StackDefinition) -> None:
    waiting = leftovers.Left(kind="fleet", id="fleet-1", note="active, wants 1", launches=True)
    said = list(sweep.table(stack, [waiting]))
    assert said[0] == "Billed, and not kept by the definition:"
    assert said[-1].endswith(": $0.00 a month nobody asked for. A fleet can launch a node at any time.")


def test_an_expired_fleet_launches_nothing_though_aws_may_show_it_as_active(
    cloud: Cloud, stack: StackDefinition
) -> None:
    cloud.no_capacity()
    declare_fleet(cloud)
    assert leftovers_by_kind(stack)["fleet"].launches
    found = leftovers_by_kind(stack, EXPIRES)["fleet"]
    assert (found.note, found.bills) == ("active, wants 1, expired", False)


def test_sweep_does_not_take_another_owner_s_node_for_a_leftover(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud, owner="bob")
    declare_bucket(cloud, owner="bob")
    cloud.tick()
    assert main(["sweep", "small-growth"]) == 0
    _, title, *lines, last = capsys.readouterr().out.splitlines()
    assert title == "Of a stack of the same name and another owner than you: ask before removing it:"
    found = [line for line in lines if "aws " not in line]
    assert all(line.endswith(", owner bob") for line in found)
    assert {"fleet", "instance", "volume", "bucket", "VPC"} <= {line[18:].strip().split()[0] for line in found}
    theirs = r"Another owner's: \$\d+\.\d\d a month\. A fleet can launch a node at any time\."
    assert re.fullmatch(rf".*nothing billable is left over\. {theirs}", last)


def test_a_fleet_of_several_nodes_is_the_stack_s_by_the_subnet_of_its_template_s_interfaces(
    cloud: Cloud, stack: StackDefinition
) -> None:
    declare_fleet(cloud)
    ec2 = cloud.client("ec2")
    (subnet,) = ec2.describe_subnets(Filters=[{"Name": "cidr-block", "Values": ["10.0.0.0/24"]}])["Subnets"]
    tags = [{"Key": key, "Value": value} for key, value in {**TAGS, "gpufleet:owner": "bob"}.items()]
    (first,) = ec2.describe_launch_templates()["LaunchTemplates"]
    (known,) = ec2.describe_launch_template_versions(LaunchTemplateId=first["LaunchTemplateId"])[
        "LaunchTemplateVersions"
    ]
    interfaces = [{"DeviceIndex": 0, "SubnetId": subnet["SubnetId"]}]
    data = {"ImageId": known["LaunchTemplateData"]["ImageId"], "NetworkInterfaces": interfaces}
    template = ec2.create_launch_template(LaunchTemplateName="several", LaunchTemplateData=data)["LaunchTemplate"][
        "LaunchTemplateId"
    ]
    several = ec2.create_fleet(
        Type="maintain",
        TargetCapacitySpecification={"TotalTargetCapacity": 0, "DefaultTargetCapacityType": "spot"},
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "1"},
                "Overrides": [{"InstanceType": "g5.2xlarge"}],
            }
        ],
        TagSpecifications=[{"ResourceType": "fleet", "Tags": tags}],
    )["FleetId"]
    owners = {found.id: found.owner for found in leftovers.look(stack, aws.client, NOW)}
    assert owners[several] == ""
    ec2.delete_launch_template(LaunchTemplateId=template)
    owners = {found.id: found.owner for found in leftovers.look(stack, aws.client, NOW)}
    assert owners[several] == "bob"


def test_sweep_finds_a_node_by_its_fleet_when_its_own_tags_are_gone(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    cloud.tick()
    (node,) = cloud.instances()
    cloud.client("ec2").delete_tags(Resources=[node.id], Tags=[{"Key": key} for key in TAGS])
    assert leftovers_by_kind(stack)["instance"].id == node.id


def test_a_kept_bucket_is_no_leftover_and_shows_its_price(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(cloud)
    assert main(["sweep", "small-growth"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1] == "Kept on purpose (storage.keep of small-growth.yaml):"
    assert "9 objects, 0.000 GB, expiring after 30 days" in said
    path.write_text(path.read_text().replace("tokens}", "tokens, keep: {bucket: false}}"))
    assert main(["sweep", "small-growth"]) == 1
    assert "aws s3 rb --force s3://gpufleet-small-growth-0a1b2c3" in capsys.readouterr().out


def test_an_ami_of_a_bake_is_kept_until_its_day_and_then_a_leftover(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    cloud.tick()
    (node,) = cloud.instances()
    ec2 = cloud.client("ec2")
    ec2.delete_fleets(FleetIds=[node.fleet_id], TerminateInstances=False)
    labels = {**TAGS, "gpufleet:stack": "small-growth-bake", "gpufleet:delete-after": "2026-12-21T12:00:00Z"}
    tags = [{"Key": key, "Value": value} for key, value in labels.items()]
    image = ec2.create_image(
        InstanceId=node.id, Name="baked", TagSpecifications=[{"ResourceType": "image", "Tags": tags}]
    )["ImageId"]
    found = leftovers_by_kind(stack)["AMI"]
    assert (found.id, found.asked_for, found.unwanted) == (image, True, False)
    assert found.note.endswith("GiB, a schedule deletes it at 2026-12-21T12:00:00Z")
    assert found.note.startswith("100 GiB")
    assert found.usd_per_month.quantize(Decimal("0.01")) == Decimal("5.37")
    said = "\n".join(sweep.table(stack, [found]))
    assert "Kept by `gpufleet bake`; `gpufleet bake small-growth --delete` deletes it:" in said
    late = leftovers_by_kind(stack, datetime(2026, 12, 21, 12, 1, tzinfo=UTC))["AMI"]
    assert late.unwanted
    late.steps[0].do(lambda service: cloud.client(service))
    assert {kind for kind, _ in cloud.leftovers()} & {"image", "snapshot"} == set()
    assert "AMI" not in leftovers_by_kind(stack)


def test_a_bucket_of_another_stack_with_a_like_name_is_not_ours(cloud: Cloud, stack: StackDefinition) -> None:
    s3 = cloud.client("s3")
    name = "gpufleet-small-growth-two-0a1b2c3"
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": cloud.region})
    assert leftovers_by_kind(stack) == {}
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": [{"Key": "gpufleet:stack", "Value": "small-growth-two"}]})
    assert leftovers_by_kind(stack) == {}


def test_a_bucket_that_was_just_deleted_and_is_still_listed_is_passed_over(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = cloud.client("s3")
    gone = {"Name": "gpufleet-small-growth-0a1b2c3", "CreationDate": datetime(2026, 11, 22, tzinfo=UTC)}
    monkeypatch.setattr(run_folder, "pages", lambda *asked, **how: [gone])
    assert run_folder.find_buckets(s3, stack.name) == ([], {}, [])


def closed(s3: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes AWS refuse to show the bucket's tags."""
    tags = s3.get_bucket_tagging

    def refusing(**asked: Any) -> Any:
        if asked["Bucket"] == name:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}, "GetBucketTagging")
        return tags(**asked)

    monkeypatch.setattr(s3, "get_bucket_tagging", refusing)


def test_a_bucket_that_hides_its_tags_hides_none_of_ours(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, ours = cloud.client("s3"), finished(cloud)
    for name in (
        "gpufleet-small-growth-two-0a1b2c3",
        "gpufleet-small-growth-9z8y7x6",
    ):  # a bucket with a longer name that begins like ours
        s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": cloud.region})
        closed(s3, name, monkeypatch)
    folder = run_folder.find_folder(s3, stack)
    assert folder is not None
    assert folder.bucket == ours
    found = [
        each for each in leftovers.look(stack, lambda service, _: cloud.client(service), NOW) if each.kind == "bucket"
    ]
    assert [(each.id, each.unseen) for each in found] == [("gpufleet-small-growth-9z8y7x6", True), (ours, False)]
    assert "let you call GetBucketTagging: Access Denied" in found[0].note


def test_where_no_bucket_shows_its_tags_nobody_says_that_there_is_no_run(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, ours = cloud.client("s3"), finished(cloud)
    closed(s3, ours, monkeypatch)
    with pytest.raises(AwsRefused, match=rf"belongs to small-growth: {ours} \(AWS does not let you call GetBuck"):
        run_folder.find_folder(s3, stack)


def test_a_right_that_is_missing_hides_no_node_and_is_not_taken_for_nothing(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("ListRoles", "DescribeVolumes"):
        cloud.deny(action)
    assert main(["sweep", "small-growth"]) == 2
    _, title, volumes, roles, last = capsys.readouterr().out.splitlines()
    assert title == "AWS did not show these; they may exist and cost money:"
    assert re.fullmatch(r" +volumes +AWS does not let you call DescribeVolumes: .*", volumes)
    assert re.fullmatch(r" +roles +AWS does not let you call ListRoles: .*", roles)
    assert last == "small-growth in us-east-2: nothing billable is among the things that AWS shows."
    declare_fleet(cloud)
    cloud.tick()
    cloud.deny("DescribeFleets")
    assert main(["sweep", "small-growth"]) == 1
    assert "aws ec2 terminate-instances --instance-ids " in capsys.readouterr().out


def test_sweep_with_keys_that_nobody_knows_stops_at_once(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    assert main(["sweep", "small-growth"]) == 2
    assert capsys.readouterr().out == ""


def test_a_type_without_an_on_demand_price_is_shown_at_the_dearest_known(stack: StackDefinition) -> None:
    """The catalog has only spot prices for p5e."""
    assert leftovers._hourly("p5e.48xlarge", "us-east-2") == Decimal("62.9957")
    assert leftovers._hourly("p5.48xlarge", "us-east-2") == Decimal("55.04")


def test_a_loose_disk_like_ours_is_shown_but_not_claimed(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ec2 = cloud.client("ec2")
    make = {"VolumeType": "gp3", "Iops": 3000, "Throughput": 125, "AvailabilityZone": "us-east-2a"}
    volume = ec2.create_volume(Size=100, **make)["VolumeId"]
    other = ec2.create_volume(Size=101, **make)["VolumeId"]
    assert main(["sweep", "small-growth"]) == 0
    said = capsys.readouterr().out
    assert "Perhaps of this stack (these have no tags):" in said
    assert volume in said
    assert other not in said


def test_after_the_fleet_is_deleted_only_what_is_free_remains(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    cloud.tick()
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    cloud.tick()
    found = leftovers_by_kind(stack)
    assert {"fleet", "instance", "volume"} & set(found) == set()
    assert all(not one.usd_per_month for one in found.values())


def test_instance_profiles_and_endpoints_are_found_until_they_are_deleted(cloud: Cloud, stack: StackDefinition) -> None:
    iam, ec2 = cloud.client("iam"), cloud.client("ec2")
    tags = [{"Key": key, "Value": value} for key, value in TAGS.items()]
    iam.create_instance_profile(InstanceProfileName="gpufleet-small-growth-0a1b2c3", Tags=tags)
    iam.create_instance_profile(InstanceProfileName="gpufleet-small-growth-two")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc,
        VpcEndpointType="Gateway",
        RouteTableIds=[ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]],
        ServiceName="com.amazonaws.us-east-2.s3",
        TagSpecifications=[{"ResourceType": "vpc-endpoint", "Tags": tags}],
    )["VpcEndpoint"]["VpcEndpointId"]
    found = leftovers_by_kind(stack)
    assert {kind: one.id for kind, one in found.items()} == {
        "instance profile": "gpufleet-small-growth-0a1b2c3",
        "VPC endpoint": endpoint,
    }
    ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint])  # AWS lists a deleted fleet for a while
    iam.delete_instance_profile(InstanceProfileName="gpufleet-small-growth-0a1b2c3")
    assert leftovers_by_kind(stack) == {}


def test_a_nat_gateway_and_its_address_are_billed_and_a_stranger_s_is_not_ours(
    cloud: Cloud, stack: StackDefinition
) -> None:
    ec2 = cloud.client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    tags = [{"Key": key, "Value": value} for key, value in TAGS.items()]
    found = []
    for own in (tags, []):
        address = ec2.allocate_address(
            Domain="vpc", **({"TagSpecifications": [{"ResourceType": "elastic-ip", "Tags": own}]} if own else {})
        )["AllocationId"]
        given = {"TagSpecifications": [{"ResourceType": "natgateway", "Tags": own}]} if own else {}
        made = ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address, **given)["NatGateway"]
        found.append((made["NatGatewayId"], address))
    left = leftovers_by_kind(stack)
    assert left["NAT gateway"].id == found[0][0]
    assert left["NAT gateway"].usd_per_month == Decimal("0.045") * 730
    assert left["elastic address"].id == found[0][1]
    for step in left["NAT gateway"].steps:
        assert found[0][0] in str(step)
    ec2.delete_nat_gateway(NatGatewayId=found[0][0])
    assert "NAT gateway" not in leftovers_by_kind(stack)
