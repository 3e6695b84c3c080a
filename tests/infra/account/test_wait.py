"""`gpufleet wait`: a fleet that gets no node is explained, with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpufleet.infra.account import wait as wait_module
from gpufleet.infra.account.fleet import find_instances
from gpufleet.infra.account.wait import WaitLoop, explain
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.rehearsal.account import ami_id
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.fleet import Event
from tests.infra.commands_world import AMI, EXPIRES, advance, declare_bucket, declare_fleet, put, waited


def test_a_node_is_named_with_type_and_zone(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    code, said = waited(cloud, stack)
    (node,) = cloud.instances()
    assert code == 0
    assert f"node {node.id}, g5.2xlarge in us-east-2a runs since 2026-11-21" in said


def test_a_second_fleet_of_the_run_that_no_stack_knows_is_named_with_how_to_end_it(
    cloud: Cloud, stack: StackDefinition
) -> None:
    lost = declare_fleet(cloud)
    declare_fleet(cloud, owner="bob")
    assert waited(cloud, stack)[0] == 0  # the node of another owner does not count
    cloud.client("ec2").delete_launch_template(LaunchTemplateName="gpufleet-small-growth-r1-you")
    advance(cloud, 60)
    kept = declare_fleet(cloud)
    code, said = waited(cloud, stack)
    assert code == 1
    assert said.startswith("2 fleets of run r1 launch nodes, each billed.")
    for fleet in (lost, kept):
        assert f"--terminate-instances --fleet-ids {fleet} --region us-east-2   # made 2026-11-2" in said
    cloud.client("ec2").modify_fleet(FleetId=kept, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    assert waited(cloud, stack)[0] == 0  # of the one that launches: with another put aside there is one node
    cloud.client("ec2").modify_fleet(FleetId=kept, TargetCapacitySpecification={"TotalTargetCapacity": 1})
    cloud.client("ec2").delete_fleets(FleetIds=[lost], TerminateInstances=True)
    assert waited(cloud, stack)[0] == 0


def test_a_fallback_is_no_second_fleet_and_its_node_is_the_run_s(cloud: Cloud, stack: StackDefinition) -> None:
    late = replace(stack, fleet=replace(stack.fleet, fallback="on-demand"))
    declare_fleet(cloud)
    other = declare_fleet(cloud, capacity="on-demand", target=0)
    assert waited(cloud, late)[0] == 0
    cloud.launcher.no_spot = True
    cloud.kill(cloud.instances()[0].id)
    code, said = waited(cloud, late)
    assert code == 1
    assert "limits.deadline" not in said
    cloud.client("ec2").modify_fleet(FleetId=other, TargetCapacitySpecification={"TotalTargetCapacity": 1})
    code, said = waited(cloud, late)
    assert code == 0
    assert f"node {cloud.instances()[-1].id}, g5.2xlarge" in said
    assert waited(cloud, stack)[0] == 1  # without a fallback this would be a second fleet of the run


def test_a_run_without_a_node_in_either_market_says_so(cloud: Cloud, stack: StackDefinition) -> None:
    late = replace(stack, fleet=replace(stack.fleet, fallback="on-demand"))
    cloud.no_capacity()
    declare_fleet(cloud)
    declare_fleet(cloud, capacity="on-demand")
    code, said = waited(cloud, late)
    assert code == 1
    assert "The hour has come to go on on demand (fleet.fallback): both fleets look for a node." in said
    assert "Neither on spot nor on demand: limits.deadline may be missed." in said


def no_quota(cloud: Cloud) -> None:
    cloud.quotas["L-3819A6DF"] = 0


def no_role(cloud: Cloud) -> None:
    cloud.client("iam").delete_role(RoleName="AWSServiceRoleForEC2Fleet")


def no_capacity(cloud: Cloud) -> None:
    cloud.no_capacity()


def no_ami(cloud: Cloud) -> None:
    cloud.deregister_ami(ami_id("us-east-2", AMI))


@pytest.mark.parametrize(
    ("break_it", "event", "cause", "remedy", "at_once"),
    [
        pytest.param(
            no_quota,
            "spotInstanceCountLimitExceeded",
            "the account's vCPU quota",
            "gpufleet doctor",
            False,
            id="quota 0",
        ),
        pytest.param(
            no_role, "iamFleetRoleInvalid", "the fleet may not launch", "ec2fleet.amazonaws.com", True, id="role"
        ),
        pytest.param(
            no_capacity, "allLaunchSpecs", "AWS has no free g5.2xlarge", "keeps trying", False, id="no capacity"
        ),
        pytest.param(no_ami, "allLaunchSpecs", "the AMI does not exist", "--pin", True, id="AMI gone"),
    ],
)
def test_why_there_is_no_node_is_said_once_with_what_to_do(
    cloud: Cloud,
    stack: StackDefinition,
    break_it: Callable[[Cloud], None],
    event: str,
    cause: str,
    remedy: str,
    at_once: bool,
) -> None:
    declare_fleet(cloud)
    break_it(cloud)
    started = cloud.clock.now()
    code, said = waited(cloud, stack, timeout_s=120)
    assert code == 1
    assert event in said
    assert said.count(f"That means {cause}") == 1
    assert remedy in said
    assert ("Waiting cannot help" in said) is at_once
    assert ((cloud.clock.now() - started).total_seconds() < 1) is at_once


@pytest.mark.parametrize("kind", ["error", "service-error"])
def test_an_error_is_explained_however_aws_spells_its_kind(stack: StackDefinition, kind: str) -> None:
    """The EC2 user guide shows the first in DescribeFleetHistory's answer, the API model allows only the second."""
    said: list[str] = []
    watch = WaitLoop(definition=stack, ec2=None, s3=None, say=said.append)
    watch._event({"EventType": kind, "EventInformation": {"EventSubType": "spotInstanceCountLimitExceeded"}})
    watch._event({"EventType": "fleet-change", "EventInformation": {"EventSubType": "terminated"}})
    assert said[0] == "spotInstanceCountLimitExceeded"
    assert said[1].startswith("  That means the account's vCPU quota")
    assert len(said) == 2


