"""What stops a run that is not worth its money, and what is said of one that is slower than its bill assumed."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretrain_world as pretrain
import pytest
import torch
import train_world as world
from train_world import StopAt

from job import atomic
from job.experiments.pretrain import Pretrain
from job.train import step
from job.train.device import UTILIZATION_SAMPLES, Device, Utilization
from job.train.guard import LossSpikeError, SpikeGuard, Thresholds

GPU = Device(torch=torch.device("cuda"), name="", count=1, memory_gb=24.0, driver=None, peak_tflops=70)
PREDICTED = {"phase": "dense", "tokens_per_s": 1000.0, "mfu": 0.4}


def seen(losses: list[float]) -> SpikeGuard:
    guard = SpikeGuard()
    for index, loss in enumerate(losses):
        guard.see(loss, index + 1)
    return guard


def falling(count: int = 30, noise: float = 0.05) -> list[float]:
    """A loss from 11 towards 2, with noise."""
    draw = random.Random(3)
    return [2 + 9 * 0.9**index + draw.gauss(0, noise) for index in range(count)]


def spike(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """From then on each step's loss is three times what it is."""
    real = step.update

    def spiked(*given: Any) -> step.StepResult:
        result = real(*given)
        return result._replace(loss=result.loss * 3) if given[4] >= after else result

    monkeypatch.setattr(step, "update", spiked)


def test_an_ordinary_loss_curve_is_never_suspicious() -> None:
    assert not seen(falling(200, noise=0.3)).suspicious


def test_one_high_loss_is_suspicious_and_forgiven_when_it_comes_back() -> None:
    guard = seen([*falling(120), 9.0])
    assert guard.suspicious
    guard.see(2.1, 122)
    assert not guard.suspicious


def test_two_high_losses_in_a_row_end_the_run_and_name_the_checkpoint_from_before() -> None:
    guard = seen([*falling(120), 9.0])
    with pytest.raises(
        LossSpikeError,
        match=r"is 9.500 at step 400, after 1.* 2 times in a row. .* up to step 120 are from before",
    ):
        guard.see(9.5, 400)


def test_a_bump_of_less_than_a_nat_in_a_quiet_window_is_no_spike() -> None:
    assert not seen([*[2.0, 2.001] * 20, 2.9, 2.9]).suspicious


@pytest.mark.parametrize(("loss", "suspicious"), [(6.9, False), (7.1, True)])
def test_a_loss_is_a_spike_ten_median_deviations_above_the_median(loss: float, suspicious: bool) -> None:
    assert seen([*[1.5, 2.5] * 20, loss]).suspicious == suspicious  # median 2, deviation 0.5


def test_a_start_is_too_short_to_judge() -> None:
    assert not seen([4.0] * 8 + [40.0, 40.0]).suspicious


@pytest.mark.parametrize("seen_before", [0, 1])
def test_a_guard_that_goes_on_judges_as_if_nothing_had_happened(seen_before: int) -> None:
    guard = seen([*falling(120), *[9.0] * seen_before])
    on = SpikeGuard(json.loads(json.dumps(guard.state)))
    for _ in range(1 - seen_before):
        on.see(9.5, 121)
    with pytest.raises(LossSpikeError, match="after 1"):
        on.see(9.5, 122)


def test_a_spike_in_the_first_steps_after_an_interruption_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = world.make(tmp_path, steps_per_phase=20, eval={"every": 100})
    assert world.train(workdir, StopAt(workdir, 14)) == 75
    stopped = world.committed(workdir)[-1]
    spike(monkeypatch, after=0)
    assert world.train(workdir) == 65
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    assert f"at step {stopped + 2}, after" in record["detail"]


def test_a_spike_ends_the_run_with_its_reason_and_without_a_save_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike(monkeypatch, after=12)
    workdir = world.make(tmp_path, steps_per_phase=20, eval={"every": 100})
    assert world.train(workdir, StopAt(workdir, saves=tuple(range(1, 100)))) == 65
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    assert record["error"] == "LossSpikeError"
    newest = world.committed(workdir)[-1]
    assert 0 < newest <= 12
    assert "Checkpoints up to step 12 are from before: lower optim.lr" in record["detail"]


def test_a_save_between_two_logs_waits_for_a_loss_that_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike(monkeypatch, after=31)
    workdir = world.make(tmp_path, steps_per_phase=60, log={"every": 3}, eval={"every": 100})
    asked = StopAt(workdir, saves=(20, 32))  # the spike begins with step 32, the logs after 30 and 33
    assert world.train(workdir, asked) == 65
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    assert world.committed(workdir) == [21]
    assert "Checkpoints up to step 30 are from before" in record["detail"]


