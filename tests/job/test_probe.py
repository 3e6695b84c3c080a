"""A probe drives a trainer by its files and measures it from outside."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic, probe
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.messages import Stop
from gpufleet.job.experiments.engine.requests import Requests
from tests.job import train_world


class Fake:
    """A trainer of one phase on a clock of its own: a step every 0.1 s, logged each time; obeys stop and save."""

    output_at = 0.0

    def __init__(self, workdir: Path, steps: int, code: int = 0, rung: int = 0) -> None:
        self.workdir, self.steps, self.code, self.rung = workdir, steps, code, rung
        self.step, self.now, self.killed = 0, 1000.0, False
        self._saving: list[tuple[int, float]] = []

    def sleep(self, seconds: float) -> None:
        """Time passes: at 3 s the first step, then one each 0.1 s; a save takes 0.5 s."""
        self.now += seconds
        due = round((self.now - 1003.0) / 0.1)
        if self.code == 0 and self.step < self.steps and due > self.step:
            self.step += 1
            with (self.workdir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(self._line()) + "\n")
            atomic.write_json(self.workdir / "rung.json", {"phase": "all", "rung": self.rung, "micro": 8})
            if (self.workdir / "save.json").exists():
                (self.workdir / "save.json").unlink()
                self._saving.append((self.step, self.now + 0.5))
                (self.workdir / "ckpt" / f"step_{self.step:08d}").mkdir(parents=True)
        for step, done in self._saving:
            if self.now >= done:
                atomic.write_json(self.workdir / "ckpt" / f"step_{step:08d}" / "commit.json", {})

    def poll(self) -> int | None:
        if self.code:
            return self.code
        if (self.workdir / "stop.json").exists():
            return TrainerExit.STOPPED
        return 0 if self.step == self.steps and self.now > 1003.0 + self.steps * 0.1 + 2.0 else None

    def kill(self) -> None:
        self.killed = True

    def _line(self) -> dict[str, Any]:
        saved = [step for step, _ in self._saving if step == self.step - 1]
        saves = [{"step": step, "reason": "timed", "bytes": 4_000_000, "blocked_s": 0.0} for step in saved]
        timed = 100.0 if self.step > 10 else None
        at = round(1003.0 + self.step * 0.1, 3)
        return {"phase": "all", "step": self.step, "ts": at, "step_ms": timed, "mem_gb": 1.0, "saves": saves}


def run(fake: Fake, **more: Any) -> probe.ProbeResult:
    return probe.run(fake.workdir, start=lambda rung: fake, clock=lambda: fake.now, sleep=fake.sleep, **more)


def test_a_probe_says_how_long_steps_start_and_end_take(tmp_path: Path) -> None:
    fake = Fake(tmp_path, steps=40)
    found = run(fake)
    (phase,) = found.phases
    assert phase["step_ms"]["median"] == 100.0
    assert found.start_s == pytest.approx(3.0, abs=0.05)
    assert found.finish_s == pytest.approx(2.0, abs=0.05)
    assert found.seconds == pytest.approx(9.0, abs=0.1)
    assert phase["rung"]["micro"] == 8
    assert fake.killed


def test_a_checkpoint_is_asked_for_once_and_its_writing_is_timed(tmp_path: Path) -> None:
    (phase,) = run(Fake(tmp_path, steps=60), save_at={"all": 20}).phases
    assert phase["save"]["bytes"] == 4_000_000
    assert phase["save"]["write_s"] == pytest.approx(0.5, abs=3 * probe.TICK_S)
    assert len(list((tmp_path / "ckpt").iterdir())) == 1


def test_a_job_that_cannot_be_shortened_is_asked_to_stop_with_a_save(tmp_path: Path) -> None:
    fake = Fake(tmp_path, steps=10_000)
    found = run(fake, stop_at=30)
    assert fake.step < 40
    assert found.finish_s is None  # its end was not reached
    stop = Stop.read(tmp_path)
    assert stop == Stop(reason="probe", save=True, ends=False)


def test_out_of_memory_goes_down_the_ladder_as_a_run_does(tmp_path: Path) -> None:
    atomic.write_json(tmp_path / "rung.json", {"phase": "all", "rung": 0, "micro": 8, "lower": 2})
    started = []
    fakes = {0: Fake(tmp_path, 40, code=TrainerExit.OUT_OF_MEMORY), 2: Fake(tmp_path, 40, rung=2)}

    def start(rung: int) -> Fake:
        started.append(rung)
        return fakes[rung]

    def newest_clock() -> float:
        return fakes[started[-1] if started else 0].now

    def sleep(seconds: float) -> None:
        fakes[started[-1]].sleep(seconds)

    (phase,) = probe.run(tmp_path, start=start, clock=newest_clock, sleep=sleep).phases
    assert started == [0, 2]
    assert phase["rung"]["rung"] == 2


def _fatal(folder: Path) -> None:
    atomic.write_json(folder / "fatal.json", {"error": "ValueError", "detail": "no dataset"})


def _log(folder: Path) -> None:
    (folder / "job.log").write_text("one\nTraceback: it broke\n")


@pytest.mark.parametrize(
    ("code", "left", "words"),
    [
        (65, _fatal, "ValueError: no dataset"),
        (1, _log, "it broke"),
        (-9, lambda folder: None, "ended with -9"),
        (69, lambda folder: None, "out of memory at the end of the ladder"),
    ],
)
def test_a_probe_that_fails_says_why(tmp_path: Path, code: int, left: Callable[[Path], None], words: str) -> None:
    left(tmp_path)
    with pytest.raises(probe.ProbeFailedError, match=words):
        run(Fake(tmp_path, steps=40, code=code))


def test_too_few_steps_to_time_any_is_said(tmp_path: Path) -> None:
    with pytest.raises(probe.ProbeFailedError, match="ask for more --steps"):
        run(Fake(tmp_path, steps=8))


def test_a_job_that_tells_no_step_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FIRST_SIGN_S", 1.0)
    fake = Fake(tmp_path, steps=40)  # its first step comes after 3 s
    with pytest.raises(probe.ProbeFailedError, match=r"does job\.progress match"):
        run(fake, stop_at=60)
    assert fake.killed


def test_a_save_is_waited_for_beyond_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    fake, said = Fake(tmp_path, steps=10_000), list[str]()
    run(fake, stop_at=30, save_wait_s=4.0, say=said.append)
    assert 68 <= fake.step <= 75  # none came
    assert len(said) == 1


class ProbedTrainer(threading.Thread):
    """The real trainer, in this process."""

    output_at = 0.0

    def __init__(self, workdir: Path) -> None:
        super().__init__()
        self._workdir, self._code = workdir, 1

    def run(self) -> None:
        self._code = train_world.train(self._workdir, Requests(self._workdir))

    def poll(self) -> int | None:
        return None if self.is_alive() else self._code

    def kill(self) -> None:
        self.join()


def test_the_real_trainer_leaves_all_that_a_probe_looks_for(tmp_path: Path) -> None:
    workdir = train_world.make(tmp_path, steps_per_phase=32, eval={"every": 4, "sample_tokens": 1})
    thread = ProbedTrainer(workdir)

    def start(rung: int) -> ProbedTrainer:
        thread.start()
        return thread

    found = probe.run(workdir, start=start, sleep=thread.join, save_at={"dense": 4, "moe": 36, "grown": 68})
    assert [phase["name"] for phase in found.phases] == ["dense", "moe", "grown"]
    for phase in found.phases:
        assert phase["steps"] >= 5
        assert phase["step_ms"]["median"] > 0
        assert phase["evaluation_s"] is not None
        assert phase["save"]["bytes"] > 0
        assert phase["save"]["write_s"] is not None
        assert phase["rung"]["micro"] == 4
    assert [phase["boundary_s"] is None for phase in found.phases] == [True, False, False]
    assert found.finish_s is not None
