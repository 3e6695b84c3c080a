"""What stops a run that is not worth its money, and what is said of one that is slower than its bill assumed."""

from __future__ import annotations

import errno
import json
import math
import random
import re
import sys
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from gpufleet.job import atomic
from gpufleet.job.experiments.engine import step
from gpufleet.job.experiments.engine.committed import Committed
from gpufleet.job.experiments.engine.device import Device
from gpufleet.job.experiments.engine.experiment import Experiment
from gpufleet.job.experiments.engine.guard import LossSpikeError, SpikeGuard, Thresholds
from gpufleet.job.experiments.pretrain.run import Pretrain
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.spec import ExperimentConfig
from gpufleet.job.experiments.two_tower.run import TwoTower
from gpufleet.job.kind import Guard
from gpufleet.job.supervisor.publish import commits
from tests.job import kernel_world as kernel
from tests.job import pretrain_world as pretrain
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job import two_tower_world as two_tower
from tests.job.train_world import StopAt

GPU = Device(torch=torch.device("cuda"), name="", count=1, memory_gb=24.0, driver=None, peak_tflops=70)
PREDICTED = {"phase": "dense", "tokens_per_s": 1000.0, "mfu": 0.4}


def guard_after(losses: list[float], **config: Any) -> SpikeGuard:
    guard = SpikeGuard(Guard(**config))
    for index, loss in enumerate(losses):
        guard.see(loss, index + 1)
    return guard


def falling(count: int = 120, noise: float = 0.05) -> list[float]:
    """A loss from 11 towards 2, with noise."""
    draw = random.Random(3)
    return [2 + 9 * 0.9**index + draw.gauss(0, noise) for index in range(count)]


def mixed(seed: int, share: float, *, rows: int = 4, count: int = 2_000) -> list[float]:
    """Of 20,000 steps each tenth: means over rows of which a `share` has thirty times the loss of the others."""
    draw = random.Random(seed)
    hard = [sum(draw.random() < share for _ in range(rows)) for _ in range(count)]
    return [(draw.uniform(0.5, 1.5) * (rows - n) + 30 * n) / rows for n in hard]


@pytest.mark.parametrize("share", [0.01, 0.02])
def test_hard_rows_among_easy_ones_never_make_it_look_twice_in_sixty_runs(share: float) -> None:
    asked = 0
    for seed in range(60):
        guard = SpikeGuard(Guard())
        asked += sum(guard.see(loss, 10 * at) for at, loss in enumerate(mixed(seed, share), 1))
    assert asked == 0


@pytest.mark.parametrize(
    ("losses", "asks"),
    [
        (falling(200, noise=0.3), False),
        ([*falling(), *[9.0] * 9, 2.1], False),
        ([*falling(), *[9.0] * 10], True),
        ([*[2.0, 2.001] * 20, *[2.9] * 20], False),  # less than a nat above
        ([4.0] * 8 + [40.0] * 20, False),  # too short a start to judge
        ([*falling(), *[2 + 0.1 * index for index in range(1, 30)]], True),  # little by little
        ([*mixed(1, 0.02, count=200), *[loss + 6 for loss in mixed(2, 0.02, count=10)]], True),
    ],
)
def test_losses_that_rise_and_stay_up_make_it_ask_for_the_validation_loss(losses: list[float], asks: bool) -> None:
    guard = SpikeGuard(Guard())
    assert any(guard.see(loss, at) for at, loss in enumerate(losses, 1)) == asks


def risen(*evaluations: float) -> SpikeGuard:
    """Of losses that diverge at step 121, evaluated at some steps before."""
    guard = SpikeGuard(Guard())
    for at, loss in enumerate([*falling(), *[9.0] * 10], 1):
        guard.see(loss, at, dict(zip((20, 60, 100), evaluations, strict=False)).get(at))
    return guard


@pytest.mark.parametrize(
    ("before", "now", "diverged"),
    [
        ((8.0, 4.0, 2.0), 5.1, True),  # nearer to the worst than to the best of the phase
        ((8.0, 4.0, 2.0), 4.9, False),
        ((2.0,), 2.1, False),  # within a tenth of the only one
        ((2.0,), 2.3, True),
        ((0.9, 0.4), 0.8, True),  # 1 - nDCG@10
        ((), 3.0, False),  # no evaluation before: 3.0 is near the training losses, 8.0 is not
        ((), 8.0, True),
    ],
)
def test_only_a_validation_loss_out_of_its_range_confirms_a_divergence(
    before: tuple[float, ...], now: float, diverged: bool
) -> None:
    guard = risen(*before)
    assert guard.suspicious
    if diverged:
        with pytest.raises(
            LossSpikeError, match=r"10 logged losses in a row .* newest is 9.000, at step 130; the valid"
        ):
            guard.judge(now, 130)
    else:
        assert "no divergence, although 10 logged" in str(guard.judge(now, 130))
        assert not guard.suspicious
        assert not any(guard.see(9.0, at) for at in range(131, 200))  # it is the new level


