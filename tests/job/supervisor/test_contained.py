"""A trainer in the container of a rehearsed node: the node's loop and the stand-in for docker, for real."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

import pytest

from gpufleet.job.node.jobs import Jobs
from gpufleet.job.supervisor.child import Child, JobLog, trainer
from gpufleet.job.supervisor.contained import ContainedProcess
from tests.job.jobs_world import serving
from tests.waiting import is_alive, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a container keeps together, Linux alone can show")


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with serving(tmp_path, monkeypatch, job_image="") as workdir:
        yield workdir


class LetGo(Child):
    """One that is let go at once, in the container."""

    def __init__(self, workdir: Path, *words: str, told: Mapping[str, str] | None = None) -> None:
        self.printed = BytesIO()
        log = JobLog(workdir / "job.log", self.printed)
        argv = [sys.executable, *words]
        super().__init__(
            lambda: ContainedProcess(workdir, argv, told or {}), log, time.time, waits=workdir / "start.json"
        )

    def ended(self) -> tuple[int | None, list[str]]:
        """Its code, and what it printed."""
        self.go(0)
        wait_for("the end of the trainer", lambda: self.poll() is not None)
        return self.poll(), self.printed.getvalue().decode().splitlines()


def test_what_it_prints_and_its_code_come_back_and_it_has_nothing_of_the_node_s(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the node's")
    look = (
        "import os, sys; print(os.environ.get('AWS_ACCESS_KEY_ID'), os.environ['A']); print(sys.argv[1]); sys.exit(69)"
    )

    assert LetGo(workdir, "-c", look, "a 'word'", told={"A": "b $c"}).ended() == (69, ["None b $c", "a 'word'"])


def test_a_signal_is_told_as_that_of_a_child_is(workdir: Path) -> None:
    assert LetGo(workdir, "-c", "import os; os.kill(os.getpid(), 9)").ended()[0] == -9


def test_it_begins_before_it_is_let_go(workdir: Path) -> None:
    program = "import sys, time; print('imported', flush=True); open(sys.argv[1], 'w'); time.sleep(5000)"
    child = LetGo(workdir, "-c", program, str(workdir / "began"))
    wait_for("the trainer's file", lambda: (workdir / "began").exists(), process=child)
    assert child.poll() is None
    child.kill()


def test_a_kill_ends_all_of_it_and_another_one_can_begin(workdir: Path) -> None:
    forks = (
        "import subprocess, time; p = subprocess.Popen(['setsid', 'sleep', '5000']); print(p.pid, flush=True); p.wait()"
    )
    child = LetGo(workdir, "-c", forks)
    child.go(0)
    wait_for("the number of the process below", lambda: child.printed.getvalue().endswith(b"\n"), process=child)
    grandchild = int(child.printed.getvalue())
    assert is_alive(grandchild)

    child.kill()

    assert child.poll() == -9
    wait_for("the end of the process below", lambda: not is_alive(grandchild))
    assert LetGo(workdir, "-c", "print('again')").ended() == (0, ["again"])


def test_a_container_that_cannot_be_had_is_a_crash_with_docker_s_reason(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, "command", lambda self: ["sh", "-c", "echo exec format error >&2; exit 126"])

    assert LetGo(workdir).ended() == (126, ["no trainer: exec format error"])


def test_a_trainer_there_is_held_by_the_shell_of_its_container(workdir: Path) -> None:
    words = trainer(workdir, 0, 1, "platform", parent="-")[1:]
    code, printed = LetGo(workdir, *words[: words.index("platform") + 1]).ended()
    assert code == 0, printed
