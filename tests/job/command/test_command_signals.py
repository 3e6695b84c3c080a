"""What loses a save elsewhere, and does not here: shells, launchers, workers, bars, files that rest half written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpufleet.job.contract.messages import SaveRequest, Stop
from tests.job.command_world import PYTHON, CommandJob, of_format, parameters, wrong


def stopped(job: CommandJob, *, seen: str, reason: str = "notice") -> int:
    """The host's exit code, where a stop comes once `seen` has been printed."""
    process = job.start()

    def stop() -> None:
        job.wait_for_line(seen, process)
        deadline = time.time() + 3600 if reason == "notice" else None
        job.tell(Stop(reason=reason, save=True, ends=deadline is None, deadline=deadline))

    return job.finish(process, stop)


def whole_commit(job: CommandJob) -> int:
    """The one committed step, and it is whole."""
    (each,) = job.commits()
    assert wrong(job.workdir / "ckpt" / each.folder, each.step) == []
    return each.step


@pytest.mark.parametrize("shell", ["bash -c 'echo before; {}; echo after'", "sh -c '{} & wait'", "{}"])
def test_a_shell_that_ends_at_the_signal_does_not_take_the_save_along(tmp_path: Path, shell: str) -> None:
    told = of_format("file", "--steps 100000 --every 100000 --catch --pause 0.1")
    job = CommandJob(tmp_path / "w", {**told, "command": shell.format(told["command"])})
    assert stopped(job, seen="step 20 ") == 75, job.log
    assert whole_commit(job) >= 20


def family(tmp_path: Path, part: str, signal: str, **sections: object) -> CommandJob:
    command = f"{PYTHON} family.py {{checkpoints}} {part} {signal}"
    return CommandJob(tmp_path / "w", parameters(command, stop={"signal": signal}, **sections))


def test_usr1_does_not_end_a_launcher_that_does_not_know_it_and_its_ranks_save(tmp_path: Path) -> None:
    job = family(tmp_path, "launcher", "USR1")
    assert stopped(job, seen="step 20 ") == 75, job.log
    assert whole_commit(job) >= 20
    assert "the launcher ends well" in job.log
    assert {"rank 0 has seen 1", "rank 1 has seen 1"} <= set(job.log.splitlines())


def test_a_launcher_that_would_pass_the_signal_on_is_left_alone_and_its_ranks_get_it_once(tmp_path: Path) -> None:
    """torchrun passes it on to all that its ranks have started, workers that load data too: those take a save along."""
    job = family(tmp_path, "launcher-that-passes-on", "TERM")
    assert stopped(job, seen="step 20 ") == 75, job.log
    assert whole_commit(job) >= 20
    assert {"rank 0 has seen 1", "rank 1 has seen 1", "the launcher ends well"} <= set(job.log.splitlines())
    assert "the launcher was signalled" not in job.log


def test_a_script_that_starts_itself_again_as_another_rank_gets_it_in_both(tmp_path: Path) -> None:
    job = family(tmp_path, "again", "TERM")
    assert stopped(job, seen="step 20 ") == 75, job.log
    assert whole_commit(job) >= 20
    assert {"rank 0 has seen 1", "rank 1 has seen 1"} <= set(job.log.splitlines())


def test_ranks_of_a_launcher_that_dies_of_the_signal_are_waited_for(tmp_path: Path) -> None:
    job = family(tmp_path, "launcher", "TERM")
    assert stopped(job, seen="step 20 ") == 75, job.log
    assert whole_commit(job) >= 20


def test_a_worker_that_loads_data_is_left_to_its_script(tmp_path: Path) -> None:
    job = family(tmp_path, "loader", "TERM")
    assert stopped(job, seen="step 20 ") == 75, job.log
    assert whole_commit(job) >= 20
    assert "the worker was signalled" not in job.log
    assert "fell with its worker" not in job.log


def test_a_signal_that_saves_and_goes_on_is_sent_where_the_machine_may_go_away(tmp_path: Path) -> None:
    until = (
        'n=0; until [ "$more" = 0 ]; do n=$((n+1)); more=${more:+$((more-1))}; echo step $n loss 1; sleep 0.02; done'
    )
    job = CommandJob(tmp_path / "w", parameters(f"trap 'echo asked; more=5' USR2; {until}", stop={"request": "USR2"}))
    process = job.start()

    def ask() -> None:
        job.wait_for_line("step 20 ", process)
        job.tell(SaveRequest(reason="rebalance"))

    assert job.finish(process, ask) == 0
    assert job.log.partition("asked")[2].count("\nstep ") == 5
    assert not (job.workdir / SaveRequest.FILE).exists()


@pytest.mark.parametrize(("way", "steps"), [("ends", [1]), ("fails", [])])
def test_a_file_that_rests_half_written_is_no_checkpoint(tmp_path: Path, way: str, steps: list[int]) -> None:
    """Half of its bytes are there for 4 s, and nobody touches them."""
    seen = parameters(
        f"{PYTHON} half.py {{checkpoints}} 4 {way}",
        checkpoint={"each": ["ckpt-{step}.bin"]},
        exit={"restarts": 0},
    )
    job = CommandJob(tmp_path / "w", seen)
    assert job.run() == (0 if way == "ends" else 1), job.log
    assert job.steps() == steps


LATE = """
import pathlib, time
from gpufleet.job.command import processes
send, here = processes.send, pathlib.Path({folder!r})
def newest():
    return max((int(each.name.split("-")[1]) for each in here.rglob("checkpoint-*")), default=0)
def late(first, name):
    end, until = time.monotonic() + 60, newest() + 20
    while newest() < until and time.monotonic() < end:
        time.sleep(0.01)
    return send(first, name)
processes.send = late
"""


@pytest.mark.parametrize(("catch", "reason"), [("", "timed"), ("--catch", "stop")])
def test_what_is_saved_while_a_signal_is_sent_is_an_answer_to_it_where_a_process_survives_it(
    tmp_path: Path, catch: str, reason: str
) -> None:
    """Two more saves come between the look at what is there and the signal."""
    told = of_format("hf-trainer", f"--steps 100000 --every 10 --step-s 0.02 {catch}")
    job = CommandJob(tmp_path / "w", told, changed=LATE.format(folder=str(tmp_path / "w")))
    process = job.start()

    def stop() -> None:
        job.wait_for(lambda: job.metrics() and job.metrics()[-1]["step"] >= 25, process, "step 25")
        job.tell(Stop(reason="notice", save=True, ends=False, deadline=time.time() + 3600))

    assert job.finish(process, stop) in (75, 1), job.log
    assert job.commits()[-1].reason == reason, job.log
