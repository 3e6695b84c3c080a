"""Trials on one node, on the embedded AWS: the real program, user-data and job. One fleet and one boot do them all."""

from __future__ import annotations

import json
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.job.contract.reading import epoch
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.contract.spent import MINIMUM_S
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.launch import CloudInstance
from gpufleet.rehearsal.rehearse import rehearse
from tests.infra.shared_files import SHARED
from tests.rehearsal.test_stages import StagedRun, launched
from tests.waiting import wait_for

TRIALS = ("t1", "t2", "t3")
SCRIPT = """\
import json, os, pathlib, sys, time
kept, outputs, name = sys.argv[1:]
name = name.replace("--x=", "t")
hold, state = pathlib.Path(HOLD), pathlib.Path(kept, "state.json")
begun = json.loads(state.read_text())["step"] if state.exists() else 0
(hold / f"{name}.{os.getpid()}").write_text(str(begun))
def save():
    state.with_suffix(".new").write_text(json.dumps({"step": step}))
    state.with_suffix(".new").replace(state)
for step in range(begun + 1, 4):
    save()
    print("step", step, "loss", 9 if name == "t2" else 1, flush=True)
    held = 0
    while step == 2 and (hold / name).exists():
        time.sleep(0.05)
        held += 1
        if held % 100 == 0:  # a save that came with the first ones counts as an earlier step's
            save()
    if (hold / f"{name}-fails").exists():
        sys.exit(3)
pathlib.Path(outputs, "done.txt").write_text(name)
"""

REHEARSED = """\
import json, pathlib, sys, time
kept, outputs, name = sys.argv[1:]
state = pathlib.Path(kept, "state.json")
step = json.loads(state.read_text())["step"] if state.exists() else 0
while step < 60:
    step += 1
    time.sleep(0.1 if name == "--x=2" else 0)
    if step % 10 == 0:
        state.with_suffix(".new").write_text(json.dumps({"step": step}))
        state.with_suffix(".new").replace(state)
    print("step", step, "loss", 1, flush=True)
pathlib.Path(outputs, "done.txt").write_text(name)
"""


def receipts(run: StagedRun) -> list[Receipt]:
    return [run.receipt(trial) for trial in TRIALS]


def seconds_lived(every: list[Receipt], node: CloudInstance) -> Decimal:
    """The seconds for which the trials' receipts count the node."""
    of_node = [cost for receipt in every for cost in receipt.attempts if cost.instance == node.id]
    assert [cost.seconds for cost in of_node[1:]] == [cost.lived_s for cost in of_node[1:]]
    assert of_node[0].seconds == max(of_node[0].lived_s, MINIMUM_S)  # the minimum charge of a start counts once
    return sum((cost.lived_s for cost in of_node), Decimal(0))


def begun(run: StagedRun, trial: str) -> list[str]:
    """The step from which each start of the trial went on."""
    return [path.read_text() for path in sorted(run.hold.glob(f"{trial}.*"), key=lambda path: path.stat().st_mtime)]


def test_three_trials_share_one_node_and_one_boot_and_pay_for_it_once(tmp_path: Path) -> None:
    with launched(tmp_path, SHARED, {"trial.py": SCRIPT}) as run:
        done = [run.wait(trial) for trial in TRIALS]
        wait_for("the node's end", lambda: not run.living(), log=run.logs)
        assert [each["reason"] for each in done] == ["finished"] * 3
        (node,) = run.cloud.instances()
        last = epoch(done[-1]["at"]) or 0.0
        lived = last - node.launched_at.replace(microsecond=0).timestamp()
        assert [bool(each.attempts[0].older_s) for each in receipts(run)] == [False, True, True]
        assert float(seconds_lived(receipts(run), node)) == pytest.approx(lived, abs=2.0)
        for before, trial in zip(done, TRIALS[1:], strict=False):
            record = run.json(trial, f"attempts/{node.id}.json") or {}
            assert record["launched_at"] == before["at"]


def test_a_trial_that_fails_ends_no_other_and_an_interrupted_one_goes_on_on_the_next_node(tmp_path: Path) -> None:
    with launched(tmp_path, SHARED, {"trial.py": SCRIPT}) as run:
        (run.hold / "t1-fails").touch()
        (run.hold / "t2").touch()
        wait_for("the start of t2", lambda: begun(run, "t2"), log=run.logs)
        wait_for("step 2", lambda: run.store("t2").entries("ckpt/step_00000002/"), log=run.logs)
        (first,) = run.cloud.instances()
        run.cloud.interrupt(first.id)
        wait_for("another start of t2", lambda: len(begun(run, "t2")) == 2, log=run.logs)
        (run.hold / "t2").unlink()
        done = [run.wait(trial) for trial in TRIALS]
        wait_for("the node's end", lambda: not run.living(), log=run.logs)
        assert [each["reason"] for each in done] == ["failed", "finished", "finished"]
        assert begun(run, "t2") == ["0", "2"]
        assert len(begun(run, "t3")) == 1
        assert [len(each.attempts) for each in receipts(run)] == [1, 2, 1]
        assert len(run.cloud.instances()) == 2


@pytest.mark.slow
def test_a_file_of_trials_is_rehearsed_with_a_loss_between_two_and_a_notice_in_the_second(tmp_path: Path) -> None:
    text = SHARED.replace("work: {steps: 3}", "work: {steps: 60}").replace("every: {steps: 1}", "every: {steps: 10}")
    project = scratch.make(tmp_path / "project", {"staged": text})
    (project / "code").mkdir()
    (project / "code" / "trial.py").write_text(REHEARSED)
    said: list[str] = []
    assert rehearse("staged", root=project, out=said.append) == 0, "\n".join(said)
    folder = project / "rehearsals" / "staged" / "r1"
    summary = json.loads((folder / "summary.json").read_text())
    assert [each.split()[0] for each in summary["interruptions"]] == ["loss", "notice"]
    assert (summary["steps"], summary["nodes"]) == (180, 3)
    assert summary["engine"].startswith("pulumi ") == (shutil.which("pulumi") is not None)
    assert {"  ok    t2: lost after t1: node 1 was lost; the next one did not repeat t1"} <= {*said}
    assert {"  ok    t3: stays on the node of t2: node 3"} <= {*said}
    for number, trial in enumerate(TRIALS, 1):
        assert (folder / "results" / trial / "final" / "done.txt").read_text() == f"--x={number}"
