"""The figures of a step: timed, written on the console, kept in metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from job.train import metrics


def test_the_console_line_reads_as_the_specification_shows_it() -> None:
    line = metrics.Line(
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
        if step == 11:
            clock.settle()
            now[0] += 50.0  # the save
    assert clock.read() == 2.0


def test_a_metrics_file_is_cut_to_the_resumed_step_and_to_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    metrics.MetricsFile(path).resume(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
