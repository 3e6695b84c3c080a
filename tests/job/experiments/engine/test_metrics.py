"""The figures of a step: timed, written on the console, kept in metrics.jsonl."""

from __future__ import annotations

import errno
import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic
from gpufleet.job.experiments.engine import metrics
from gpufleet.job.experiments.engine.experiment import Phase
from gpufleet.job.experiments.engine.journal import Journal, Scalars
from gpufleet.job.experiments.engine.parallel import World
from tests.job import train_world as world


def test_the_console_line_reads_as_the_specification_shows_it() -> None:
    line = metrics.ConsoleLine(
        step=120,
        steps=1000,
        loss=2.7902,
        val_loss=2.8310,
        lr=3e-4,
        step_s=0.0401,
        tokens_per_s=51072.0,
        mfu=0.444,
        memory_gb=9.8,
        memory_total_gb=24.0,
        gpu_util=93.0,
        spent_usd=0.021,
        eta_s=35.3,
    )
    assert str(line) == (
        "step 000120/001000 | loss 2.7902 | val 2.8310 | lr 3.00e-04 | 40.1 ms | 51,072 tok/s | mfu 44.4% | "
        "mem 9.8/24.0 GB | gpu 93% | $0.021 | eta 0:00:35"
    )


def test_the_time_left_counts_later_phases_by_the_operations_of_their_steps() -> None:
    small = Phase(index=0, name="a", first=0, steps=8, flops_per_token=2.0, tokens_per_step=10)
    large = Phase(index=1, name="b", first=8, steps=4, flops_per_token=6.0, tokens_per_step=20)  # six times as long
    journal = Journal.__new__(Journal)
    journal._phases = [small, large]
    assert [journal._eta_s(small, 5, 0.5), journal._eta_s(large, 3, 3.0)] == [0.5 * (5 + 4 * 6), 9.0]


def test_mfu_is_of_the_peak_of_all_gpus_of_the_run(tmp_path: Path) -> None:
    opened = world.experiment(world.make(tmp_path))
    phase = replace(opened.phases[0], flops_per_token=1e9)
    gpus = replace(opened.session, device=replace(opened.session.device, peak_tflops=50.0), world=World(size=2))
    Journal(gpus, [phase]).write(
        phase, 1, {"loss": 1.0}, lr=0.1, step_s=0.1, tok_s=20_000.0, shown_val_loss=None, over=False
    )
    assert world.records(tmp_path)[0]["mfu"] == 0.2


def test_timing_skips_the_first_ten_steps_and_what_is_between_steps() -> None:
    now, waits = [0.0], []
    clock = metrics.StepClock(lambda: waits.append(now[0]), clock=lambda: now[0])

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            now[0] += 100.0  # an evaluation, a save
            clock.start()
            now[0] += seconds
            clock.stop()

    steps(10, 50.0)
    assert clock.read() is None
    steps(3, 2.0)
    assert clock.read() == 2.0
    steps(2, 2.0)
    assert (clock.steps, clock.full) == (2, 2.0)  # since the reading
    assert len(waits) == 1


def test_a_save_between_two_readings_takes_none_of_the_time_that_steps_left_on_the_device() -> None:
    now, queued = [0.0], [0.0]

    def synchronize() -> None:
        now[0], queued[0] = now[0] + queued[0], 0.0

    clock = metrics.StepClock(synchronize, clock=lambda: now[0])
    for step in range(14):
        clock.start()
        queued[0] += 2.0
        if step == 13:
            synchronize()  # the read-back of a logged step
        clock.stop()
        if step in (3, 11):  # in the warm-up, and behind it
            clock.settle()
            now[0] += 50.0  # the save
    assert clock.read() == 2.0


def test_a_metrics_file_is_cut_to_the_resumed_step_and_to_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics.MetricsFile(path).resume(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_line_that_does_not_fit_leaves_no_half_of_itself(tmp_path: Path) -> None:
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 10, limits[1]))  # as a full disk cuts it
    try:
        with pytest.raises(OSError, match="No space left"):
            file.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    file.write({"step": 3})
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 3]


def full(*given: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "broken",
    [(metrics.MetricsFile, "write"), (metrics.MetricsFile, "resume"), (Scalars, "__init__"), (Scalars, "write")],
)
def test_a_log_that_cannot_be_written_is_said_once_and_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: tuple[type, str]
) -> None:
    workdir = world.make(tmp_path, log={"tensorboard": True})
    where, name = broken
    monkeypatch.setattr(where, name, full)
    assert world.train(workdir, world.StopAt(workdir, 3)) == 75
    assert capsys.readouterr().out.count("lines are lost") == 1


def test_each_log_that_loses_lines_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = world.make(tmp_path, log={"tensorboard": True})
    monkeypatch.setattr(Scalars, "__init__", full)
    monkeypatch.setattr(metrics.MetricsFile, "write", full)
    assert world.train(workdir, world.StopAt(workdir, 3)) == 75
    said = capsys.readouterr().out
    assert said.count("lines are lost (TensorBoard's)") == said.count("lines are lost (metrics.jsonl)") == 1


def test_half_a_line_that_could_not_be_cut_off_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, world.StopAt(workdir, 3)) == 75
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"ts": 1.0, "pha')  # a kill
    monkeypatch.setattr(metrics.MetricsFile, "resume", full)
    assert world.train(workdir) == 0


def test_a_rung_that_cannot_be_written_down_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir, real = world.make(tmp_path), atomic.write_json

    def rung_full(path: Path, value: Any) -> None:
        if path.name == "rung.json":
            full()
        real(path, value)

    (workdir / "rung.json").write_text('{"phase": "another", "rung": 1, "lower": 1}')
    monkeypatch.setattr(atomic, "write_json", rung_full)
    assert world.train(workdir, world.StopAt(workdir, 3)) == 75
    assert "rung.json could not be written" in capsys.readouterr().out
    assert not (workdir / "rung.json").exists()  # it would send an out-of-memory to the same rung for ever
