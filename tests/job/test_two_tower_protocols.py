"""Who may look at which fold, and which weights are judged: epochs are chosen on the watched fold, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_world
import two_tower_world as world
from torch import Tensor

from job.dataset import ranking
from job.dataset.ranking import GAINS, Tables, generate
from job.experiments import two_tower_baselines as baselines
from job.experiments import two_tower_tables as tables_of
from job.experiments.two_tower_batches import Batches
from job.experiments.two_tower_data import Indices, fold_of, members, watched
from job.experiments.two_tower_members import Members

CONFIG = world.config()
TABLES = generate(23, 31, 12, 16, seed=3)
HONEST = [member for member in members(CONFIG) if member.protocol == "honest"]

# Where each member is made to be at its best: never only at the end. The honest median is 2, their maximum 4.
BEST: dict[str, list[int]] = {"honest": [1, 2, 4, 1, 3], "optimistic": [4, 3, 1, 4, 4]}
SCRIPT = torch.full((5, 10), 0.1, dtype=torch.float64)  # [epoch, member]
SCRIPT[1] = 0.5
SCRIPT[BEST["honest"] + BEST["optimistic"], torch.arange(10)] = torch.linspace(0.6, 0.9, 10, dtype=torch.float64)


def flipped(queries: Indices) -> Tables:
    """The same dataset, but for these queries every judgement is another."""
    labels = TABLES.labels.copy()
    labels[queries] = (labels[queries] + 1) % 3
    return replace(TABLES, labels=labels)


@pytest.mark.parametrize("fold", range(5))
def test_what_an_honest_member_watches_knows_no_label_of_its_test_fold(fold: int) -> None:
    def seen(tables: Tables) -> tuple[bytes, bytes, bytes]:
        queries, gains, weights = watched(HONEST, tables)
        return queries[fold].tobytes(), gains[fold].tobytes(), weights[fold].tobytes()

    assert seen(flipped(HONEST[fold].test)) == seen(TABLES)
    assert seen(flipped(HONEST[fold].watch)) != seen(TABLES)  # the flip itself is real
    queries, _, weights = watched(HONEST, TABLES)
    assert set(fold_of(23, 5, 42)[queries[fold][weights[fold] > 0]]) == {(fold + 1) % 5}


@pytest.fixture
def lambdaranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tables], dict[str, bytes]]:
    """What LightGBM is given to learn from and to stop by, for fold 2."""
    lightgbm = pytest.importorskip("lightgbm", reason="LightGBM, the baseline itself, is not installed")
    train: Callable[..., Any] = lightgbm.train
    given: dict[str, bytes] = {}

    def spy(parameters: Any, learnt: Any, *, valid_sets: list[Any], **rest: Any) -> Any:
        found = train(parameters, learnt, valid_sets=valid_sets, **rest)
        assert len(valid_sets) == 1
        for name, of in (("train", learnt), ("valid", valid_sets[0])):
            given[f"{name} features"], given[f"{name} labels"] = of.data.tobytes(), of.get_label().tobytes()
        return found

    def called(tables: Tables) -> dict[str, bytes]:
        baselines.lambdarank(HONEST[2], tables, seed=1, threads=1)
        return dict(given)

    monkeypatch.setattr(lightgbm, "train", spy)
    monkeypatch.setattr(baselines, "MAX_TREES", 1)
    return called


def test_lambdarank_neither_learns_from_its_test_fold_nor_stops_by_it(
    lambdaranks: Callable[[Tables], dict[str, bytes]],
) -> None:
    assert lambdaranks(TABLES) == lambdaranks(flipped(HONEST[2].test))


def test_lambdarank_stops_by_its_watched_fold_and_makes_no_feature_of_it(
    lambdaranks: Callable[[Tables], dict[str, bytes]],
) -> None:
    before, after = lambdaranks(TABLES), lambdaranks(flipped(HONEST[2].watch))
    assert [name for name in before if before[name] != after[name]] == ["valid labels"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """A run whose members are at their best where BEST says; after each epoch, all judged queries' scores [K, Q, M]."""
    workdir = world.make(tmp_path_factory.mktemp("scripted"), patience=4)
    judged, seen = torch.from_numpy(ranking.read(workdir / "data").queries), []

    def watched_ndcg(self: Batches, module: Members) -> Tensor:
        seen.append(module.score(judged))
        return SCRIPT[len(seen)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "watched_ndcg", watched_ndcg)
        patch.setattr(baselines, "MAX_TREES", 1)
        assert train_world.train(workdir) == 0
    assert len(seen) == 4
    return workdir, seen


