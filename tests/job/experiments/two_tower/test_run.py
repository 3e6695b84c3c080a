"""two-tower from end to end on the engine: what it leaves, that a stop changes nothing, and that no label leaks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gpufleet.job.experiments.dataset import prepare
from gpufleet.job.experiments.two_tower import baselines, ranking
from gpufleet.job.experiments.two_tower import run as two_tower
from gpufleet.job.experiments.two_tower.batches import Batches
from gpufleet.job.experiments.two_tower.folds import Member, fold_of
from gpufleet.job.experiments.two_tower.ranking_metrics import ndcg
from tests.job import train_world
from tests.job import two_tower_world as world
from tests.job.train_world import StopAt

SWEEP: dict[str, Any] = {"sweep": ["o", "r"], "epochs": 2, "steps_per_epoch": 2}


def scores(workdir: Path) -> dict[str, Any]:
    with np.load(workdir / "exports" / "scores.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = world.make(tmp_path_factory.mktemp("finished"))
    assert train_world.train(workdir) == 0
    return workdir


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_TREES", 3)


def test_the_fold_table_has_both_protocols_and_the_baselines_of_the_honest_one(finished: Path) -> None:
    honest, optimistic = world.read(finished, "fold_table.json")["tables"]
    assert (honest["protocol"], optimistic["protocol"]) == ("honest", "optimistic")
    assert "OPTIMISTIC" in optimistic["note"]
    assert [m["method"] for m in honest["methods"]] == ["tower", "popularity", "LambdaRank", "random"]
    assert [m["method"] for m in optimistic["methods"]] == ["tower"]
    for table in (honest, optimistic):
        tower = table["methods"][0]
        assert [row["fold"] for row in tower["folds"]] == [0, 1, 2, 3, 4]
        assert sum(row["queries"] for row in tower["folds"]) == 23
        values = [row["ndcg@10"] for row in tower["folds"]]
        assert tower["ndcg@10"]["mean"] == pytest.approx(np.mean(values), abs=1e-6)
        assert tower["ndcg@10"]["std"] == pytest.approx(np.std(values, ddof=1), abs=1e-6)
        low, high = tower["ndcg@10"]["interval95"]
        half = 2.776 * np.std(values, ddof=1) / 5**0.5
        assert low == pytest.approx(max(0, np.mean(values) - half), abs=1e-5)
        assert high == pytest.approx(min(1, np.mean(values) + half), abs=1e-5)
        assert all(1 <= row["epoch"] <= 4 for row in tower["folds"])


def test_the_scores_are_what_the_table_was_made_of(finished: Path) -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn, the reference, is not installed")
    found, tables = scores(finished), ranking.read(finished / "data")
    assert found["tower"].shape == (5, 23, 31)
    assert found["queries"].tolist() == tables.names["queries"]
    wanted = np.array(ranking.GAINS)[tables.labels]
    rows = world.read(finished, "fold_table.json")["tables"][0]["methods"][0]["folds"]
    for fold, row in enumerate(rows):
        tested = found["fold"] == fold
        reference = sklearn_metrics.ndcg_score(wanted[tested], found["tower"][fold][tested], k=10)
        assert row["ndcg@10"] == pytest.approx(reference, abs=1e-6)


def test_the_result_says_whether_the_tower_beats_what_it_must(finished: Path) -> None:
    result = world.read(finished, "results.json")
    against = {c["against"]: c for c in result["comparisons"]}
    assert set(against) == {"popularity", "LambdaRank", "random"}
    for found in against.values():
        assert found["beats"] == (found["difference"]["mean"] > found["difference"]["std"])
    mean = {m["method"]: m["ndcg@10"]["mean"] for m in result["tables"][0]["methods"]}
    for name, found in against.items():
        assert found["difference"]["mean"] == pytest.approx(mean["tower"] - mean[name], abs=2e-6)
    assert all("folds" not in m and "note" in m for table in result["tables"] for m in table["methods"])
    losing = not against["popularity"]["beats"] or not against["LambdaRank"]["beats"]
    assert ("does not beat" in result["verdict"]["tower"]) == losing
    assert result["refit"]["epochs"] in result["families"]["tower"]["epoch"]
    assert [p["phase"] for p in result["measured"]] == ["folds", "refit"]


def test_the_refit_is_one_model_with_its_shapes(finished: Path) -> None:
    weights, meta = load_file(finished / "final" / "model.safetensors"), world.read(finished, "final/meta.json")
    assert sum(tensor.size for tensor in weights.values()) == 1014
    found, sized = train_world.export_bytes(finished)
    found += (finished / "exports" / "scores.npz").stat().st_size
    assert found == pytest.approx(sized, rel=0.2)  # sized with the optimistic protocol's scores, which a save has
    assert meta["towers"]["model"] == [12, 8]
    assert len(meta["models"]) == 31
    assert (meta["step"], meta["val_loss"]) == (train_world.records(finished)[-1]["step"], None)


@pytest.mark.parametrize("look", [4, pytest.param(9, marks=pytest.mark.slow), 15])
def test_a_run_stopped_amid_its_folds_or_its_refit_ends_the_same_to_the_bit(
    look: int, finished: Path, tmp_path: Path
) -> None:
    workdir = world.make(tmp_path)
    assert train_world.train(workdir, StopAt(workdir, look)) == 75
    assert not (workdir / "final").exists()
    assert train_world.train(workdir) == 0
    assert train_world.final_hash(workdir) == train_world.final_hash(finished)
    for name, array in scores(finished).items():
        assert array.tobytes() == scores(workdir)[name].tobytes()


def test_steps_that_folds_leave_out_as_they_end_early_are_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gets better: two epochs of four, then one of the refit, stopped within it and resumed."""
    monkeypatch.setattr(Batches, "watched_ndcg", lambda batches, module: torch.full((10,), 0.5))
    workdir = world.make(tmp_path, patience=1, log={"every": 1})
    assert train_world.train(workdir, StopAt(workdir, 10)) == 75
    assert world.read(workdir, "ckpt/step_00000006/commit.json")["goes_on_from"] == 12
    assert train_world.train(workdir) == 0
    found = [(record["step"], record["tokens"]) for record in train_world.records(workdir)]
    folds, refit = 10 * (19 + 12), 23 + 12
    assert found == [
        *((step, step * folds) for step in range(1, 7)),
        *((12 + step, 6 * folds + step * refit) for step in range(1, 4)),
    ]
    assert world.read(workdir, "ckpt/step_00000015/commit.json")["tokens"] == found[-1][1]


