"""`gpufleet status` reports on a run that is up, is over, or has not begun."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.account import aws, status
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import Goal, StackDefinition
from gpufleet.job.contract.aws import SWITCH
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import EXPIRES, TAGS, declare_bucket, declare_fleet, put
from tests.receipt_tree import receipt

NOW = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)
BEAT = b'{"ts":"2026-11-21T12:00:00Z","step":1}\n' * 200 + (
    b'{"ts":"2026-11-21T12:08:00Z","step":120,"phase":"moe","spent_usd":0.42,"loss":2.5,"tok_s":51072}\n{"ts": torn'
)


def stated(stack: StackDefinition) -> dict[str, str]:
    """The report's lines by their first word; of several such lines the last one."""
    lines = status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW)
    return {line[:12].strip(): line[12:] for line in lines}


def test_status_tells_fleet_node_progress_and_money(cloud: Cloud, stack: StackDefinition) -> None:
    fleet, bucket = declare_fleet(cloud), declare_bucket(cloud)
    cloud.tick()
    (node,) = cloud.instances()
    put(cloud, bucket, f"heartbeat/{node.id}.jsonl", BEAT)
    put(cloud, bucket, f"attempts/{node.id}.json", {"instance": node.id, "type": "g5.2xlarge", "booted_at": "12:00"})
    for step in (100, 90):
        put(cloud, bucket, f"ckpt/step_{step:08d}/manifest.json", {})
        put(cloud, bucket, f"ckpt/step_{step:08d}/model.pt", b"x")
    put(cloud, bucket, "ckpt/step_00000110/model.pt", b"not published")
    put(cloud, bucket, "ckpt/step_before/manifest.json", b"put there by hand")
    put(cloud, bucket, "best.json", {"step": 90})
    told = stated(stack)
    assert told["fleet"].startswith(f"{fleet}, active, wants 1 node, ends at the latest 2126-11-23 00:00 UTC")
    assert told["node"].startswith(f"{node.id}, g5.2xlarge spot in us-east-2a, running since 2026-11-21")
    assert told["attempt"].endswith("running")
    assert told["heartbeat"] == "2026-11-21T12:08:00Z, 120 s ago"
    assert told["progress"] == "phase moe, step 120, loss 2.5000, 51,072 tokens/s"
    assert told["spent"] == "$0.4200 of $3.00"
    assert "no spot price" not in " ".join(told.values())
    assert told["checkpoint"] == "steps 90, 100, best 90"
    assert "done" not in told


