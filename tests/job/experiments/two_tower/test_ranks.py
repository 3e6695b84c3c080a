"""Ranks that share the members leave what one process leaves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import parallel
from gpufleet.job.experiments.two_tower import baselines
from gpufleet.job.experiments.two_tower.members import Share
from tests.job import rank_world, train_world
from tests.job import two_tower_world as world
from tests.job.train_world import StopAt

FOLDS, MEMBERS = 5, 10
PARAMETERS: dict[str, Any] = {"sweep": ["o", "r"], "epochs": 3, "steps_per_epoch": 2}


def rank(number: int, size: int, port: int, workdir: Path, look: int | None) -> None:
    torch.set_num_threads(1)
    baselines.MAX_TREES = 3
    rank_world.environment(number, size, port)
    assert parallel.expected().size == size
    sys.exit(trainer.train(workdir, 0, StopAt(workdir, look if number == 0 else None)))


def train(workdir: Path, size: int, look: int | None = None) -> list[int | None]:
    return rank_world.launched(rank, size, workdir, look)


@pytest.fixture(scope="module", params=["full", "sampled"])
def undivided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of one process."""
    workdir = world.make(tmp_path_factory.mktemp("undivided"), objective=request.param, **PARAMETERS)
    assert train(workdir, 1) == [0]
    return workdir


def fresh(undivided: Path, folder: Path) -> Path:
    """A work folder of the same run that has not begun."""
    (folder / "run").mkdir()
    shutil.copytree(undivided / "data", folder / "run" / "data")
    shutil.copy(undivided / "run.json", folder / "run" / "run.json")
    return folder / "run"


def same_results(one: Path, other: Path) -> None:
    """The refit is the same to the bit, because it has the same family and epochs. A fold's products are rounded by the
    number of matrices that one rank multiplies at once: 4e-7 of the largest gradient in a step of this size.
    """
    assert train_world.final_hash(one) == train_world.final_hash(other)
    with np.load(one / "exports" / "scores.npz") as wanted, np.load(other / "exports" / "scores.npz") as found:
        for name in ("o", "r"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=5e-3)
    losses = [{line["step"]: line["loss"] for line in train_world.records(workdir)} for workdir in (one, other)]
    assert losses[0].keys() <= losses[1].keys()  # a start logs its first step too
    assert {step: losses[1][step] for step in losses[0]} == pytest.approx(losses[0], abs=1e-3)
    families = [world.read(workdir, "results.json")["families"] for workdir in (one, other)]
    for name, record in families[0].items():
        assert families[1][name]["epoch"] == record["epoch"]
        assert families[1][name]["best"] == pytest.approx(record["best"], abs=1e-3)
        assert families[1][name]["weak"] == record["weak"]


@pytest.mark.parametrize("size", [2, 4])  # of 4 ranks three have three members, and the last has one
def test_members_shared_by_ranks_end_as_those_of_one_process(undivided: Path, size: int, tmp_path: Path) -> None:
    workdir = fresh(undivided, tmp_path)
    assert train(workdir, size) == [0] * size
    same_results(undivided, workdir)


def test_a_run_that_stops_on_two_ranks_goes_on_with_three(undivided: Path, tmp_path: Path) -> None:
    workdir = fresh(undivided, tmp_path)
    assert set(train(workdir, 2, look=4)) <= {0, 75}
    assert not (workdir / "final").exists()
    assert train(workdir, 3) == [0, 0, 0]
    same_results(undivided, workdir)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (4, 4), (7, 5), (8, 5)])
def test_no_rank_is_without_a_member_and_all_members_are_somewhere(gpus: int, ranks: int) -> None:
    config = world.config(gpus=gpus)
    assert config.ranks(8) == ranks
    parts = [Share.of_rank(MEMBERS, parallel.World(rank=number, size=ranks)) for number in range(ranks)]
    assert [k for part in parts for k in range(MEMBERS)[part.own]] == list(range(MEMBERS))
    assert all(part.count for part in parts)
