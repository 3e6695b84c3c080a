"""A canary that is killed at any of its writes to AWS: the next one removes whatever it has left."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.canary import stacks
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.commands import canary as command
from gpufleet.rehearsal import canary, scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.environment import scratch as settings
from gpufleet.rehearsal.habits import Habits
from tests import forked
from tests.rehearsal.killed import Killer
from tests.rehearsal.killed_calls import is_empty

assert canary.fis  # moto's service, with notices
WRITES = {stacks.RUN: 87, stacks.CAP: 78}  # of a stack's flight from its first to its last, which a test counts
OFTEN = {(stacks.RUN, 52)}  # amid the notice
EVERY = [(name, at) for name, writes in WRITES.items() for at in range(1, writes + 1)]


def fly(cloud: Cloud, folder: Path, name: str, at: int) -> Killer:
    """A flight of the stack that is killed after the write, and what it wrote until then."""
    project = scratch.make(folder / "project", {})
    stacks.choose(project, "r1", cloud.region, cloud.client, stacks.EMBEDDED, notice=True)
    killer = Killer(cloud, at)

    def begun(process: int) -> None:
        killer.kill = lambda: os.killpg(process, signal.SIGKILL)

    program = ["tests.rehearsal.canary_program", str(project), name]
    forked.run(program, settings(cloud.environment()), folder / "printed.txt", begun=begun)
    killer.detach()
    cloud.tick()
    return killer


def left(cloud: Cloud) -> set[Any]:
    """What is in the account beyond what it began with; a bucket without tags and objects costs nothing."""
    templates = cloud.client("fis").list_experiment_templates()["experimentTemplates"]
    resources = {each for each in cloud.leftovers() if not is_empty(cloud, each)}
    return {("template", each["id"]) for each in templates} | resources


@pytest.mark.parametrize(
    ("name", "at"), [pytest.param(*each, marks=[] if each in OFTEN else pytest.mark.slow) for each in EVERY]
)
def test_what_a_killed_canary_has_left_is_removed_by_the_next(
    tmp_path: Path, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "TYPES", 1)
    monkeypatch.setattr(command, "Flight", partial(Flight, sleep=lambda seconds: time.sleep(seconds / 50)))
    with Cloud(tmp_path / "cloud", habits=Habits(notice_s=0.5, relaunch_s=0.5)) as cloud:
        killer = fly(cloud, tmp_path, name, at)
        assert killer.fired, (tmp_path / "printed.txt").read_text()
        command._of_before(tmp_path / "project", cloud.client)
        assert left(cloud) == set(), killer.calls[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_a_canary_writes_as_often_as_the_kills_go(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "TYPES", 1)
    with Cloud(tmp_path / "cloud", habits=Habits(notice_s=0.5, relaunch_s=0.5)) as cloud:
        killer = fly(cloud, tmp_path, name, 1000)
        assert len(killer.calls) == WRITES[name], (tmp_path / "printed.txt").read_text()
