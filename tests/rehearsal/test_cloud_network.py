"""The embedded AWS where moto answers otherwise: what is in use stays, and what a description tells of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from tests.rehearsal.declared import describe, fleet, template
from tests.waiting import HANG_S


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with Cloud(tmp_path, clock=ManualClock()) as cloud:
        yield cloud


def network(cloud: Cloud) -> dict[str, str]:
    """A VPC with all that the program puts into one, by EC2's own words for them."""
    ec2 = cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    service = {"ServiceName": "com.amazonaws.us-east-2.s3", "VpcEndpointType": "Gateway"}
    endpoint = ec2.create_vpc_endpoint(VpcId=vpc, RouteTableIds=[table], **service)
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/20", AvailabilityZone="us-east-2a")["Subnet"]["SubnetId"]
    ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
    return {
        "VpcId": vpc,
        "InternetGatewayId": gateway,
        "RouteTableId": table,
        "VpcEndpointIds": endpoint["VpcEndpoint"]["VpcEndpointId"],
        "SubnetId": subnet,
        "GroupId": group,
    }


def with_node(cloud: Cloud, made: dict[str, str]) -> str:
    """A fleet with a node in the network; the fleet's id."""
    spec = {
        "LaunchTemplateId": template(cloud, SecurityGroupIds=[made["GroupId"]]),
        "Version": "$Latest",
    }
    overrides = [{"InstanceType": "g5.2xlarge", "SubnetId": made["SubnetId"]}]
    found = fleet(cloud, LaunchTemplateConfigs=[{"LaunchTemplateSpecification": spec, "Overrides": overrides}])
    cloud.tick()
    return found


DELETES: dict[str, Callable[[Any, dict[str, str]], Any]] = {
    "subnet": lambda ec2, made: ec2.delete_subnet(SubnetId=made["SubnetId"]),
    "security group": lambda ec2, made: ec2.delete_security_group(GroupId=made["GroupId"]),
    "gateway": lambda ec2, made: ec2.detach_internet_gateway(
        InternetGatewayId=made["InternetGatewayId"], VpcId=made["VpcId"]
    ),
    "attached gateway": lambda ec2, made: ec2.delete_internet_gateway(InternetGatewayId=made["InternetGatewayId"]),
    "route table": lambda ec2, made: ec2.delete_route_table(RouteTableId=made["RouteTableId"]),
    "VPC": lambda ec2, made: ec2.delete_vpc(VpcId=made["VpcId"]),
}


@pytest.mark.parametrize("what", DELETES)
def test_what_a_node_uses_is_not_deleted_from_under_it(cloud: Cloud, what: str) -> None:
    made = network(cloud)
    with_node(cloud, made)
    with pytest.raises(ClientError, match=r"\(DependencyViolation\)"):
        DELETES[what](cloud.client("ec2"), made)


def test_a_vpc_goes_once_nothing_is_left_in_it(cloud: Cloud) -> None:
    ec2, made = cloud.client("ec2"), network(cloud)
    node_fleet = with_node(cloud, made)
    ec2.delete_fleets(FleetIds=[node_fleet], TerminateInstances=True)
    cloud.tick()
    in_order: list[Callable[[], object]] = [
        lambda: ec2.delete_vpc_endpoints(VpcEndpointIds=[made["VpcEndpointIds"]]),
        *(partial(DELETES[what], ec2, made) for what in ("gateway", "attached gateway", "subnet")),
        *(partial(DELETES[what], ec2, made) for what in ("route table", "security group")),
    ]
    for step in in_order:
        with pytest.raises(ClientError, match="DependencyViolation"):
            DELETES["VPC"](ec2, made)
        step()
    DELETES["VPC"](ec2, made)


def test_an_endpoint_goes_although_its_route_table_has_gone_before_it(cloud: Cloud) -> None:
    ec2, made = cloud.client("ec2"), network(cloud)
    ec2.delete_subnet(SubnetId=made["SubnetId"])
    ec2.delete_route_table(RouteTableId=made["RouteTableId"])
    (endpoint,) = ec2.describe_vpc_endpoints()["VpcEndpoints"]
    assert ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint["VpcEndpointId"]])["Unsuccessful"] == []


