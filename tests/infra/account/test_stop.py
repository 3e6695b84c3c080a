"""`gpufleet stop` writes its request once a node can read it, and writes nothing else."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpufleet.infra.account import aws, run_folder, status, stop
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import declare_bucket, declare_fleet, put

NOW = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)


def asked(stack: StackDefinition) -> None:
    stop.ask(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW)


def objects(stack: StackDefinition) -> list[str]:
    folder = run_folder.find_folder(aws.client("s3", "us-east-2"), stack)
    return [each.name for each in folder.objects()] if folder else []


def test_the_request_lies_beside_the_run_and_status_says_so(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "run.json", {})
    asked(stack)
    (node,) = cloud.instances()
    assert f"{node.id} looks every 60 s, finishes its step, saves, leaves final/" in capsys.readouterr().out
    assert objects(stack) == ["run.json", "stop.json"]
    lines = status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW)
    assert "asked       to end, by you at 2026-11-21T12:10:00Z" in list(lines)


def test_where_no_node_runs_it_says_what_the_request_will_cost(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.no_capacity()
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "run.json", {})
    asked(stack)
    said = capsys.readouterr().out
    assert "No node runs. The next one looks every 60 s: it leaves what the last checkpoint has" in said
    assert "If you do not want to pay for a node, run `pulumi destroy`: the bucket stays" in said


def test_somebody_elses_node_is_not_said_to_heed_it(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud, owner="somebody")
    cloud.tick()
    cloud.no_capacity()
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "run.json", {})
    asked(stack)
    assert "No node runs. The next one looks" in capsys.readouterr().out


def test_of_a_fleet_at_zero_no_node_is_promised(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = declare_fleet(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    put(cloud, declare_bucket(cloud), "run.json", {})
    asked(stack)
    said = capsys.readouterr().out
    assert (
        "the fleet is at 0, so no node will act on the request. `gpufleet wait small-growth` says how to start one."
        in said
    )
    assert "The next one" not in said


@pytest.mark.parametrize("bucket", [None, "bob"])
def test_a_run_whose_bucket_is_gone_asks_nobody_elses_to_end(
    cloud: Cloud, stack: StackDefinition, bucket: str | None
) -> None:
    declare_fleet(cloud)
    if bucket:
        put(cloud, declare_bucket(cloud, owner=bucket), "run.json", {})
    with pytest.raises(AwsRefused, match="no bucket of owner you holds run r1 of small-growth"):
        asked(stack)


def test_a_run_that_is_over_is_not_asked(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    asked(stack)
    assert "run r1 of small-growth is over already: finished, 2026-11-21T12:01:00Z" in capsys.readouterr().out
    assert objects(stack) == ["done.json"]


@pytest.mark.parametrize("owner", [None, "somebody"])
def test_without_a_fleet_of_ones_own_nothing_is_asked(cloud: Cloud, stack: StackDefinition, owner: str | None) -> None:
    put(cloud, declare_bucket(cloud), "run.json", {})
    if owner:
        declare_fleet(cloud, owner=owner)
    with pytest.raises(
        AwsRefused, match="one of somebody, who must ask with their own file" if owner else "there is no fleet of"
    ):
        asked(stack)
    assert objects(stack) == ["run.json"]


@pytest.mark.parametrize("before", [None, "r0"])
def test_before_any_up_it_says_that_there_is_nothing_to_stop(
    cloud: Cloud, stack: StackDefinition, before: str | None
) -> None:
    if before:
        put(cloud, declare_bucket(cloud), "run.json", {}, run=before)
    with pytest.raises(AwsRefused) as refused:
        asked(stack)
    assert str(refused.value).startswith(
        "nothing to stop: there is no run r1 of small-growth in us-east-2: run `pulumi up` first."
    )
    assert ("`--run ID` names an earlier one: r0." in str(refused.value)) is bool(before)


def test_a_second_request_says_when_the_first_was_made_and_leaves_it(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "run.json", {})
    asked(stack)
    capsys.readouterr()
    later = NOW.replace(minute=30)
    stop.ask(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), later)
    said = capsys.readouterr().out
    assert said.startswith(f"asked already, by you at 2026-11-21T12:10:00Z: s3://{bucket}/r1/stop.json\n")
    assert "looks every 60 s" in said
    lines = status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), later)
    assert "asked       to end, by you at 2026-11-21T12:10:00Z" in list(lines)


def test_the_end_of_somebody_elses_run_is_not_taken_for_this_ones(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud, owner="bob"), "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    with pytest.raises(AwsRefused, match="no bucket of owner you holds run r1"):
        asked(stack)
    assert "over already" not in capsys.readouterr().out
