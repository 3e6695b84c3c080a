"""A node in a Capacity Block: its fleet replaces nothing, and is deleted with all of its nodes or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.infra.boot_stubs import DELETE, INSTANCE, RUN, SHUTDOWN, TERMINATE, BootOutcome, StubNode


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    made = StubNode(tmp_path)
    made.capacity, made.hourly_usd = "block", {"root disk": "0.011"}
    made.imds("meta-data/local-ipv4", "10.0.0.4")  # by which several meet
    return made


def deletions(outcome: BootOutcome) -> list[bool]:
    """Of the fleet, in order: whether with its nodes."""
    return ["--terminate-instances" in call for call in outcome.calls if call.startswith(DELETE)]


def says_done(node: StubNode, instance: str) -> str:
    """What a supervisor does of several that reads or writes that this node has ended the run."""
    marker = {"schema": 1, "reason": "finished", "detail": "", "instance": instance, "at": "2026-11-26T00:00:00Z"}
    return f"echo '{json.dumps(marker)}' > {node.s3 / 'r1/done.json'}"


def test_who_ends_the_run_deletes_the_fleet_with_itself(node: StubNode) -> None:
    outcome = node.boot()
    assert node.stored("done.json")["reason"] == "finished"
    assert deletions(outcome) == [True]
    assert outcome.writes()[-4:] == ["done.json", DELETE, TERMINATE, SHUTDOWN]


def test_one_that_fails_ends_the_fleet_so_that_the_next_up_makes_it_again(node: StubNode) -> None:
    node.notify = {"topic": "arn:aws:sns:us-east-2:1:t"}
    node.job_ends_with(1)
    outcome = node.boot()
    assert not node.has("done.json")
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["code"] == 1
    assert deletions(outcome) == [True]
    told = (node.world / "told").read_text()
    assert "its fleet is ended, because it replaces no node; `pulumi up` launches all nodes again" in told


def test_on_spot_it_stays_for_the_next_node(node: StubNode) -> None:
    node.capacity = "spot"
    node.job_ends_with(1)
    assert deletions(node.boot()) == []


def test_a_node_that_is_launched_again_after_the_end_ends_the_fleet(node: StubNode) -> None:
    node.put("done.json", {"reason": "finished", "instance": "i-earlier"})
    outcome = node.boot()
    assert outcome.calls_starting(RUN) == []
    assert deletions(outcome) == [True]


def test_of_several_the_one_that_ended_the_run_waits_for_the_others_and_they_leave_alone(node: StubNode) -> None:
    node.nodes = 2
    (node.world / "there").write_text(f"{INSTANCE}\ni-other\n")
    asked_twice = '[[ $(grep -c "describe-instances --output" $WORLD/calls) -gt 1 ]]'
    gone = f"(until {asked_twice}; do /bin/sleep 0.02; done; echo {INSTANCE} > $WORLD/there) & "
    node.job_ends_with(0, gone + says_done(node, INSTANCE))
    outcome = node.boot()
    asked = [each for each in outcome.calls if each.startswith("aws ec2 describe-instances --output")]
    assert len(asked) > 1  # until the other has gone
    assert deletions(outcome) == [True]


def test_of_several_one_that_follows_leaves_the_fleet_to_who_has_ended_the_run(node: StubNode) -> None:
    node.nodes = 2
    (node.world / "there").write_text(f"{INSTANCE}\ni-other\n")
    node.job_ends_with(0, says_done(node, "i-other"))
    outcome = node.boot()
    assert deletions(outcome) == []
    assert outcome.calls_starting(SHUTDOWN) == [SHUTDOWN]
    assert "the node that ended the run deletes the fleet" in outcome.log


def test_of_several_one_that_comes_after_the_end_ends_the_fleet_where_who_ended_the_run_is_gone(node: StubNode) -> None:
    node.nodes = 2
    node.put("done.json", {"reason": "finished", "instance": "i-earlier"})
    (node.world / "there").write_text(f"{INSTANCE}\n")
    assert deletions(node.boot()) == [True]


def test_people_are_told_of_a_failed_node_before_it_ends_itself(node: StubNode) -> None:
    node.notify = {"topic": "arn:aws:sns:us-east-2:1:t"}
    node.job_ends_with(1)
    calls = node.boot().calls
    told, deleted = (next(at for at, call in enumerate(calls) if call.startswith(what)) for what in ("aws sns", DELETE))
    assert told < deleted