def test_an_improvement_is_saved_although_its_own_batch_was_a_hard_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, losses = step.update, {4: 3.0, 8: 2.9, 12: 2.8, 16: 2.5, 20: 2.6, 24: 2.7}

    def hard(*given: Any) -> step.StepResult:
        result = real(*given)
        return result._replace(loss=result.loss * 9) if given[4] == 15 else result

    monkeypatch.setattr(step, "update", hard)
    monkeypatch.setattr(Pretrain, "evaluate", lambda self, phase, at, *_: losses[at])
    workdir = pretrain.make(tmp_path, steps=24)
    assert world.train(workdir) == 0
    assert world.committed(workdir) == [16, 24]
    assert (atomic.read_object(workdir / "results.json") or {})["best_step"] == 16


def warned(**figures: Any) -> list[str]:
    usual: dict[str, Any] = {"tokens_per_s": 900.0, "mfu": 0.38, "memory_gb": 20.0, "utilization": 97.0}
    return Thresholds(PREDICTED, GPU).check(**{**usual, **figures})


def test_a_run_as_fast_as_predicted_is_not_warned_of() -> None:
    assert warned() == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"utilization": 63.0}, "gpu utilisation 63 % over 5 minutes, at least 80 % is expected"),
        ({"memory_gb": 23.1}, "23.1 of 24.0 GB GPU memory in use, more than 95%"),
        (
            {"tokens_per_s": 500.0},
            "500 tok/s is 0.50 x the 1,000 that the bill is made of: time and dollars grow by 2.0",
        ),
        ({"mfu": 0.2}, "mfu 20.0% is 0.50 x the 40.0% that was assumed"),
    ],
)
def test_each_threshold_says_what_is_wrong_and_what_it_costs(figures: dict[str, Any], words: str) -> None:
    (text,) = warned(**figures)
    assert words in text


def test_a_warning_is_said_once_in_a_phase() -> None:
    thresholds = Thresholds(PREDICTED, GPU)
    figures: dict[str, Any] = {"tokens_per_s": 100.0, "mfu": None, "memory_gb": 1.0, "utilization": None}
    assert len(thresholds.check(**figures)) == 1
    assert thresholds.check(**figures) == []


def test_without_a_prediction_and_in_the_warm_up_nothing_is_compared() -> None:
    assert Thresholds({}, GPU).check(tokens_per_s=1.0, mfu=0.01, memory_gb=1.0, utilization=None) == []
    assert warned(tokens_per_s=None, mfu=None, utilization=None) == []


def test_a_slow_run_is_warned_of_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = world.make(tmp_path, steps_per_phase=13)
    tree = json.loads((workdir / "run.json").read_text())
    tree["predicted"] = [
        {"phase": name, "step_ms": 1e-6, "tokens_per_s": 1e12, "mfu": None, "memory_gb": 0.1}
        for name in ("dense", "moe", "grown")
    ]
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == 0
    said = capsys.readouterr().out
    assert said.count("that the bill is made of") == 3  # once a phase
    for name in ("dense", "moe", "grown"):
        (line,) = (line for line in said.splitlines() if line.startswith(f"phase {name}, predicted / measured: "))
        figures = r"0\.0 / [0-9.]+ ms, 1,000,000,000,000 / [0-9,]+ tok/s, - / - mfu, 0\.1 / [0-9.]+ GB"
        assert re.search(figures, line), line
    assert sum("warning: " in (record["event"] or "") for record in world.records(workdir)) == 3


def test_a_long_evaluation_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silent for a quarter of an hour, as one of 2,100 rows of sft-h100 is on an L40S, it would be killed each time."""
    monkeypatch.setattr("job.train.experiment.SPOKEN_S", 0.0)
    workdir = world.make(tmp_path, batch={"micro": 1})
    assert world.train(workdir, StopAt(workdir, 5)) == 75  # it looks three times itself
    assert re.findall(r"evaluation: (\d+)% of its tokens", capsys.readouterr().out) == ["25", "50", "75"]


def test_utilisation_is_a_mean_over_five_minutes_once_they_are_over() -> None:
    utilization = Utilization(replace(GPU, torch=torch.device("cpu")))
    utilization._recent.extend([50.0] * (UTILIZATION_SAMPLES - 1))
    assert utilization.mean() is None
    utilization._recent.append(110.0)
    assert utilization.mean() == pytest.approx(51.0)


def test_tensorboard_has_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # half a second

    workdir = world.make(tmp_path, log={"tensorboard": True})
    assert world.train(workdir, StopAt(workdir, 7)) == 75
    assert world.train(workdir) == 0
    found = EventAccumulator(str(workdir / "tb"))
    found.Reload()
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == {r["step"]: pytest.approx(r["loss"], rel=1e-6) for r in world.records(workdir)}
    assert {"val_loss", "lr", "router_load/0", "mem_gb"} <= set(found.Tags()["scalars"])


def test_tensorboard_is_not_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # an import raises ImportError
    assert world.train(world.make(tmp_path / "without")) == 0
    workdir = world.make(tmp_path / "asked", log={"tensorboard": True})
    assert world.train(workdir) == 65
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    assert "install tensorboard, or set it to false" in record["detail"]
