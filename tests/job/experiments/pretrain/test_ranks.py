"""pretrain-d64 on two ranks: the same losses as on one, and a checkpoint of two continues on one."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gpufleet.job import atomic
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import parallel
from gpufleet.job.experiments.engine.experiment import Phase
from gpufleet.job.experiments.pretrain import muon
from gpufleet.job.experiments.pretrain.run import Pretrain
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.kind.common import Rung
from tests.job import pretrain_world as pretrain
from tests.job import rank_world
from tests.job import train_world as world

pytestmark = pytest.mark.xdist_group("ranks")

OPTIM = {"muon": {"kind": "muon", "lr": 0.02, "momentum_steps": 10}, "adamw": {"kind": "adamw", "lr": 0.003}}
ODD: dict[str, Any] = {"batch": {"rows": 9}, "eval": {"windows": 9}}  # leave the second rank a row of padding


class RisingRanks(Pretrain):
    """Its validation loss rises from the first evaluation, whatever it learns."""

    def evaluate(self, phase: Phase, step: int, module: nn.Module, rung: Rung) -> float:
        super().evaluate(phase, step, module, rung)
        return 1 + step / 100


def rank(number: int, size: int, port: int, works: list[tuple[Path, int | None]], nodes: int = 1) -> None:
    """A rank's process: one run after the other, each stopped at its `look`."""
    torch.set_num_threads(1)
    warnings.simplefilter("default")  # those of the ranks are no concern of this file
    for place, (given, look) in enumerate(works):
        rank_world.environment(number, size, port + place, nodes)
        folder = rank_world.of_node(given, parallel.expected().node)
        if folder.name == "rising":
            PretrainConfig.trainer = f"{__name__}:{RisingRanks.__name__}"
        code = trainer.train(folder, 0, world.StopAt(folder, look))
        assert code == 0, code