def test_a_fold_is_scored_by_the_weights_of_its_chosen_epoch_not_by_the_last(
    scripted: tuple[Path, list[Tensor]],
) -> None:
    workdir, seen = scripted
    with np.load(workdir / "exports" / "scores.npz") as found:
        scores = found["tower"]
    for fold, epoch in enumerate(BEST["honest"]):
        assert scores[fold].tobytes() == seen[epoch - 1][fold].numpy().tobytes()
    assert scores[0].tobytes() != seen[-1][0].numpy().tobytes()


def test_the_refit_takes_the_median_of_the_epochs_that_the_honest_folds_chose(
    scripted: tuple[Path, list[Tensor]],
) -> None:
    workdir, _ = scripted
    result = world.read(workdir, "results.json")
    assert result["families"]["tower"]["epoch"] == BEST["honest"] + BEST["optimistic"]
    assert result["refit"] == {"family": "tower", "epochs": 2}
    assert [phase["steps"] for phase in result["measured"]] == [12, 6]


@pytest.mark.parametrize(("table", "protocol"), [(0, "honest"), (1, "optimistic")])
def test_each_table_holds_its_own_protocols_members_at_their_own_epochs(
    table: int, protocol: str, scripted: tuple[Path, list[Tensor]]
) -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn, the reference, is not installed")
    workdir, seen = scripted
    wanted = np.array(GAINS)[ranking.read(workdir / "data").labels]
    found = world.read(workdir, "fold_table.json")["tables"][table]
    assert found["protocol"] == protocol
    for row, epoch in zip(found["methods"][0]["folds"], BEST[protocol], strict=True):
        tested = fold_of(23, 5, 42) == row["fold"]
        scores = seen[epoch - 1][5 * table + row["fold"]].numpy()[tested]
        assert row["epoch"] == epoch
        assert row["ndcg@10"] == pytest.approx(sklearn_metrics.ndcg_score(wanted[tested], scores, k=10), abs=1e-6)


def test_an_interval_ends_where_the_metric_does() -> None:
    near_one = [1.0, 1.0, 1.0, 1.0, 0.96]
    free, cut = tables_of.spread(near_one), tables_of.spread(near_one, (0.0, 1.0))
    assert free["interval95"][1] > 1
    assert cut == {**free, "interval95": [free["interval95"][0], 1.0]}
    assert tables_of.spread([0.0, 0.0, 0.1], (0.0, 1.0))["interval95"][0] == 0.0


def test_every_method_and_every_comparison_has_a_possible_interval() -> None:
    fold_of_query = np.arange(6) % 3
    best, worst = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    best[0], worst[1] = 0.9, 0.1
    for values in (best, worst):
        found = tables_of.method("it", dict.fromkeys(tables_of.METRICS, values), fold_of_query, None)
        assert all(0 <= end <= 1 for metric in tables_of.METRICS for end in found[metric]["interval95"])
    differences = [tables_of.compared("a", a, "b", b, fold_of_query) for a, b in ((best, worst), (worst, best))]
    assert [d["difference"]["interval95"][place] for d, place in zip(differences, (1, 0), strict=True)] == [1.0, -1.0]


def test_the_console_names_the_figure_that_chooses_epochs_and_the_refit_has_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "MAX_TREES", 1)
    workdir = world.make(tmp_path, optimistic=False, epochs=1)
    assert train_world.train(workdir) == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if " | loss " in line and "step 0" in line]
    folds, *refit = ([line for line in steps if f"step 00000{n}/" in line][-1] for n in (3, 4, 6))
    (record,) = (r for r in train_world.records(workdir) if r["step"] == 3)
    assert f"| 1-nDCG@10 {record['val_loss']:.4f} |" in folds
    assert 0 < record["val_loss"] < 1
    assert all("| val - |" in line for line in refit)  # nor does it show the folds' last one
    assert [r["val_loss"] for r in train_world.records(workdir) if r["phase"] == "refit"] == [None, None]