def test_the_first_line_of_status_answers_and_details_are_under_all(
    cloud: Cloud, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, bucket = declare_fleet(cloud), declare_bucket(cloud)
    cloud.tick()
    (node,) = cloud.instances()
    assert main(["status", "small-growth"]) == 0
    assert ": a node runs, but has not reported yet\n" in capsys.readouterr().out
    put(cloud, bucket, f"heartbeat/{node.id}.jsonl", BEAT)
    put(cloud, bucket, f"attempts/{node.id}.json", {"instance": node.id, "type": "g5.2xlarge", "booted_at": "12:00"})
    assert main(["status", "small-growth"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    state = "phase moe, step 120, loss 2.5000, 51,072 tokens/s"
    assert first == f"small-growth, run r1, us-east-2: {state}, 0.4200 of 3.00 USD spent"
    assert {"fleet", "node", "heartbeat", "checkpoint"} <= {line.split()[0] for line in lines}
    assert re.fullmatch(r"all +\d more lines: `gpufleet status small-growth --all`", lines[-1])
    assert len(lines) < 12
    assert main(["status", "small-growth", "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    cloud.tick()
    assert main(["status", "small-growth"]) == 0
    assert f": no node; last {state}, 0.4200" in capsys.readouterr().out
    put(cloud, bucket, "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    assert main(["status", "small-growth"]) == 0
    assert capsys.readouterr().out.startswith("small-growth, run r1, us-east-2: finished, 2026-11-21T12:01:00Z, 0.4200")


def test_status_tells_of_the_fallback_and_its_hour(cloud: Cloud, stack: StackDefinition) -> None:
    late = replace(stack, fleet=replace(stack.fleet, fallback="on-demand"))
    declare_fleet(cloud)
    other = declare_fleet(cloud, capacity="on-demand", target=0)
    scheduler, group = cloud.client("scheduler"), "gpufleet-small-growth-1"
    owned = [{"Key": key, "Value": value} for key, value in TAGS.items()]
    scheduler.create_schedule_group(Name=group, Tags=owned)
    target = {"Arn": "arn:aws:states:us-east-2:1:stateMachine:x", "RoleArn": "arn:aws:iam::1:role/r"}
    asked = {"Name": SWITCH, "GroupName": group, "FlexibleTimeWindow": {"Mode": "OFF"}, "Target": target}
    scheduler.create_schedule(**asked, ScheduleExpression="at(2026-11-22T09:00:00)")

    def said(now: datetime) -> str:
        ec2, s3 = cloud.client("ec2"), cloud.client("s3")
        return "\n".join(status.report(late, ec2, s3, now, aws.client("scheduler", "us-east-2")))

    assert f"and {other}, on-demand, stands by" in said(NOW)
    assert "to on demand: at 2026-11-22 09:00 UTC, unless a node that trains changes the hour" in said(NOW)
    assert "to on demand: since 2026-11-22 09:00 UTC, unless AWS has no capacity there" in said(NOW + timedelta(days=1))
    scheduler.update_schedule(**asked, ScheduleExpression="at(2026-11-22T09:00:00)", State="DISABLED")
    assert "to on demand: off, as the run is over or the cost does not fit within its limits" in said(NOW)
    cloud.client("ec2").modify_fleet(FleetId=other, TargetCapacitySpecification={"TotalTargetCapacity": 1})
    assert "looks for a node too" in said(NOW)


def test_status_says_how_much_of_the_dollars_is_at_the_ceiling_of_an_untold_spot_price(
    cloud: Cloud, stack: StackDefinition
) -> None:
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "heartbeat/i-1.jsonl", {"ts": "2026-11-21T12:08:00Z", "ceiling_s": "900.000"})
    assert stated(stack)[""] == "0.25 h of it at the on-demand price: AWS gives no spot price"


def test_status_tells_who_trains_together_who_waits_and_what_the_leader_says(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.NOW", datetime.now(UTC))
    bucket = declare_bucket(cloud)
    made = {"number": 3, "members": ["i-1", "i-2"], "addresses": ["10.0.0.1", "10.0.0.2"]}
    put(cloud, bucket, "gang/000003.json", made)
    put(cloud, bucket, "gang/000002.json", {**made, "number": 2, "members": ["i-0", "i-2"]})
    there = {"address": "10.0.0.1", "launched_at": 1.0, "since": 1_800_000_000.0}
    put(cloud, bucket, "gang/nodes/i-1.json", {**there, "instance": "i-1", "state": "busy"})
    put(cloud, bucket, "gang/nodes/i-2.json", {**there, "instance": "i-2", "state": "ready"})
    put(cloud, bucket, "heartbeat/i-1.jsonl", {"ts": "2026-11-21T12:08:00Z", "step": 120, "phase": "moe"})
    put(cloud, bucket, "heartbeat/i-2.jsonl", {"ts": "2026-11-21T12:08:30Z", "step": 119})
    lines = list(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW))
    assert "gang        generation 3: i-1 leads, with i-2" in lines
    assert "            1 of 1 wait, at most 1.21 USD an hour" in lines
    assert "            i-2 waits for the others since 2027-01-15T08:00:00.000Z, billed" in lines
    assert "progress    phase moe, step 120" in lines


def test_status_tells_how_long_a_node_took_to_its_first_step_and_how_fast_it_reaches_others(
    cloud: Cloud, stack: StackDefinition
) -> None:
    told = {"instance": "i-1", "booted_at": "12:00", "pulled_s": 252.0, "started_s": 480.0}
    told["preflight"] = {"between_gb_s": 41.26, "transport": "AWS Libfabric"}
    put(cloud, declare_bucket(cloud), "attempts/i-1.json", told)
    took = "set-up 8.0 min, image pull 4.2 min, 41.3 GB/s to the other nodes over AWS Libfabric"
    assert stated(stack)["attempt"].endswith(took)


def test_status_tells_what_a_job_warns_of(cloud: Cloud, stack: StackDefinition) -> None:
    told = {"instance": "i-1", "booted_at": "12:00", "alarm": "loss is nan from step 21 on"}
    put(cloud, declare_bucket(cloud), "attempts/i-1.json", told)
    assert stated(stack)["warning"] == "loss is nan from step 21 on"


def test_status_tells_how_its_gpus_fare(cloud: Cloud, stack: StackDefinition) -> None:
    beat = {"ts": "2026-11-21T12:08:00Z", "gpu_util": 97.0, "gpu_mem_gb": 70.12, "gpu_temp_c": 61.0, "xids": [31]}
    put(cloud, declare_bucket(cloud), "heartbeat/i-1.jsonl", beat)
    assert stated(stack)["gpu"] == "97 % used, 70.1 GB, 61 °C, Xid 31 reported by the driver"


def test_status_names_no_speed_before_steps_are_timed(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    beat = {"ts": "2026-11-21T12:00:00Z", "phase": "moe", "step": 1, "loss": 3.4657359027997265, "tok_s": None}
    put(cloud, declare_bucket(cloud), "heartbeat/i-1.jsonl", beat)
    assert stated(stack)["progress"] == "phase moe, step 1, loss 3.4657"


def test_status_says_that_a_fleet_has_expired(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    (line,) = [
        each
        for each in status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), EXPIRES)
        if each.startswith("fleet")
    ]
    assert line == f"fleet       {fleet}, active, expired 2126-11-23 00:00 UTC: it launches nothing more"


def test_status_tells_a_node_that_was_lost_from_the_one_that_took_its_place(
    cloud: Cloud, stack: StackDefinition
) -> None:
    declare_fleet(cloud)
    bucket = declare_bucket(cloud)
    cloud.tick()
    cloud.kill(cloud.instances()[0].id)
    assert isinstance(cloud.clock, ManualClock)
    cloud.clock.advance(60)
    cloud.tick()
    lost, node = cloud.instances()
    for number, each in enumerate((lost, node)):
        put(cloud, bucket, f"attempts/{each.id}.json", {"instance": each.id, "booted_at": f"12:0{number}"})
    put(cloud, bucket, f"heartbeat/{lost.id}.jsonl", BEAT)
    beat = {"ts": "2026-11-21T12:09:00Z", "step": 0, "phase": None, "loss": None, "tok_s": None, "spent_usd": "0.5"}
    put(cloud, bucket, f"heartbeat/{node.id}.jsonl", beat)
    lines = list(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW))
    assert [line.rpartition(", ")[2] for line in lines if line.startswith("attempt")] == [
        "gone without notice",
        "running",
    ]
    assert "progress    nothing logged by this node yet" in lines
    put(cloud, bucket, f"heartbeat/{node.id}.jsonl", {**beat, "step": 100})
    assert stated(stack)["progress"] == "nothing logged by this node yet; it goes on from step 100"


def test_status_says_when_the_heartbeat_has_stopped(cloud: Cloud, stack: StackDefinition) -> None:
    put(cloud, declare_bucket(cloud), "heartbeat/i-1.jsonl", b'{"ts":"2026-11-21T12:00:00Z"}\n')
    assert "that is more than 5 intervals of 60 s: see `gpufleet logs small-growth`" in stated(stack)[""]


@pytest.mark.parametrize("capacity", [1, 0])
def test_status_names_a_fleet_that_goes_on_after_its_run(cloud: Cloud, stack: StackDefinition, capacity: int) -> None:
    fleet, bucket = declare_fleet(cloud), declare_bucket(cloud)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": capacity})
    put(cloud, bucket, "heartbeat/i-1.jsonl", b'{"ts":"2026-11-21T12:00:00Z"}\n')
    put(cloud, bucket, "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    told = stated(stack).get("needless", "")
    assert told.endswith(f"--fleet-ids {fleet} --region us-east-2") is bool(capacity)
    assert ("Each is billed until it sees that the run is over" in told) is bool(capacity)


def test_status_of_a_run_that_is_done_says_what_comes_next(cloud: Cloud, stack: StackDefinition) -> None:
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "heartbeat/i-1.jsonl", b'{"ts":"2026-11-21T12:00:00Z"}\n')
    put(cloud, bucket, "done.json", {"reason": "max_usd", "detail": "$2.98 spent", "at": "2026-11-21T12:01:00Z"})
    told = stated(stack)
    assert told["fleet"].startswith("none")
    assert told["done"] == "max_usd, 2026-11-21T12:01:00Z. $2.98 spent"
    assert told["next"] == "gpufleet results small-growth; pulumi destroy; gpufleet sweep small-growth"
    assert "" not in told


def test_what_comes_next_for_an_earlier_run_names_it_and_destroys_nothing(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "heartbeat/i-1.jsonl", b'{"ts":"2026-11-21T12:00:00Z"}\n')
    path.write_text(path.read_text().replace("run: {id: r1", "run: {id: r2"))
    earlier = ["small-growth", "--run", "r1"]
    assert main(["status", *earlier]) == 0
    assert "see `gpufleet logs small-growth --run r1`" in capsys.readouterr().out
    assert main(["results", *earlier]) == 1
    assert "`gpufleet status small-growth --run r1` says more" in capsys.readouterr().out
    assert main(["stop", *earlier]) == 0
    said = capsys.readouterr().out
    assert "Next: `gpufleet logs small-growth --run r1 --follow`, `gpufleet results small-growth --run r1`.\n" in said
    put(cloud, bucket, "done.json", {"reason": "stopped", "at": "2026-11-21T12:11:00Z"})
    assert main(["status", *earlier]) == 0
    assert "next        gpufleet results small-growth --run r1\n" in capsys.readouterr().out


def test_status_of_a_deleted_fleet_promises_no_node(cloud: Cloud, stack: StackDefinition) -> None:
    fleet, bucket = declare_fleet(cloud), declare_bucket(cloud)
    put(cloud, bucket, "run.json", {})
    assert stated(stack)["heartbeat"].startswith("none yet")
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    cloud.tick()
    told = stated(stack)
    assert told["fleet"] == f"{fleet}, deleted: it launches nothing more"
    assert told["heartbeat"] == "none"


def test_status_of_a_run_put_aside_says_where_to_learn_how_it_goes_on(cloud: Cloud, stack: StackDefinition) -> None:
    fleet, bucket = declare_fleet(cloud), declare_bucket(cloud)
    put(cloud, bucket, "run.json", {})
    assert "next" not in stated(stack)
    cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
    assert stated(stack)["next"] == "the fleet is at 0: gpufleet wait small-growth says how the run goes on"
    put(cloud, bucket, "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    assert stated(stack)["next"].startswith("gpufleet results small-growth")


def test_status_says_what_else_answers_to_this_run_and_whose_it_is(cloud: Cloud, stack: StackDefinition) -> None:
    mine, theirs = declare_fleet(cloud), declare_fleet(cloud, owner="bob")
    put(cloud, declare_bucket(cloud), "run.json", {})
    put(cloud, declare_bucket(cloud, "1b2c3d4", owner="bob"), "run.json", {})
    cloud.tick()
    said = "\n".join(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW))
    assert f"fleet       {mine}, active" in said
    assert f"also {theirs}, active, owner bob; this is the one of run.owner, you" in said
    assert sum(line.endswith("owner bob") for line in said.splitlines() if line.startswith("node ")) == 1
    assert (
        "also s3://gpufleet-small-growth-1b2c3d4/r1/ (owner bob); this command uses the newest bucket of run.owner, you"
        in said
    )
    cloud.client("ec2").delete_launch_template(LaunchTemplateName="gpufleet-small-growth-r1-you")
    declare_fleet(cloud)
    said = "\n".join(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW))
    assert re.search(
        r"also fleet-.*, owner you; a run has one: gpufleet wait small-growth says how to end the oth", said
    )
    said = "\n".join(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), EXPIRES))
    assert "how to end the other" not in said  # these fleets end by themselves


def test_status_says_whose_a_fleet_is_where_there_is_none_of_ones_own(cloud: Cloud, stack: StackDefinition) -> None:
    theirs = declare_fleet(cloud, owner="bob")
    assert stated(stack)["fleet"].startswith(f"{theirs}, active, owner bob, wants 1 node")


def test_where_ones_own_bucket_is_gone_another_owners_end_ends_nothing(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    bucket = declare_bucket(cloud, owner="bob")
    put(cloud, bucket, "heartbeat/i-1.jsonl", b'{"ts":"2026-11-21T12:00:00Z"}\n')
    put(cloud, bucket, "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    told = stated(stack)
    assert told["bucket"] == f"s3://{bucket}/r1/, owner bob, whose run all lines below describe"
    assert "needless" not in told


def test_status_of_nothing_is_an_error_in_words(cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "small-growth"]) == 2
    assert (
        capsys.readouterr().err == "gpufleet: there is no run r1 of small-growth in us-east-2: run `pulumi up` first.\n"
    )


def test_status_shows_the_goals_and_at_the_end_what_came_of_them(cloud: Cloud, stack: StackDefinition) -> None:
    meant = replace(stack, goal=Goal(usd=Decimal("0.5"), results={"val_loss": Decimal(2)}))
    declare_fleet(cloud)
    bucket = declare_bucket(cloud)
    assert "goal" not in stated(stack)
    put(cloud, bucket, "job.log", b"x")
    assert stated(meant)["goal"] == "at most 0.5 USD"
    assert stated(meant)[""] == "val_loss at most 2"
    goals = [{"name": "usd", "wanted": "0.5", "reached": "1.1", "met": False}]
    put(cloud, bucket, "receipt.json", receipt(goals=goals))
    assert stated(meant)["goal"] == "at most 0.5 USD: missed by 0.6: 1.1"
