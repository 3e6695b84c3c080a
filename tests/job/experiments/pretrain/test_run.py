"""pretrain-d64 from its first step to final/, in one process."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpufleet.job import atomic
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.experiments.engine.checkpoint import Checkpoints
from gpufleet.job.experiments.engine.committed import Committed
from gpufleet.job.experiments.engine.experiment import Phase
from gpufleet.job.experiments.pretrain.model import CharGpt
from gpufleet.job.experiments.pretrain.rows import Rows
from gpufleet.job.experiments.pretrain.run import Pretrain, make_optimizer, momentum, plateau, rate
from gpufleet.job.experiments.pretrain.serve.model import open_model
from gpufleet.job.experiments.pretrain.serve.request import GenerateRequest
from gpufleet.job.experiments.pretrain.spec import EarlyStop, MuonAdamW
from tests.job import pretrain_world as pretrain
from tests.job import train_world as world


def losses(workdir: Path) -> list[float]:
    return [record["loss"] for record in world.records(workdir)]


def results(workdir: Path) -> dict[str, Any]:
    found = atomic.read_object(workdir / "results.json")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = pretrain.make(tmp_path_factory.mktemp("run"), steps=60)
    assert world.train(workdir) == TrainerExit.FINISHED
    return workdir


def test_it_learns(finished: Path) -> None:
    found = losses(finished)
    assert found[0] == pytest.approx(3.4657, abs=1e-3)  # ln 32: the head starts at zero
    assert sum(found[-5:]) / 5 < 2.4


def test_the_result_table_says_what_was_predicted_measured_and_learned(finished: Path) -> None:
    table = results(finished)
    assert (table["steps"], table["params_total"], table["tokens"]) == (60, 2 * 12 * 32 * 32 + 64 * 32, 60 * 8 * 32)
    assert [e["step"] for e in table["evaluations"]] == list(range(4, 61, 4))
    best = min(table["evaluations"], key=lambda e: e["val_loss"])
    assert (table["best_step"], table["val_loss_nats_per_character"]) == (best["step"], best["val_loss"])
    assert table["measured"]["tokens_per_s"] > 0
    assert len(table["samples"]["1+2"]) == 3 + 4


def test_the_export_is_served_and_continues_as_the_run_did(finished: Path) -> None:
    found, sized = world.export_bytes(finished)
    assert found == sized
    served = open_model(finished / "final")
    asked = GenerateRequest(prompt="1+2", max_tokens=4, temperature=0)
    assert "1+2" + "".join(served.generate(asked)) == results(finished)["samples"]["1+2"]
    assert served.info()["val_loss"] == results(finished)["val_loss_nats_per_character"]


def test_the_exported_weights_have_the_validation_loss_they_are_said_to_have(finished: Path) -> None:
    module, meta = open_model(finished / "final").module, json.loads((finished / "final" / "meta.json").read_text())
    held_out = Rows(finished / "data" / "validation.bin", sequence=32, device=torch.device("cpu"))
    with torch.no_grad():
        loss = module(*held_out.windows(held_out.fixed(10))).loss_sum.item() / (10 * 32)
    assert loss == pytest.approx(meta["val_loss"], rel=1e-6)


def stopped_and_resumed(workdir: Path, look: int) -> Path:
    assert world.train(workdir, world.StopAt(workdir, look)) == TrainerExit.STOPPED
    assert world.train(workdir) == TrainerExit.FINISHED
    return workdir


@pytest.mark.parametrize(
    ("kind", "lr", "looks"), [("muon", 0.02, (1, 6, 12)), pytest.param("adamw", 0.003, (7,), marks=pytest.mark.slow)]
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, kind: str, lr: float, looks: tuple[int, ...]) -> None:
    optim = {"kind": kind, "lr": lr, "momentum_steps": 10}
    whole = pretrain.make(tmp_path / "whole", optim=optim)
    assert world.train(whole) == TrainerExit.FINISHED
    for look in looks:
        cut = stopped_and_resumed(pretrain.make(tmp_path / str(look), optim=optim), look)
        assert world.final_hash(cut) == world.final_hash(whole)
        assert losses(cut) == losses(whole)
        assert results(cut)["evaluations"] == results(whole)["evaluations"]


def test_micro_batches_do_not_change_the_result(tmp_path: Path) -> None:
    found = []
    for micro in (8, 3):
        workdir = pretrain.make(tmp_path / str(micro), batch={"micro": micro}, optim={"kind": "adamw", "lr": 0.003})
        assert world.train(workdir) == TrainerExit.FINISHED
        found.append(losses(workdir))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


class Rising(Pretrain):
    """Validation that falls until step 12 and rises from there."""

    def evaluate(self, phase: Any, step: int, module: Any, rung: Any) -> float:
        super().evaluate(phase, step, module, rung)
        return 1.0 + abs(step - 12) / 100


def test_a_rising_validation_ends_the_run_and_the_best_weights_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpufleet.job.experiments.pretrain.run.Pretrain", Rising)
    workdir = pretrain.make(tmp_path, steps=200, early_stop={"patience": 4, "after": 8})
    written: dict[int, Any] = {}
    schedule = Rising.schedule

    def remember(self: Rising, phase: Any, opt: Any, step: int) -> float:
        assert self._module is not None
        written[step] = {name: tensor.clone() for name, tensor in self._module.state_dict().items()}
        return schedule(self, phase, opt, step)

    monkeypatch.setattr(Rising, "schedule", remember)
    assert world.train(workdir) == TrainerExit.FINISHED
    table = results(workdir)
    assert (table["steps"], table["best_step"]) == (28, 12)
    assert "4 evaluations in a row" in table["early_stop"]
    exported = load_file(workdir / "final" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in written[12].items())
    assert not torch.equal(exported["head.weight"], written[27]["head.weight"])
    events = "; ".join(record["event"] or "" for record in world.records(workdir))
    assert "ends early at step 28" in events
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step 000028/000200"))
    assert line.endswith("| eta 0:00:00")


def planted(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Validation losses by the number of optimizer steps done."""

    def evaluate(self: Pretrain, phase: Any, step: int, module: Any, rung: Any) -> float:
        real(self, phase, step, module, rung)
        return losses[step]

    real = Pretrain.evaluate
    monkeypatch.setattr(Pretrain, "evaluate", evaluate)


