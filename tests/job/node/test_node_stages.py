"""The last node of a stage begins the next one: after the mark, before its own fleet goes, and twice is once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.infra.boot_stubs import DELETE, INSTANCE, RUN, SHUTDOWN, StubNode

BEGIN = (
    "aws stepfunctions start-execution --state-machine-arn"
    " arn:aws:states:us-east-2:111122223333:stateMachine:gpufleet-schedules-train"
)
MARKED = "done.json"


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    made = StubNode(tmp_path)
    made.next_stage = "train"
    return made


def test_the_next_stage_begins_after_the_mark_and_before_the_own_fleet_goes(node: StubNode) -> None:
    outcome = node.boot()
    mark = next(call for call in outcome.calls if call.startswith("aws s3 cp /") and MARKED in call.split()[4])
    assert outcome.calls_starting(mark, BEGIN, DELETE, SHUTDOWN) == [mark, BEGIN, DELETE, SHUTDOWN]


def test_a_node_that_finds_its_stage_done_begins_the_next(node: StubNode) -> None:
    """The one before was killed between the mark and the start, or after it: it is not known which."""
    node.put(MARKED, {"reason": "finished"})
    outcome = node.boot()
    assert outcome.calls_starting(RUN, BEGIN, DELETE, SHUTDOWN) == [BEGIN, DELETE, SHUTDOWN]


@pytest.mark.parametrize("reason", ["max_usd", "stopped", "failed"])
def test_a_stage_that_ended_otherwise_begins_nothing(node: StubNode, reason: str) -> None:
    marker = node.s3 / "r1/done.json"
    node.job_ends_with(70 if reason == "failed" else 0, f"""echo '{{"reason": "{reason}"}}' > {marker}""")
    assert node.boot().calls_starting(BEGIN, DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


def test_a_run_that_was_asked_to_end_begins_no_further_stage(node: StubNode) -> None:
    node.put("stop.json", {"by": "me", "at": "2026-11-30T00:00:00Z"})
    assert node.boot().calls_starting(BEGIN, DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


def test_a_start_that_aws_refuses_leaves_the_fleet_for_another_node(node: StubNode) -> None:
    node.fails("states")
    outcome = node.boot()
    assert set(outcome.calls_starting(BEGIN, DELETE, SHUTDOWN)) == {BEGIN, SHUTDOWN}
    assert "the next node tries again" in outcome.log


def test_killed_at_any_call_of_its_end_the_next_stage_begins_once_the_mark_is_there(tmp_path: Path) -> None:
    def make(name: str) -> StubNode:
        made = StubNode(tmp_path / name)
        made.next_stage = "train"
        return made

    calls = make("whole").boot().calls
    job = next(number for number, call in enumerate(calls) if call.startswith(RUN) and "first.sh" not in call)
    assert len(calls) - job > 5
    for moment in range(job + 2, len(calls)):
        lost, another = make(f"{moment}-lost"), make(f"{moment}-another")
        lost.dies(at=moment)
        killed = lost.boot().calls
        assert SHUTDOWN not in killed
        done = killed[:-1]  # the last call was not heard
        if not any(call.startswith(DELETE) for call in done):  # else no other node comes
            shutil.copytree(lost.s3 / "r1", another.s3 / "r1", dirs_exist_ok=True)
            done += another.boot().calls
            assert another.stored(MARKED)["reason"] == "finished"
        begun = [start for call in done for start in (BEGIN, DELETE) if call.startswith(start)]
        assert begun[0] == BEGIN, (moment, done)
        assert begun[-1] == DELETE, (moment, done)


def test_nodes_of_a_stage_that_have_let_go_start_the_machine_of_their_own_stage(node: StubNode) -> None:
    node.run, node.nodes = "r1/prepare", 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    told = json.dumps({"name": "3-2", "pause_s": 7200.0})
    node.job_ends_with(75, f"echo '{told}' >$(find {node.root} -path '*/run/run.json' -printf '%h')/ask_again.json")
    (call,) = [call for call in node.boot().calls if call.startswith("aws stepfunctions")]
    assert "stateMachine:gpufleet-schedules_prepare " in call
    assert "--name r1-prepare-3-2" in call  # AWS allows no slash in it


def test_what_earlier_stages_spent_shortens_the_time_of_this_one(node: StubNode) -> None:
    node.limits["max_usd"], node.before = "12", ["prepare"]
    exit_ = {"code": 0, "reason": "finished", "notice": False, "at": "2026-11-21T20:00:00Z"}
    spent = {"instance": "i-1", "type": "g5.2xlarge", "zone": "us-east-2a", "launched_at": "2026-11-21T11:00:00Z"}
    node.put("prepare/attempts/i-1.json", {**spent, "booted_at": "2026-11-21T11:01:00Z", "exit": exit_})
    node.put("prepare/heartbeat/i-0.jsonl", "")
    rates = {"g5.2xlarge": {"on_demand": "1.20", "spot": {"us-east-2a": "0.40"}}}
    extras = {"hourly_usd": {}, "fixed_usd": "0.20"}
    node.put("prepare/run.json", {"limits": node.limits, "capacity": "spot", "rates": rates, "extras": extras})
    outcome = node.boot()
    # 9 h at 1.20 and 0.20 leave one dollar of the twelve, and this node has lived for 90 minutes.
    assert node.stored(MARKED)["reason"] == "max_usd"
    assert RUN not in outcome.writes()


def test_an_earlier_stage_whose_records_cannot_be_read_is_no_stage_that_spent_nothing(node: StubNode) -> None:
    node.before = ["prepare"]
    outcome = node.boot()
    assert "what the stage prepare has spent cannot be read" in outcome.log
    assert RUN not in outcome.writes()
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["code"] == 1