def test_a_flipped_test_label_changes_no_prediction_for_its_own_fold(finished: Path, tmp_path: Path) -> None:
    before, folds = scores(finished), fold_of(23, 5, 42)
    tables = ranking.read(finished / "data")
    query = int(np.flatnonzero(folds == 2)[0])
    labels = tables.labels.copy()
    labels[query] = (labels[query] + 1) % 3
    workdir = world.make(tmp_path)

    def write(folder: Path) -> None:
        for file in (finished / "data").iterdir():
            if file.name != prepare.MANIFEST:
                shutil.copy(file, folder / file.name)
        np.save(folder / ranking.LABELS, labels)

    facts = prepare.read_manifest(finished / "data").facts
    prepare.publish(workdir / "data", kind="ranking", source="flipped", facts=facts, write=write)
    assert train_world.train(workdir) == 0
    after = scores(workdir)
    assert before["tower"][2].tobytes() == after["tower"][2].tobytes()
    for fold in (0, 3, 4):  # they learn from it; fold 1 only watches it
        assert before["tower"][fold].tobytes() != after["tower"][fold].tobytes()


def test_the_query_ladder_changes_the_scores_by_rounding_only(finished: Path, tmp_path: Path) -> None:
    workdir = world.make(tmp_path, chunk=8)
    assert train_world.train(workdir) == 0
    assert json.loads((workdir / "rung.json").read_text())["micro"] == 8
    assert np.allclose(scores(workdir)["tower"], scores(finished)["tower"], rtol=1e-3, atol=1e-3)


