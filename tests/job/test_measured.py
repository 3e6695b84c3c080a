"""What metrics.jsonl says about speed, and what that speed depends on."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import measured
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.kind import EXPERIMENTS


def line(phase: str, step: int, ts: float, step_ms: float | None, **more: Any) -> dict[str, Any]:
    return {"phase": phase, "step": step, "ts": ts, "step_ms": step_ms, "mem_gb": 1.0, "val_loss": None, **more}


def saved(step: int, reason: str, blocked_s: float) -> list[dict[str, Any]]:
    return [{"step": step, "reason": reason, "bytes": 12_000_000, "blocked_s": blocked_s}]


# 100 ms a step and an evaluation of 2 s at 20; a save of 0.5 s after step 10; 7 s between the phases; 200 ms a step.
GROWTH = "tinystories-growth"
RECORDS = [
    line("dense", 1, 1000.1, None),
    line("dense", 10, 1001.0, None),
    line("dense", 20, 1004.5, 100.0, val_loss=2.0, saves=saved(10, "timed", 0.5)),
    line("dense", 30, 1005.5, 100.0),
    line("moe", 31, 1012.7, None, saves=saved(30, "boundary", 0.3), mem_gb=1.5),
    line("moe", 41, 1014.7, 200.0, mem_gb=2.0),
]


def test_time_is_told_apart_into_steps_evaluations_saves_and_what_lies_between_phases() -> None:
    dense, moe = measured.phases(RECORDS)
    assert dense["step_ms"] == {"median": 100.0, "q1": 100.0, "q3": 100.0}
    assert dense["evaluation_s"] == pytest.approx(2.0)  # 3.5 s less ten steps and the save
    assert dense["save"] == {"bytes": 12_000_000, "blocks_s": 0.5}
    assert dense["boundary_s"] is None
    assert moe["boundary_s"] == pytest.approx(7.0)  # 7.2 s less the first step
    assert moe["memory_gb"] == 2.0
    assert moe["evaluation_s"] is None
    assert moe["save"] is None


def test_memory_that_nobody_told_is_unknown_and_not_none_used() -> None:
    untold = [{**record, "mem_gb": None} for record in RECORDS]
    assert [phase["memory_gb"] for phase in measured.phases(untold)] == [None, None]


def test_steps_that_an_early_end_leaves_out_take_no_time() -> None:
    early = [*RECORDS[:4], *({**record, "step": record["step"] + 200} for record in RECORDS[4:])]
    assert measured.phases(early)[1]["boundary_s"] == pytest.approx(7.0)


def test_each_line_stands_for_the_steps_that_it_timed() -> None:
    lines = [line("a", 10, 0, None), line("a", 15, 1, 9.0), line("a", 115, 2, 1.0), line("a", 120, 3, 9.0)]
    (phase,) = measured.phases(lines)
    assert phase["step_ms"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}


def test_a_last_step_of_fewer_rows_makes_no_step_faster() -> None:
    """Six steps of 1000 tokens, of which the last one has a tenth: as long as 5.1, and then an evaluation of 0.3 s."""
    timed = {"step_ms": 85.0, "tok_s": 10_000.0}
    lines = [line("sft", 10, 0.0, None, tokens=10_000), line("sft", 16, 0.81, val_loss=2.0, tokens=16_000, **timed)]
    (phase,) = measured.phases(lines)
    assert phase["step_ms"]["median"] == pytest.approx(100.0)
    assert phase["evaluation_s"] == pytest.approx(0.3)  # beside the time that the steps did take


@pytest.mark.parametrize(("at", "step"), [(5000.0, 20), (1005.6, 30)])
def test_the_pause_of_an_interruption_is_neither_an_evaluation_nor_a_boundary(at: float, step: int) -> None:
    resumed = [
        *RECORDS[:3],
        line("dense", 30, at, 100.0, val_loss=1.9, resumed=step),
        line("moe", 31, 9000.0, None, resumed=30),
        line("moe", 41, 9002.0, 200.0),
    ]
    dense, moe = measured.phases(resumed)
    assert dense["evaluation_s"] == pytest.approx(2.0)
    assert moe["boundary_s"] is None


def test_a_phase_without_a_timed_step_is_left_out() -> None:
    assert measured.phases([line("dense", 1, 0.0, None), line("dense", 2, 0.1, None)]) == []
    assert measured.phases([]) == []


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"model": {"width": 64}}, "model.width"),
        ({"batch": {"sequences": 3}}, "batch.sequences"),
        ({"data": {"sequence": 99}}, "data.sequence"),
        ({"precision": {"phase3_state": "fp32"}}, "precision.phase3_state"),
        ({"eval": {"windows": 5}}, "eval.windows"),
    ],
)
def test_what_changes_speed_counts(change: dict[str, Any], path: str) -> None:
    plain = asdict(GrowthConfig())
    changed = {
        key: {**value, **change.get(key, {})} if isinstance(value, dict) else value for key, value in plain.items()
    }
    before, after = measured.settings(GROWTH, plain), measured.settings(GROWTH, changed)
    assert [key for key in before if before[key] != after[key]] == [path]


def test_steps_seed_rates_and_cadence_do_not_count() -> None:
    config = GrowthConfig()
    other = replace(
        config,
        steps_per_phase=7,
        seed=3,
        optim=replace(config.optim, lr=(1.0, 1.0, 1.0), clip=9.0),
        checkpoint=replace(config.checkpoint, interval_s=1.0),
        eval=replace(config.eval, every=3),
        log=replace(config.log, every=1),
    )
    assert measured.settings(GROWTH, asdict(config)) == measured.settings(GROWTH, asdict(other))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_of_every_experiment_model_device_and_precision_count(name: str) -> None:
    found = measured.settings(name, asdict(EXPERIMENTS[name]()))
    assert {"device", "precision.compute"} <= found.keys()
    assert any(key.startswith(("model.", "towers.")) for key in found)
    assert not {"seed", "checkpoint.interval_s", "optim.lr", "log.every"} & found.keys()


def test_muon_and_adamw_are_different_speeds() -> None:
    assert "optim.kind" in measured.settings("pretrain-d64", asdict(EXPERIMENTS["pretrain-d64"]()))


def test_the_code_that_trains_has_a_name_that_changes_with_it(tmp_path: Path) -> None:
    own = (
        "experiments/engine/loop.py",
        "experiments/models/dense.py",
        "kind/one.py",
        "experiments/student.py",
        "experiments/kernel/run.py",
    )
    others = ("supervisor/meter.py", "experiments/sft/run.py", "experiments/kernel/judge/funnel.py")
    for name in own + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    now = measured.code_sha256("kernel-sft", tmp_path)
    for name in own + others:
        (tmp_path / name).write_text("x = 2\n")
        before, now = now, measured.code_sha256("kernel-sft", tmp_path)
        assert (now != before) == (name in own), name
