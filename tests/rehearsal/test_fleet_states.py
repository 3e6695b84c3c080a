"""The embedded AWS's table: what EC2 does with a fleet and moto does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from gpufleet.job.text import stamp
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.launch import FLEET_ROLE
from tests.rehearsal.declared import describe, events, fleet, living, subnets, template

RUN = {"gpufleet:run": "r1"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cloud(tmp_path: Path, clock: ManualClock) -> Iterator[Cloud]:
    with Cloud(tmp_path, clock=clock, habits=Habits(relaunch_s=5, notice_s=120, retry_s=30)) as cloud:
        yield cloud


def advance(cloud: Cloud, clock: ManualClock, seconds: float) -> None:
    clock.advance(seconds)
    cloud.tick()


def test_a_terminated_node_is_replaced_after_the_delay(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud)
    first = cloud.client("ec2").describe_fleet_instances(FleetId=fleet_id)["ActiveInstances"][0]["InstanceId"]
    cloud.client("ec2").terminate_instances(InstanceIds=[first])
    advance(cloud, clock, 4)
    assert living(cloud) == []
    assert describe(cloud, fleet_id)["FulfilledCapacity"] == 0
    advance(cloud, clock, 1)
    assert len(living(cloud)) == 1
    assert living(cloud) != [first]
    assert describe(cloud, fleet_id)["FulfilledCapacity"] == 1


def test_a_shutdown_from_inside_terminates_and_is_replaced(cloud: Cloud, clock: ManualClock) -> None:
    fleet(cloud)
    cloud.tick()
    first = living(cloud)[0]
    cloud.shut_down(first)
    advance(cloud, clock, 5)
    assert len(living(cloud)) == 1
    assert living(cloud) != [first]


def test_without_the_template_saying_terminate_a_shutdown_leaves_the_disks(cloud: Cloud) -> None:
    fleet(cloud, template(cloud, InstanceInitiatedShutdownBehavior="stop"))
    cloud.tick()
    cloud.shut_down(living(cloud)[0])
    assert any(kind == "volume" for kind, _ in cloud.leftovers())


def test_modify_fleet_to_zero_gives_a_notice_and_then_terminates_for_good(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud)
    cloud.tick()
    cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    node = cloud.instances()[0]
    assert node.notice_at == clock.now()
    advance(cloud, clock, 119)
    assert living(cloud) == [node.id]
    advance(cloud, clock, 1)
    assert living(cloud) == []
    advance(cloud, clock, 3600)
    assert living(cloud) == []
    assert describe(cloud, fleet_id)["FleetState"] == "active"
    assert describe(cloud, fleet_id)["TargetCapacitySpecification"]["TotalTargetCapacity"] == 0


@pytest.mark.parametrize("expires", [False, True])
def test_a_node_on_demand_goes_without_a_notice(cloud: Cloud, clock: ManualClock, expires: bool) -> None:
    until = ManualClock(clock.now())
    until.advance(60)
    on_demand = {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "on-demand"}
    fleet_id = fleet(cloud, TargetCapacitySpecification=on_demand, ValidUntil=stamp(until.now()))
    cloud.tick()
    if not expires:
        cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    advance(cloud, clock, 60)
    advance(cloud, clock, 0)
    (node,) = cloud.instances()
    assert living(cloud) == []
    assert node.notice_at is None
    assert ("instanceChange", "termination_notified") not in events(cloud, fleet_id)


def test_no_termination_neither_shrinks_nor_replaces(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud, ExcessCapacityTerminationPolicy="no-termination")
    cloud.tick()
    node = living(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    advance(cloud, clock, 3600)
    assert living(cloud) == node


def test_only_a_maintain_fleet_can_be_modified(cloud: Cloud) -> None:
    fleet_id = fleet(cloud, Type="request")
    with pytest.raises(ClientError, match="only maintain"):
        cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})


def test_expiry_terminates_and_launches_nothing_more(cloud: Cloud, clock: ManualClock) -> None:
    until = ManualClock(clock.now())
    until.advance(3600)
    fleet_id = fleet(cloud, ValidUntil=stamp(until.now()))
    advance(cloud, clock, 3599)
    node = cloud.instances()[0]
    assert node.notice_at is None
    advance(cloud, clock, 1)
    assert node.notice_at == clock.now()
    advance(cloud, clock, 121)
    assert living(cloud) == []
    advance(cloud, clock, 3600)
    assert len(cloud.instances()) == 1
    assert ("fleetRequestChange", "expired") in events(cloud, fleet_id)
    assert describe(cloud, fleet_id)["FleetState"] == "deleted"


def test_an_expired_fleet_that_may_not_terminate_leaves_its_node_running(cloud: Cloud, clock: ManualClock) -> None:
    fleet(cloud, ValidUntil=stamp(clock.now()), TerminateInstancesWithExpiration=False)
    cloud.tick()
    assert cloud.instances() == []  # expired before the first launch
    other = ManualClock(clock.now())
    other.advance(10)
    fleet(cloud, ValidUntil=stamp(other.now()), TerminateInstancesWithExpiration=False)
    cloud.tick()
    advance(cloud, clock, 3600)
    assert len(living(cloud)) == 1


def test_deleting_settles_to_deleted_and_can_be_done_after_the_node_died(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud)
    cloud.tick()
    cloud.client("ec2").terminate_instances(InstanceIds=living(cloud))
    answer = cloud.client("ec2").delete_fleets(FleetIds=[fleet_id], TerminateInstances=True)
    assert answer["SuccessfulFleetDeletions"][0]["CurrentFleetState"] == "deleted_terminating"
    assert describe(cloud, fleet_id)["FleetState"] == "deleted"
    advance(cloud, clock, 60)
    assert living(cloud) == []


def test_deleting_without_terminating_keeps_the_node_and_replaces_it_no_more(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud)
    cloud.tick()
    node = living(cloud)
    cloud.client("ec2").delete_fleets(FleetIds=[fleet_id], TerminateInstances=False)
    advance(cloud, clock, 60)
    assert living(cloud) == node
    assert describe(cloud, fleet_id)["FleetState"] == "deleted_running"
    cloud.shut_down(node[0])
    advance(cloud, clock, 60)
    assert living(cloud) == []
    assert describe(cloud, fleet_id)["FleetState"] == "deleted"


def test_a_deleted_fleet_cannot_be_deleted_again_and_lingers_for_two_days(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud)
    cloud.client("ec2").delete_fleets(FleetIds=[fleet_id], TerminateInstances=True)
    cloud.tick()
    again = cloud.client("ec2").delete_fleets(FleetIds=[fleet_id, "fleet-none"], TerminateInstances=True)
    codes = [failed["Error"]["Code"] for failed in again["UnsuccessfulFleetDeletions"]]
    assert codes == ["fleetNotInDeletableState", "fleetIdDoesNotExist"]
    advance(cloud, clock, 49 * 3600)
    with pytest.raises(ClientError, match="does not exist"):
        describe(cloud, fleet_id)


def test_the_history_tells_what_happened(cloud: Cloud, clock: ManualClock) -> None:
    fleet_id = fleet(cloud)
    cloud.tick()
    cloud.interrupt(living(cloud)[0])
    advance(cloud, clock, 121)
    cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    assert events(cloud, fleet_id) == [
        ("fleetRequestChange", "submitted"),
        ("fleetRequestChange", "active"),
        ("instanceChange", "launched"),
        ("instanceChange", "termination_notified"),
        ("instanceChange", "terminated"),
        ("fleetRequestChange", "modify_in_progress"),
        ("fleetRequestChange", "modify_succeeded"),
    ]
    start = "2026-11-21T12:01:00Z"
    of_nodes = cloud.client("ec2").describe_fleet_history(
        FleetId=fleet_id, StartTime=start, EventType="instance-change"
    )
    assert [r["EventInformation"]["EventSubType"] for r in of_nodes["HistoryRecords"]] == ["terminated"]


def test_an_interrupted_pool_is_not_the_next_one(cloud: Cloud, clock: ManualClock) -> None:
    fleet(cloud)
    cloud.tick()
    cloud.interrupt(living(cloud)[0])
    advance(cloud, clock, 121)
    advance(cloud, clock, 6)
    first, second = cloud.instances()
    assert first.zone != second.zone


def test_a_systems_manager_parameter_is_refused_as_image(cloud: Cloud) -> None:
    with pytest.raises(ClientError, match=r"InvalidAMIID\.Malformed"):
        fleet(cloud, template(cloud, ImageId="resolve:ssm:/aws/service/x"))


def test_an_unknown_image_is_refused(cloud: Cloud) -> None:
    with pytest.raises(ClientError, match=r"InvalidAMIID\.NotFound"):
        fleet(cloud, template(cloud, ImageId="ami-00000000000000000"))


def test_a_maintain_fleet_may_only_tag_itself(cloud: Cloud) -> None:
    with pytest.raises(ClientError, match="taggable"):
        fleet(cloud, TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}])


def test_two_subnets_in_one_zone_are_refused(cloud: Cloud) -> None:
    first = subnets(cloud)[0]
    vpc = cloud.client("ec2").describe_subnets(SubnetIds=[first])["Subnets"][0]["VpcId"]
    second = cloud.client("ec2").create_subnet(VpcId=vpc, CidrBlock="10.0.9.0/24", AvailabilityZone="us-east-2a")
    overrides = [{"InstanceType": "g5.2xlarge", "SubnetId": s} for s in (first, second["Subnet"]["SubnetId"])]
    config = {
        "LaunchTemplateSpecification": {"LaunchTemplateId": template(cloud), "Version": "1"},
        "Overrides": overrides,
    }
    with pytest.raises(ClientError, match="two subnets in one zone"):
        fleet(cloud, LaunchTemplateConfigs=[config])


def _no_quota(cloud: Cloud) -> None:
    cloud.quotas["L-3819A6DF"] = 0


def _no_capacity(cloud: Cloud) -> None:
    cloud.no_capacity()


def _no_role(cloud: Cloud) -> None:
    cloud.client("iam").delete_role(RoleName=FLEET_ROLE)


def _no_image(cloud: Cloud) -> None:
    for image in cloud.client("ec2").describe_images()["Images"]:
        cloud.deregister_ami(image["ImageId"])


@pytest.mark.parametrize(
    ("break_it", "sub_type", "said"),
    [
        (_no_quota, "spotInstanceCountLimitExceeded", "Max spot instance count exceeded"),
        (_no_capacity, "allLaunchSpecsTemporarilyBlacklisted", "no Spot capacity available"),
        (_no_role, "iamFleetRoleInvalid", FLEET_ROLE),
        (_no_image, "allLaunchSpecsTemporarilyBlacklisted", r"InvalidAMIID\.NotFound"),
    ],
)
def test_what_prevents_a_launch_is_an_error_event_and_not_an_error_of_create(
    cloud: Cloud, break_it: Callable[[Cloud], None], sub_type: str, said: str
) -> None:
    fleet_id = fleet(cloud)
    break_it(cloud)
    assert describe(cloud, fleet_id)["FleetState"] == "active"
    assert living(cloud) == []
    errors = [e for e in cloud.fleets.fleets[fleet_id].history if e.type == "error"]
    assert [e.sub_type for e in errors] == [sub_type]
    assert re.search(said, errors[0].description)
    assert describe(cloud, fleet_id)["ActivityStatus"] == "error"


def test_a_missing_instance_profile_is_an_event(cloud: Cloud) -> None:
    fleet_id = fleet(cloud, template(cloud, IamInstanceProfile={"Name": "nobody"}))
    cloud.tick()
    described = [e.description for e in cloud.fleets.fleets[fleet_id].history if e.type == "error"]
    assert "Invalid IAM Instance Profile name" in described[0]


def test_a_template_that_tags_what_the_fleet_s_role_may_not_launches_nothing(cloud: Cloud) -> None:
    label = [{"ResourceType": kind, "Tags": [{"Key": "k", "Value": "v"}]} for kind in ("instance", "network-interface")]
    fleet_id = fleet(cloud, template(cloud, TagSpecifications=label))
    cloud.tick()
    assert living(cloud) == []
    [error] = [e for e in cloud.fleets.fleets[fleet_id].history if e.type == "error"]
    assert error.sub_type == "iamFleetRoleInvalid"
    assert "ec2:CreateTags on resource: network-interface" in error.description


def test_capacity_that_comes_back_is_found(cloud: Cloud, clock: ManualClock) -> None:
    cloud.no_capacity()
    fleet(cloud)
    cloud.tick()
    cloud.launcher.no_capacity.clear()
    advance(cloud, clock, 29)
    assert living(cloud) == []
    advance(cloud, clock, 1)
    assert len(living(cloud)) == 1


def test_the_node_has_its_disks_its_tags_and_its_lifecycle(cloud: Cloud) -> None:
    data = {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 50, "VolumeType": "gp3", "Iops": 4000, "Throughput": 250}}
    root = {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 100, "VolumeType": "gp3", "DeleteOnTermination": True}}
    fleet_id = fleet(cloud, template(cloud, BlockDeviceMappings=[root, data]))
    cloud.tick()
    node = living(cloud)[0]
    ec2 = cloud.client("ec2")
    volumes = ec2.describe_volumes(Filters=[{"Name": "attachment.instance-id", "Values": [node]}])["Volumes"]
    assert sorted((v["Size"], v["Iops"], v["Attachments"][0]["Device"]) for v in volumes) == [
        (50, 4000, "/dev/sdf"),
        (100, 3000, "/dev/xvda"),
    ]
    assert [v.get("Tags") for v in volumes] == [None, None]  # a template cannot tag a spot node's volumes
    described = ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
    tags = {tag["Key"]: tag["Value"] for tag in described["Tags"]}
    assert tags["aws:ec2:fleet-id"] == fleet_id
    assert tags["gpufleet:run"] == "r1"
    assert described["InstanceLifecycle"] == "spot"


def test_a_terminated_node_takes_along_only_what_it_should(cloud: Cloud, clock: ManualClock) -> None:
    kept = {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 50, "VolumeType": "gp3", "DeleteOnTermination": False}}
    fleet_id = fleet(cloud, template(cloud, BlockDeviceMappings=[kept]))
    cloud.tick()
    cloud.client("ec2").delete_fleets(FleetIds=[fleet_id], TerminateInstances=True)
    advance(cloud, clock, 1)
    left = [kind for kind, _ in cloud.leftovers() if kind in ("instance", "volume", "network-interface", "fleet")]
    assert left == ["volume"]
