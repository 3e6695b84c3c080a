"""When a stage ends, the next one begins on the same machine: the program starts anew in its own place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.reading import epoch, iso
from tests.infra.boot_stubs import BUCKET, DELETE, INSTANCE, RUN, SHUTDOWN, StubNode

OWN = {"own": {"max_usd": "10", "max_hours": "10"}}


def made(folder: Path) -> StubNode:
    node = StubNode(folder)
    node.device, node.run = "cpu", "r1/t1"
    node.limits["max_usd"] = "100"
    node.put("fleets/fleet-0a1b2c3d", "known")
    node.trials = {"t2": {"before": ["t1"], **OWN}, "t3": {"before": ["t1", "t2"], **OWN}}
    return node


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    return made(tmp_path)


def document(node: StubNode, stage: str, key: str) -> Any:
    return json.loads((node.s3 / "r1" / stage / key).read_text())


def jobs(calls: list[str]) -> list[str]:
    """The stages whose supervisors were started, in order."""
    uri = f"GPUFLEET_RUN_URI=s3://{BUCKET}/r1/"
    return [call.partition(uri)[2].split()[0] for call in calls if call.startswith(RUN) and uri in call]


def test_three_stages_are_one_boot_and_each_pays_from_the_end_of_the_one_before(node: StubNode) -> None:
    marker, at = node.s3 / "r1/t1/done.json", iso(node.launched_at + 1800)
    node.job_ends_with(0, f"""[[ $* != */r1/t1* ]] || echo '{{"reason": "finished", "at": "{at}"}}' > {marker}""")
    outcome = node.boot()
    assert jobs(outcome.calls) == ["t1", "t2", "t3"]
    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN)[-2:] == [DELETE, SHUTDOWN]
    assert outcome.calls_starting(DELETE) == [DELETE]
    assert outcome.calls.count(f"docker rm -f gpufleet-{INSTANCE}") == 2
    asked = {call.partition("--prefix ")[2].split()[0] for call in outcome.calls if "known_fleet" in call}
    assert asked == {"r1/t1/known_fleet/"}  # the fleet is the first stage's
    records = [document(node, stage, f"attempts/{INSTANCE}.json") for stage in ("t1", "t2", "t3")]
    assert [each.get("stayed", False) for each in records] == [True, True, False]
    for stage, record in zip(("t1", "t2"), records[1:], strict=False):
        ended = document(node, stage, "done.json")["at"]
        assert record["launched_at"] == ended
        assert record["older_s"] == pytest.approx((epoch(ended) or 0.0) - node.launched_at, abs=1)
    assert all(document(node, stage, "done.json")["reason"] == "finished" for stage in ("t1", "t2", "t3"))


def test_of_an_ended_stage_only_its_inputs_stay(node: StubNode) -> None:
    folder = node.root / "opt/gpufleet/run"
    left = ("data/set.bin", "user/inputs/texts/a.txt", "user/checkpoints/state.json", "ckpt/step/x", "metrics.jsonl")
    seen = node.world / "seen"
    make = "; ".join(f"mkdir -p {(folder / name).parent} && touch {folder / name}" for name in left)
    script = f"[[ $* != */r1/t1* ]] || {{ {make}; }}\n[[ $* != */r1/t2* ]] || (cd {folder} && find . -type f >{seen})\n"
    node.job_ends_with(0, script)
    node.boot()
    there = {name.removeprefix("./") for name in seen.read_text().split()}
    assert there & {*left} == {"data/set.bin", "user/inputs/texts/a.txt"}


@pytest.mark.parametrize("reason", ["failed", "stopped", "max_usd", "max_hours"])
def test_however_a_stage_ends_the_next_begins(node: StubNode, reason: str) -> None:
    marker = node.s3 / "r1/t1/done.json"
    end = f"""[[ $* != */r1/t1* ]] || echo '{{"reason": "{reason}", "at": "2026-11-21T12:00:00Z"}}' > {marker}"""
    node.job_ends_with(0, end)
    assert jobs(node.boot().calls) == ["t1", "t2", "t3"]


@pytest.mark.parametrize("reason", ["deadline", "expiry", "timer"])
def test_where_the_fleet_ends_or_the_node_hangs_none_follows(node: StubNode, reason: str) -> None:
    marker = node.s3 / "r1/t1/done.json"
    node.job_ends_with(0, f"""echo '{{"reason": "{reason}"}}' > {marker}""")
    outcome = node.boot()
    assert jobs(outcome.calls) == ["t1"]
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


def test_where_the_shared_dollars_are_too_few_a_stage_does_not_begin_and_none_follows(node: StubNode) -> None:
    # The node has lived for 90 minutes at 1.20 an hour when the first stage ends.
    node.limits["max_usd"] = "4"
    for trial in node.trials.values():
        trial["least_usd"] = "2.30"
    outcome = node.boot()
    assert jobs(outcome.calls) == ["t1"]
    done = document(node, "t2", "done.json")
    assert (done["reason"], done["detail"]) == ("max_usd", "it did not begin: it needs 2.30 USD, and 2.20 are left")
    assert not (node.s3 / "r1/t3/attempts").exists()
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stage_is_not_begun_by_a_node_that_was_lost_before_it_looked_at_the_dollars(
    node: StubNode, is_begun: bool
) -> None:
    node.limits["max_usd"] = "4"
    for trial in node.trials.values():
        trial["least_usd"] = "2.30"
    lost = node.s3 / "r1/t2"
    (lost / "attempts").mkdir(parents=True)
    record = {"instance": "i-1", "launched_at": iso(node.launched_at + 5390)}
    (lost / "attempts/i-1.json").write_text(json.dumps(record))
    if is_begun:
        (lost / "heartbeat").mkdir()
        (lost / "heartbeat/i-1.jsonl").write_text('{"step": 1}\n')
    assert jobs(node.boot().calls) == (["t1", "t2"] if is_begun else ["t1"])  # none after it either way


def test_a_run_that_was_asked_to_end_begins_no_further_stage(node: StubNode) -> None:
    (node.s3 / "r1/t2").mkdir(parents=True)
    (node.s3 / "r1/t2/stop.json").write_text(json.dumps({"by": "me", "at": "2026-11-30T00:00:00Z"}))
    outcome = node.boot()
    assert jobs(outcome.calls) == ["t1"]
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


def test_a_rebooted_machine_begins_no_stage(node: StubNode) -> None:
    node.put("done.json", {"reason": "finished", "at": "2026-11-21T12:00:00Z"})
    (node.root / "opt/gpufleet").mkdir(parents=True)
    (node.root / "opt/gpufleet/booted").touch()
    outcome = node.boot()
    assert jobs(outcome.calls) == []
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]


def test_a_machine_that_is_told_to_end_between_two_programs_leaves_its_fleet(node: StubNode) -> None:
    (node.world / "begins").write_text("[[ $RUN_ID != r1/t2 ]] || kill -TERM $$\n")
    outcome = node.boot()
    assert jobs(outcome.calls) == ["t1"]
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]


def test_another_run_json_than_the_declared_one_begins_nothing(node: StubNode) -> None:
    script = node.script()
    file = node.s3 / "r1/t2/run.json"
    file.write_text(file.read_text().replace('"max_usd": "100"', '"max_usd": "999"'))
    assert jobs(node.boot(script).calls) == ["t1"]


@pytest.mark.slow
def test_killed_between_two_stages_another_node_goes_on(tmp_path: Path) -> None:
    calls = made(tmp_path / "whole").boot().calls
    starts = [number for number, call in enumerate(calls) if call.startswith(RUN) and "GPUFLEET_RUN_URI" in call]
    for moment in range(starts[0] + 2, starts[1] + 1):
        lost, another = made(tmp_path / f"{moment}-lost"), made(tmp_path / f"{moment}-another")
        lost.dies(at=moment)
        killed = jobs(lost.boot().calls)
        shutil.copytree(lost.s3 / "r1", another.s3 / "r1", dirs_exist_ok=True)
        again = jobs(another.boot().calls)
        assert killed in (["t1"], ["t1", "t2"]), moment  # calls of other threads come in between
        assert again in (["t1", "t2", "t3"], ["t2", "t3"]), moment
        assert document(another, "t3", "done.json")["reason"] == "finished"
