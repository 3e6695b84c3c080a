"""Resource handlers over the embedded AWS: what is written is what is read, and what others change is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from moto.s3.models import s3_backends

from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.handlers import HANDLERS, handler, table
from gpufleet.rehearsal.handlers.table import UNKNOWN, Aws, UnsupportedError
from tests.rehearsal.declared import subnets, template

TRUST = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
    }
)
VPC, GROUP, OBJECT = "aws:ec2/vpc:Vpc", "aws:ec2/securityGroup:SecurityGroup", "aws:s3/bucketObjectv2:BucketObjectv2"
SUBNET, LIFECYCLE = "aws:ec2/subnet:Subnet", "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
SCHEDULE = "aws:scheduler/schedule:Schedule"
BUCKET, FLEET, LOGS = "aws:s3/bucket:Bucket", "aws:ec2/fleet:Fleet", "aws:cloudwatch/logGroup:LogGroup"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with Cloud(tmp_path_factory.mktemp("cloud"), clock=ManualClock(datetime(2026, 11, 21, tzinfo=UTC))) as cloud:
        yield cloud


@pytest.fixture(scope="module")
def aws(cloud: Cloud) -> Aws:
    return Aws(environment=cloud.environment(), region="us-east-2")


def make(aws: Aws, kind: str, **inputs: Any) -> tuple[str, dict[str, Any]]:
    """The id and the state of a new resource."""
    resource_id = handler(kind).create(aws, inputs)
    state = table.state(handler(kind), aws, resource_id, inputs)
    assert state is not None
    return resource_id, state


def change(aws: Aws, kind: str, resource_id: str, before: dict[str, Any], /, **inputs: Any) -> dict[str, Any]:
    """The state after an update in place."""
    update = handler(kind).update
    assert update is not None
    update(aws, resource_id, before, inputs)
    after = table.state(handler(kind), aws, resource_id, inputs)
    assert after is not None
    return after


def declared(state: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    return {key: state.get(key) for key in inputs}


def _schedule(expression: str, state: str) -> dict[str, Any]:
    target = {"arn": "arn:aws:scheduler:::aws-sdk:ec2:deleteFleets", "roleArn": "arn:aws:iam::1:role/r", "input": "{}"}
    return {
        "groupName": "default",
        "name": "stop",
        "scheduleExpression": expression,
        "scheduleExpressionTimezone": "UTC",
        "flexibleTimeWindow": {"mode": "OFF"},
        "target": {**target, "retryPolicy": {"maximumEventAgeInSeconds": 86400, "maximumRetryAttempts": 185}},
        "state": state,
        "actionAfterCompletion": "NONE",
    }


UPDATES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        VPC,
        {"cidrBlock": "10.9.0.0/16", "enableDnsSupport": True, "tags": {"a": "1", "b": "2"}},
        {"cidrBlock": "10.9.0.0/16", "enableDnsSupport": False, "tags": {"a": "3"}},
    ),
    (
        LOGS,
        {"name": "g", "retentionInDays": 7, "tags": {"a": "1", "b": "2"}},
        {"name": "g", "retentionInDays": 30, "tags": {"a": "3"}},
    ),
    (
        "aws:iam/role:Role",
        {"name": "r", "assumeRolePolicy": TRUST, "description": "one", "tags": {"a": "1", "b": "2"}},
        {
            "name": "r",
            "assumeRolePolicy": TRUST.replace("ec2.", "lambda."),
            "description": "two",
            "tags": {"a": "3"},
        },
    ),
    (
        "aws:scheduler/scheduleGroup:ScheduleGroup",
        {"name": "g", "tags": {"a": "1", "b": "2"}},
        {"name": "g", "tags": {"a": "3"}},
    ),
    (SCHEDULE, _schedule("at(2036-11-27T10:00:00)", "ENABLED"), _schedule("at(2036-11-28T10:00:00)", "DISABLED")),
    (BUCKET, {"bucket": "updated", "tags": {"a": "1"}}, {"bucket": "updated", "tags": {"a": "3"}}),
]


@pytest.mark.parametrize(("kind", "before", "after"), UPDATES, ids=[kind for kind, *_ in UPDATES])
def test_what_is_written_is_what_is_read_after_create_and_update(
    aws: Aws, kind: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    resource_id, state = make(aws, kind, **before)
    assert declared(state, before) == before
    assert table.diff(handler(kind), state, before) == {}
    changed = change(aws, kind, resource_id, state, **after)
    assert declared(changed, after) == after
    handler(kind).delete(aws, resource_id, changed)
    assert table.state(handler(kind), aws, resource_id, after) is None


def test_an_object_follows_its_content(aws: Aws, tmp_path: Path) -> None:
    make(aws, BUCKET, bucket="objects", forceDestroy=True)
    file = tmp_path / "shard.bin"
    file.write_bytes(b"\x00one")
    inputs = {"bucket": "objects", "key": "inputs/a/shard.bin", "source": {"path": str(file)}, "tags": {"a": "1"}}
    key, state = make(aws, OBJECT, **inputs)
    assert aws.s3.get_object(Bucket="objects", Key=key)["Body"].read() == b"\x00one"
    after = change(aws, OBJECT, key, state, bucket="objects", key=key, content="two")
    assert aws.s3.get_object(Bucket="objects", Key=key)["Body"].read() == b"two"
    assert after["etag"] != state["etag"]


def test_a_bucket_with_objects_goes_only_when_it_was_declared_so(aws: Aws) -> None:
    for force in (False, True):
        _, state = make(aws, BUCKET, bucket=f"full-{force}".lower(), forceDestroy=force)
        aws.s3.put_object(Bucket=state["bucket"], Key="x", Body=b"x")
        if force:
            handler(BUCKET).delete(aws, state["bucket"], state)
            assert table.state(handler(BUCKET), aws, state["bucket"], state) is None
        else:
            with pytest.raises(UnsupportedError, match="is not empty and was declared without forceDestroy"):
                handler(BUCKET).delete(aws, state["bucket"], state)


def test_a_new_security_group_lets_nothing_in_and_nothing_out(aws: Aws, cloud: Cloud) -> None:
    vpc, _ = make(aws, VPC, cidrBlock="10.8.0.0/16")
    group, state = make(aws, GROUP, vpcId=vpc, description="d", name="n")
    described = cloud.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"][0]
    assert (described["IpPermissions"], described["IpPermissionsEgress"]) == ([], [])
    assert state["ingress"] == []


def test_a_door_opened_by_hand_is_seen(aws: Aws, cloud: Cloud) -> None:
    vpc, _ = make(aws, VPC, cidrBlock="10.7.0.0/16")
    group, state = make(aws, GROUP, vpcId=vpc, description="d", name="n2")
    opened = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    cloud.client("ec2").authorize_security_group_ingress(GroupId=group, IpPermissions=[opened])
    after = table.state(handler(GROUP), aws, group, state)
    assert after is not None
    assert after["ingress"] == [{"protocol": "tcp", "fromPort": 22, "toPort": 22, "cidrBlocks": ["0.0.0.0/0"]}]


def fleet_inputs(cloud: Cloud) -> dict[str, Any]:
    return {
        "launchTemplateConfigs": [
            {
                "launchTemplateSpecification": {"launchTemplateId": template(cloud), "version": "1"},
                "overrides": [{"instanceType": "g5.2xlarge", "subnetId": subnets(cloud)[0]}],
            }
        ],
        "targetCapacitySpecification": {"defaultTargetCapacityType": "spot", "totalTargetCapacity": 1},
        "spotOptions": {
            "allocationStrategy": "price-capacity-optimized",
            "instanceInterruptionBehavior": "terminate",
        },
        "type": "maintain",
        "excessCapacityTerminationPolicy": "termination",
        "terminateInstances": True,
        "terminateInstancesWithExpiration": True,
        "replaceUnhealthyInstances": False,
        "validUntil": "2026-11-22T02:00:00Z",
        "tags": {"gpufleet:run": "r1"},
    }


def test_a_fleet_reads_back_as_declared_and_an_update_resends_its_capacity(aws: Aws, cloud: Cloud) -> None:
    inputs = fleet_inputs(cloud)
    fleet, state = make(aws, FLEET, **inputs)
    assert table.diff(handler(FLEET), state, inputs) == {"validFrom": True}  # AWS's answer, and the program ignores it
    inputs["validFrom"] = state["validFrom"]
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    live = table.state(handler(FLEET), aws, fleet, state)
    assert live is not None
    assert live["targetCapacitySpecification"]["totalTargetCapacity"] == 0
    assert table.diff(handler(FLEET), live, inputs) == {"targetCapacitySpecification": False}
    after = change(aws, FLEET, fleet, live, **inputs)  # the provider's habit, which the program must never meet
    assert after["targetCapacitySpecification"]["totalTargetCapacity"] == 1
    handler(FLEET).delete(aws, fleet, after)
    assert table.state(handler(FLEET), aws, fleet, after) is None


def test_a_deleted_fleet_counts_as_gone_though_the_api_still_shows_it(aws: Aws, cloud: Cloud) -> None:
    inputs = fleet_inputs(cloud)
    fleet, state = make(aws, FLEET, **inputs)
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=False)
    assert table.state(handler(FLEET), aws, fleet, state) is None
    assert cloud.client("ec2").describe_fleets(FleetIds=[fleet])["Fleets"]


@pytest.mark.parametrize(
    ("changed", "replaces"),
    [
        ({"validUntil": "2026-11-23T02:00:00Z"}, {"validUntil": True}),
        ({"spotOptions": {"allocationStrategy": "lowestPrice"}}, {"spotOptions": True}),
        (
            {"targetCapacitySpecification": {"defaultTargetCapacityType": "on-demand", "totalTargetCapacity": 1}},
            {"targetCapacitySpecification.defaultTargetCapacityType": True},
        ),
        (
            {"targetCapacitySpecification": {"defaultTargetCapacityType": "spot", "totalTargetCapacity": 2}},
            {"targetCapacitySpecification": False},
        ),
        ({"terminateInstances": False}, {"terminateInstances": False}),
        ({"tags": {"gpufleet:run": "r2"}}, {"tags": False}),
    ],
)
def test_a_change_of_a_fleet_replaces_it_only_where_the_provider_does(
    cloud: Cloud, changed: dict[str, Any], replaces: dict[str, bool]
) -> None:
    inputs = fleet_inputs(cloud)
    assert table.diff(handler(FLEET), inputs, {**inputs, **changed}) == replaces


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"cidrBlock": "10.0.0.0/16", "ipv6Pool": 1}, "has no property 'ipv6Pool'"),
        ({"enableDnsSupport": True}, "needs 'cidrBlock'"),
    ],
)
def test_a_property_that_is_unknown_or_missing_is_refused(inputs: dict[str, Any], reason: str) -> None:
    _, failures = table.check(VPC, handler(VPC), "v", {}, inputs, b"")
    assert reason in failures[0][1]


def test_a_nested_property_that_aws_does_not_keep_is_refused_once_it_is_written(aws: Aws) -> None:
    make(aws, BUCKET, bucket="nested")
    rule = {"id": "a", "status": "Enabled", "filter": {"prefix": "a/"}, "expiration": {"days": 1}}
    more = {"bucket": "nested", "rules": [{**rule, "noncurrentVersionExpiration": {"noncurrentDays": 1}}]}
    lifecycle = handler(LIFECYCLE)
    lifecycle.create(aws, more)
    assert table.written(LIFECYCLE, lifecycle, aws, "nested", more) == more
    lifecycle.create(aws, {"bucket": "nested", "rules": [rule]})
    with pytest.raises(UnsupportedError, match="has not taken rules as declared"):
        table.written(LIFECYCLE, lifecycle, aws, "nested", more)


def test_a_value_outside_its_enum_is_refused(cloud: Cloud) -> None:
    inputs = fleet_inputs(cloud)
    inputs["spotOptions"] = {"allocationStrategy": "lowest-price"}
    _, failures = table.check(FLEET, handler(FLEET), "f", {}, inputs, b"")
    assert [path for path, _ in failures] == ["spotOptions.allocationStrategy"]


def test_a_name_is_drawn_once_and_kept() -> None:
    first, _ = table.check(BUCKET, handler(BUCKET), "b", {}, {}, b"seed")
    again, _ = table.check(BUCKET, handler(BUCKET), "b", first, {}, b"another")
    assert first["bucket"].startswith("b-")
    assert first == again


def test_a_preview_promises_nothing_that_only_aws_knows() -> None:
    promised = table.expected(handler(VPC), {}, {"cidrBlock": "10.0.0.0/16"})
    assert promised == {"cidrBlock": "10.0.0.0/16", "arn": UNKNOWN, "tagsAll": UNKNOWN}


def test_a_full_bucket_goes_with_more_objects_than_one_listing_names(aws: Aws, cloud: Cloud) -> None:
    _, state = make(aws, BUCKET, bucket="thousand", forceDestroy=True)
    for number in range(1001):
        s3_backends[cloud.account]["aws"].put_object("thousand", f"r1/{number}", b"")
    handler(BUCKET).delete(aws, "thousand", state)
    assert "thousand" not in {bucket["Name"] for bucket in aws.s3.list_buckets()["Buckets"]}


def test_every_handler_names_the_source_of_its_replacement_table() -> None:
    assert all(
        each.source.startswith(("ec2/", "events/", "iam/", "logs/", "s3/", "scheduler/", "sfn/", "sns/"))
        for each in HANDLERS.values()
    )
