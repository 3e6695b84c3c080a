"""A probe: a few hundred steps of the real trainer, measured from outside.

The probe starts and controls the trainer in the same way as the supervisor: with its command line and the files of its
work folder (docs/interruptions.md). So a probe works for every experiment, and measures what a run will do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpufleet.job import measured, progress
from gpufleet.job.contract import commit, metrics
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.commit import COMMIT
from gpufleet.job.contract.messages import Fatal, SaveRequest, Stop, UsedRung
from gpufleet.job.contract.workdir import CHECKPOINTS, ENDED, LOG, METRICS, STEPS, step_of
from gpufleet.job.supervisor.child import FIRST_SIGN_S, Child, GroupedProcess, JobLog, trainer
from gpufleet.job.supervisor.world import Trainer

TICK_S = 0.02  # seconds between two looks; the duration of a save is only known to this precision


class ProbeFailedError(Exception):
    """The trainer did not reach the end of the probe. The message is the trainer's own reason, or the end of
    its log.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of a probe. `phases`: what job.measured.phases returns, and for each phase two facts that only an
    observer can see: `save.write_s`, and the `rung` (with `micro` and `checkpointing`). `finish_s`: None if the probe
    was stopped before the end of the experiment. `stop_s`: the time from the request to stop until its checkpoint was
    complete; None if there was no such checkpoint.
    """

    phases: list[dict[str, Any]]
    start_s: float
    finish_s: float | None
    stop_s: float | None
    seconds: float  # seconds from the process's start to its end
    cpu_s: float  # processor seconds of all threads of the trainer


@dataclass(slots=True)
class _Seen:
    """What the probe noticed while the trainer ran."""

    began: dict[int, float] = field(default_factory=dict)  # the time at which a checkpoint's folder appeared, by step
    written: dict[int, float] = field(default_factory=dict)  # seconds until a checkpoint was committed, by step
    stop_saves: set[int] = field(default_factory=set)  # steps that were saved because of a request to stop
    rungs: dict[str, UsedRung] = field(default_factory=dict)  # the rung of each phase, from rung.json
    asked: set[str] = field(default_factory=set)  # phases in which a save was requested
    reached: float | None = None  # the time at which metrics.jsonl had the probe's last step
    stopped: float | None = None  # the time at which the trainer was asked to stop
    step: int = 0  # the newest step in metrics.jsonl


def run(
    workdir: Path,
    *,
    stop_at: int | None = None,
    save_at: Mapping[str, int] | None = None,
    steps: int | None = None,
    ranks: int = 1,
    module: str = "",
    save_wait_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    environment: Mapping[str, str] = os.environ,
    start: Callable[[int], Trainer] | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> ProbeResult:
    """Trains in `workdir` (run.json, data/, inputs/) to the end, or until step `stop_at` is logged.

    `save_at`: for each phase, the step after which a checkpoint is requested once. `save_wait_s`: how long to wait for
    a checkpoint after `stop_at`. `steps`: the number of steps, for a progress bar. `ranks`: the number of training
    processes, which run `module`. If `start` is given, it is a function that starts the trainer instead. If memory runs
    out, the probe goes down the ladder, as a run does. Raises ProbeFailedError.
    """
    plan = _Plan(workdir, stop_at, save_at or {}, save_wait_s, say, steps)
    with Path(os.devnull).open("wb") as nowhere:
        return _run(plan, start or _starter(workdir, ranks, module, environment, nowhere), clock, sleep)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The arguments of `run`."""

    workdir: Path
    stop_at: int | None
    save_at: Mapping[str, int]
    save_wait_s: float
    say: Callable[[str], None]
    steps: int | None