def full_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """No room on the disk for that checkpoint."""

    def make_way(self: Checkpoints, path: Path, size: int) -> str | None:
        return "full" if path.name == f"step_{step:08d}" else real(self, path, size)

    real = Checkpoints._make_way
    monkeypatch.setattr(Checkpoints, "_make_way", make_way)


def test_a_best_that_could_not_be_saved_is_not_what_the_next_must_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_at(monkeypatch, 8)
    planted(monkeypatch, {4: 1.2, 8: 1.0, 12: 1.05, 16: 1.3})
    workdir = pretrain.make(tmp_path, steps=16)
    assert world.train(workdir) == TrainerExit.FINISHED
    assert world.committed(workdir) == [12, 16]
    assert results(workdir)["best_step"] == 12


def test_the_last_weights_are_exported_where_they_are_the_best_and_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_at(monkeypatch, 12)
    planted(monkeypatch, {4: 1.2, 8: 1.1, 12: 1.0})
    workdir = pretrain.make(tmp_path)
    assert world.train(workdir) == TrainerExit.FINISHED
    assert world.committed(workdir) == [4, 8]
    assert results(workdir)["best_step"] == 12


def test_a_torn_checkpoint_is_never_the_best_that_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, {4: 1.2, 8: 1.0, 12: 1.1, 16: 1.3})
    workdir = pretrain.make(tmp_path, steps=16)
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(9))) == TrainerExit.STOPPED
    data = workdir / "ckpt" / "step_00000008" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert world.train(workdir) == TrainerExit.FINISHED
    assert results(workdir)["best_step"] == 12


def test_a_best_that_did_not_reach_the_next_node_is_not_what_it_must_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, {4: 1.2, 8: 1.0, 12: 1.1, 16: 1.3})
    workdir = pretrain.make(tmp_path, steps=16)
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(9))) == TrainerExit.STOPPED
    assert world.committed(workdir) == [8, 9]
    shutil.rmtree(workdir / "ckpt" / "step_00000008")
    assert world.train(workdir) == TrainerExit.FINISHED
    assert world.committed(workdir) == [12, 16]
    assert results(workdir)["best_step"] == 12