def test_a_sweep_trains_each_variant_and_refits_the_one_its_inner_folds_prefer(tmp_path: Path) -> None:
    workdir = world.make(tmp_path, **SWEEP, optimistic=False)
    assert train_world.train(workdir, StopAt(workdir, 7)) == 75
    assert train_world.train(workdir) == 0
    (honest,) = world.read(workdir, "fold_table.json")["tables"]
    assert [m["method"] for m in honest["methods"]] == ["o", "r", "popularity", "LambdaRank", "random"]
    result, found = world.read(workdir, "results.json"), scores(workdir)
    inner = {name: np.mean(record["best"]) for name, record in result["families"].items()}
    assert result["refit"]["family"] == max(inner, key=lambda name: inner[name])
    assert found["o"].any()
    assert found["r"].any()
    assert not np.array_equal(found["o"], found["r"])
    tested, tables = found["fold"] == 0, ranking.read(workdir / "data")
    wanted = torch.from_numpy(np.array(ranking.GAINS)[tables.labels[tested]])
    for method in honest["methods"][:2]:  # each under its own name
        own = ndcg(torch.from_numpy(found[method["method"]][0][tested]), wanted, 10).mean().item()
        assert method["folds"][0]["ndcg@10"] == pytest.approx(own, abs=1e-6)


def test_the_sampled_objective_trains_too(tmp_path: Path) -> None:
    workdir = world.make(tmp_path, objective="sampled", optimistic=False, sampled={"batch": 8, "negatives": 3})
    assert train_world.train(workdir) == 0
    losses = [r["loss"] for r in train_world.records(workdir)]
    assert all(0 < loss < 20 for loss in losses)


def test_lambdarank_says_a_line_a_minute_and_one_per_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    clock = iter(range(0, 1_000_000, 25))  # seconds: a minute is over after every third look
    monkeypatch.setattr(two_tower, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def lambdarank(member: Member, tables: Any, *, stop: Callable[[], None], threads: int, **how: Any) -> Any:
        assert threads == len(os.sched_getaffinity(0))  # as billed: all cores, where the user names no number
        for _ in range(7):
            stop()
        return np.zeros((len(member.test), 31), dtype=np.float32)

    monkeypatch.setattr(baselines, "lambdarank", lambdarank)
    monkeypatch.setattr(baselines, "lambdarank_missing", lambda models: None)
    workdir = world.make(tmp_path, optimistic=False, epochs=1)
    assert train_world.train(workdir) == 0
    said = [line for line in "".join(capfd.readouterr()).splitlines() if "LambdaRank, fold" in line]
    assert [line.split("LambdaRank, ")[1] for line in said] == [
        line
        for fold in range(1, 6)
        for line in (
            f"fold {fold}/5: 3 trees in 75 s, of at most 3",
            f"fold {fold}/5: 6 trees in 150 s, of at most 3",
            f"fold {fold}/5: done, 7 trees in 200 s",
        )
    ]


def test_without_lightgbm_the_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "lambdarank_missing", lambda models: "not installed")
    workdir = world.make(tmp_path, optimistic=False, epochs=1)
    assert train_world.train(workdir) == 0
    methods = {m["method"]: m for m in world.read(workdir, "fold_table.json")["tables"][0]["methods"]}
    assert methods["LambdaRank"]["note"] == "not installed"
    assert methods["LambdaRank"]["ndcg@10"] is None
    assert "Not compared: LambdaRank" in world.read(workdir, "results.json")["verdict"]["tower"]


def test_a_lightgbm_that_cannot_be_imported_is_said_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lightgbm.py").write_text('raise OSError("libgomp.so.1: cannot open shared object file")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lightgbm", raising=False)
    why = baselines.lambdarank_missing(10)
    assert why == "cannot be imported: libgomp.so.1: cannot open shared object file"


@pytest.mark.parametrize("models", [10_000, 10_001])
def test_the_most_models_of_a_query_are_lightgbms_own(models: int) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    rows = lightgbm.Dataset(np.arange(models)[:, None] % 7, label=np.arange(models) % 2, group=[models])
    if baselines.lambdarank_missing(models) is None:
        lightgbm.train({"objective": "lambdarank", "verbosity": -1}, rows, num_boost_round=1)
    else:
        with pytest.raises(lightgbm.basic.LightGBMError, match="exceeds upper limit"):
            lightgbm.train({"objective": "lambdarank", "verbosity": -1}, rows, num_boost_round=1)


def test_a_config_that_does_not_fit_the_data_is_refused_before_training(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    tree = world.read(workdir, "run.json")
    tree["job"]["parameters"]["data"]["models"] = 32
    (workdir / "run.json").write_text(json.dumps(tree))
    assert train_world.train(workdir) == 65
    assert "job.parameters.data.models is 32, the data has 31" in world.read(workdir, "fatal.json")["detail"]