def test_without_a_validation_loss_twice_as_many_losses_are_needed() -> None:
    guard = risen()
    assert guard.judge(None, 130) is None
    for at in range(131, 141):
        guard.see(9.0, at)
    with pytest.raises(LossSpikeError, match=r"20 logged losses in a row .* there is no validation loss to confirm it"):
        guard.judge(None, 140)


def test_an_evaluation_in_its_range_clears_high_losses() -> None:
    guard = risen(8.0, 4.0, 2.0)
    guard.see(9.0, 131, 2.0)
    assert (guard.suspicious, guard.clean) == (False, 131)


def test_switched_off_it_suspects_nothing() -> None:
    assert not guard_after([*falling(), *[9.0] * 50], divergence=False).suspicious


@pytest.mark.parametrize("before", [0, 4])
def test_a_guard_that_goes_on_judges_as_if_nothing_had_happened(before: int) -> None:
    guard = guard_after([*falling(), *[9.0] * before])
    on = SpikeGuard(Guard(), json.loads(json.dumps(guard.state)))
    asked = [on.see(9.0, 121 + at) for at in range(10 - before)]
    assert asked == [False] * (9 - before) + [True]
    assert on.clean == 120


WORLDS: dict[str, Callable[..., Path]] = {
    "tinystories-growth": partial(world.make, steps_per_phase=60, eval={"every": 10}),
    "pretrain-d64": partial(pretrain.make, steps=60, eval={"every": 10}),
    "sft-h100": partial(sft.make, data={"examples": 600}, epochs=2, eval={"every": 10}),
    "two-tower": partial(two_tower.make, epochs=20, patience=20, log={"every": 1}),
    "kernel-sft": partial(kernel.make, epochs=11, funnel={"planted": 0}, generate={"candidates": 1}),
}
LOST_AT, SAVED_AT = 35, 30


def destroy(monkeypatch: pytest.MonkeyPatch, *, heals_at: float, kind: str = "diverges") -> list[float]:
    """From LOST_AT on training is lost, unless the rate is at most `heals_at` times what it was first there: weights
    are NaN, or all losses five nats higher. The rates at that step, one for each try.
    """
    real, rates, higher = step.update, list[float](), [0.0]

    def ruined(*given: Any) -> step.StepResult:
        result, (_, module, opt, _, at, *_) = real(*given), given
        if at == LOST_AT:
            rates.append(max(group["lr"] for group in opt.param_groups))
        lost = at >= LOST_AT and rates[-1] > heals_at * rates[0] * 1.001
        higher[0] = 5.0 * (lost and kind == "diverges")
        if lost and kind == "nan":
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(math.nan)
        return result._replace(loss=result.loss + higher[0])

    def evaluated(own: Any, real: Any, *given: Any) -> float | None:
        found = real(own, *given)
        return None if found is None else found + higher[0]

    for owner, name in ((Experiment, "measure"), (TwoTower, "measure"), (TwoTower, "evaluate")):
        monkeypatch.setattr(owner, name, partialmethod(evaluated, getattr(owner, name)))
    for config in (ExperimentConfig, SftConfig):  # a save on its way would leave no turn to that of SAVED_AT
        monkeypatch.setattr(config, "waits_for_saves", lambda self: True)
    monkeypatch.setattr(step, "update", ruined)
    return rates


