"""Two nodes of two ranks train as one rank does; the first alone has checkpoints, which any number of ranks resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpufleet.job.experiments.engine import parallel
from tests.job import rank_world as world
from tests.job.train_world import committed, records

pytestmark = pytest.mark.xdist_group("ranks")

SPREADS = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])


def losses(workdir: Path) -> list[float]:
    return [record["loss"] for record in records(workdir)]


@pytest.fixture(scope="module")
def one_rank_workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = world.make(tmp_path_factory.mktemp("alone") / "run", sharded=False, micro=2)
    assert world.train(1, workdir) == 0
    return workdir


@SPREADS
def test_two_nodes_of_two_ranks_have_the_losses_and_weights_of_one_rank(
    sharded: bool, one_rank_workdir: Path, tmp_path: Path
) -> None:
    workdir = world.make(tmp_path / "run", sharded=sharded, micro=2)
    assert world.train(4, workdir, nodes=2, broken="count") == 0

    assert losses(workdir) == pytest.approx(losses(one_rank_workdir), rel=1e-6)
    norms = [[record["grad_norm"] for record in records(each)] for each in (workdir, one_rank_workdir)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    whole, other = (load_file(each / "final" / "model.safetensors") for each in (workdir, one_rank_workdir))
    for name, tensor in other.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-4, atol=1e-6)
    if sharded:  # two micro-batches a step: each block and the rest are summed between nodes once
        assert len((workdir / "sums.txt").read_text().splitlines()) == 4 * world.STEPS


@SPREADS
def test_what_two_nodes_saved_one_two_and_four_ranks_resume_and_the_other_way(
    sharded: bool, one_rank_workdir: Path, tmp_path: Path
) -> None:
    workdir = world.make(tmp_path / "run", sharded=sharded, micro=2)
    assert world.train(4, workdir, 2, nodes=2) == 75
    assert (committed(workdir), committed(world.of_node(workdir, 1))) == ([2], [])
    assert world.train(1, workdir, 2) == 75
    assert world.train(4, workdir, 2, nodes=2) == 75
    assert world.train(2, workdir, 2) == 75
    assert world.train(4, workdir, nodes=4) == 0
    assert losses(workdir) == pytest.approx(losses(one_rank_workdir), rel=1e-6)


def test_each_node_is_told_how_its_ranks_ended(tmp_path: Path) -> None:
    workdir = world.make(tmp_path / "run", sharded=True)
    assert world.train(2, workdir, 1, nodes=2) == 75
    ended = [json.loads((world.of_node(workdir, node) / "ended.json").read_text()) for node in (0, 1)]
    assert ended == [{"code": 75, "rank": 0}, {"code": 75, "rank": 1}]


def test_a_process_is_where_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parallel.expected().first, parallel.expected().is_saving) == (True, True)
    for name, value in (("RANK", 6), ("LOCAL_RANK", 2), ("GROUP_RANK", 1), ("WORLD_SIZE", 8), ("GROUP_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    found = parallel.expected()
    assert (found.node, found.nodes, found.ranks_per_node, found.is_saving, found.first_here) == (1, 2, 4, False, False)
