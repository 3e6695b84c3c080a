"""When the loop saves, and what: improvements at exactly their step, as far as a save's stall allows; no moments at a
phase's end.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gpufleet.job import atomic
from gpufleet.job.contract.commit import Commit
from gpufleet.job.experiments.engine import metrics, step
from gpufleet.job.experiments.engine.cadence import Cadence, Stall
from gpufleet.job.experiments.engine.checkpoint import Checkpoints, Saved, State
from gpufleet.job.experiments.engine.committed import Committed
from gpufleet.job.experiments.engine.device import Device
from gpufleet.job.experiments.growth.run import TinystoriesGrowth
from gpufleet.job.experiments.kernel.run import Kernel
from gpufleet.job.experiments.pretrain.run import Pretrain
from gpufleet.job.kind import from_json
from gpufleet.job.supervisor.publish import commits
from tests.job import kernel_world as kernel
from tests.job import pretrain_world as pretrain
from tests.job import train_world as world
from tests.job.train_world import STEPS, StopAt

pytestmark = pytest.mark.xdist_group("kernels")

EVALUATION_S = 10.0  # on the world's clock


class TimedWorld:
    """A clock that only evaluations, steps and saves move. Every evaluation is better than the one before."""

    def __init__(self) -> None:
        self.now, self.step_s, self.blocked_s, self.beside_s = 0.0, 0.0, 0.0, 0.0
        self.busy = False
        self.fresh = False  # no step was done since the last save
        self.evaluations = 0
        self.saves: list[tuple[int, str]] = []  # step and reason of those that began

    def evaluate(self, *given: Any) -> float:
        self.now += EVALUATION_S
        self.evaluations += 1
        return -float(self.evaluations)


@pytest.fixture
def timed_world(monkeypatch: pytest.MonkeyPatch) -> TimedWorld:
    found, update, save = TimedWorld(), step.update, Checkpoints.save

    def updated(*given: Any) -> step.StepResult:
        found.now += found.step_s + (found.beside_s if found.fresh else 0.0)
        found.fresh = False
        return update(*given)

    def saving(self: Checkpoints, state: State, commit: Commit, progress: dict[str, Any]) -> list[Saved]:
        found.now += found.blocked_s
        found.fresh = True
        found.saves.append((commit.step, commit.reason))
        return save(self, state, commit, progress)

    monkeypatch.setattr("gpufleet.job.experiments.engine.cadence.time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(metrics, "StepClock", partial(metrics.StepClock, clock=lambda: found.now))
    monkeypatch.setattr(step, "update", updated)
    monkeypatch.setattr(Checkpoints, "save", saving)
    monkeypatch.setattr(Checkpoints, "busy", property(lambda self: found.busy))
    monkeypatch.setattr(TinystoriesGrowth, "evaluate", found.evaluate)
    return found


def best(*steps: int) -> list[tuple[int, str]]:
    return [(number, "best") for number in steps]


def run(timed_world: TimedWorld, workdir: Path, steps: int = 20, **changed: Any) -> list[tuple[int, str]]:
    """The saves of a phase of `steps` steps before its end, evaluated at every second one."""
    made = world.make(workdir, steps_per_phase=steps, **changed)
    assert world.train(made, StopAt(made, steps + 1)) == 75
    *found, last = timed_world.saves
    assert last == (steps, "boundary")
    return found


def checkpoint_content(workdir: Path, number: int) -> dict[str, Any]:
    """What the checkpoint of a step holds, by name."""
    return FileSystemReader(workdir / "ckpt" / f"step_{number:08d}").read_metadata().state_dict_metadata


def kinds(workdir: Path, number: int) -> set[str]:
    return {name.split(".")[0] for name in checkpoint_content(workdir, number)}


def numbers(workdir: Path, number: int) -> int:
    return sum(tensor.size.numel() for tensor in checkpoint_content(workdir, number).values())


def test_every_improvement_is_saved_while_saves_cost_next_to_nothing(timed_world: TimedWorld, tmp_path: Path) -> None:
    timed_world.blocked_s = 0.05  # of the 10 s to the next evaluation
    assert run(timed_world, tmp_path) == best(2, 4, 6, 8, 10, 12, 14, 16, 18)


def test_an_improvement_waits_where_the_last_save_cost_over_a_hundredth_of_the_time_since(
    timed_world: TimedWorld, tmp_path: Path
) -> None:
    timed_world.blocked_s = 0.35  # 35 s
    assert run(timed_world, tmp_path) == best(2, 10, 18)
    events = [record["event"] for record in world.records(tmp_path) if record["step"] == 5]
    assert events == ["an improvement not saved: 0.35 s of a save 10.0 s ago"]


def test_what_steps_left_the_device_to_do_is_no_cost_of_a_save(
    timed_world: TimedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*given: Any) -> float:
        timed_world.blocked_s = 0.35  # for whoever waits for the device first
        return timed_world.evaluate()

    def synchronize(device: Device) -> None:
        timed_world.now, timed_world.blocked_s = timed_world.now + timed_world.blocked_s, 0.0

    monkeypatch.setattr(TinystoriesGrowth, "evaluate", evaluate)
    monkeypatch.setattr(Device, "synchronize", synchronize)
    assert run(timed_world, tmp_path) == best(2, 4, 6, 8, 10, 12, 14, 16, 18)


def test_slower_steps_beside_a_save_count_as_its_cost(timed_world: TimedWorld, tmp_path: Path) -> None:
    timed_world.step_s, timed_world.beside_s = 1.0, 0.5  # no step before the eleventh is timed
    found = run(timed_world, tmp_path, steps=40)
    assert found == best(2, 4, 6, 8, 10, 20, 30)  # at least 50 s apart once it is known


def test_a_save_that_the_cadence_asks_for_is_the_improvements_where_there_is_one(
    timed_world: TimedWorld, tmp_path: Path
) -> None:
    timed_world.blocked_s = 0.35
    assert run(timed_world, tmp_path, checkpoint={"interval_s": 25.0}) == best(2, 8, 14)


def test_an_improvement_during_a_save_waits_for_the_next_one(
    timed_world: TimedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*given: Any) -> float:
        timed_world.busy = timed_world.evaluations == 2  # at step 6
        return timed_world.evaluate()

    monkeypatch.setattr(TinystoriesGrowth, "evaluate", evaluate)
    assert run(timed_world, tmp_path, steps=10) == best(2, 4, 8)


def test_what_a_run_exports_is_saved_during_a_save_and_whatever_it_costs(
    timed_world: TimedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretrain, "evaluate", timed_world.evaluate)
    timed_world.busy, timed_world.blocked_s = True, 5.0
    assert world.train(pretrain.make(tmp_path, steps=16)) == 0
    assert timed_world.saves == [*best(4, 8, 12), (16, "final")]


def test_an_experiment_may_do_without_saves_of_improvements(
    timed_world: TimedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinystoriesGrowth, "saves_improvements", Kernel.saves_improvements)
    assert run(timed_world, tmp_path, checkpoint={"interval_s": 65.0}) == [(14, "timed")]


def test_a_save_that_was_asked_for_is_made_once(timed_world: TimedWorld, tmp_path: Path) -> None:
    made = world.make(tmp_path, eval={"every": 100})
    assert world.train(made, StopAt(made, STEPS + 1, saves=(2,))) == 75
    assert timed_world.saves == [(2, "timed"), (STEPS, "boundary")]


@pytest.mark.parametrize(("experiment", "to_beat"), [("tinystories-growth", [1.5, 1.5]), ("pretrain-d64", [None, 2.0])])
def test_an_earlier_nodes_best_is_to_be_beaten_unless_the_best_must_be_on_this_disk(
    experiment: str, to_beat: list[float | None]
) -> None:
    nothing: Any = SimpleNamespace(committed=SimpleNamespace(best=lambda phase: None))
    session: Any = SimpleNamespace(config=from_json(experiment, {}), checkpoints=nothing)
    cadence = Cadence(session, improvements=True, event=print)
    cadence.resume("train", 1.5)
    cadence.begin("train")
    before = cadence.best
    cadence.improve(2.0)  # a stop saves whatever its evaluation was
    assert [before, cadence.best] == to_beat


def test_an_evaluation_as_good_as_the_best_is_no_improvement(
    timed_world: TimedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinystoriesGrowth, "evaluate", lambda *_: 1.0)
    assert run(timed_world, tmp_path, steps=8) == best(2)


def test_a_stop_saves_no_step_that_is_saved_already(timed_world: TimedWorld, tmp_path: Path) -> None:
    made = world.make(tmp_path)
    assert world.train(made, StopAt(made, 2)) == 75
    assert timed_world.saves == best(2)


def test_what_steps_lost_is_measured_against_those_alone() -> None:
    stall = Stall()
    assert stall.seconds == 0.0
    stall.see(None, 0, busy=False)  # the warm-up
    stall.see(1.0, 10, busy=False)
    stall.begin(0.25)
    assert stall.seconds == 0.25
    stall.see(1.5, 4, busy=True)
    stall.see(1.25, 4, busy=False)  # it ended in this stretch
    stall.see(1.0, 10, busy=False)
    assert stall.seconds == 0.25 + 4 * 0.5 + 4 * 0.25
    stall.begin(0.5)
    assert stall.seconds == 0.5


def test_a_checkpoint_tells_of_nothing_that_came_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, save = list[dict[str, Any]](), Checkpoints.save

    def saving(self: Checkpoints, state: State, commit: Commit, progress: dict[str, Any]) -> list[Saved]:
        told.append(progress)
        return save(self, state, commit, progress)

    monkeypatch.setattr(Checkpoints, "save", saving)
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, STEPS + 2 + 1)) == 75  # after a step of the second phase
    before, *_, after = (progress["experiment"]["boundaries"] for progress in told)
    assert (len(before), len(after)) == (0, 1)


def test_evaluations_are_counted_from_their_phases_first_step(tmp_path: Path) -> None:
    experiment = world.experiment(world.make(tmp_path))
    phase = replace(experiment.phases[1], first=5, steps=5)
    assert [step for step in range(6, 11) if experiment.evaluated(phase, step)] == [7, 9, 10]


def test_the_end_of_a_phase_is_saved_without_moments_and_what_lies_before_it_with_them(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, STEPS + 2 + 1)) == 75  # after a step of the second phase
    assert kinds(workdir, STEPS) == {"model"}
    assert {commit.step: commit.val_loss for commit in commits(workdir)}[STEPS] == (
        world.records(workdir)[STEPS - 1]["val_loss"]
    )
    assert kinds(workdir, STEPS + 1) == {"model", "exp_avg", "exp_avg_sq"}
    tree = atomic.read_object(workdir / "run.json") or {}
    config = from_json("tinystories-growth", tree["job"]["parameters"])
    assert numbers(workdir, STEPS) * 4 == config.sizes().phase_ends[0]
    assert numbers(workdir, STEPS + 1) * 4 == config.sizes().checkpoints[1]


def test_a_run_cut_after_its_last_save_trains_nothing_and_makes_no_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir) == 0
    assert kinds(workdir, 3 * STEPS) == {"model"}
    before, lines = world.final_hash(workdir), len(world.records(workdir))
    for name in ("final", "exports"):
        shutil.rmtree(workdir / name)

    def fail_if_called(*given: Any) -> None:
        raise AssertionError("no step is left")

    monkeypatch.setattr(TinystoriesGrowth, "optimizer", fail_if_called)
    monkeypatch.setattr(step, "update", fail_if_called)
    assert world.train(workdir) == 0
    assert (world.final_hash(workdir), len(world.records(workdir))) == (before, lines)


@pytest.mark.usefixtures("one_judge")
def test_kernel_sft_cut_while_it_generates_needs_no_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = kernel.make(tmp_path, generate={"candidates": 1}, funnel={"planted": 0})
    assert world.train(workdir, StopAt(workdir, 9)) == 75
    assert kinds(workdir, len(world.records(workdir))) == {"model"}
    assert not (workdir / "results.json").exists()

    def fail_if_called(*given: Any) -> None:
        raise AssertionError("no step is left")

    monkeypatch.setattr(step, "update", fail_if_called)
    assert world.train(workdir) == 0
    assert len(kernel.lines(workdir, "candidates")) == 2


def test_a_stop_in_a_phases_last_step_saves_its_evaluation_with_it(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, STEPS)) == 75
    (newest,) = (commit for commit in commits(workdir) if commit.step == STEPS)
    assert newest.reason == "stop"
    assert newest.val_loss == world.records(workdir)[-1]["val_loss"] is not None


def test_a_stop_saves_its_step_again_where_the_save_on_its_way_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, tries = Committed.add, list[int]()

    def full_at_first(self: Committed, path: Path, commit: Commit, progress: dict[str, Any]) -> None:
        tries.append(commit.step)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        add(self, path, commit, progress)

    monkeypatch.setattr(Committed, "add", full_at_first)
    workdir = pretrain.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, pretrain.look_after(4))) == 75
    assert tries == [4, 4]  # as the best so far, and as the last
    assert world.committed(workdir) == [4]
    assert world.train(workdir) == 0
    assert [record["val_loss"] is not None for record in world.records(workdir)[:4]] == [False] * 3 + [True]
