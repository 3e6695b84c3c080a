"""`gpufleet status` and `logs`: what they say of a run that is up, over, or has not begun."""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from commands_world import EXPIRES, TAGS, declare_bucket, declare_fleet, put

from infra.cli import main
from infra.commands import aws, status
from infra.commands.logs import Reader
from infra.definition import StackDefinition
from rehearsal.clock import ManualClock
from rehearsal.cloud import Cloud

NOW = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)
BEAT = b'{"ts":"2026-11-21T12:00:00Z","step":1}\n' * 200 + (
    b'{"ts":"2026-11-21T12:08:00Z","step":120,"phase":"moe","spent_usd":0.42,"loss":2.5,"tok_s":51072}\n{"ts": torn'
)


def stated(stack: StackDefinition) -> dict[str, str]:
    """The report's lines by their first word; the last of each."""
    lines = status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW)
    return {line[:12].strip(): line[12:] for line in lines}


# status --------------------------------------------------------------------------------------------------------------


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


def test_status_says_how_much_of_the_dollars_is_at_the_ceiling_of_an_untold_spot_price(
    cloud: Cloud, stack: StackDefinition
) -> None:
    declare_fleet(cloud)
    put(cloud, declare_bucket(cloud), "heartbeat/i-1.jsonl", {"ts": "2026-11-21T12:08:00Z", "ceiling_s": "900.000"})
    assert stated(stack)[""] == "0.25 h of it at the on-demand price: AWS tells no spot price"


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
    assert ("each billed until it finds that the run is over" in told) is bool(capacity)


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
    assert capsys.readouterr().out.endswith("next        gpufleet results small-growth --run r1\n")


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
    assert f"also {theirs}, active, owner bob; shown is the one of run.owner, you" in said
    assert sum(line.endswith("owner bob") for line in said.splitlines() if line.startswith("node ")) == 1
    assert "also s3://gpufleet-small-growth-1b2c3d4/r1/ (owner bob); used is the newest of run.owner, you" in said
    cloud.client("ec2").delete_launch_template(LaunchTemplateName="gpufleet-small-growth-r1-you")
    declare_fleet(cloud)
    said = "\n".join(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), NOW))
    assert re.search(
        r"also fleet-.*, owner you; a run has one: gpufleet wait small-growth says how to end the oth", said
    )
    said = "\n".join(status.report(stack, aws.client("ec2", "us-east-2"), aws.client("s3", "us-east-2"), EXPIRES))
    assert "how to end the other" not in said  # they end by themselves


def test_status_says_whose_a_fleet_is_where_there_is_none_of_ones_own(cloud: Cloud, stack: StackDefinition) -> None:
    theirs = declare_fleet(cloud, owner="bob")
    assert stated(stack)["fleet"].startswith(f"{theirs}, active, owner bob, wants 1 node")


def test_where_ones_own_bucket_is_gone_another_owners_end_ends_nothing(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    bucket = declare_bucket(cloud, owner="bob")
    put(cloud, bucket, "heartbeat/i-1.jsonl", b'{"ts":"2026-11-21T12:00:00Z"}\n')
    put(cloud, bucket, "done.json", {"reason": "finished", "at": "2026-11-21T12:01:00Z"})
    told = stated(stack)
    assert told["bucket"] == f"s3://{bucket}/r1/, owner bob, whose run all below is of"
    assert "needless" not in told


def test_status_of_nothing_is_an_error_in_words(cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "small-growth"]) == 2
    assert (
        capsys.readouterr().err == "gpufleet: there is no run r1 of small-growth in us-east-2: run `pulumi up` first.\n"
    )


# logs ----------------------------------------------------------------------------------------------------------------


