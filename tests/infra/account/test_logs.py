"""`gpufleet logs` prints and follows a run's log, and explains itself if there is nothing to print."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import aws, run_folder
from gpufleet.infra.account import logs as logs_module
from gpufleet.infra.account.logs import Reader
from gpufleet.infra.account.run_folder import RunFolder
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import TAGS, advance, declare_bucket, declare_fleet, put


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
    bucket, looks, find = declare_bucket(cloud), list[str](), run_folder.find_folder
    put(cloud, bucket, "run.json", {})

    def looked(s3: Any, definition: StackDefinition) -> RunFolder | None:
        looks.append(definition.run.id)  # listings, which S3 charges for: not every three seconds
        return find(s3, definition)

    monkeypatch.setattr(logs_module, "find_folder", looked)
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
            advance(cloud, 600)

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
    assert "there is no boot log of run r1 yet" in capsys.readouterr().err
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
    refusal = capsys.readouterr().err
    assert "has printed nothing yet" in refusal
    assert "--boot` shows what ended nodes did" in refusal  # no other node has a boot log
    said: list[str] = []
    end = functools.partial(put, cloud, bucket, "done.json", {"reason": "failed"})
    rounds: Iterator[Callable[[], object]] = iter([lambda: None, end, lambda: None])
    logs, s3, ec2 = (aws.client(service, "us-east-2") for service in ("logs", "s3", "ec2"))

    def sleep(_: float) -> None:
        next(rounds)()

    reader = Reader(definition=stack, logs=logs, s3=s3, ec2=ec2, sleep=sleep, say=said.append)
    assert reader.follow() == 0
    assert [line[:29] for line in said] == ["-- run r1 has printed nothing", "-- the run is done: failed"]
