"""A run that is stopped anywhere ends with the weights of one that never was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch import nn

from gpufleet.job import atomic
from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.engine import committed
from gpufleet.job.experiments.engine.checkpoint import Checkpoints
from gpufleet.job.experiments.engine.experiment import Phase
from gpufleet.job.experiments.engine.export import META
from gpufleet.job.experiments.growth import model as growth
from gpufleet.job.experiments.growth.run import TinystoriesGrowth
from gpufleet.job.experiments.models.config import CAPACITY
from tests.job import train_world as world
from tests.job.train_world import STEPS, StopAt

TOTAL = 3 * STEPS
# Looks at the stop file: one before each phase's first step, one after each step, one after each phase.
LOOKS = 3 * (STEPS + 2)
POINTS = sorted(random.Random(20261121).sample(range(LOOKS), 17))
QUICK = POINTS[::6]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = world.make(tmp_path_factory.mktemp("uninterrupted"))
    assert world.train(workdir) == 0
    return workdir


@pytest.mark.parametrize(
    "look", [look if look in QUICK else pytest.param(look, marks=pytest.mark.slow) for look in POINTS]
)
def test_a_run_stopped_at_a_seeded_point_ends_with_the_same_weights(
    look: int, uninterrupted: Path, tmp_path: Path
) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, look)) == 75
    assert not (workdir / "final").exists()
    assert world.train(workdir) == 0
    assert world.final_hash(workdir) == world.final_hash(uninterrupted)


def test_the_seeded_points_lie_in_every_phase_and_at_a_boundary() -> None:
    phases = {look // (STEPS + 2) for look in QUICK}
    assert phases == {0, 1, 2}
    assert any(look % (STEPS + 2) in (0, STEPS, STEPS + 1) for look in QUICK)


def test_a_run_that_a_limit_ends_leaves_the_model_as_it_is_then(uninterrupted: Path, tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, STEPS + 2 + 3, ends=True)) == 75
    meta = atomic.read_object(workdir / "final" / META) or {}
    assert (meta["phase"], meta["step"], meta["val_loss"]) == ("moe", max(world.committed(workdir)), None)
    assert STEPS < meta["step"] < 2 * STEPS
    assert world.train(workdir, StopAt(workdir, LOOKS - 2 - (STEPS + 2 + 3), ends=True)) == 75  # nothing left to train
    assert world.final_hash(workdir) == world.final_hash(uninterrupted)


def test_a_model_left_at_a_limit_names_its_own_step_where_nothing_could_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "_make_way", lambda self, path, size: "the disk is full")
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 3, ends=True)) == 75
    meta = atomic.read_object(workdir / "final" / META) or {}
    assert (meta["step"], meta["tokens"]) == (3, world.records(workdir)[-1]["tokens"])


def test_a_run_stopped_three_times_logs_each_step_once(uninterrupted: Path, tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    for look in (3, 4, 5):
        assert world.train(workdir, StopAt(workdir, look)) == 75
    assert world.train(workdir) == 0
    assert [(r["step"], r["loss"], r["val_loss"], r["tokens"]) for r in world.records(workdir)] == [
        (r["step"], r["loss"], r["val_loss"], r["tokens"]) for r in world.records(uninterrupted)
    ]


def test_a_run_killed_between_saves_repeats_the_lost_steps_to_the_same_weights(
    uninterrupted: Path, tmp_path: Path
) -> None:
    workdir = world.make(tmp_path)
    kill = StopAt(workdir, 9, save=False, saves=(4,))  # after step 7; an asynchronous save of step 5
    assert world.train(workdir, kill) == 75
    assert max(world.committed(workdir)) < max(r["step"] for r in world.records(workdir))
    assert world.train(workdir) == 0
    assert world.final_hash(workdir) == world.final_hash(uninterrupted)


def test_a_run_that_saves_beside_every_step_has_the_same_weights(uninterrupted: Path, tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, saves=tuple(range(1, 100)))) == 0
    assert world.final_hash(workdir) == world.final_hash(uninterrupted)


def test_a_resume_on_a_work_folder_with_nothing_but_the_checkpoint_reports_both_growths(
    uninterrupted: Path, tmp_path: Path
) -> None:
    first, second = world.make(tmp_path / "first"), world.make(tmp_path / "second")
    assert world.train(first, StopAt(first, 2 * (STEPS + 2) + 2)) == 75  # in the third phase
    (second / "ckpt").mkdir()
    newest = f"step_{max(world.committed(first)):08d}"
    (first / "ckpt" / newest).rename(second / "ckpt" / newest)
    (first / "metrics.jsonl").rename(second / "metrics.jsonl")
    assert world.train(second) == 0
    for name in ("growth_report.json", "loss.csv"):
        assert (second / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_a_run_that_goes_on_where_experts_are_padded_has_the_capacity_that_its_boundary_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = world.make(tmp_path, model={"experts": 8, "router_std": 0.5})
    assert world.train(workdir, StopAt(workdir, STEPS + 2 + 2)) == 75
    real, seen = TinystoriesGrowth.blank, []

    def blank(self: TinystoriesGrowth, phase: Phase) -> nn.Module:
        seen.append(real(self, phase))
        return seen[0]

    monkeypatch.setattr(growth, "_choose_dispatch", lambda module, device: module.set_dispatch("padded"))
    monkeypatch.setattr(TinystoriesGrowth, "blank", blank)
    assert world.train(workdir) == 0
    report = atomic.read_object(workdir / "growth_report.json") or {}
    assert isinstance(seen[0], growth.Growth)
    assert seen[0].capacity == report["boundaries"][0]["capacity"] > CAPACITY


def test_a_resume_says_which_of_its_inputs_are_others_than_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = world.make(tmp_path)
    (workdir / "inputs").mkdir()
    weights = workdir / "inputs" / "model.safetensors"
    weights.write_bytes(b"\0" * (3 * committed.ENDS))
    assert world.train(workdir, StopAt(workdir, 2)) == 75
    assert world.train(workdir, StopAt(workdir, 1)) == 75
    assert "warning" not in capsys.readouterr().out
    weights.write_bytes(b"\0" * (3 * committed.ENDS - 1) + b"\1")
    prepare.prepare(workdir / "data", sources.Generated(count=200, seed=2), model_vocab=160)
    assert world.train(workdir, StopAt(workdir, 1)) == 75
    said = capsys.readouterr().out
    assert "warning: dataset: was " in said
    assert "warning: base weights: was " in said
    assert "warning: dataset: was " in world.records(workdir)[-1]["event"]
