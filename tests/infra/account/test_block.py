"""What the commands say of a run in a Capacity Block: before `up`, while its fleet lacks nodes, and when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpufleet.infra.account import aws, checks, leftovers, quotas, status
from gpufleet.infra.account.checks import Check
from gpufleet.infra.definition.model import CapacityBlock, StackDefinition
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.launch import Reservation
from tests.infra.commands_world import RESERVED, advance, declare_bucket, declare_fleet, has_block, put, waited


@pytest.fixture
def in_block(stack: StackDefinition, cloud: Cloud) -> StackDefinition:
    """The stack in a block that the account has bought."""
    bought = has_block(cloud)
    block = CapacityBlock(reservation=RESERVED, start=bought.start, end=bought.end, fee_usd=Decimal(100))
    return replace(stack, fleet=replace(stack.fleet, capacity="block", zones=("us-east-2a",), block=block))


def checked(definition: StackDefinition) -> list[Check]:
    return list(checks.block(definition, aws.client("ec2", "us-east-2")))


def test_doctor_finds_the_block_as_the_file_has_it(cloud: Cloud, in_block: StackDefinition) -> None:
    (found,) = checked(in_block)
    assert found.state == "ok"
    assert found.found.startswith(f"{RESERVED}, active: 1 x g5.2xlarge in us-east-2a, 2026-")
    assert list(quotas.vcpu_quotas(in_block, None)) == []  # instances in a block are counted separately
    assert list(checks.service_roles(in_block, None)) == []  # the user who runs `up` launches into the block
    assert list(checks.block(replace(in_block, fleet=in_block.fleet.bought_as("spot")), None)) == []


def changed(**values: object) -> Callable[[Cloud], None]:
    def change(cloud: Cloud) -> None:
        cloud.has_block(replace(cloud.launcher.blocks[RESERVED], **values))  # type: ignore[arg-type]

    return change


def moved(cloud: Cloud) -> None:
    was = cloud.launcher.blocks[RESERVED]
    changed(start=was.start + timedelta(hours=24), end=was.end + timedelta(hours=24))(cloud)


def ended(cloud: Cloud) -> None:
    advance(cloud, 3 * 24 * 3600)


def in_use(cloud: Cloud) -> None:
    declare_fleet(cloud, run="r0", capacity="capacity-block")


@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        (lambda cloud: cloud.launcher.blocks.clear(), ["does not exist in us-east-2"], "fleet.block.reservation"),
        (changed(type="g6.xlarge"), ["fleet.instance_types says g5.2xlarge, "], "Write g6.xlarge."),
        (changed(zone="us-east-2b"), ["fleet.zones says us-east-2a, "], "Write us-east-2b."),
        (moved, ["fleet.block.start says 2026-", "fleet.block.end says 2026-"], "Write 2026-"),
        (ended, ["is expired"], "Name another block"),
        (
            in_use,
            ["has 1 instance, 0 of them free or used by this run, which needs 1"],
            "End other instances in the block",
        ),
    ],
    ids=["none", "type", "zone", "dates", "over", "in use"],
)
def test_doctor_says_what_is_wrong_with_it(
    cloud: Cloud, in_block: StackDefinition, change: Callable[[Cloud], None], said: list[str], fix: str
) -> None:
    change(cloud)
    found = checked(in_block)
    assert [each.state for each in found] == ["problem"] * len(said)
    for each, words in zip(found, said, strict=True):
        assert words in each.found
        assert fix in each.fix


def test_more_nodes_than_it_has_and_another_kind_of_reservation_are_problems(
    cloud: Cloud, in_block: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = checked(replace(in_block, fleet=replace(in_block.fleet, nodes=2)))
    assert "this run, which needs 2" in found.found
    ec2 = aws.client("ec2", "us-east-2")
    told = ec2.describe_capacity_reservations(CapacityReservationIds=[RESERVED])

    class Other:
        def describe_capacity_reservations(self, **asked: object) -> object:
            return {"CapacityReservations": [{**told["CapacityReservations"][0], "ReservationType": "default"}]}

    (found,) = checks.block(in_block, Other())
    assert found.found == f"{RESERVED} is a reservation of another kind than a Capacity Block"


def test_doctor_takes_the_run_s_own_nodes_for_no_others(cloud: Cloud, in_block: StackDefinition) -> None:
    declare_fleet(cloud, capacity="capacity-block")
    (found,) = checked(in_block)
    assert found.state == "ok"


def test_wait_names_the_node_and_is_done(cloud: Cloud, in_block: StackDefinition) -> None:
    declare_fleet(cloud, capacity="capacity-block")
    code, said = waited(cloud, in_block)
    assert code == 0
    assert f"node {cloud.instances()[0].id}, g5.2xlarge in us-east-2a runs since" in said


def test_wait_says_in_aws_s_words_why_there_are_too_few_and_how_to_begin_again(
    cloud: Cloud, in_block: StackDefinition
) -> None:
    two = replace(in_block, fleet=replace(in_block.fleet, nodes=2))
    fleet = declare_fleet(cloud, capacity="capacity-block", target=2)
    code, said = waited(cloud, two)
    assert code == 1
    assert "AWS says: InsufficientInstanceCapacity: " in said
    assert f"fleet {fleet} has 1 of 2 nodes, and asks for no more" in said
    assert f"--terminate-instances --fleet-ids {fleet} --region us-east-2" in said


def test_a_lost_node_is_told_by_wait_and_status(cloud: Cloud, in_block: StackDefinition) -> None:
    fleet, bucket = declare_fleet(cloud, capacity="capacity-block"), declare_bucket(cloud)
    put(cloud, bucket, "run.json", {})
    cloud.kill(cloud.instances()[0].id)
    advance(cloud, 3600)
    cloud.tick()
    code, said = waited(cloud, in_block)
    assert code == 1
    assert f"fleet {fleet} has 0 of 1 node, and asks for no more" in said
    ec2, s3 = aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2")
    lines = list(status.report(in_block, ec2, s3, cloud.clock.now()))
    assert any("the fleet has 0 of 1 node and replaces none: gpufleet wait" in line for line in lines)


def test_a_finished_run_is_over_for_wait_though_nodes_lack(cloud: Cloud, in_block: StackDefinition) -> None:
    declare_fleet(cloud, capacity="capacity-block")
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "run.json", {})
    put(cloud, bucket, "done.json", {"reason": "finished", "instance": "i-earlier"})
    cloud.kill(cloud.instances()[0].id)
    cloud.tick()
    code, said = waited(cloud, in_block)
    assert code == 0
    assert "the run is over: finished" in said


def test_a_node_left_over_in_a_block_costs_nothing_itself(cloud: Cloud, in_block: StackDefinition) -> None:
    declare_fleet(cloud, capacity="capacity-block")
    (node,) = (each for each in leftovers.look(in_block, aws.client, cloud.clock.now()) if each.kind == "instance")
    assert node.usd_per_month == 0
    assert node.note.endswith("its block is already paid")


def test_a_fleet_that_only_stays_in_its_state_is_not_left_over(cloud: Cloud, in_block: StackDefinition) -> None:
    fleet = declare_fleet(cloud, capacity="capacity-block")

    def found() -> list[str]:
        return [each.id for each in leftovers.look(in_block, aws.client, cloud.clock.now()) if each.kind == "fleet"]

    assert found() == [fleet]
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    cloud.tick()
    assert cloud.fleets.fleets[fleet].state == "deleted_terminating"
    assert found() == []


def test_an_instant_fleet_is_deleted_with_its_nodes_or_not_at_all(cloud: Cloud) -> None:
    bought: Reservation = has_block(cloud)
    fleet, ec2 = declare_fleet(cloud, capacity="capacity-block"), cloud.client("ec2")
    refused = ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=False)
    assert [each["FleetId"] for each in refused["UnsuccessfulFleetDeletions"]] == [fleet]
    assert cloud.launcher.in_block(bought.id) == 1
