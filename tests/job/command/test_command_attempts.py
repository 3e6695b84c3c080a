"""Supervisor, host and command in one tree of processes: a notice, a loss, a limit, and what the next node does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import runs
from command_world import FORMATS, OWN_CODE, STEP_LINE, of_format, parameters, wrong
from command_world import PYTHON as OWN_PYTHON
from repository import ROOT

from gpufleet.job import atomic
from gpufleet.rehearsal.imds import Imds

NAMES = ("hf-trainer",)


class SupervisedNode:
    """One node: a supervisor, with the user's code where staging would put it."""

    def __init__(self, folder: Path, run: dict[str, Any], instance: str, **environment: str) -> None:
        self.bucket, self.workdir = folder / "bucket", folder / instance
        (self.workdir / "user").mkdir(parents=True)
        (self.workdir / "user" / "code").symlink_to(OWN_CODE)
        run_json = runs.place(self.workdir, run)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpufleet.job", str(run_json)],
            cwd=ROOT,
            env=runs.environment_of(self.bucket, instance, **environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        path = self.workdir / "job.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, seen: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not seen():
            assert self.process.poll() is None, f"ended early:\n{self.log}"
            assert time.monotonic() < end, f"never got there:\n{self.log}"
            time.sleep(0.01)

    def code(self) -> int:
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.lose()
            raise AssertionError(self.log) from None

    def lose(self) -> None:
        """The machine is gone."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def step(self) -> int:
        """The newest that it has told."""
        path = self.workdir / "metrics.jsonl"
        found = atomic.objects(path.read_bytes()) if path.exists() else []
        return int(found[-1]["step"]) if found else 0

    def manifests(self) -> list[int]:
        return sorted(int(path.parent.name[5:]) for path in (self.bucket / "r1" / "ckpt").glob("step_*/manifest.json"))

    def stored(self, key: str) -> Any:
        return json.loads((self.bucket / "r1" / key).read_text())


def run_of(folder: Path, parameters: dict[str, Any], **changes: Any) -> dict[str, Any]:
    tree = runs.tree(job={"experiment": "command", "parameters": parameters}, **changes)
    return runs.with_files(tree, folder / "bucket", {"dataset.json": b'{"schema": 1, "files": []}'})


@pytest.mark.parametrize("name", NAMES)
def test_a_notice_saves_and_the_next_node_goes_on_from_there_to_the_end(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path, of_format(name, "--steps 200 --every 500 --catch", work={"steps": 200}))
    with Imds() as imds:
        first = SupervisedNode(tmp_path, run, "i-1", AWS_EC2_METADATA_SERVICE_ENDPOINT=imds.endpoint)
        first.wait_for(lambda: first.step() >= 10)
        imds.notice(imds.clock.now() + timedelta(seconds=100))
        assert first.code() == 75, first.log
    (step,) = first.manifests()
    assert 10 <= step < 200
    assert wrong(first.bucket / "r1" / "ckpt" / f"step_{step:08d}" / "files", step) == []

    last = SupervisedNode(tmp_path, run, "i-2")
    assert last.code() == 0, last.log
    assert last.stored("done.json")["reason"] == "finished"
    steps = [json.loads(line)["step"] for line in (last.bucket / "r1" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == 200
    seen = last.stored("receipt.json")["measured"]  # the next bill can stand on it
    assert [phase["name"] for phase in seen["phases"]] == ["train"]
    assert 20 <= seen["phases"][0]["step_ms"]["median"] < 200
    assert seen["versions"] == {"driver": None}


def test_a_node_that_is_lost_takes_the_command_along_and_costs_no_more_than_an_interval(tmp_path: Path) -> None:
    run = run_of(tmp_path, of_format("file", "--steps 400 --every 40 --step-s 0.05", work={"steps": 400}))
    first = SupervisedNode(tmp_path, run, "i-1")
    first.wait_for(first.manifests)
    first.lose()
    (newest, *_) = reversed(first.manifests())
    until = time.monotonic() + 10
    while left := [each for each in processes() if str(first.workdir) in each]:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    second = SupervisedNode(tmp_path, run, "i-2")
    second.wait_for(lambda: re.search(r"^step (\d+) loss", second.log.partition("resuming from")[2], re.MULTILINE))
    match = re.search(r"^step (\d+) loss", second.log.partition("resuming from")[2], re.MULTILINE)
    assert match
    assert int(match[1]) == newest + 1
    second.lose()


def processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_at_its_limit_a_command_is_asked_to_stop_and_the_end_says_so(tmp_path: Path) -> None:
    limits = {"max_usd": "3.00", "max_hours": str((120 + 66 + 4 + 4) / 3600), "deadline": None}
    run = run_of(tmp_path, of_format("file", "--steps 4000 --every 10 --catch", stop={"grace_s": 4.0}), limits=limits)
    node = SupervisedNode(tmp_path, run, "i-1", GPUFLEET_LAUNCHED_AT=runs.launched(seconds_ago=120))
    assert node.code() == 0, node.log
    done = node.stored("done.json")
    assert done["reason"] == "max_hours"
    assert re.match(r"the command ended with .* at step [0-9,]+\n  \| ", done["detail"])


def test_a_command_deaf_to_its_limit_spends_no_more_than_its_stopping_time(tmp_path: Path) -> None:
    limits = {"max_usd": "3.00", "max_hours": str((120 + 66 + 4 + 4) / 3600), "deadline": None}
    deaf = "trap '' TERM INT; while :; do (setsid sleep 300 &); sleep 1; done"
    node = SupervisedNode(
        tmp_path,
        run_of(tmp_path, parameters(deaf, stop={"grace_s": 2.0}), limits=limits),
        "i-1",
        GPUFLEET_LAUNCHED_AT=runs.launched(seconds_ago=120),
    )
    assert node.code() == 0, node.log
    assert node.stored("done.json")["reason"] == "max_hours"
    assert "it did not leave in time" in node.stored("done.json")["detail"]
    receipt = node.stored("receipt.json")
    assert float(receipt["attempts"][0]["seconds"]) <= 120 + 66 + 4 + 4  # the cap holds its stopping time
    assert not [each for each in processes() if "sleep 300" in each and str(tmp_path) in each]


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
