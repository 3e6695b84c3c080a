"""Supervisor, host and command in one tree of processes: a notice, a loss, a limit, and what the next node does."""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.rehearsal.imds import Imds
from tests.job import runs
from tests.job.command_world import (
    FORMATS,
    STEP_LINE,
    SupervisedNode,
    of_format,
    parameters,
    processes_in,
    run_of,
    wrong,
)
from tests.job.command_world import PYTHON as OWN_PYTHON
from tests.waiting import wait_for

NAMES, STEPS = ("hf-trainer",), 600


@pytest.mark.parametrize("name", NAMES)
def test_a_notice_saves_and_the_next_node_goes_on_from_there_to_the_end(tmp_path: Path, name: str) -> None:
    slow, quick = "--step-s 0.1", "--step-s 0.005"  # it must not be over before the notice comes
    resume = {"args": f"--resume={{step}} {quick}"}
    told = of_format(name, f"--steps {STEPS} --every {STEPS + 1} --catch {slow}", work={"steps": STEPS}, resume=resume)
    run = run_of(tmp_path, told)
    with Imds() as imds:
        first = SupervisedNode(tmp_path, run, "i-1", AWS_EC2_METADATA_SERVICE_ENDPOINT=imds.endpoint)
        first.wait_for("step 10", lambda: first.step() >= 10)
        imds.notice(imds.clock.now() + timedelta(minutes=9))
        assert first.code() == 75, first.log
    (step,) = first.manifests()
    assert 10 <= step < STEPS
    assert wrong(first.bucket / "r1" / "ckpt" / f"step_{step:08d}" / "files", step) == []

    last = SupervisedNode(tmp_path, run, "i-2")
    assert last.code() == 0, last.log
    assert last.stored("done.json")["reason"] == "finished"
    steps = [json.loads(line)["step"] for line in (last.bucket / "r1" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    seen = last.stored("receipt.json")["measured"]  # the next bill can stand on it
    assert [phase["name"] for phase in seen["phases"]] == ["train"]
    median_s = seen["phases"][0]["step_ms"]["median"] / 1000  # half of the node's steps take at least as long
    assert 0.005 <= median_s <= float(last.stored("receipt.json")["attempts"][1]["seconds"]) / ((STEPS - step) / 2)
    assert seen["versions"] == {"driver": None}


def test_a_node_that_is_lost_takes_the_command_along_and_costs_no_more_than_an_interval(tmp_path: Path) -> None:
    run = run_of(tmp_path, of_format("file", "--steps 400 --every 40 --step-s 0.05", work={"steps": 400}))
    first = SupervisedNode(tmp_path, run, "i-1")
    first.wait_for("a checkpoint in the bucket", first.manifests)
    first.lose()
    (newest, *_) = reversed(first.manifests())
    wait_for("the end of all its processes", lambda: not processes_in(first.workdir))
    second = SupervisedNode(tmp_path, run, "i-2")
    steps = partial(re.compile(r"^step (\d+) loss", re.MULTILINE).findall)
    first_step, *_ = second.wait_for("a step", lambda: steps(second.log.partition("resuming from")[2]))
    assert int(first_step) == newest + 1
    second.lose()


CAP_S, LEFT_S = 36_000, 1000  # of those that a node begins with, which is less than a silence that counts
STOP_S = 66 + 4 + 4  # so long before its cap a command with 4 s of grace is asked to stop, a few seconds more or less
LIMITS = {"max_usd": "30.00", "max_hours": str(CAP_S / 3600), "deadline": None}


def near_its_cap(folder: Path, parameters: dict[str, Any], ready: str) -> SupervisedNode:
    """A node whose command has to stop a few seconds after it has said `ready`."""
    run = run_of(folder, parameters, limits=LIMITS)
    launched, began = runs.launched(seconds_ago=CAP_S - LEFT_S), time.time()
    node = SupervisedNode(folder, run, "i-1", GPUFLEET_LAUNCHED_AT=launched)
    node.wait_for(f"{ready!r} in its log", lambda: ready in node.log)
    node.let_pass(LEFT_S - STOP_S - (time.time() - began))
    return node


def test_at_its_limit_a_command_is_asked_to_stop_and_the_end_says_so(tmp_path: Path) -> None:
    told = of_format("file", "--steps 100000 --every 10 --catch", stop={"grace_s": 4.0})
    node = near_its_cap(tmp_path, told, "step 3 ")
    assert node.code() == 0, node.log
    done = node.stored("done.json")
    assert done["reason"] == "max_hours"
    assert re.match(r"the command ended with .* at step [0-9,]+\n  \| ", done["detail"])


def test_a_command_deaf_to_its_limit_spends_no_more_than_its_stopping_time(tmp_path: Path) -> None:
    deaf = "trap '' TERM INT; echo begun; while :; do (setsid sleep 3000 &); sleep 1; done"
    node = near_its_cap(tmp_path, parameters(deaf, stop={"grace_s": 4.0}), "begun")
    assert node.code() == 0, node.log
    assert node.stored("done.json")["reason"] == "max_hours"
    assert "it did not stop in time" in node.stored("done.json")["detail"]
    receipt = node.stored("receipt.json")
    assert float(receipt["attempts"][0]["seconds"]) <= CAP_S  # the cap holds its stopping time
    assert not processes_in(tmp_path)


def test_a_command_that_cannot_succeed_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    failing = f'{OWN_PYTHON} -c \'print("step 3 loss nan"); raise SystemExit("no such corpus")\''
    run = run_of(tmp_path, parameters(failing, progress={"stdout": [STEP_LINE]}))
    node = SupervisedNode(tmp_path, run, "i-1")
    assert node.code() == 70, node.log
    detail = node.stored("done.json")["detail"]
    assert "the command ended with exit code 1 at step 3, twice for the same reason" in detail
    assert "  | no such corpus" in detail
    warned = "loss is nan from step 3 on"
    assert node.stored("attempts/i-1.json")["alarm"] == warned
    assert [each["alarm"] for each in node.stored("receipt.json")["attempts"]] == [warned]
    assert f"; warned: {warned}" in node.log


assert set(NAMES) <= set(FORMATS)