def test_a_reason_beyond_the_first_answer_of_a_long_history_is_found(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    no_role(cloud)
    cloud.fleets.fleets[fleet].history += [Event(cloud.clock.now(), "information", "odd")] * 1000
    assert "Waiting cannot help: the fleet may not launch" in waited(cloud, stack)[1]


def test_a_wait_that_times_out_ends_with_the_reasons_and_the_next_command(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    cloud.no_capacity()
    code, said = waited(cloud, stack, timeout_s=30)
    assert code == 1
    heading, reason, _ = said.splitlines()[-3:]
    assert heading == "No node after 30 s."
    assert reason.startswith("  - AWS has no free g5.2xlarge in us-east-2a, us-east-2b right now. Wait: ")
    assert said.endswith("`gpufleet wait small-growth` again, or `pulumi destroy`.")


@pytest.mark.parametrize(
    ("described", "at_once", "last"),
    [
        ("Your account is being verified. (PendingVerification)", False, "AWS is still verifying this account. Wait"),
        ("This account is blocked and not recognized as valid. (Blocked)", True, "it is blocked"),
        ("You are not subscribed to this service. (OptInRequired)", True, "lacks a subscription that the AMI needs"),
        ("You are not authorized to perform this operation. (UnauthorizedOperation)", True, "a policy of the account"),
        ("Volume of size 75GB is smaller than its snapshot (InvalidBlockDeviceMapping)", True, "accept the disks"),
        ("The gp3 storage limit of this region is exceeded. (VolumeLimitExceeded)", True, "quota for disks"),
        (
            "Something that AWS says since yesterday",
            False,
            "AWS says: launchSpecTemporarilyBlacklisted: Something that",
        ),
    ],
)
def test_what_aws_said_stands_last_and_what_cannot_pass_ends_the_wait_at_once(
    cloud: Cloud, stack: StackDefinition, described: str, at_once: bool, last: str
) -> None:
    fleet = cloud.fleets.fleets[declare_fleet(cloud)]
    cloud.no_capacity()
    fleet.history.append(Event(cloud.clock.now(), "error", "launchSpecTemporarilyBlacklisted", described))
    started = cloud.clock.now()
    code, said = waited(cloud, stack, timeout_s=90)
    assert code == 1
    assert ((cloud.clock.now() - started).total_seconds() < 1) is at_once
    assert any(last in line for line in said.splitlines()[-4:])
    assert "gives no reason" not in said


@pytest.mark.parametrize(
    ("code", "message", "at_once", "last"),
    [
        (
            "Client.VolumeLimitExceeded",
            "Volume limit exceeded",
            True,
            "Waiting cannot help: the account's quota for disks",
        ),
        ("Server.Odd", "nobody knows", False, "AWS says: Server.Odd: nobody knows"),
        ("Client.InstanceInitiatedShutdown", "Instance initiated shutdown", False, "started and ended"),
    ],
)
def test_nodes_that_end_at_launch_are_told_with_their_reason_and_that_each_start_is_billed(
    cloud: Cloud,
    stack: StackDefinition,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    message: str,
    at_once: bool,
    last: str,
) -> None:
    real = find_instances

    def instances(ec2: Any, filters: Any) -> list[dict[str, Any]]:
        found = real(ec2, filters)
        for each in found:
            if each["State"]["Name"] == "terminated":
                each["StateReason"] = {"Code": code, "Message": message}
        return found

    monkeypatch.setattr(wait_module, "find_instances", instances)
    declare_fleet(cloud)

    def kill() -> None:
        cloud.tick()
        for each in cloud.instances():
            if not each.ended_at:
                cloud.launcher.terminate(each.id)
        cloud.tick()

    kill()
    found, said = waited(cloud, stack, timeout_s=60, meanwhile=kill)
    assert found == 1
    assert ("Waiting cannot help" in said) is at_once
    assert any(last in line for line in said.splitlines()[-4:])
    assert "once a node runs, at least a minute is billed" in said
    assert "Nothing is billed" not in said


def test_a_run_that_is_done_is_no_failure(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "finished", "detail": "3000 steps"})
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    assert waited(cloud, stack) == (
        0,
        "the run is over: finished. 3000 steps\nNext: `gpufleet results small-growth`, then `pulumi destroy`.",
    )


@pytest.mark.parametrize(("at", "code"), [("2026-11-21T11:50:00Z", 1), ("2026-11-21T11:59:00Z", 0)])
def test_a_fleet_that_goes_on_after_its_run_is_named_with_how_to_end_it(
    cloud: Cloud, stack: StackDefinition, at: str, code: int
) -> None:
    fleet = declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "finished", "at": at})
    found, said = waited(cloud, stack)
    assert found == code
    last = f"  aws ec2 delete-fleets --terminate-instances --fleet-ids {fleet} --region us-east-2"
    assert (said.splitlines()[-1] == last) is bool(code)


