"""What the end of a command means, and what follows from it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.command.endings import End, judge
from gpufleet.job.command.stopping import Leaving
from gpufleet.job.contract.messages import CommandEnd, Fatal, LeaderSaved, Observed, Stop
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.supervisor.publish import Publisher
from gpufleet.job.supervisor.store import FolderStore
from tests.job.command_world import PYTHON, CommandJob, kill, of_format, parameters, processes_in

Z = ("bye",)


def config(**sections: Any) -> CommandConfig:
    return convert.from_json(CommandConfig, {"command": "x", **sections}, "job", CommandConfig())


STEPS = {"work": {"steps": 60_000}}
EPOCHS = {"work": {"epochs": 6}}
RULES = {"exit": {"fatal": [3], "again": [4], "restarts": 2}}


@pytest.mark.parametrize(
    ("sections", "end", "stopped", "verdict", "said"),
    [
        # Exit code 0, and nobody had asked.
        (STEPS, {"step": 59_990, "spread": 50}, False, "finished", ""),  # the last line came before the last step
        (STEPS, {"step": 58_000, "spread": 500}, False, "failed", "ended by itself at step 58,000 of 60,000; if"),
        (STEPS, {"step": 58_000, "spread": 500, "is_delivered": True}, False, "finished", ""),
        (STEPS, {"step": 50_000, "saved": 60_000}, False, "finished", ""),
        (EPOCHS, {"step": 5}, False, "finished", ""),  # the last epoch is told when it begins, or from 0
        (EPOCHS, {"step": 4}, False, "failed", "ended by itself at epoch 4 of 6"),
        (STEPS, {"step": 0, "is_told": False}, False, "failed", "whether it reached step 60,000 is unknown: no line"),
        (STEPS, {"step": 0, "is_told": False, "unread": ("ep 3 of 9", "ep 4 of 9")}, False, "failed",
         "No line matched job.progress.stdout; the last ones with numbers were: ep 3 of 9 | ep 4 of 9"),
        (STEPS, {"step": 0, "is_told": False, "is_saved": True}, False, "finished", ""),
        # It was given a checkpoint, and did nothing.
        ({}, {"step": 30, "is_told": False, "restored": 30, "is_idle": True}, False, "failed",
         "got the checkpoint of step 30, printed no step, wrote nothing and ended with exit code 0"),
        (STEPS, {"step": 30, "is_told": False, "restored": 30, "is_idle": True}, False, "failed", "it does not resume"),
        (STEPS, {"step": 60_000, "is_told": False, "restored": 60_000, "is_idle": True}, False, "finished", ""),
        ({}, {"step": 30, "is_told": False, "restored": 30, "is_idle": True, "follows": True}, False, "finished", ""),
        # Exit code 0 after a stop: the last step must be certain.
        (STEPS, {"step": 60_000}, True, "stopped", ""),  # by its lines alone
        (STEPS, {"step": 59_990, "saved": 59_990, "spread": 50}, True, "stopped", ""),
        (STEPS, {"step": 59_990, "saved": 60_000}, True, "finished", ""),
        (STEPS, {"step": 60_000, "is_delivered": True}, True, "finished", ""),
        (STEPS, {"step": 60_000, "saved": 60_000, "code": 143}, True, "stopped", ""),
        ({}, {"step": 60_000, "saved": 60_000}, True, "stopped", ""),  # nobody knows which is the last
        (EPOCHS, {"step": 5, "saved": 5}, True, "stopped", ""),
    ],
)  # fmt: skip
def test_how_far_it_came_says_what_an_exit_code_of_0_means(
    sections: dict[str, Any], end: dict[str, Any], stopped: bool, verdict: str, said: str
) -> None:
    found, why = judge(config(**sections), End(**{"code": 0, **end}), [], stopped=stopped)
    assert found == verdict
    assert said in why


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({"cause": "ValueError: 3 of 8"}, {"cause": "ValueError: 4 of 8"}, True),  # but for its numbers
        ({"cause": "ValueError: a"}, {"cause": "TypeError: b"}, False),
        ({"lines": ("reset by peer", "====")}, {"lines": ("a broken GPU", "====")}, False),  # its launcher's last line
        ({"lines": ("exit 1 (pid 77)", "====")}, {"lines": ("exit 1 (pid 78)", "====")}, True),
        ({"cause": "ValueError: a"}, {"cause": "ValueError: a", "step": 8}, False),
        ({"code": 1}, {"code": 137}, False),
    ],
)
def test_two_ends_are_alike_by_their_cause(one: dict[str, Any], other: dict[str, Any], alike: bool) -> None:
    first, second = (End(**{"code": 1, "step": 7, "lines": Z, **each}) for each in (one, other))
    assert first.is_like(second) is alike


@pytest.mark.parametrize(
    ("sections", "code", "step", "before", "stopped", "verdict", "said"),
    [
        (STEPS, 0, 60_000, [], False, "finished", "exit code 0 at step 60,000"),
        (STEPS, 0, 59_400, [], False, "finished", ""),  # the last ones are logged nowhere
        (STEPS, 0, 3_120, [], False, "failed", "ended by itself at step 3,120 of 60,000"),
        ({"work": {"steps": 60_000, "early": True}}, 0, 3_120, [], False, "finished", ""),
        ({}, 0, 7, [], False, "finished", ""),
        (STEPS, 0, 3_120, [], True, "stopped", ""),  # a save and an exit: not its end
        ({}, 0, 7, [], True, "stopped", ""),
        (RULES, 3, 7, [], False, "failed", "exit code 3 at step 7, which is one of exit.fatal"),
        (RULES, 3, 7, [], True, "stopped", ""),
        (RULES, 4, 7, [], False, "elsewhere", "one of exit.again"),
        (RULES, 1, 7, [], False, "again", "exit code 1 at step 7"),
        (RULES, 1, 9, [5, 7], False, "elsewhere", ""),
        (RULES, 1, 7, [7], False, "failed", "twice for the same reason"),
        (RULES, 143, 7, [], False, "again", "SIGTERM, exit code 143"),  # by somebody else: a crash, no stop
        (RULES, 137, 7, [], False, "again", "SIGKILL, exit code 137, as if the kernel lacks memory"),
        (RULES, 139, 7, [], False, "again", "SIGSEGV, exit code 139"),
        (RULES, 1, 7, [], True, "stopped", ""),
    ],
)
def test_the_table_of_endings(
    sections: dict[str, Any], code: int, step: int, before: list[int], stopped: bool, verdict: str, said: str
) -> None:
    earlier = [End(code=1, step=each, lines=Z) for each in before]
    found, why = judge(config(**sections), End(code=code, step=step, lines=Z), earlier, stopped=stopped)
    assert found == verdict
    assert said in why


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to", "out of memory"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling", "out of memory"),
        ("OSError: [Errno 28] No space left on device", "no room on the disk"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "a GPU's memory is broken"),
    ],
)
def test_a_known_text_tells_the_reason(line: str, reason: str) -> None:
    assert f"exit code 1, {reason} at step 3" in End(code=1, step=3, lines=("x", line)).sentence


def test_a_command_that_ends_too_early_fails_with_its_step_and_its_last_lines(tmp_path: Path) -> None:
    job = CommandJob(tmp_path / "w", of_format("file", "--steps 30 --every 10", work={"steps": 500}))
    assert job.run() == 65, job.log
    fatal = Fatal.read(job.workdir)
    assert fatal is not None
    assert "the command ended by itself at step 30 of 500" in fatal.detail
    assert "  | step 30 loss 0.0333" in fatal.detail
    assert fatal.detail.count("  | ") == 20


@pytest.mark.parametrize("reason", ["notice", "max_usd", "stopped"])
def test_exit_code_0_after_a_stop_is_never_the_end(tmp_path: Path, reason: str) -> None:
    job = CommandJob(tmp_path / "w", of_format("file", "--steps 100000 --every 100000 --catch", stop={"saves": "true"}))
    process = job.start()

    def stop() -> None:
        job.wait_for_line("step 20 ", process)
        deadline = time.time() + 3600 if reason == "notice" else None
        job.tell(Stop(reason=reason, save=True, ends=deadline is None, deadline=deadline))

    assert job.finish(process, stop) == 75, job.log
    assert job.steps()


def test_a_crash_is_gone_on_from_in_place_and_then_elsewhere(tmp_path: Path) -> None:
    steps = "$((60 + $(cat ../n 2>/dev/null || echo 0)))"  # another step at the second end
    told = of_format("file", f"--every 40 --step-s 0.04 --steps {steps}; echo failed; echo 10 >../n; exit 9")
    told |= {"resume": {"args": "", "check": "none"}, "exit": {"restarts": 1}}
    job = CommandJob(tmp_path / "w", told)
    assert job.run() == 1, job.log
    assert "restart 1 of 1, from the last whole checkpoint" in job.log
    assert "restored step 40" in job.log
    left = CommandEnd.read(job.workdir)
    assert left is not None
    assert "exit code 9" in left.how
    assert left.lines[-1] == "failed"


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_of_several_starts_nothing_again_by_itself(node: int, tmp_path: Path) -> None:
    job = CommandJob(tmp_path / "w", {**of_format("file", "--steps 1; exit 9"), "exit": {"restarts": 1}})
    job.environment = {"GPUFLEET_NODES": "2", "GPUFLEET_NODE_RANK": str(node)}
    job.tell(LeaderSaved(step=-1, named_by="", ended=True))
    assert job.run() == 1, job.log
    assert ", from the last whole checkpoint" not in job.log
    seen = Observed.read(job.workdir)
    assert seen is not None
    assert seen.follows is (node > 0)


def test_a_command_that_does_not_resume_ends_the_run_within_a_logging_interval(tmp_path: Path) -> None:
    told = of_format("file", "--steps 400 --every 60")
    deaf = {**told, "resume": {"args": "", "env": None, "check": "step"}}
    job = CommandJob(tmp_path / "w", deaf)
    process = job.start()
    job.wait_for(job.steps, process, "a checkpoint")
    kill(process)
    (restored,) = job.steps()
    began = len(job.log)
    assert job.run() == 65, job.log
    fatal = Fatal.read(job.workdir)
    assert fatal is not None
    assert fatal.detail.startswith(
        f"checkpoint of step {restored} was restored and the command began at step 1: it does not resume"
    )
    last = max(map(int, re.findall(r"^step (\d+) loss", job.log[began:], re.MULTILINE)))
    assert last < restored


STUCK = "from gpufleet.job.command.watchdogs import StartWatch; StartWatch.stuck"


def test_a_command_that_stands_still_is_started_again_and_that_is_counted(tmp_path: Path) -> None:
    silent = parameters("echo step 1 loss 1; exec sleep 5000", exit={"restarts": 1})
    stuck = "lambda self, output_at, step_at: 'it stands still' if step_at > self._began else ''"
    job = CommandJob(tmp_path / "w", silent, changed=f"{STUCK} = {stuck}")
    assert job.run() == 1, job.log
    assert job.log.count("the command was ended at step 1: it stands still") == 2
    assert job.log.count("step 1 loss 1") == 2


def test_the_watch_over_a_command_hears_of_a_bar_that_draws_over_itself(tmp_path: Path) -> None:
    drawing = parameters("printf '\\r 1 %%'; exec sleep 5000", exit={"restarts": 0})
    drawn = "lambda self, output_at, step_at: 'drawn' if output_at > self._began else ''"
    job = CommandJob(tmp_path / "w", drawing, changed=f"{STUCK} = {drawn}")
    assert job.run() == 1, job.log
    assert "the command was ended at step 0: drawn" in job.log


DEAF = "trap '' TERM; echo begun; while :; do sleep 0.2; done"
FORKING = f"{PYTHON} -c 'import os, time; [os.fork() for _ in range(6)]; os.write(1, b\"begun\\n\"); time.sleep(5000)'"
SETSID = "setsid sh -c \"trap '' TERM; echo begun; sleep 5000\" & " * 2 + "exec sleep 5000"


@pytest.mark.parametrize(
    ("command", "count"), [(DEAF, 1), (FORKING, 64), (SETSID, 2)], ids=["deaf", "forking", "in sessions of their own"]
)
def test_a_command_deaf_to_a_limit_is_gone_after_its_grace(tmp_path: Path, command: str, count: int) -> None:
    job = CommandJob(tmp_path / "w", parameters(command, stop={"grace_s": 2.0}))
    process = job.start()

    def stop() -> None:
        job.wait_for(lambda: job.log.count("begun") == count, process, f"{count} processes")
        job.tell(Stop(reason="max_usd", save=True, ends=True))

    assert job.finish(process, stop) == 75, job.log
    assert not processes_in(tmp_path)


@pytest.mark.parametrize(
    ("saves", "fits", "signalled"),
    [("true", True, True), ("unknown", True, True), ("false", True, False), ("true", False, False)],
)
def test_a_notice_is_passed_on_only_where_that_can_save(
    tmp_path: Path, saves: str, fits: bool, signalled: bool
) -> None:
    job = CommandJob(tmp_path / "w", of_format("file", "--steps 100000 --every 100000", stop={"saves": saves}))
    process = job.start()

    def stop() -> None:
        job.wait_for_line("step 20 ", process)
        job.tell(Stop(reason="notice", save=fits, deadline=time.time() + 3600))
        if not signalled:  # it trains on: its own save may still become whole
            plan = "host: stop (notice): no signal"
            job.wait_for(lambda: job.log.partition(plan)[2].count("\nstep ") > 20, process, "more steps")
            kill(process)

    assert job.finish(process, stop) == (75 if signalled else -signal.SIGKILL), job.log
    assert ("SIGTERM to" in job.log) is signalled


@pytest.mark.parametrize(
    ("saves", "reason", "deadline", "seconds", "on_signal", "why"),
    [
        (True, "notice", 120.0, 116.0, False, ""),
        (True, "notice", 120.0, 117.0, False, "it did not stop in time"),
        (False, "notice", 120.0, 117.0, False, "the machine goes away"),
        (True, "notice", 120.0, 1.0, True, "its checkpoint is whole, and the machine goes away"),
        (False, "stopped", None, 1.0, False, "stopped after a whole checkpoint"),
        (True, "max_usd", None, 89.0, False, ""),
        (True, "max_usd", None, 90.0, False, "it did not stop in time"),
    ],
)
def test_how_long_a_command_is_waited_for(
    saves: bool, reason: str, deadline: float | None, seconds: float, on_signal: bool, why: str
) -> None:
    """A checkpoint becomes whole a second after the stop, where `on_signal` says so because of the signal."""
    told = config(stop={"saves": "true" if saves else "false"})
    leaving = Leaving(told, Stop(reason=reason, save=True, deadline=deadline), now=0.0, newest=5)

    def look(now: float) -> str:
        return leaving.look(
            now,
            saving=lambda: False,
            committed=5 if now < 1.0 else 6,
            on_signal=on_signal and now >= 1.0,
            send=lambda name: None,
            say=lambda text: None,
        )

    assert look(0.5) == ""
    assert look(seconds) == why
    assert leaving.signalled is saves


def test_outputs_are_delivered_at_the_end(tmp_path: Path) -> None:
    make = "mkdir -p {outputs}/tb {checkpoints}/final; cd {outputs}; echo 1 >a.txt; echo x >tb/e"
    make += "; echo 2 >{checkpoints}/final/b.bin"
    told = parameters(make, outputs=["{outputs}", "{checkpoints}/final"])
    job = CommandJob(tmp_path / "w", told)
    assert job.run() == 0, job.log
    final = job.workdir / "final"
    assert (final / "a.txt").read_text() == "1\n"
    assert (final / "checkpoints" / "final" / "b.bin").read_text() == "2\n"
    store = FolderStore(tmp_path / "store")
    Publisher(run="r1", store=store, workdir=job.workdir, published=pytest.fail, say=pytest.fail).metrics()
    assert store.get_bytes("tb/e") == b"x\n"