def updated(number: int, size: int, port: int, nodes: int) -> None:
    """A rank's process: Muon over matrices that the ranks do not share evenly, against torch's own over whole ones."""
    torch.set_num_threads(1)
    rank_world.environment(number, size, port, nodes)
    ranks = parallel.join("cpu")
    drawn = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in [(7, 4)] * 4 + [(2, 6)]]
    start = [parameter.detach().clone() for parameter in whole]
    places = [Shard(0)] if nodes == 1 else [Replicate(), Shard(0)]
    cut = [nn.Parameter(distribute_tensor(tensor, ranks.mesh, places)) for tensor in start]
    assert muon.owned(cut)
    group = {"kind": "muon", "base_lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    both = [muon.Combined([{"params": parameters, **group}], betas=(0.8, 0.95)) for parameters in (whole, cut)]
    for _ in range(3):
        for one, part in zip(whole, cut, strict=True):
            one.grad = torch.randn(one.shape, generator=drawn)
            part.grad = distribute_tensor(one.grad, ranks.mesh, places)
        for opt in both:
            opt.step()
    for before, one, part in zip(start, whole, cut, strict=True):
        assert (one - before).abs().max() > 0.1
        assert (parallel.full_tensor(part) - one).abs().max() < 2e-3  # a rate of 0.1 times what bf16 rounds off
    ranks.close()


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 1), (4, 2)])
def test_matrices_that_ranks_do_not_share_evenly_are_updated_as_whole_ones(ranks: int, nodes: int) -> None:
    assert rank_world.launched(updated, ranks, nodes) == [0] * ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole runs on two ranks by kind, `cut` stopped on two, `rising` with a planted validation loss that rises from
    the first evaluation; and the same on one rank. One launch for all.
    """
    root = tmp_path_factory.mktemp("ranks")
    reshard = {"reshard_after_forward": True}
    two = {kind: pretrain.make(root / kind, optim=optim, **ODD) for kind, optim in OPTIM.items()}
    two["zero-3"] = pretrain.make(root / "zero-3", optim=OPTIM["adamw"], **reshard, **ODD)
    two["cut"] = pretrain.make(root / "cut", optim=OPTIM["adamw"], **ODD)
    two["rising"] = pretrain.make(root / "rising", optim=OPTIM["muon"])
    works = [(two[kind], 5 if kind == "cut" else None) for kind in ("muon", "adamw", "zero-3", "cut", "rising")]
    assert rank_world.launched(rank, 2, works) == [0, 0]
    for kind, optim in OPTIM.items():
        two[f"{kind} on one"] = pretrain.make(root / f"{kind}-one", optim=optim, **ODD)
        assert world.train(two[f"{kind} on one"]) == TrainerExit.FINISHED
    return two


def figures(workdir: Path, key: str) -> list[float]:
    return [record[key] for record in world.records(workdir)]


@pytest.mark.parametrize(
    ("kind", "one", "tolerance"),
    [("adamw", "adamw on one", 1e-6), ("zero-3", "adamw on one", 1e-6), ("muon", "muon on one", 1e-3)],
)
def test_two_ranks_give_the_losses_of_one(folders: dict[str, Path], kind: str, one: str, tolerance: float) -> None:
    assert figures(folders[kind], "loss") == pytest.approx(figures(folders[one], "loss"), rel=tolerance)
    assert figures(folders[kind], "grad_norm") == pytest.approx(figures(folders[one], "grad_norm"), rel=10 * tolerance)
    evaluations = [atomic.read_object(folders[name] / "results.json") or {} for name in (kind, one)]
    found = [[e["val_loss"] for e in table["evaluations"]] for table in evaluations]
    assert found[0] == pytest.approx(found[1], rel=tolerance)
    assert evaluations[0]["ranks"] == 2


# Muon orthogonalises in bf16, which lets weights part where losses do not; a shard out of place is off by more than 1.
@pytest.mark.parametrize(("kind", "one", "tolerance"), [("adamw", "adamw on one", 1e-3), ("muon", "muon on one", 0.2)])
def test_two_ranks_export_the_whole_weights(folders: dict[str, Path], kind: str, one: str, tolerance: float) -> None:
    ours, theirs = (load_file(folders[name] / "final" / "model.safetensors") for name in (kind, one))
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape
        assert torch.linalg.vector_norm(tensor - theirs[name]) < tolerance * torch.linalg.vector_norm(theirs[name])


def test_two_ranks_export_the_weights_of_the_best_evaluation(folders: dict[str, Path]) -> None:
    table = atomic.read_object(folders["rising"] / "results.json") or {}
    assert (table["best_step"], table["steps"]) == (4, 12)
    exported = load_file(folders["rising"] / "final" / "model.safetensors")
    saved = {step: {name: torch.empty_like(tensor) for name, tensor in exported.items()} for step in (4, 12)}
    for step, tensors in saved.items():
        reader = FileSystemReader(folders["rising"] / "ckpt" / f"step_{step:08d}")
        load({"model": tensors}, storage_reader=reader, no_dist=True)
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved[4].items())
    assert not torch.equal(exported["head.weight"], saved[12]["head.weight"])


def test_two_nodes_of_one_rank_end_with_the_bits_of_one_node_of_two(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"batch": {"rows": 8, "micro": 4}}  # a sum of two is the same in either order, of four not
    one, two = (pretrain.make(tmp_path / name, optim=OPTIM["muon"], **whole) for name in ("one", "two"))
    shutil.copytree(two, rank_world.of_node(two, 1))
    assert rank_world.launched(rank, 2, [(one, None)]) == [0, 0]
    assert rank_world.launched(rank, 2, [(two, None)], 2) == [0, 0]
    assert world.final_hash(one) == world.final_hash(two)


def test_a_checkpoint_of_two_ranks_continues_on_one(folders: dict[str, Path]) -> None:
    assert (atomic.read_object(folders["cut"] / "ended.json") or {})["code"] == TrainerExit.STOPPED
    assert world.committed(folders["cut"]) == [4]  # in its evaluation, on both
    assert world.train(folders["cut"]) == TrainerExit.FINISHED
    evaluations = [
        (atomic.read_object(folders[name] / "results.json") or {})["evaluations"] for name in ("cut", "adamw")
    ]
    found = [[e["val_loss"] for e in each] for each in evaluations]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert figures(folders["cut"], "loss") == pytest.approx(figures(folders["adamw on one"], "loss"), rel=1e-6)