def test_a_run_that_is_done_is_over_though_aws_has_forgotten_its_fleet(cloud: Cloud, stack: StackDefinition) -> None:
    """Another `pulumi up` would begin it anew: a destroy forgets the ids that were used."""
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "finished"})
    code, said = waited(cloud, stack)
    assert (code, said.splitlines()[0]) == (0, "the run is over: finished.")


def test_another_owners_fleet_is_not_to_be_ended_because_my_run_is_over(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud, owner="bob")
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "finished", "at": "2026-11-20T12:00:00Z"})
    code, said = waited(cloud, stack)
    assert code == 0
    assert "delete-fleets" not in said


@pytest.mark.parametrize("capacity", [0, 1])
def test_my_run_is_not_over_because_another_owners_is(cloud: Cloud, stack: StackDefinition, capacity: int) -> None:
    """`run_folder` returns the other owner's folder if my own bucket is gone."""
    fleet = declare_fleet(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": capacity})
    put(cloud, declare_bucket(cloud, owner="bob"), "done.json", {"reason": "finished", "at": "2026-11-20T12:00:00Z"})
    said = waited(cloud, stack)[1]
    assert "the run is over" not in said.lower()
    assert "delete-fleets" not in said


def test_a_fleet_at_zero_without_a_done_marker_is_a_failure(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    code, said = waited(cloud, stack)
    assert code == 1
    assert "no done marker" in said
    *_, fleet_id, _, capacity = said.splitlines()[-1].split()
    assert fleet_id == fleet
    _, _, wanted = capacity.partition("=")
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": int(wanted)})
    assert waited(cloud, stack)[0] == 0


def test_the_fleet_of_a_stage_at_zero_waits_for_the_stage_before(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    code, said = waited(cloud, replace(stack, before=("prepare",)))
    assert code == 1
    assert "no done marker" not in said
    assert "The fleet keeps trying" in said


def test_a_stage_that_will_not_begin_is_not_waited_for(cloud: Cloud, stack: StackDefinition) -> None:
    """The run was asked to end during the stage before it."""
    fleet, bucket = declare_fleet(cloud), declare_bucket(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    put(cloud, bucket, "stop.json", {"schema": 1, "by": "you", "at": "2026-11-21T11:59:00Z"})
    stage = replace(stack, before=("prepare",))
    code, said = waited(cloud, stage)
    assert code == 0
    assert said.startswith("the run was asked to end before its stage")
    put(cloud, bucket, "attempts/i-1.json", {"booted_at": "2026-11-21T11:59:30Z"})  # it has begun nevertheless
    assert waited(cloud, stage)[0] == 1


def test_a_stage_that_is_done_names_the_next_one(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "finished", "detail": "3000 steps"})
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    code, said = waited(cloud, replace(stack, next_stage="judge"))
    assert (code, said.partition(";")[2]) == (0, " judge is next.")


def test_a_deleted_fleet_launches_nothing_more(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    code, said = waited(cloud, stack)
    assert code == 1
    assert "launches nothing more" in said


@pytest.mark.parametrize("capacity", [1, 0])
@pytest.mark.parametrize("state", ["active", "deleted"])
def test_an_expired_fleet_is_not_waited_for_whatever_state_aws_shows_it_in(
    cloud: Cloud, stack: StackDefinition, state: str, capacity: int
) -> None:
    fleet = declare_fleet(cloud)
    cloud.no_capacity()
    cloud.fleets.expired_state = state
    capacities = {"TotalTargetCapacity": capacity}
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification=capacities)
    assert isinstance(cloud.clock, ManualClock)
    advance(cloud, (EXPIRES - cloud.clock.now()).total_seconds())
    code, said = waited(cloud, stack, timeout_s=90)
    assert code == 1
    assert "it launches nothing more." in said
    assert "waiting for fleet" not in said
    assert "TotalTargetCapacity" not in said


def test_of_two_expired_fleets_none_is_said_to_launch_nodes(cloud: Cloud, stack: StackDefinition) -> None:
    lost = declare_fleet(cloud)
    cloud.tick()  # the fleet has its node before its template is deleted
    cloud.client("ec2").delete_launch_template(LaunchTemplateName="gpufleet-small-growth-r1-you")
    fleets = lost, declare_fleet(cloud)
    cloud.fleets.expired_state = "active"
    assert waited(cloud, stack)[1].startswith("2 fleets of run r1 launch nodes")
    assert isinstance(cloud.clock, ManualClock)
    advance(cloud, (EXPIRES - cloud.clock.now()).total_seconds())
    cloud.client("ec2").terminate_instances(InstanceIds=[node.id for node in cloud.instances()])
    cloud.tick()
    code, said = waited(cloud, stack)
    assert code == 1
    assert re.match(rf"fleet ({'|'.join(fleets)}) is expired: it launches nothing more", said)


def test_a_fleet_of_another_run_is_not_taken_for_ours(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud, run="r0")
    with pytest.raises(AwsRefused, match=r"no fleet of run r1 .* `pulumi up` first. This stack has fleets of r0"):
        waited(cloud, stack)


def test_a_node_that_ended_and_was_replaced_is_told(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    cloud.tick()
    (first,) = cloud.instances()
    cloud.kill(first.id)
    code, said = waited(cloud, stack)
    assert code == 0
    assert f"node {first.id} has ended" in said
    assert f"node {cloud.instances()[1].id}, " in said


@pytest.mark.parametrize(
    ("sub_type", "description", "cause", "final"),
    [
        ("spotInstanceCountLimitExceeded", "", "quota", False),
        ("launchSpecTemporarilyBlacklisted", "g5: VcpuLimitExceeded: more vCPU capacity than allowed", "quota", False),
        ("launchSpecTemporarilyBlacklisted", "InsufficientInstanceCapacity", "no free", False),
        ("launchSpecUnusable", "", "ceiling", False),
        ("fleetProgressHalted", "", "ceiling", False),
        ("iamFleetRoleInvalid", "", "service-linked", True),
        ("launchSpecTemporarilyBlacklisted", "Not authorized for ServiceLinkedRoleCreation", "service-linked", True),
        (
            "allLaunchSpecsTemporarilyBlacklisted",
            "Value (p) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
            "a moment ago",
            False,
        ),
        ("launchSpecTemporarilyBlacklisted", "InvalidAMIID.NotFound", "AMI", True),
        ("launchSpecTemporarilyBlacklisted", "InvalidSnapshot.NotFound", "snapshot", True),
        ("", "Client.InternalError: Client error on launch", "encryption key", True),
        (
            "launchSpecTemporarilyBlacklisted",
            "Unsupported: not supported in your requested Availability Zone",
            "offer",
            False,
        ),
        ("launchSpecTemporarilyBlacklisted", "InvalidSubnetID.NotFound", "network", True),
        ("spotFleetRequestConfigurationInvalid", "something new", "does not accept", False),
    ],
)
def test_every_known_event_has_a_cause(
    stack: StackDefinition, sub_type: str, description: str, cause: str, final: bool
) -> None:
    reason = explain(sub_type, description, stack)
    assert reason is not None
    assert cause in reason.cause
    assert reason.final is final
    assert reason.remedy


def test_what_is_not_known_is_not_guessed(stack: StackDefinition) -> None:
    assert explain("registerWithLoadBalancersFailed", "odd", stack) is None


@pytest.mark.parametrize("gone", ["InvalidSubnetID.NotFound", "InvalidGroup.NotFound", "Invalid IAM Instance Profile"])
def test_what_was_deleted_under_a_fleet_comes_back_with_a_new_run_alone(stack: StackDefinition, gone: str) -> None:
    """`up` makes the deleted resource again under another id, and does not change the fleet of a run that has begun."""
    reason = explain("launchSpecTemporarilyBlacklisted", gone, stack)
    assert reason is not None
    assert "give run.id a new value" in reason.remedy.replace("Give", "give")
