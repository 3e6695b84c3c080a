"""Killed amid saves, at seeded moments: nothing torn is ever committed, and nothing torn is put back.

Each round is a node: it restores the newest commit, runs the script of a convention, and is lost. In between the script
alone is killed, so that the host has to judge what it has left.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from gpufleet.job.command import processes
from tests.job.command_world import FORMATS, CommandJob, kill, of_format, wrong

SEED = 11
# Saves take most of the time; one file that is written over and over is left alone for a second, to be seen at all.
PACE = {"file": ("--every 50 --step-s 0.03 --pause 0.08", 4.0)}
USUAL = ("--every 2 --step-s 0.01", 1.5)


def killed(tmp_path: Path, name: str, kills: int) -> CommandJob:
    """The work folder after so many kills, each at a moment of its own."""
    draw, (pace, longest_s) = random.Random(f"{SEED} {name}"), PACE.get(name, USUAL)
    parameters = of_format(name, f"--steps 100000 {pace}", exit={"restarts": 100})
    job = CommandJob(tmp_path / "w", parameters)
    done = 0
    while done < kills:
        began, process = time.time(), job.start()
        try:
            job.wait_for(partial(has_stepped, job, began), process, "a step")
            for _ in range(min(10, kills - done)):
                time.sleep(draw.uniform(0.3, longest_s))
                left = [each for each in processes.descendants(process.pid) if is_script(each)]
                if draw.random() < 0.8:
                    end(left)
                    done += 1
                    job.wait_for(partial(none_is_script, left), process, "the end of the script")
                    check(job)
                else:
                    break
        finally:
            kill(process)
        done += 1
        check(job)
    return job


def end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_script(pid: int) -> bool:
    try:
        return b".py\0--out" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def none_is_script(pids: list[int]) -> bool:
    return not any(is_script(each) for each in pids)


def has_stepped(job: CommandJob, since: float) -> bool:
    return any(line["ts"] > since for line in job.metrics()[-1:])


def check(job: CommandJob) -> None:
    for each in job.commits():
        folder = job.workdir / "ckpt" / each.folder
        try:
            assert wrong(folder, each.step) == [], (each.step, job.log[-3000:])
        except FileNotFoundError:  # replaced while it was read
            continue


def put_back_is_whole(job: CommandJob) -> None:
    """What the next start is given: nothing where a crowded machine had each node killed before its first save."""
    commits, began, started = job.commits(), len(job.log), time.time()
    process = job.start()
    try:
        job.wait_for(partial(has_stepped, job, started), process, "a step")
    finally:
        kill(process)
    restored = re.findall(r"restored step ([0-9,]+)", job.log[began:])
    assert restored == [f"{each.step:,}" for each in commits[-1:]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_command_killed_amid_a_save_leaves_nothing_torn(tmp_path: Path, name: str) -> None:
    job = killed(tmp_path, name, 3)
    put_back_is_whole(job)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_command_killed_a_hundred_times_amid_saves_leaves_nothing_torn(tmp_path: Path, name: str) -> None:
    job = killed(tmp_path, name, 100)
    put_back_is_whole(job)
