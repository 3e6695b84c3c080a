"""Which weights final/ holds: of the last phase's best evaluation or after the last step, as the file chooses, and said
in the log, meta.json and results.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpufleet.job import atomic
from gpufleet.job.experiments.engine import step
from gpufleet.job.experiments.engine.experiment import Experiment
from gpufleet.job.experiments.two_tower.run import TwoTower
from tests.job import kernel_world as kernel
from tests.job import pretrain_world as pretrain
from tests.job import sft_world as sft
from tests.job import train_world as world
from tests.job import two_tower_world as two_tower

WORLDS: dict[str, Callable[..., Path]] = {
    "growth": partial(world.make, steps_per_phase=8),
    "pretrain": partial(pretrain.make, eval={"every": 2}),
    "adapter": partial(sft.make, eval={"every": 2}),
    "full": partial(sft.make, method="full", eval={"every": 2}),
    "kernel": partial(kernel.make, epochs=3, funnel={"planted": 0}, generate={"candidates": 1}),
    "two-tower": two_tower.make,
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The evaluations, by step. Three before a phase's last one is its best; those of earlier phases are lower."""
    seen: dict[int, float] = {}

    def evaluate(self: Experiment, phase: Any, at: int, *_: Any) -> float:
        left = (phase.last - at) // 2
        seen[at] = {3: 1.0, 2: 1.5}.get(left, 3.0) + 10 * phase.index
        return seen[at]

    monkeypatch.setattr(Experiment, "evaluate", evaluate)
    return seen


def tree(workdir: Path, name: str) -> dict[str, Any]:
    found = atomic.read_object(workdir / name)
    assert found is not None
    return found


@pytest.mark.usefixtures("one_judge")
@pytest.mark.parametrize(
    ("job", "asked", "best"),
    [
        ("growth", {}, False),  # a save for each improvement would take longer than the training
        ("growth", {"deliver": "best"}, True),
        ("pretrain", {}, True),
        ("pretrain", {"deliver": "last"}, False),
        ("adapter", {}, True),
        ("adapter", {"deliver": "last"}, False),
        ("full", {}, True),
        ("kernel", {}, False),  # its candidates are judged, not its loss
    ],
)
def test_the_weights_that_the_file_asks_for_are_delivered_and_named(
    job: str,
    asked: dict[str, Any],
    best: bool,
    planted: dict[int, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workdir = WORLDS[job](tmp_path, **asked)
    assert world.train(workdir) == 0
    last, lowest = max(planted), _lowest_of_last_phase(planted)
    meta, result, said = tree(workdir, "final/meta.json"), tree(workdir, "results.json"), capsys.readouterr().out
    wanted = lowest if best else last
    assert (meta["step"], meta["val_loss"]) == (wanted, planted[wanted])
    told: dict[str, Any] = {"choice": "best" if best else "last", "step": wanted, "val_loss": planted[wanted]}
    told["last"] = {"step": last, "val_loss": planted[last]}
    told["best"] = {"step": lowest, "val_loss": planted[lowest]}
    assert meta["delivered"] == result["delivered"] == told
    assert result["retries"] == []
    if best:
        assert f"delivered: step {lowest} (validation {planted[lowest]:.4f}), the best evaluated; the last: " in said
    elif lowest != last:
        assert (
            f"the best evaluation, {planted[lowest]:.4f} at step {lowest}, is better, but `deliver` does not ask for it"
            in said
        )


def _lowest_of_last_phase(planted: dict[int, float]) -> int:
    of_last = {at: loss for at, loss in planted.items() if loss > max(planted.values()) - 5}
    return min(of_last, key=lambda at: of_last[at])


def test_two_tower_says_that_its_refit_is_delivered_as_it_ends(tmp_path: Path) -> None:
    workdir = WORLDS["two-tower"](tmp_path)
    assert world.train(workdir) == 0
    result = tree(workdir, "results.json")
    assert result["delivered"]["choice"] == "last"
    assert result["delivered"] == tree(workdir, "final/meta.json")["delivered"]
    assert result["delivered"]["best"] is None  # the refit holds nothing out
    assert not hasattr(TwoTower, "deliver")


@pytest.mark.usefixtures("planted")
def test_the_best_of_the_last_phase_are_its_weights_also_where_the_run_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = step.update, dict[int, dict[str, torch.Tensor]]()

    def remembered(*given: Any) -> step.StepResult:
        written[given[4]] = {name: tensor.clone() for name, tensor in given[1].state_dict().items()}
        return real(*given)

    monkeypatch.setattr(step, "update", remembered)
    workdir = WORLDS["growth"](tmp_path, deliver="best")
    assert world.train(workdir, world.StopAt(workdir, 24 + 1)) == 75  # behind the last step
    assert world.train(workdir) == 0
    best = tree(workdir, "final/meta.json")["step"]
    assert 16 < best < 24
    exported = load_file(workdir / "final" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in written[best].items())


@pytest.mark.parametrize(("asked", "best"), [({}, True), ({"deliver": "last"}, False)])
def test_a_limit_leaves_the_adapter_of_the_weights_that_are_asked_for(
    asked: dict[str, Any], best: bool, planted: dict[int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = sft.make(tmp_path, method="full", eval={"every": 2}, epochs=3, **asked)
    assert world.train(workdir, world.StopAt(workdir, 7, ends=True)) == 75
    meta = json.loads((workdir / "final" / "meta.json").read_text())
    lowest = min(planted, key=lambda at: planted[at])
    assert (meta["step"], meta["delivered"]["choice"]) == ((lowest, "best") if best else (7, "last"))
    assert f"delivered: step {meta['step']} " in capsys.readouterr().out
