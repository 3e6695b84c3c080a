"""What a boot does about the run's limits: before the job begins, while it runs, and where AWS takes the machine."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from gpufleet.job.contract.reading import iso
from gpufleet.job.node.allowance import STOP_S
from tests.infra.boot_stubs import DELETE, INSTANCE, MOVE, RUN, SHUTDOWN, TERMINATE, StubNode


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    made = StubNode(tmp_path)
    made.launched(minutes_ago=2)
    return made


def earlier(node: StubNode, instance: str, hours_ago: float, **more: object) -> None:
    """A node that was launched so long before this one, and ended with a notice."""
    at = iso(node.launched_at - 3600 * hours_ago)
    ending = {"code": 75, "reason": "notice", "notice": True, "at": at}
    node.put(
        f"attempts/{instance}.json",
        {"type": "g5.2xlarge", "zone": "us-east-2a", "launched_at": at, "booted_at": at, "exit": ending, **more},
    )


def ended(node: StubNode, instance: str, hours_ago: float) -> None:
    """What the fleet's history says of it."""
    with (node.world / "history").open("a") as history:
        history.write(f"terminated\t{instance}\t{iso(node.launched_at - 3600 * hours_ago)}\n")


def test_the_hour_at_which_aws_ends_the_fleet_is_moved_before_the_job_begins(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}

    outcome = node.boot()

    assert outcome.calls_starting(MOVE, RUN)[:2] == [MOVE, RUN]
    assert node.moves()[0] == pytest.approx(node.launched_at + 2 * 3600 + STOP_S, abs=1)


def test_a_schedule_that_cannot_be_moved_is_said_and_keeps_no_job_from_running(node: StubNode) -> None:
    node.fails("scheduler")

    outcome = node.boot()

    assert outcome.calls_starting(RUN, SHUTDOWN) == [RUN, SHUTDOWN]
    assert "the hour at which AWS ends the fleet cannot be moved and stays" in outcome.log


def test_a_lost_node_does_not_give_the_next_one_a_timer_of_its_own(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}
    earlier(node, "i-1", 3, exit=None)
    ended(node, "i-1", 1.5)

    node.boot()

    assert node.moves()[0] == pytest.approx(node.launched_at + 0.5 * 3600 + STOP_S, abs=1)
    assert list(node.stored(f"attempts/{INSTANCE}.json")["ended"]) == ["i-1"]


def test_what_an_earlier_boot_was_told_of_a_node_s_end_counts_where_aws_tells_no_more(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}
    node.fails("history")
    at = iso(node.launched_at - 1.5 * 3600)
    earlier(node, "i-1", 3, exit=None)
    earlier(node, "i-2", 1.4, ended={"i-1": at})

    node.boot()

    assert node.moves()[0] == pytest.approx(node.launched_at + 0.5 * 3600 - 60 + STOP_S, abs=1)


def test_a_node_without_a_record_that_an_earlier_boot_was_told_of_counts_too(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}
    node.fails("history")
    began, over = (iso(node.launched_at - 3600 * hours) for hours in (3, 2.5))
    earlier(node, "i-2", 1.4, untold={"i-1": began}, ended={"i-1": over})

    node.boot()

    assert node.moves()[0] == pytest.approx(node.launched_at + 1.5 * 3600 - 60 + STOP_S, abs=1)
    assert list(node.stored(f"attempts/{INSTANCE}.json")["untold"]) == ["i-1"]


@pytest.mark.parametrize(("limits", "reason"), [({"max_hours": "1.2"}, "max_hours"), ({"max_usd": "1.40"}, "max_usd")])
def test_a_boot_that_finds_nothing_left_ends_the_run_before_an_image_is_pulled(
    node: StubNode, limits: dict[str, str], reason: str
) -> None:
    node.limits |= limits
    earlier(node, "i-1", 3)
    ended(node, "i-1", 1.8)

    outcome = node.boot()

    assert outcome.calls_starting("docker pull", RUN, DELETE, TERMINATE, SHUTDOWN) == [DELETE, TERMINATE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == reason


def test_a_node_that_aws_takes_puts_the_hour_back_to_the_fleet_s_expiry(node: StubNode) -> None:
    node.notice()
    node.job_ends_with(75)

    node.boot()

    expiry = datetime.fromisoformat(node.limits["expires"]).timestamp()
    assert node.moves()[-1] == expiry


def test_a_crash_leaves_the_hour_where_it_is(node: StubNode) -> None:
    node.job_ends_with(1)

    node.boot()

    assert len(node.moves()) == 1


def test_the_marker_that_the_supervisor_could_not_write_is_the_node_s_to_send(node: StubNode) -> None:
    marker = {"schema": 1, "reason": "max_usd", "detail": "d", "instance": INSTANCE, "at": "2026-11-27T00:00:00Z"}
    path = node.root / "opt/gpufleet/run/done.json"
    node.job_ends_with(0, f"echo '{json.dumps(marker)}' >{path}")

    outcome = node.boot()

    assert node.stored("done.json") == marker
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


def test_a_node_that_is_still_there_counts_on_although_nothing_was_heard_of_it(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}
    earlier(node, "i-1", 1, exit=None)
    (node.world / "there").write_text("i-1\n")

    node.boot()

    left_s = 2 * 3600 - 1 * 3600
    assert 2 * node.launched_at + left_s + STOP_S - node.moves()[0] == node.after_a_moment_of_its_life(0)  # two count


def test_where_aws_says_nothing_a_node_nothing_was_heard_of_counts_until_the_next_one_came(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}
    node.fails("history")
    earlier(node, "i-1", 1, exit=None)

    node.boot()

    assert node.moves()[0] == pytest.approx(node.launched_at + 1 * 3600 + STOP_S, abs=1)


def test_a_node_that_ended_before_it_could_record_itself_counts_as_aws_tells_of_it(node: StubNode) -> None:
    node.limits |= {"max_hours": "2"}
    events = [(1.6, "launched", "i-1"), (1.1, "terminated", "i-1"), (0, "launched", INSTANCE)]
    told = [f"{what}\t{name}\t{iso(node.launched_at - 3600 * ago)}\n" for ago, what, name in events]
    (node.world / "history").write_text("".join(told))

    node.boot()

    assert node.moves()[0] == pytest.approx(node.launched_at + 1.5 * 3600 + STOP_S, abs=1)
