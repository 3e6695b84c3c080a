"""Real launches of torchrun as the supervisor makes them: how they end, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest

from gpufleet.job.supervisor.child import Child, GroupedProcess, JobLog, trainer
from tests.job import rank_world as world
from tests.job.train_world import committed, records
from tests.repository import ROOT
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")


def launch(workdir: Path) -> Child:
    words = trainer(workdir, 0, 2, "tests.job.rank_world")  # the same trainer, the toy among its experiments
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    log = JobLog(workdir / "job.log", BytesIO())
    return Child(lambda: GroupedProcess(words, environment), log, time.time, workdir / "ended.json")


def wait_for_steps(child: Child, workdir: Path) -> None:
    told = workdir / "metrics.jsonl"
    wait_for("a step", lambda: told.exists() and records(workdir), process=child, log=(workdir / "job.log").read_text)


def wait_for_end(child: Child, workdir: Path) -> None:
    wait_for("the end of torchrun", lambda: child.poll() is not None, log=(workdir / "job.log").read_text)


def ranks(workdir: Path) -> list[int]:
    """Process ids of what runs with this work folder, torchrun among them."""
    words, found = f"\0{workdir}\0--rung\0".encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # gone meanwhile
            if words in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def make(workdir: Path, steps: int) -> Path:
    world.make(workdir, sharded=True)
    tree = json.loads((workdir / "run.json").read_text())
    tree["job"]["parameters"]["steps"] = steps
    (workdir / "run.json").write_text(json.dumps(tree))
    return workdir


def test_a_stop_request_ends_all_ranks_with_a_save_and_the_code_of_a_stop(tmp_path: Path) -> None:
    workdir = make(tmp_path, 1_000_000)
    child = launch(workdir)
    try:
        wait_for_steps(child, workdir)
        (workdir / "stop.json").write_text('{"reason": "notice", "save": true}')
        wait_for_end(child, workdir)
    finally:
        child.kill()
    assert child.poll() == 75
    assert len(committed(workdir)) == 1
    assert ranks(workdir) == []
    assert (workdir / "job.log").read_text().count("stopped after step") == 1


@pytest.mark.slow
def test_ranks_do_not_outlive_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    workdir = make(tmp_path, 1_000_000)
    child = launch(workdir)
    try:
        wait_for_steps(child, workdir)
        assert len(ranks(workdir)) == 3
    finally:
        child.kill()
    wait_for("the end of all ranks", lambda: not ranks(workdir))
    assert child.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_an_error_that_all_ranks_see_ends_with_its_own_code(tmp_path: Path) -> None:
    workdir = make(tmp_path, 4)
    (workdir / "data" / "dataset.json").unlink()
    child = launch(workdir)
    try:
        wait_for_end(child, workdir)
    finally:
        child.kill()
    assert child.poll() == 65
    assert "not a prepared dataset" in (workdir / "fatal.json").read_text()