def test_an_evaluation_that_is_stopped_is_made_up_for_by_the_next_start_or_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(monkeypatch, {4: 1.2, 8: 1.0, 12: 1.1})
    workdir = pretrain.make(tmp_path)
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(7) + 1)) == TrainerExit.STOPPED
    assert "stopped after step 8: test" in capsys.readouterr().out
    (line,) = (record for record in world.records(workdir) if record["step"] == 8)
    assert line["val_loss"] is None
    assert world.train(workdir, world.StopAt(workdir, 2)) == TrainerExit.STOPPED  # in it again
    assert world.committed(workdir) == [4, 8]
    assert world.train(workdir) == TrainerExit.FINISHED
    (again,) = (record for record in world.records(workdir) if record["step"] == 8)
    assert again == {**line, "val_loss": 1.0, "resumed": 8}
    assert [record["val_loss"] for record in world.records(workdir) if record["step"] in (4, 8, 12)] == [1.2, 1.0, 1.1]
    assert results(workdir)["best_step"] == 8
    assert (atomic.read_object(workdir / "ckpt" / "step_00000008" / "commit.json") or {})["val_loss"] == 1.0


def test_where_the_disk_has_no_room_for_the_loss_of_an_evaluation_made_up_for_the_next_best_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    planted(monkeypatch, {4: 1.2, 8: 1.0, 12: 1.1, 16: 1.3})
    workdir = pretrain.make(tmp_path, steps=16)
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(7) + 1)) == TrainerExit.STOPPED
    monkeypatch.setattr(Committed, "evaluated", full)
    assert world.train(workdir) == TrainerExit.FINISHED
    assert results(workdir)["best_step"] == 12


def test_an_evaluation_made_up_for_can_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufleet.job.experiments.pretrain.run.Pretrain", Rising)
    workdir = pretrain.make(tmp_path, steps=200, early_stop={"patience": 4, "after": 8})
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(27) + 1)) == TrainerExit.STOPPED
    assert world.train(workdir) == TrainerExit.FINISHED
    assert (results(workdir)["steps"], results(workdir)["best_step"]) == (28, 12)


def test_an_end_by_early_stop_is_repeated_without_a_step_when_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.job.experiments.pretrain.run.Pretrain", Rising)
    workdir = pretrain.make(tmp_path, steps=200, early_stop={"patience": 4, "after": 8})
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(28) + 2)) == TrainerExit.STOPPED  # behind it
    assert max(world.committed(workdir)) == 28
    assert world.train(workdir) == TrainerExit.FINISHED
    assert (results(workdir)["steps"], results(workdir)["best_step"]) == (28, 12)


def test_where_the_best_checkpoint_is_gone_what_is_exported_is_said_to_be_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpufleet.job.experiments.pretrain.run.Pretrain", Rising)
    workdir = pretrain.make(tmp_path, steps=200, early_stop={"patience": 4, "after": 8})
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(22))) == TrainerExit.STOPPED
    shutil.rmtree(workdir / "ckpt" / "step_00000012")  # as on another node, which has the newest alone
    assert world.train(workdir) == TrainerExit.FINISHED
    said, table = capsys.readouterr().out, results(workdir)
    assert "the best evaluation, 1.0000 at step 12, has no checkpoint on this disk" in said
    meta = atomic.read_object(workdir / "final" / "meta.json") or {}
    assert meta["step"] == table["best_step"] != 12
    assert meta["val_loss"] == 1.0 + abs(meta["step"] - 12) / 100


def test_a_run_that_a_limit_ends_leaves_its_best_checkpoint_to_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, {4: 1.2, 8: 1.0, 12: 1.1, 16: 1.3})
    workdir = pretrain.make(tmp_path, steps=40, optim={"kind": "adamw", "lr": 0.003})  # the quicker one
    assert world.train(workdir, world.StopAt(workdir, 3, ends=True)) == TrainerExit.STOPPED
    assert not (workdir / "final").exists()  # nothing was evaluated yet
    assert (
        world.train(workdir, world.StopAt(workdir, pretrain.look_after(14, begun=3))) == TrainerExit.STOPPED
    )  # another start goes on
    assert not (workdir / "final").exists()
    assert (
        world.train(workdir, world.StopAt(workdir, pretrain.look_after(16, begun=14), ends=True)) == TrainerExit.STOPPED
    )
    table, meta = results(workdir), atomic.read_object(workdir / "final" / "meta.json") or {}
    assert (table["steps"], table["steps_planned"], table["best_step"]) == (max(world.committed(workdir)), 40, 8)
    assert (meta["step"], meta["val_loss"]) == (8, 1.0)
    assert "".join(open_model(workdir / "final").generate(GenerateRequest(prompt="1", max_tokens=2)))