@pytest.mark.usefixtures("one_judge")
@pytest.mark.parametrize(
    ("experiment", "kind"),
    [
        ("tinystories-growth", "diverges"),
        ("pretrain-d64", "diverges"),
        ("sft-h100", "diverges"),
        ("two-tower", "diverges"),
        ("two-tower", "nan"),
        ("kernel-sft", "nan"),
    ],
)
def test_a_run_that_is_lost_goes_on_from_the_last_good_checkpoint_at_half_the_rate(
    experiment: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = destroy(monkeypatch, heals_at=0.25, kind=kind)
    workdir = WORLDS[experiment](tmp_path)
    assert world.train(workdir, StopAt(workdir, saves=(SAVED_AT,))) == 0
    assert [rate / rates[0] for rate in rates] == pytest.approx([1.0, 0.5, 0.25])
    said = capsys.readouterr().out
    assert said.count("every rate times 0.5: retry") == 2
    assert f"Again from the checkpoint of step {SAVED_AT}" in said
    steps = [record["step"] for record in world.records(workdir)]
    assert steps == sorted(set(steps))


def test_the_run_ends_as_failed_when_all_retries_were_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = destroy(monkeypatch, heals_at=0.0)
    workdir = WORLDS["pretrain-d64"](tmp_path)
    assert world.train(workdir, StopAt(workdir, saves=tuple(range(1, 500)))) == 65
    detail = fatal(workdir)
    assert detail.startswith("LossSpikeError: diverged: 10 logged losses in a row are more than 1 above")
    lost = f"lost at 45, tried again from {LOST_AT}"
    assert re.search(rf"2 of guard.retries 2 used; {lost}; {lost}\. Lower", detail)
    assert len(rates) == 3
    assert max(world.committed(workdir)) <= LOST_AT  # nothing was saved amid it


def pretrain_looks(steps: int) -> int:
    """Looks at the stop request until `steps` steps are done, and one of a second start: one after each step, one
    before the first, and four in each evaluation after ten steps.
    """
    return steps + 4 * (steps // 10) + 2


def test_retries_are_counted_over_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = destroy(monkeypatch, heals_at=0.0, kind="nan")
    workdir = WORLDS["pretrain-d64"](tmp_path, guard={"retries": 1})
    assert (
        world.train(workdir, StopAt(workdir, pretrain_looks(38), saves=(SAVED_AT,))) == 75
    )  # after the first was lost
    assert [commit.retries[0].lost_at for commit in commits(workdir)][-1] == LOST_AT + 2
    assert world.train(workdir) == 65
    assert len(rates) == 2
    assert "1 of guard.retries 1 used" in fatal(workdir)


def test_a_run_with_nothing_to_go_back_to_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destroy(monkeypatch, heals_at=0.0, kind="nan")
    workdir = WORLDS["tinystories-growth"](tmp_path, eval={"every": 100})
    assert world.train(workdir) == 65
    assert "no checkpoint up to step 36 is on this disk; 0 of guard.retries 2 used" in fatal(workdir)


def test_a_disk_too_full_to_count_a_retry_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    destroy(monkeypatch, heals_at=0.5, kind="nan")
    monkeypatch.setattr(Committed, "go_back", full)
    assert world.train(WORLDS["pretrain-d64"](tmp_path)) == 65
    assert "no retry is possible" in capsys.readouterr().out


def test_a_rise_of_the_training_losses_alone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = step.update
    monkeypatch.setattr(step, "update", lambda *given: shifted(real(*given), given[4]))
    workdir = WORLDS["pretrain-d64"](tmp_path, eval={"every": 30})
    assert world.train(workdir) == 0
    said = capsys.readouterr().out
    assert said.count("no divergence, although 10 logged losses in a row are more than 1 above") == 1
    assert any("no divergence" in (record["event"] or "") for record in world.records(workdir))


def shifted(result: step.StepResult, at: int) -> step.StepResult:
    return result._replace(loss=result.loss + 5 * (at >= 31))


def test_a_save_between_two_logs_waits_for_a_loss_that_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroy(monkeypatch, heals_at=0.0)
    workdir = world.make(tmp_path, steps_per_phase=80, log={"every": 3}, eval={"every": 100}, guard=QUICK)
    asked = StopAt(workdir, saves=(20, LOST_AT + 1))  # the logs are after 33 and 36
    assert world.train(workdir, asked) == 65
    assert world.committed(workdir) == [21]


QUICK = {"window": 10, "in_a_row": 3, "retries": 0}


def test_an_improvement_is_saved_although_its_own_batch_was_a_hard_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, losses = step.update, {4: 3.0, 8: 2.9, 12: 2.8, 16: 2.5, 20: 2.6, 24: 2.7}

    def hard(*given: Any) -> step.StepResult:
        result = real(*given)
        return result._replace(loss=result.loss * 9) if given[4] == 15 else result

    monkeypatch.setattr(step, "update", hard)
    monkeypatch.setattr(Pretrain, "evaluate", lambda self, phase, at, *_: losses[at])
    workdir = pretrain.make(tmp_path, steps=24, guard={"window": 10})
    assert world.train(workdir) == 0
    assert world.committed(workdir) == [16, 24]
    assert (atomic.read_object(workdir / "results.json") or {})["best_step"] == 16


def fatal(workdir: Path) -> str:
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    return f"{record['error']}: {record['detail']}"


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
    monkeypatch.setattr("gpufleet.job.experiments.engine.experiment.SPOKEN_S", 0.0)
    workdir = world.make(tmp_path, batch={"micro": 1})
    assert world.train(workdir, StopAt(workdir, 5)) == 75  # the evaluation itself asks three times whether to stop
    assert re.findall(r"evaluation: (\d+)% of its tokens", capsys.readouterr().out) == ["25", "50", "75"]


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