def test_a_security_group_that_another_one_s_rule_names_stays(cloud: Cloud) -> None:
    ec2, made = cloud.client("ec2"), network(cloud)
    other = ec2.create_security_group(GroupName="other", Description="other", VpcId=made["VpcId"])["GroupId"]
    rule = {"IpProtocol": "tcp", "FromPort": 1, "ToPort": 1, "UserIdGroupPairs": [{"GroupId": made["GroupId"]}]}
    ec2.authorize_security_group_ingress(GroupId=other, IpPermissions=[rule])
    with pytest.raises(ClientError, match="DependencyViolation"):
        DELETES["security group"](ec2, made)
    ec2.delete_security_group(GroupId=other)
    DELETES["security group"](ec2, made)


@pytest.mark.parametrize(("capacity", "spot", "on_demand"), [("spot", 1, 0), ("on-demand", 0, 1)])
def test_a_fleet_shows_what_aws_fills_in(cloud: Cloud, capacity: str, spot: int, on_demand: int) -> None:
    asked = {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": capacity}
    fleet_id = fleet(cloud, TargetCapacitySpecification=asked)
    found = describe(cloud, fleet_id)
    filled = {"SpotTargetCapacity": spot, "OnDemandTargetCapacity": on_demand}
    assert found["TargetCapacitySpecification"] == {**asked, **filled}
    assert found["OnDemandOptions"] == {"AllocationStrategy": "lowestPrice"}
    cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    empty = describe(cloud, fleet_id)["TargetCapacitySpecification"]
    assert (empty["SpotTargetCapacity"], empty["OnDemandTargetCapacity"]) == (0, 0)


def test_a_template_s_own_tags_are_its_own_and_as_they_are_now(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    launched = {"ResourceType": "instance", "Tags": [{"Key": "of", "Value": "node"}]}
    made = ec2.create_launch_template(
        LaunchTemplateName="t",
        LaunchTemplateData={"TagSpecifications": [launched]},
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": [{"Key": "of", "Value": "template"}]}],
    )["LaunchTemplate"]["LaunchTemplateId"]
    data = ec2.describe_launch_template_versions(LaunchTemplateId=made)["LaunchTemplateVersions"][0]
    assert data["LaunchTemplateData"]["TagSpecifications"] == [launched]
    ec2.create_tags(Resources=[made], Tags=[{"Key": "of", "Value": "later"}])
    (shown,) = ec2.describe_launch_templates(LaunchTemplateIds=[made])["LaunchTemplates"]
    assert shown["Tags"] == [{"Key": "of", "Value": "later"}]


def test_a_spot_node_names_its_request_wherever_it_is_described(cloud: Cloud) -> None:
    ec2, fleet_id = cloud.client("ec2"), fleet(cloud)
    cloud.tick()
    (active,) = ec2.describe_fleet_instances(FleetId=fleet_id)["ActiveInstances"]
    (node,) = ec2.describe_instances()["Reservations"][0]["Instances"]
    assert node["SpotInstanceRequestId"] == active["SpotInstanceRequestId"]
    assert node["SpotInstanceRequestId"].startswith("sir-")


def test_a_rule_that_names_a_group_has_its_description_and_needs_no_ports(cloud: Cloud) -> None:
    ec2, made = cloud.client("ec2"), network(cloud)
    within = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": made["GroupId"], "Description": "one run's"}]}
    (rule,) = ec2.authorize_security_group_ingress(GroupId=made["GroupId"], IpPermissions=[within])[
        "SecurityGroupRules"
    ]

    def description() -> str:
        named = ec2.describe_security_group_rules(SecurityGroupRuleIds=[rule["SecurityGroupRuleId"]])
        return str(named["SecurityGroupRules"][0]["Description"])

    assert description() == "one run's"
    changed = {"IpProtocol": "-1", "ReferencedGroupId": made["GroupId"], "Description": "among themselves"}
    asked = {"SecurityGroupRuleId": rule["SecurityGroupRuleId"], "SecurityGroupRule": changed}
    ec2.modify_security_group_rules(GroupId=made["GroupId"], SecurityGroupRules=[asked])
    assert description() == "among themselves"


def test_a_bucket_takes_tags_as_it_is_created(cloud: Cloud) -> None:
    s3, tags = cloud.client("s3"), [{"Key": "gpufleet:stack", "Value": "a & b"}, {"Key": "of", "Value": "team"}]
    s3.create_bucket(Bucket="tagged", CreateBucketConfiguration={"LocationConstraint": "us-east-2", "Tags": tags})
    assert s3.get_bucket_tagging(Bucket="tagged")["TagSet"] == tags
    s3.create_bucket(Bucket="plain", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
    with pytest.raises(ClientError, match="NoSuchTagSet"):
        s3.get_bucket_tagging(Bucket="plain")


def test_step_functions_tell_whether_a_definition_is_one_and_of_versions(cloud: Cloud) -> None:
    states = cloud.client("stepfunctions")
    one = {"StartAt": "a", "States": {"a": {"Type": "Pass", "End": True}}}
    for definition, result in ((one, "OK"), ({**one, "StartAt": "b"}, "FAIL"), ({}, "FAIL")):
        assert states.validate_state_machine_definition(definition=json.dumps(definition))["result"] == result
    role = "arn:aws:iam::111122223333:role/any"
    made = states.create_state_machine(name="m", definition=json.dumps(one), roleArn=role)["stateMachineArn"]
    assert states.list_state_machine_versions(stateMachineArn=made)["stateMachineVersions"] == []


def test_an_instant_fleet_is_told_of_by_its_id_alone_and_lingers(cloud: Cloud) -> None:
    """As AWS says of DescribeFleets; that it lingers is reported (docs/decisions/2026-11-26-capacity-block.md)."""
    ec2 = cloud.client("ec2")
    tags = [{"ResourceType": "fleet", "Tags": [{"Key": "of", "Value": "run"}]}]
    asked = {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "on-demand"}
    made = fleet(cloud, Type="instant", TargetCapacitySpecification=asked, TagSpecifications=tags, SpotOptions={})
    assert ec2.describe_fleets()["Fleets"] == []
    filters = [{"Name": "resource-type", "Values": ["fleet"]}, {"Name": "tag:of", "Values": ["run"]}]
    assert [each["ResourceId"] for each in ec2.describe_tags(Filters=filters)["Tags"]] == [made]
    assert describe(cloud, made)["FleetState"] == "active"
    ec2.delete_fleets(FleetIds=[made], TerminateInstances=True)
    assert isinstance(cloud.clock, ManualClock)
    for hours, state in ((0, "deleted_terminating"), (40, "deleted_terminating")):
        cloud.clock.advance(hours * 3600)
        assert describe(cloud, made)["FleetState"] == state
        assert not [node for node in cloud.instances() if not node.ended_at]
    cloud.clock.advance(9 * 3600)
    cloud.tick()
    with pytest.raises(ClientError, match="InvalidFleetId"):
        describe(cloud, made)


def test_ec2_is_asked_by_one_at_a_time_and_s3_by_many(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads: moto's tables of EC2 are not made for two of them."""
    inside, most, whole, two_of_s3 = [0], [0], DomainDispatcherApplication.__call__, threading.Barrier(2)

    def counted(app: Any, environ: dict[str, Any], start: Any) -> Any:
        if "/ec2/" not in environ["HTTP_AUTHORIZATION"]:
            two_of_s3.wait(HANG_S)
            return whole(app, environ, start)
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)  # another, if it may, comes meanwhile
        answer = whole(app, environ, start)
        inside[0] -= 1
        return answer

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", counted)
    ec2, s3 = cloud.client("ec2"), cloud.client("s3")
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask) for ask in [ec2.describe_vpcs, s3.list_buckets] * 8]
        assert all(each.result() for each in asked)
    assert most == [1]