def test_a_limit_met_by_a_node_before_its_first_step_counts_the_steps_of_those_before(tmp_path: Path) -> None:
    workdir = pretrain.make(tmp_path, optim={"kind": "adamw", "lr": 0.003})
    assert (
        world.train(workdir, world.StopAt(workdir, pretrain.look_after(6))) == TrainerExit.STOPPED
    )  # evaluated after step 4
    assert world.train(workdir, world.StopAt(workdir, 0, ends=True)) == TrainerExit.STOPPED
    assert (results(workdir)["steps"], results(workdir)["best_step"]) == (6, 4)


def test_a_limit_met_after_the_only_evaluation_was_made_up_for_exports_its_checkpoint(tmp_path: Path) -> None:
    workdir = pretrain.make(tmp_path, optim={"kind": "adamw", "lr": 0.003})
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(3) + 1)) == TrainerExit.STOPPED  # in it
    assert world.train(workdir, world.StopAt(workdir, 1 + 4)) == TrainerExit.STOPPED  # after it, and before a step
    assert world.train(workdir, world.StopAt(workdir, 0, ends=True)) == TrainerExit.STOPPED
    assert (results(workdir)["steps"], results(workdir)["best_step"]) == (4, 4)


def test_a_limit_met_after_the_last_step_costs_no_export(tmp_path: Path) -> None:
    workdir = pretrain.make(tmp_path, optim={"kind": "adamw", "lr": 0.003})
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(12) + 2, ends=True)) == TrainerExit.STOPPED
    assert (results(workdir)["steps"], results(workdir)["samples"]) == (12, {})
    assert (workdir / "final" / "meta.json").is_file()


def test_a_stop_is_heeded_between_two_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = pretrain.make(tmp_path, optim={"kind": "adamw", "lr": 0.003}, eval={"prompts": ["1+2", "3"]})
    assert world.train(workdir, world.StopAt(workdir, pretrain.look_after(12) + 3)) == TrainerExit.STOPPED
    said = capsys.readouterr().out
    assert "'1+2' -> " in said
    assert "'3' -> " not in said


DEFAULT = EarlyStop()


@pytest.mark.parametrize(
    ("every", "values", "ends"),
    [
        (250, [0.5, 0.4, 0.3, 0.2, 0.1], None),
        (250, [0.3, 0.31, 0.32, 0.33, 0.34], 1250),  # four in a row
        (250, [0.3, 0.2999, 0.2998, 0.2997, 0.2996], 1250),  # less than min_delta in all
        (250, [0.3, 0.2998, 0.2996, 0.2994, 0.2992], None),  # 0.0006 below the best, little by little
        (250, [0.3, 0.31, 0.31, 0.31, 0.2, 0.3, 0.3, 0.3], None),  # the fifth was better
        (250, [0.3, 0.31, 0.31, 0.31, 0.2, 0.3, 0.3, 0.3, 0.3], 2250),
        (100, [0.3] * 9, None),  # not before step 1000
        (100, [0.3] * 10, 1000),
    ],
)
def test_training_ends_behind_four_evaluations_without_an_improvement(
    every: int, values: list[float], ends: int | None
) -> None:
    seen = [(every * (i + 1), value) for i, value in enumerate(values)]
    first = next((seen[i][0] for i in range(len(seen)) if plateau(seen[: i + 1], DEFAULT)), None)
    assert first == ends


def test_rates_are_constant_and_fall_to_zero_over_the_last_two_fifths() -> None:
    optim = MuonAdamW()
    assert [rate(step, 22_630, optim) for step in (0, 13_577, 13_578)] == [1.0, 1.0, 1.0]
    assert rate(13_579, 22_630, optim) < 1
    assert rate(22_629, 22_630, optim) == pytest.approx(1 / 9052)
    assert rate(18_104, 22_630, optim) == pytest.approx(0.5)
    assert [rate(step, 100, MuonAdamW(warmup=10, cooldown=0.0)) for step in (0, 4, 9, 99)] == [0.1, 0.5, 1.0, 1.0]


