"""A command in the container of a rehearsed node: the node's loop, the stand-in for docker, the host, for real."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.environment import JOB_CONTAINER
from gpufleet.job.node.jobs import Jobs
from tests.job.command_world import PYTHON, CommandJob, of_format, parameters
from tests.job.jobs_world import serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a container keeps together, Linux alone can show")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run's folder on a rehearsed machine, whose loop serves what is asked."""
    with serving(tmp_path, monkeypatch, job_image="me/train:1") as workdir:
        yield workdir


def contained(node: Path, parameters: dict[str, Any]) -> CommandJob:
    job = CommandJob(node, parameters)
    job.environment = {JOB_CONTAINER: "1"}
    return job


def test_a_command_runs_in_a_container_of_its_own_and_nothing_of_gpufleet_s_python_is_there(node: Path) -> None:
    look = "import sys, os; print(sorted(os.environ)); print(sys.prefix, os.environ['PATH'])"
    job = contained(node, parameters(f'{PYTHON} -c "{look}"; {PYTHON} -c "import job, infra; print(infra.PAUSE)"'))
    assert job.run() == 0, job.log
    assert "PYTHONPATH" not in job.log
    assert f"{Path(sys.executable).parent}" not in job.log
    assert "\n0.002\n" in job.log  # the user's own packages called job and infra


def test_the_set_up_is_done_once_for_all_starts_of_a_node(node: Path) -> None:
    failing = "echo step $(cat n | wc -l) loss 1; echo x >>n; exit 3"
    told = parameters(failing, setup="echo setting up; echo x >n", exit={"restarts": 2})
    job = contained(node, told)
    assert job.run() == 1, job.log
    assert job.log.count("setting up") == 1
    assert [f"step {number} loss" in job.log for number in (1, 2, 3)] == [True] * 3


def test_what_has_lost_its_parent_still_saves_and_is_waited_for(node: Path) -> None:
    """`sh` ends at once; the process that it has left behind writes for a second and is in no group of anybody's."""
    told = of_format("file", "--steps 3 --every 3 --step-s 0.3")
    told["command"] = f"setsid {told['command']} & sleep 0.5; exit 0"
    job = contained(node, told)
    job.changed = "from gpufleet.job.command import host; host.LEFTOVER_S = 900.0"
    assert job.run() == 0, job.log
    assert job.steps() == [3], job.log


def test_an_image_that_cannot_run_is_a_failed_attempt_with_docker_s_reason(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, "command", lambda self: ["sh", "-c", "echo exec format error >&2; exit 126"])
    job = contained(node, parameters("true", exit={"restarts": 0}))
    assert job.run() == 1
    assert "exec format error" in job.log
