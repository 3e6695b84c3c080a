"""A run in three stages, of which the middle one has two nodes, on the embedded AWS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.rehearsal.rehearse import rehearse
from tests.infra.staged_files import PINNED, several_in
from tests.rehearsal.test_stages import STAGES, launched, project_with, saving_stages
from tests.waiting import wait_for

ONCE = "    rehearsal: {interruptions: {with_notice: 1, without_notice: 0}}\n"


@pytest.mark.slow
def test_one_node_then_two_then_one_are_rehearsed_and_cost_their_sum(tmp_path: Path) -> None:
    text = saving_stages().replace("  - name: train\n", f"  - name: train\n{ONCE}")
    project = project_with(several_in("train", text), tmp_path)
    said: list[str] = []
    assert rehearse("staged", root=project, out=said.append) == 0, "\n".join(said)
    folder = project / "rehearsals" / "staged" / "r1"
    summary = json.loads((folder / "summary.json").read_text())
    assert [each.split()[0] for each in summary["interruptions"]] == ["notice"]
    assert summary["nodes"] == 1 + 3 + 1
    parts = [Receipt.from_json(json.loads((folder / "results" / stage / RECEIPT).read_bytes())) for stage in STAGES]
    assert [len(each.attempts) for each in parts] == [1, 3, 1]
    whole = Receipt.from_json(json.loads((folder / RECEIPT).read_bytes()))
    assert whole.actual == sum(each.actual for each in parts) == sum(line.actual for line in whole.lines)


@pytest.mark.slow
@pytest.mark.parametrize("several", STAGES)
def test_every_stage_may_have_two_nodes_and_the_next_begins_once(tmp_path: Path, several: str) -> None:
    text = several_in(several, PINNED)
    with launched(tmp_path, text) as run:
        (run.hold / several).touch()
        first = run.started(several, 2)
        run.cloud.kill(first.id)  # without a word
        run.started(several, 4)  # both begin anew, once the replacement is there
        (run.hold / several).unlink()
        assert run.wait("judge")["reason"] == "finished"
        wait_for("the last node's end", lambda: not run.living(), log=run.logs)
        assert run.store("judge").get_bytes("final/done.txt") == b"prepare\ntrain\njudge\n"
        assert [len(run.nodes(stage)) for stage in STAGES] == [3 if stage == several else 1 for stage in STAGES]
        whole, parts = run.result(), [run.receipt(stage) for stage in STAGES]
        assert whole.actual == sum(each.actual for each in parts) == sum(line.actual for line in whole.lines)


@pytest.mark.slow
def test_a_leader_that_is_killed_before_it_hands_on_leaves_that_to_the_other_node(tmp_path: Path) -> None:
    with launched(tmp_path, several_in("prepare", PINNED)) as run:
        (run.hold / "prepare").touch()
        run.started("prepare", 2)
        run.cloud.deny("StartExecution", node=True)
        (run.hold / "prepare").unlink()
        leader = run.wait("prepare")["instance"]
        run.cloud.kill(leader)
        run.cloud.allow("StartExecution")
        assert run.wait("judge")["reason"] == "finished"
        assert [len(run.nodes(stage)) for stage in ("train", "judge")] == [1, 1]
