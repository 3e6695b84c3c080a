"""What lines of a command's output say of the time of its steps and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import measured
from gpufleet.job.command import progress
from gpufleet.job.command.progress import Metrics, StepReader
from gpufleet.job.contract import metrics
from gpufleet.job.contract.metrics import Save
from gpufleet.job.kind.command import CommandConfig, Progress
from tests.job.command_world import as_restored

LINE = r"^step (?P<step>\d+)( took (?P<step_ms>\d+))?( val (?P<val>[\d.]+))?"


class Script:
    """Prints on a clock of its own; each line of output is one of metrics.jsonl."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, restored: int = 0) -> None:
        self.now, self.path = 1000.0, folder / "metrics.jsonl"
        monkeypatch.setattr(progress, "FLUSH_S", 0.0)
        config = CommandConfig(command="x", progress=Progress(stdout=(LINE,)))
        self.reader = StepReader(
            Metrics(self.path), config, lambda text: None, lambda kind, text: None, clock=lambda: self.now
        )
        self.reader.begin(as_restored(restored) if restored else None, folder / "progress.jsonl")

    def step(self, step: int, took: float, more: str = "") -> None:
        self.now += took
        self.reader.line(f"step {step}{more}", self.now)
        self.reader.poll()

    def save(self, step: int, reason: Any = "timed") -> None:
        self.reader.saved(Save(step=step, reason=reason, bytes=7, blocked_s=99.0), self.now, is_counted=True)

    @property
    def records(self) -> list[dict[str, Any]]:
        return metrics.records(self.path.read_bytes().splitlines())


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(tmp_path, monkeypatch)


def test_the_first_ten_steps_of_a_start_have_no_time_whoever_tells_it(script: Script) -> None:
    for step in range(1, 21):
        script.step(step, 5.0 if step <= 10 else 0.1, " took 777" if step <= 10 else "")
    assert [record["step_ms"] for record in script.records] == [None] * 10 + [pytest.approx(100.0)] * 10


def test_a_start_that_goes_on_has_its_own_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, monkeypatch, restored=500)
    for step in range(501, 521):
        script.step(step, 0.1)
    assert [record["step"] for record in script.records if record["step_ms"] is not None] == list(range(511, 521))


def test_a_save_stops_it_for_what_its_steps_do_not_explain_and_no_step_is_slower_for_it(script: Script) -> None:
    for step in range(1, 41):
        script.step(step, 4.1 if step in (16, 31) else 0.1)
        if step in (15, 30):
            script.now += 0.05
            script.save(step)
            script.now -= 0.05
    (phase,) = measured.phases(script.records)
    assert phase["step_ms"]["median"] == pytest.approx(100.0)
    assert phase["save"] == {"bytes": 7, "blocks_s": pytest.approx(4.0), "every_steps": 15}


def test_a_save_that_nothing_follows_is_told_at_the_end_as_long_as_one_before(script: Script) -> None:
    for step in range(1, 31):
        script.step(step, 3.1 if step == 21 else 0.1)
        if step == 20:
            script.save(20)
    script.save(30, "stop")
    script.reader.flush()
    saves = [save for record in script.records for save in metrics.saves(record)]
    assert [(save.step, save.reason) for save in saves] == [(20, "timed"), (30, "stop")]
    assert [save.blocked_s for save in saves] == [pytest.approx(3.0)] * 2
    assert json.loads(script.path.read_text().splitlines()[-1])["step"] == 30


def test_an_evaluation_is_no_slow_step(script: Script) -> None:
    for step in range(1, 41):
        script.step(step, 2.1 if step == 30 else 0.1, " val 2.5" if step == 30 else "")
    (phase,) = measured.phases(script.records)
    assert phase["evaluation_s"] == pytest.approx(2.0)
    assert script.records[29]["step_ms"] is None