def _run(
    plan: _Plan, start: Callable[[int], Trainer], clock: Callable[[], float], sleep: Callable[[float], None]
) -> ProbeResult:
    workdir, rung, cpu_s = plan.workdir, 0, _cpu_s()
    while True:
        seen, began = _Seen(), clock()
        child = start(rung)
        try:
            with progress.shown("training", plan.steps, "steps") as advance:
                while (code := child.poll()) is None:
                    _look(plan, seen, now := clock(), advance)
                    if now > began + FIRST_SIGN_S and _last(workdir) is None:
                        reason = (
                            f"no step in {FIRST_SIGN_S / 60:.0f} min; if this is a command, does job.progress match"
                            " its lines?"
                        )
                        raise ProbeFailedError(f"{reason}\n{_end_of_log(workdir)}")
                    sleep(TICK_S)
        finally:
            child.kill()
        ended = clock()
        _see_saves(workdir, seen, ended)
        if code != TrainerExit.OUT_OF_MEMORY:
            break
        used = UsedRung.read(workdir)
        if used is None or used.lower is None:
            raise ProbeFailedError(f"out of memory at the end of the ladder: {used}")
        rung = used.lower
        (workdir / METRICS).unlink(missing_ok=True)
    records = _records(workdir)
    phases = measured.phases(records)
    if code not in (TrainerExit.FINISHED, TrainerExit.STOPPED) or not phases:
        raise ProbeFailedError(_failure_reason(workdir, code))
    for phase in phases:
        own = [record["step"] for record in records if record["phase"] == phase["name"]]
        took = [s for step, s in seen.written.items() if own[0] <= step <= own[-1]]
        if phase["save"] is not None:
            phase["save"]["write_s"] = round(max(took), 3) or None if took else None
        used = seen.rungs.get(phase["name"])
        phase["rung"] = {key: getattr(used, key, None) for key in ("rung", "micro", "checkpointing")}
    first_s = records[0]["step"] * phases[0]["step_ms"]["median"] / 1e3
    return ProbeResult(
        phases=phases,
        start_s=round(max(0.0, records[0]["ts"] - began - first_s), 3),
        finish_s=round(ended - records[-1]["ts"], 3) if code == TrainerExit.FINISHED else None,
        stop_s=_stop_s(seen),
        seconds=round(ended - began, 3),
        cpu_s=round(_cpu_s() - cpu_s, 2),
    )


def _starter(
    workdir: Path, ranks: int, module: str, environment: Mapping[str, str], nowhere: IO[bytes]
) -> Callable[[int], Trainer]:
    """A function that starts the trainer on a rung as job/__main__.py does, with its output only in job.log."""
    log = JobLog(workdir / LOG, stream=nowhere)
    # The current folder belongs to a user and may contain a gpufleet/, so modules are not searched in it.
    environment = {**environment, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    ended = workdir / ENDED if ranks > 1 else None

    def start(rung: int) -> Trainer:
        words = trainer(workdir, rung, ranks, module)
        return Child(lambda: GroupedProcess(words, environment), log, time.time, ended)

    return start


def _look(plan: _Plan, seen: _Seen, now: float, advance: progress.Advance) -> None:
    workdir = plan.workdir
    _see_saves(workdir, seen, now)
    if (used := UsedRung.read(workdir)) is not None:
        seen.rungs[used.phase] = used
    record = _last(workdir)
    if record is None:
        return
    phase, step = record["phase"], record["step"]
    advance(step - seen.step)
    seen.step = step
    if phase in plan.save_at and phase not in seen.asked and step >= plan.save_at[phase]:
        seen.asked.add(phase)
        SaveRequest(reason="probe").write(workdir)
    if plan.stop_at is None or step < plan.stop_at or seen.stopped is not None:
        return
    if seen.reached is None:
        seen.reached = now
        if plan.save_wait_s and not seen.written:
            plan.say(f"no checkpoint yet: waiting for one, {plan.save_wait_s / 60:.0f} min at most ...")
    if seen.written or now >= seen.reached + plan.save_wait_s:
        seen.stopped = now
        Stop(reason="probe").write(workdir)


def _see_saves(workdir: Path, seen: _Seen, now: float) -> None:
    for path in (workdir / CHECKPOINTS).glob(STEPS):
        if (step := step_of(path.name)) is None:
            continue
        seen.began.setdefault(step, now)
        if step not in seen.written and (path / COMMIT).exists():
            seen.written[step] = now - seen.began[step]
            saved = commit.read(path)
            if saved is not None and saved.reason == "stop":
                seen.stop_saves.add(step)


def _stop_s(seen: _Seen) -> float | None:
    if seen.stopped is None:
        return None
    whole = [seen.began[step] + seen.written[step] for step in seen.stop_saves]
    return round(min(whole) - seen.stopped, 3) if whole else None


def _last(workdir: Path) -> dict[str, Any] | None:
    """The newest complete line of metrics.jsonl. The file is not read from its beginning."""
    try:
        with (workdir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    return next(iter(metrics.records(lines[-1:])), None)


def _records(workdir: Path) -> list[dict[str, Any]]:
    try:
        return metrics.records((workdir / METRICS).read_bytes().split(b"\n"))
    except OSError:
        return []


def _failure_reason(workdir: Path, code: int) -> str:
    if (fatal := Fatal.read(workdir)) is not None:
        return f"{fatal.error}: {fatal.detail}"
    if code in (TrainerExit.FINISHED, TrainerExit.STOPPED):
        return "no step was timed, because the first 10 never are: ask for more --steps"
    return f"the trainer ended with {code}; {_end_of_log(workdir)}"


def _end_of_log(workdir: Path) -> str:
    try:
        lines = (workdir / LOG).read_text(errors="replace").splitlines()[-15:]
    except OSError:
        lines = []
    return "\n".join(["the end of its log:", *lines])


def _cpu_s() -> float:
    """Processor seconds of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system