def test_momentum_rises_over_300_steps() -> None:
    optim = MuonAdamW()
    assert [momentum(step, optim) for step in (0, 150, 300, 9000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])


def test_every_parameter_has_its_optimizer_and_rate() -> None:
    config = pretrain.config(model={"width": 192, "head_dim": 16})
    module = CharGpt(config.model)
    opt = make_optimizer(module, config)
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {names[p]: (group["kind"], group["lr"]) for group in opt.param_groups for p in group["params"]}
    assert found.pop("embed.weight") == ("adamw", pytest.approx(0.6))  # 0.3 x (192 / 768) ** -0.5
    assert found.pop("head.weight") == ("adamw", pytest.approx(0.008))
    assert len(found) == 12
    assert set(found.values()) == {("muon", 0.02)}
    assert all(group["weight_decay"] == 0 for group in opt.param_groups)
    assert set(opt.state[module.embed.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(opt.state[module.blocks[0].ffn.up.weight]) == {"momentum_buffer"}  # type: ignore[union-attr,index]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_combined_optimizer_steps_as_torchs_own_do(kind: str, decay: float) -> None:
    config = pretrain.config(optim={"kind": kind, "lr": 0.02, "weight_decay": decay})
    torch.manual_seed(0)
    module = CharGpt(config.model)
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    opt = make_optimizer(module, config)
    ours = Pretrain.__new__(Pretrain)
    ours.config = config
    phase = Phase(index=0, name="train", first=0, steps=10, flops_per_token=1, tokens_per_step=1)
    plain = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    tables = (32 / 768) ** -0.5
    hidden = [p for name, p in plain.items() if name.startswith("blocks.")]
    adam: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-10}
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([plain["embed.weight"]], lr=0.3 * tables, weight_decay=0.0, **adam),
        torch.optim.AdamW([plain["head.weight"]], lr=0.004 * tables, weight_decay=0.0, **adam),
        torch.optim.Muon(hidden, lr=0.02, weight_decay=decay, momentum=0.85)
        if kind == "muon"
        else torch.optim.AdamW(hidden, lr=0.02, weight_decay=decay, **adam),
    ]
    base = [one.param_groups[0]["lr"] for one in theirs]
    for step in range(8):
        ours.schedule(phase, opt, step)
        scale = 1.0 if step <= 6 else (10 - step) / 4
        for one, lr in zip(theirs, base, strict=True):
            one.param_groups[0]["lr"] = scale * lr
            if isinstance(one, torch.optim.Muon):
                one.param_groups[0]["momentum"] = 0.85 + 0.1 * step / 300
        for name, parameter in module.named_parameters():
            gradient = torch.randn(parameter.shape)
            parameter.grad, plain[name].grad = gradient, gradient.clone()
        opt.step()
        for one in theirs:
            one.step()
    for name, parameter in module.named_parameters():
        assert (parameter - plain[name]).abs().max() < 1e-6 * (plain[name] - start[name]).abs().max()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"eval": {"prompts": ["1=2"]}}, r"eval.prompts: 1 to 32 characters of"),
        ({"model": {"head_dim": 24}}, r"model.head_dim"),
        ({"data": {"sequence": 1200}}, "too short|at least"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    workdir = pretrain.make(tmp_path)
    tree = json.loads((workdir / "run.json").read_text())
    tree["job"]["parameters"] = pretrain.parameters(**changed)
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == TrainerExit.FATAL
    problem = atomic.read_object(workdir / "fatal.json")
    assert problem is not None
    assert re.search(said, problem["detail"])


def test_a_dataset_of_another_kind_is_refused(tmp_path: Path) -> None:
    workdir = pretrain.make(tmp_path / "a")
    stories = world.make(tmp_path / "b")
    (workdir / "data").rename(tmp_path / "old")
    (stories / "data").rename(workdir / "data")
    assert world.train(workdir) == TrainerExit.FATAL
    problem = atomic.read_object(workdir / "fatal.json")
    assert problem is not None
    assert "trains on characters" in problem["detail"]
