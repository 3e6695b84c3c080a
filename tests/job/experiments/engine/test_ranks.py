"""Several ranks train as one does: same batches, same result, one stop; what N ranks saved, M ranks resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.job import rank_world as world
from tests.job.train_world import committed, final_hash, records

pytestmark = pytest.mark.xdist_group("ranks")

SPREADS = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])


def losses(workdir: Path) -> list[float]:
    found = records(workdir)
    assert [record["step"] for record in found] == list(range(1, world.STEPS + 1))
    return [record["loss"] for record in found]


def weights(workdir: Path) -> dict[str, torch.Tensor]:
    return load_file(workdir / "final" / "model.safetensors")


def commit(workdir: Path, step: int) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((workdir / "ckpt" / f"step_{step:08d}" / "commit.json").read_text())
    return tree


@pytest.fixture(scope="module")
def one_rank_workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, uninterrupted."""
    workdir = world.make(tmp_path_factory.mktemp("alone"), sharded=False)
    assert world.train(1, workdir) == 0
    return workdir


@pytest.fixture(scope="module", params=[True, False], ids=["sharded", "replicated"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path]:
    """Two ranks, uninterrupted."""
    workdir = world.make(tmp_path_factory.mktemp("pair"), sharded=request.param)
    assert world.train(2, workdir) == 0
    return request.param, workdir


def test_two_ranks_have_the_losses_and_weights_of_one(pair: tuple[bool, Path], one_rank_workdir: Path) -> None:
    _, two = pair
    assert losses(two) == pytest.approx(losses(one_rank_workdir), rel=1e-6)
    assert [r["val_loss"] for r in records(two)] == [
        None if r["val_loss"] is None else pytest.approx(r["val_loss"], rel=1e-6) for r in records(one_rank_workdir)
    ]
    for name, tensor in weights(one_rank_workdir).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-4, atol=1e-6)


def test_figures_are_summed_over_ranks(pair: tuple[bool, Path]) -> None:
    assert {record["seen"] for record in records(pair[1])} == {world.ROWS * 8}


def test_two_ranks_resumed_by_two_end_with_the_same_bits(pair: tuple[bool, Path], tmp_path: Path) -> None:
    sharded, whole = pair
    workdir = world.make(tmp_path, sharded=sharded)
    assert world.train(2, workdir, 6, saves=(2, 4)) == 75
    assert world.train(2, workdir) == 0
    assert final_hash(workdir) == final_hash(whole)


@SPREADS
def test_a_run_goes_from_two_ranks_to_one_to_four_as_if_it_had_always_been_one(
    sharded: bool, one_rank_workdir: Path, tmp_path: Path
) -> None:
    workdir = world.make(tmp_path, sharded=sharded)
    assert world.train(2, workdir, 4) == 75  # before the first step, and after each: four steps
    assert committed(workdir) == [4]
    assert world.train(1, workdir, 4) == 75
    assert world.train(4, workdir) == 0
    assert losses(workdir) == pytest.approx(losses(one_rank_workdir), rel=1e-6)
    assert [commit(workdir, step)["world_size"] for step in committed(workdir)] == [1, 4]


def test_what_two_ranks_left_at_the_end_is_finished_by_another_number_without_a_step(
    pair: tuple[bool, Path], tmp_path: Path
) -> None:
    sharded, whole = pair
    workdir = tmp_path / "again"
    shutil.copytree(whole, workdir, ignore=shutil.ignore_patterns("final"))
    assert world.train(4 if sharded else 1, workdir) == 0
    assert final_hash(workdir) == final_hash(whole)
    assert losses(workdir) == losses(whole)


def test_every_rank_of_a_sharded_model_writes_its_own_part_and_the_commit_names_all(pair: tuple[bool, Path]) -> None:
    sharded, workdir = pair
    tree = commit(workdir, world.STEPS)
    names = {file["name"] for file in tree["files"]}
    assert {"__0_0.distcp", "__1_0.distcp"} <= names
    assert tree["world_size"] == 2
    if sharded:
        sizes = [file["bytes"] for file in tree["files"] if file["name"].endswith(".distcp")]
        assert max(sizes) < 1.2 * min(sizes)


def test_a_full_disk_under_one_rank_costs_a_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    workdir = world.make(tmp_path, sharded=True)
    assert world.train(2, workdir, saves=(2,), broken="disk of rank 1") == 0
    assert committed(workdir) == []
    assert any("NOT saved" in (record["event"] or "") for record in records(workdir))


def test_what_was_left_torn_is_gone_before_any_rank_writes(tmp_path: Path) -> None:
    workdir = world.make(tmp_path, sharded=False)
    torn = workdir / "ckpt" / "step_00000002"
    torn.mkdir(parents=True)
    (torn / "__1_0.distcp").write_bytes(b"half")
    assert world.train(2, workdir, 2, broken="slow rank 0") == 75
    assert committed(workdir) == [2]


def test_sharded_blocks_compile_without_a_break_and_change_nothing(one_rank_workdir: Path, tmp_path: Path) -> None:
    workdir = world.make(tmp_path, sharded=True)
    assert world.train(2, workdir, broken="compiled") == 0
    assert losses(workdir) == pytest.approx(losses(one_rank_workdir), rel=1e-6)
