"""`gpufleet results` makes the receipt of a run whose end no supervisor saw, from the objects that the run wrote."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account import results
from gpufleet.infra.account.fleet import nodes_of
from gpufleet.infra.account.results import cut_off
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import receipts
from gpufleet.infra.program.boot.run_config import run_config
from gpufleet.job.contract.run import encode
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import EXPIRES, advance, declare_bucket, declare_fleet, put


def boot_loop(cloud: Cloud, stack: StackDefinition, *, notice: bool = False) -> str:
    """A run whose third node in a row failed before its supervisor wrote anything, as the node script leaves it."""
    bucket = declare_bucket(cloud)
    inputs: dict[str, Any] = {"archive": None, "dataset": {"uri": "s3://elsewhere/tokens", "sha256": None, "files": []}}
    told = run_config(stack, price(stack, load_catalog(), runs=200), inputs, expires="2026-11-22T13:00:00Z")
    put(cloud, bucket, "run.json", encode(told))
    for number in range(3):
        began = {"type": "g5.2xlarge", "zone": "us-east-2a", "launched_at": f"2026-11-21T12:{number}0:00Z"}
        end = {"code": 1, "reason": "no working GPU", "notice": notice, "at": f"2026-11-21T12:{number}6:00Z"}
        put(cloud, bucket, f"attempts/i-{number}.json", {"instance": f"i-{number}", **began, "exit": end})
    detail = "3 boots in a row without progress; the last: no working GPU"
    done = {"reason": "boot-loop", "detail": detail, "instance": "i-2", "at": "2026-11-21T12:27:00Z"}
    put(cloud, bucket, "done.json", done)
    return bucket


def test_of_a_run_that_its_node_s_script_ended_the_receipt_is_made_of_what_it_left(
    cloud: Cloud, path: Path, stack: StackDefinition, capsys: pytest.CaptureFixture[str]
) -> None:
    boot_loop(cloud, stack)
    assert main(["results", "small-growth"]) == 1
    receipt = json.loads((path.parents[1] / "results/small-growth/r1/receipt.json").read_text())
    assert (receipt["reason"], receipt["detail"][:7]) == ("boot-loop", "3 boots")
    assert [each["seconds"] for each in receipt["attempts"]] == ["360.000", "360.000", "420.000"]
    assert receipt["hours"]["actual"] == "0.3167"
    said = capsys.readouterr().out
    assert "receipt of small-growth r1: boot-loop, 3 boots in a row without progress; the last: " in said
    assert "The run has no results.json: it ended with boot-loop (3 boots in a row" in said
    assert "`gpufleet logs small-growth --boot` says what its nodes did. Mend that; a new run.id begins anew." in said
    receipts.keep(json.dumps(receipt).encode(), path.parents[1], "small-growth", "r1")  # it adds up


@pytest.mark.parametrize("zero", [False, True])
def test_such_a_receipt_asks_the_fleet_who_took_its_nodes(
    cloud: Cloud, path: Path, stack: StackDefinition, zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_loop(cloud, stack, notice=True)
    fleet = declare_fleet(cloud)
    cloud.tick()
    advance(cloud, 15 * 60)  # the second node is there
    if zero:
        cloud.client("ec2").modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
        cloud.client("ec2").delete_launch_template(LaunchTemplateName="gpufleet-small-growth-r1-you")
        declare_fleet(cloud)  # a second one, as a killed `up` leaves it
    known: list[list[bool | None]] = []
    for days, to in ((0, "here"), (3, "here"), (3, "there")):  # AWS forgets, but the receipt stays
        at = cloud.clock.now().timestamp() + days * 86_400
        monkeypatch.setattr("gpufleet.infra.account.results.time", SimpleNamespace(time=lambda at=at: at))
        main(["results", "small-growth", "--to", str(path.parents[1] / to)])
        receipt = json.loads((path.parents[1] / to / "receipt.json").read_text())
        known.append([each["reclaimed"] for each in receipt["attempts"]])
    assert known == [[True, not zero, True], [True, not zero, True], [None, None, None]]


def test_what_a_timer_ended_is_counted_until_then(cloud: Cloud, path: Path, stack: StackDefinition) -> None:
    bucket = boot_loop(cloud, stack)
    put(cloud, bucket, "attempts/i-2.json", {"instance": "i-2", "launched_at": "2026-11-21T12:20:00Z"})  # hung
    put(cloud, bucket, "heartbeat/i-2.jsonl", b'{"attempt_s": "60", "lived_s": "60"}\n')
    put(cloud, bucket, "done.json", {"reason": "timer", "instance": "i-2", "at": "2026-11-21T14:20:00Z"})
    assert main(["results", "small-growth"]) == 1
    receipt = json.loads((path.parents[1] / "results/small-growth/r1/receipt.json").read_text())
    assert receipt["attempts"][2]["seconds"] == "7200.000"
    assert receipt["attempts"][2]["exit"]["reason"] == "timer"


def begun(cloud: Cloud, stack: StackDefinition) -> str:
    """A run that has trained for ten minutes, and its fleet with its node."""
    bucket = boot_loop(cloud, stack)
    cloud.client("s3").delete_object(Bucket=bucket, Key="r1/done.json")
    put(cloud, bucket, "heartbeat/i-2.jsonl", b'{"attempt_s": "600", "lived_s": "600"}\n')
    fleet = declare_fleet(cloud)
    cloud.tick()
    return fleet


@pytest.mark.parametrize("end", ["destroyed", "expired"])
def test_a_run_whose_fleet_is_gone_before_its_end_leaves_a_receipt(
    cloud: Cloud,
    path: Path,
    stack: StackDefinition,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    fleet, ec2 = begun(cloud, stack), cloud.client("ec2")
    assert main(["results", "small-growth"]) == 1
    assert "no results.json and no receipt.json: it is not done" in capsys.readouterr().out
    if end == "destroyed":
        ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    else:  # on a day on which AWS still shows the fleet, in some state
        (node,) = nodes_of(ec2, stack)
        ec2.modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})
        ec2.terminate_instances(InstanceIds=[node["InstanceId"]])
        monkeypatch.setattr("gpufleet.infra.account.results.datetime", SimpleNamespace(now=lambda _: EXPIRES))
    cloud.tick()
    advance(cloud, 600)
    declare_fleet(cloud, owner="bob")  # the other owner's run has the same id, and its own bucket
    cloud.tick()
    assert main(["status", "small-growth"]) == 0
    said = capsys.readouterr().out
    assert ("the run does not continue: gpufleet results small-growth" in said) is (end == "destroyed")
    assert main(["results", "small-growth"]) == 0
    said = capsys.readouterr().out
    assert "receipt of small-growth r1: fleet-gone, its fleet was deleted or has expired, and it has no node" in said
    assert "Complete for a run that ended with fleet-gone, which left no results.json." in said
    first = (path.parents[1] / "results/small-growth/r1/receipt.json").read_bytes()
    receipt = json.loads(first)
    assert [each["seconds"] for each in receipt["attempts"]] == ["360.000", "360.000", "600.000"]
    receipts.keep(first, path.parents[1], "small-growth", "r1")  # it adds up
    assert main(["results", "small-growth"]) == 0
    assert (path.parents[1] / "results/small-growth/r1/receipt.json").read_bytes() == first


def test_while_aws_does_not_say_that_the_run_is_over_no_receipt_is_made_and_none_goes(
    cloud: Cloud,
    path: Path,
    stack: StackDefinition,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud.client("ec2").delete_fleets(FleetIds=[begun(cloud, stack)], TerminateInstances=True)
    cloud.tick()
    advance(cloud, 600)
    cloud.tick()

    def refused(*_: Any, **__: Any) -> Any:
        raise ClientError({"Error": {"Code": "UnauthorizedOperation"}}, "DescribeFleets")

    monkeypatch.setattr(results, "fleets_of", refused)
    assert main(["results", "small-growth"]) == 1
    receipt = path.parents[1] / "results/small-growth/r1/receipt.json"
    assert not receipt.exists()
    receipt.write_text("{}")  # as made at the run's end: AWS forgets why nodes ended
    assert main(["results", "small-growth"]) == 1
    assert "it is not done, and AWS does not say whether it goes on." in capsys.readouterr().out
    assert receipt.exists()


@pytest.mark.parametrize(
    ("owner", "node", "state", "over"),
    [
        ("you", "you", "shutting-down", False),  # the node may still write
        ("you", "you", "terminated", True),
        ("you", "bob", "running", True),
        ("you", "", "running", False),  # the bucket may be the user's own
        ("", "bob", "running", False),
    ],
)
def test_a_run_is_cut_off_once_nothing_of_its_owner_s_may_write_any_more(
    stack: StackDefinition, monkeypatch: pytest.MonkeyPatch, owner: str, node: str, state: str, over: bool
) -> None:
    tags = [{"Key": "gpufleet:owner", "Value": node}] if node else []
    monkeypatch.setattr(results, "nodes_of", lambda *_: [{"State": {"Name": state}, "Tags": tags}])
    monkeypatch.setattr(results, "fleets_of", lambda *_: [])
    names = ("attempts/i-1.json", "heartbeat/i-1.jsonl", "node.log")  # a log is written later
    objects = [SimpleNamespace(name=n, written=datetime(2026, 11, 21, h, tzinfo=UTC)) for h, n in enumerate(names)]
    found = cut_off(stack, owner, objects, None, datetime.now(UTC))  # type: ignore[arg-type]
    assert found is not None
    assert (found.reason, found.at) == (("fleet-gone", "2026-11-21T01:00:00Z") if over else ("", ""))


def test_a_run_that_left_too_little_for_a_receipt_says_so_and_keeps_no_old_one(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = path.parents[1] / "results/small-growth/r1/receipt.json"
    old.parent.mkdir(parents=True)
    old.write_text("{}")
    put(cloud, declare_bucket(cloud), "done.json", {"reason": "failed"})
    assert main(["results", "small-growth"]) == 1
    assert not old.exists()
    assert "No receipt can be made from the files of this run: " in capsys.readouterr().out