def log_group(cloud: Cloud, stream: str, *messages: str) -> None:
    logs = cloud.client("logs")
    for name in ("gpufleet-small-growth-other", "gpufleet-small-growth-0a1b2c3"):
        logs.create_log_group(logGroupName=name, tags=TAGS if name.endswith("3") else {"gpufleet:stack": "other"})
    logs.create_log_stream(logGroupName="gpufleet-small-growth-0a1b2c3", logStreamName=stream)
    write(cloud, stream, *messages)


def write(cloud: Cloud, stream: str, *messages: str) -> None:
    start = int(datetime.now(UTC).timestamp() * 1000)
    events = [{"timestamp": start + n, "message": message} for n, message in enumerate(messages)]
    cloud.client("logs").put_log_events(
        logGroupName="gpufleet-small-growth-0a1b2c3", logStreamName=stream, logEvents=events
    )


def test_logs_come_from_the_stacks_own_group_and_run(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_group(cloud, "r1/i-1", "step 1", "step 2")
    cloud.client("logs").create_log_stream(logGroupName="gpufleet-small-growth-0a1b2c3", logStreamName="r0/i-0")
    write(cloud, "r0/i-0", "of an earlier run")
    assert main(["logs", "small-growth"]) == 0
    assert [line[9:] for line in capsys.readouterr().out.splitlines()] == ["step 1", "step 2"]


def test_logs_are_the_owners_where_two_have_the_same_stack_up(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_group(cloud, "r1/i-1", "mine")
    logs, theirs = cloud.client("logs"), "gpufleet-small-growth-0000000"
    logs.create_log_group(logGroupName=theirs, tags={**TAGS, "gpufleet:owner": "bob"})
    logs.create_log_stream(logGroupName=theirs, logStreamName="r1/i-2")
    event = {"timestamp": int(datetime.now(UTC).timestamp() * 1000), "message": "bob's"}
    logs.put_log_events(logGroupName=theirs, logStreamName="r1/i-2", logEvents=[event])
    assert main(["logs", "small-growth"]) == 0
    assert [line[9:] for line in capsys.readouterr().out.splitlines()] == ["mine"]


def test_logs_fall_back_to_the_bucket(cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(cloud, declare_bucket(cloud), "job.log", b"step 1\nstep 2\n")
    assert main(["logs", "small-growth"]) == 0
    assert capsys.readouterr().out == "step 1\nstep 2\n"


@pytest.mark.parametrize("where", ["a log", "a reason", "the name of an object"])
def test_nothing_that_a_terminal_would_obey_reaches_it(
    cloud: Cloud, path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket, evil = declare_bucket(cloud), "\x1b]0;mine\x07\x1b[2J\x9b1mred\u202e\rover"
    put(cloud, bucket, "job.log", evil.encode() if where == "a log" else b"step 1")
    put(cloud, bucket, "done.json", {"reason": "failed", "detail": evil, "at": evil})
    put(cloud, bucket, f"attempts/{evil if where.startswith('the name') else 'i-1'}.json", {"type": evil})
    for command in ("logs", "status", "results"):
        main([command, "small-growth"])
        said = capsys.readouterr()
        shown = said.out + said.err
        assert all(each.isprintable() for each in shown.split("\n")), repr(shown)


def test_follow_prints_each_line_once_and_ends_with_the_run(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, looks, find = declare_bucket(cloud), list[str](), aws.run_folder
    put(cloud, bucket, "run.json", {})

    def looked(s3: Any, definition: StackDefinition) -> aws.RunFolder | None:
        looks.append(definition.run.id)  # listings, which S3 charges for: not every three seconds
        return find(s3, definition)

    monkeypatch.setattr(aws, "run_folder", looked)
    log_group(cloud, "r1/i-1", "step 1")
    more = functools.partial(write, cloud, "r1/i-1", "step 2")
    end = functools.partial(put, cloud, bucket, "done.json", {"reason": "finished"})
    last = functools.partial(write, cloud, "r1/i-1", "receipt")  # the log driver is behind the done marker
    rounds = [more, end, last]
    said: list[str] = []
    reader = Reader(
        definition=stack,
        logs=aws.client("logs", "us-east-2"),
        s3=aws.client("s3", "us-east-2"),
        ec2=aws.client("ec2", "us-east-2"),
        sleep=lambda _: rounds.pop(0)(),
        say=said.append,
    )
    assert reader.follow() == 0
    assert [line[9:] for line in said[:-1]] == ["step 1", "step 2", "receipt"]
    assert said[-1] == "-- the run is done: finished"
    assert looks == ["r1"]


def test_follow_ends_when_nothing_goes_on_with_the_run(cloud: Cloud, stack: StackDefinition) -> None:
    fleet, bucket, said = declare_fleet(cloud), declare_bucket(cloud), list[str]()
    cloud.tick()
    put(cloud, bucket, "attempts/i-1.json", {"instance": "i-1"})
    log_group(cloud, "r1/i-1", "step 1")
    logs, s3, ec2 = (aws.client(service, "us-east-2") for service in ("logs", "s3", "ec2"))
    polls = iter(range(1000))

    def sleep(_: float) -> None:
        if next(polls) == 2:
            ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
            cloud.tick()
            cloud.clock.advance(600)

    reader = Reader(definition=stack, logs=logs, s3=s3, ec2=ec2, sleep=sleep, say=said.append)
    assert reader.follow() == 1
    assert next(polls) == 20
    assert said[0].endswith("step 1")
    assert said[1] == (
        "-- nothing goes on with the run: its fleet was deleted or has expired, and it has no node. "
        "`gpufleet results small-growth` makes its receipt."
    )


def test_boot_logs_are_shown_on_request(cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(cloud, declare_bucket(cloud), "boot/i-1.log", b"no GPU found\n")
    assert main(["logs", "small-growth", "--boot"]) == 0
    assert capsys.readouterr().out == "-- boot/i-1.log\nno GPU found\n"


def test_silence_says_its_reason_and_is_followed_only_where_something_may_come(
    cloud: Cloud, path: Path, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["logs", "small-growth"], ["logs", "small-growth", "--follow"], ["logs", "small-growth", "--boot"]):
        assert main(words) == 2
        assert "there is no run r1 of small-growth in us-east-2: run `pulumi up` first" in capsys.readouterr().err
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "run.json", {})
    assert main(["logs", "small-growth", "--boot"]) == 2
    assert "no node of run r1 has left a boot log yet" in capsys.readouterr().err
    assert main(["logs", "small-growth", "--follow"]) == 2
    assert "the stack of run r1 is destroyed, and its log group with it" in capsys.readouterr().err
    log_group(cloud, "r0/i-0", "of an earlier run")
    assert main(["logs", "small-growth", "--follow", "--run", "r9"]) == 2
    put(cloud, bucket, "dataset/train.bin", {}, run="inputs")
    assert main(["status", "small-growth", "--run", "r9"]) == 2
    assert capsys.readouterr().err.count("there is no run r9 of small-growth") == 2
    assert main(["results", "small-growth", "--run", "r9"]) == 2
    assert capsys.readouterr().err.endswith("`pulumi up` first. `--run ID` names an earlier one: r1.\n")
    assert main(["logs", "small-growth"]) == 2
    said = capsys.readouterr().err
    assert "has printed nothing yet" in said
    assert "--boot` what ended nodes did" in said  # no other has left a boot log
    said: list[str] = []
    end = functools.partial(put, cloud, bucket, "done.json", {"reason": "failed"})
    rounds = [lambda: None, end, lambda: None]
    logs, s3, ec2 = (aws.client(service, "us-east-2") for service in ("logs", "s3", "ec2"))
    reader = Reader(definition=stack, logs=logs, s3=s3, ec2=ec2, sleep=lambda _: rounds.pop(0)(), say=said.append)
    assert reader.follow() == 0
    assert [line[:29] for line in said] == ["-- run r1 has printed nothing", "-- the run is done: failed"]
