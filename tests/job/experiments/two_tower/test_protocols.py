"""Who may look at which fold, and which weights are judged: epochs are chosen on the watched fold, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpufleet.job.contract import metrics
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.student import t95
from gpufleet.job.experiments.two_tower import baselines, ranking, results
from gpufleet.job.experiments.two_tower import tables as tables_of
from gpufleet.job.experiments.two_tower.batches import Batches
from gpufleet.job.experiments.two_tower.folds import fold_of, members, rows_of, watched
from gpufleet.job.experiments.two_tower.members import Members
from gpufleet.job.experiments.two_tower.ranking import GAINS, Tables
from gpufleet.job.experiments.two_tower.run import REFIT_SEEDS, TwoTower
from gpufleet.job.experiments.two_tower.spec import REFIT, variants
from gpufleet.job.kind.common import Rung
from tests.job import train_world
from tests.job import two_tower_world as world
from tests.job.two_tower_world import TABLES, flipped

CONFIG = world.config()
HONEST = [member for member in members(CONFIG) if member.protocol == "honest"]

# Where each member is made to be at its best: never only at the end. The honest median is 2, their maximum 4.
BEST: dict[str, list[int]] = {"honest": [1, 2, 4, 1, 3], "optimistic": [4, 3, 1, 4, 4]}
SCRIPT = torch.full((5, 10), 0.1, dtype=torch.float64)  # [epoch, member]
SCRIPT[1] = 0.5
SCRIPT[BEST["honest"] + BEST["optimistic"], torch.arange(10)] = torch.linspace(0.6, 0.9, 10, dtype=torch.float64)


@pytest.mark.parametrize("fold", range(5))
def test_what_an_honest_member_watches_knows_no_label_of_its_test_fold(fold: int) -> None:
    def watched_bytes(tables: Tables) -> tuple[bytes, bytes, bytes]:
        queries, gains, weights = watched(HONEST, tables)
        return queries[fold].tobytes(), gains[fold].tobytes(), weights[fold].tobytes()

    assert watched_bytes(flipped(HONEST[fold].test)) == watched_bytes(TABLES)
    assert watched_bytes(flipped(HONEST[fold].watch)) != watched_bytes(TABLES)  # the flip itself is real
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
        assert [getattr(each, "stopping_rounds", None) for each in rest["callbacks"]] == [baselines.PATIENCE, None]
        for name, of in (("train", learnt), ("valid", valid_sets[0])):
            given[f"{name} features"], given[f"{name} labels"] = of.data.tobytes(), of.get_label().tobytes()
        return found

    def called(tables: Tables) -> dict[str, bytes]:
        given["scores"] = baselines.lambdarank(HONEST[2], tables, seed=1, threads=1).tobytes()
        return dict(given)

    monkeypatch.setattr(lightgbm, "train", spy)
    monkeypatch.setattr(baselines, "MAX_TREES", 1)
    return called


def test_lambdarank_neither_learns_from_its_test_fold_nor_stops_by_it(
    lambdaranks: Callable[[Tables], dict[str, bytes]],
) -> None:
    found = lambdaranks(TABLES)
    assert found == lambdaranks(flipped(HONEST[2].test))
    wanted = np.array([0, 2, 1], dtype=np.float32)[TABLES.labels[HONEST[2].train]]  # label 1 is the best
    assert np.array_equal(np.frombuffer(found["train labels"], dtype=np.float32), wanted.ravel())
    assert baselines.LAMBDARANK["label_gain"] == [0.0, 0.7, 1.0]
    queries = TABLES.queries.copy()
    queries[HONEST[2].test] = -queries[HONEST[2].test]
    other = lambdaranks(replace(TABLES, queries=queries))
    assert not [name for name in found if found[name] != other[name] and name != "scores"]


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


def experiment(**changed: Any) -> TwoTower:
    """Without a session: what it decides of what is put into it."""
    made = object.__new__(TwoTower)
    made.config, made.tables, made.phases = world.config(**changed), TABLES, []
    made.families = variants(made.config)
    made.progress = {"families": {}, "refit": {"family": made.families[-1][0], "epochs": 2}}
    made.session = SimpleNamespace(  # type: ignore[assignment]
        device=SimpleNamespace(torch=torch.device("cpu")), world=World(), say=lambda line: None
    )
    made._losses_K = torch.arange(10.0)
    return made


def phase(name: str = "tower", first: int = 0) -> Any:
    return SimpleNamespace(index=0, name=name, first=first, steps=12)


@pytest.mark.parametrize(
    ("first_stop", "best", "epoch", "stopped"), [(2, 0.5, 1, [3, 0, 0, 0, 0, *[3] * 5]), (4, 0.9, 4, [0] * 5 + [4] * 5)]
)
def test_a_member_is_over_after_patience_epochs_but_not_before_the_first_stop_and_a_tie_is_no_better(
    first_stop: int, best: float, epoch: int, stopped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(patience=2, first_stop=first_stop)
    fresh = {"best": [None] * 10, "epoch": [0] * 10, "stopped": [0] * 10, "epochs": 0}
    record = made.progress["families"]["tower"] = fresh
    columns = [[0.5, 0.4, 0.3, 0.9], [0.5, 0.5, 0.6, 0.6], *[[0.1, 0.2, 0.3, 0.4]] * 3, *[[0.9] * 4] * 5]
    script = iter(torch.tensor(columns, dtype=torch.float64).T)
    module, kept = made.blank(phase()), list[list[int]]()
    monkeypatch.setattr(Batches, "watched_ndcg", lambda *_: next(script))
    monkeypatch.setattr(Members, "keep", lambda self, better: kept.append(better))
    values = [made.evaluate(phase(), 1, module, Rung(micro=8)) for _ in range(4)]
    honest = np.array(columns)[:5].mean(axis=0)  # the optimistic ones choose nothing
    assert values == pytest.approx((1 - honest).tolist())
    assert record["best"] == [best, 0.6, 0.4, 0.4, 0.4, *[0.9] * 5]
    assert record["epoch"] == [epoch, 3, 4, 4, 4, *[1] * 5]
    assert record["stopped"] == stopped
    assert kept == [list(range(10)), [2, 3, 4], [1, 2, 3, 4], [0, 2, 3, 4] if best == 0.9 else [2, 3, 4]]
    assert made.stop_early(phase(), 1, None) is None
    record["stopped"] = [4] * 10
    assert made.stop_early(phase(), 1, None) == "no member improved for 2 epochs"


def test_the_refit_is_of_the_family_that_the_honest_members_prefer_and_ends_at_their_median_epoch() -> None:
    made = experiment(sweep=["o", "r"])
    made.progress["families"] = {
        "o": {"best": [0.5] * 5 + [0.9] * 5, "epoch": [1] * 10},
        "r": {"best": [0.6] * 5 + [0.1] * 5, "epoch": [1, 2, 4, 1, 3] + [4] * 5},
    }
    assert made._choose_refit() == {"family": "r", "epochs": 2}
    assert made._config(phase(REFIT)).weak.queries == 433
    assert made.stop_early(phase(REFIT), 1, None) == "2 epochs, the median that the folds chose"
    made.progress["refit"]["epochs"] = made.config.epochs
    assert made.stop_early(phase(REFIT), 1, None) is None


def test_the_rate_falls_as_a_cosine_to_a_tenth_and_only_matrices_decay_each_member_clipped() -> None:
    made = experiment(optim={"lr": 0.01, "clip": 0.5})
    module = made.blank(phase())
    opt = made.optimizer(phase(), module)
    rates = [made.schedule(phase(first=6), opt, step) for step in (6, 9, 12, 18)]
    assert rates == pytest.approx([0.01, 0.01 * (0.1 + 0.9 * (0.5 + 0.5**1.5)), 0.0055, 0.001])
    decayed = [group["weight_decay"] for group in opt.param_groups for _ in group["params"]]
    assert sorted(decayed) == [0.0] * 8 + [5e-5] * 7  # seven biases and the embedding
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.clip(opt)
    gradients = torch.cat([p.grad.flatten(1) for p in module.parameters() if p.grad is not None], dim=1)
    assert torch.allclose(gradients.norm(dim=1), torch.full((10,), 0.5))


def test_the_refit_draws_weights_and_dropout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, places = experiment(), list[int]()
    alone = made.blank(phase(REFIT))
    assert isinstance(alone, Members)
    assert torch.equal(alone.stack.packed(), Members(CONFIG, 1, REFIT_SEEDS, torch.float32).stack.packed())
    assert not torch.equal(alone.stack.packed(), Members(CONFIG, 1, 0, torch.float32).stack.packed())
    monkeypatch.setattr(Batches, "work", lambda self, config, place, micro: places.append(place))
    made.batch(phase(first=6), 8, Rung(micro=8))
    made.batch(phase(REFIT, first=12), 13, Rung(micro=8))
    assert places == [2, REFIT_SEEDS + 1]


@pytest.mark.parametrize("objective", ["full", "sampled"])
def test_a_steps_chunks_are_the_whole_of_it_and_every_step_draws_anew(objective: str) -> None:
    config = world.config(objective=objective, sampled={"batch": 200, "negatives": 3})
    batches = Batches(HONEST, TABLES, config, torch.device("cpu"))
    (whole,) = batches.work(config, 3, 1000).micros
    work = batches.work(config, 3, 8)
    parts = list(work.micros)
    assert work.total == sum(part.tokens for part in parts) == (200 if objective == "sampled" else batches.queries)
    assert [part.place for part in parts] == list(range(0, work.total, 8))
    for index, tensor in enumerate(whole.inputs):
        if index == 4:  # bits of the models, which every chunk has
            assert all(torch.equal(part.inputs[4], tensor) for part in parts)
        else:
            assert torch.equal(torch.cat([part.inputs[index] for part in parts], dim=1), tensor)
    (other,) = batches.work(config, 4, 1000).micros
    assert not torch.equal(other.inputs[3], whole.inputs[3])
    for k, member in enumerate(HONEST):  # each learns from its own rows, with the targets that belong to them
        own = rows_of(member, TABLES, config.weak, batches.queries)
        known = {(x.tobytes(), t.tobytes()) for x, t in zip(own.sentences, own.targets, strict=True)}
        drawn = zip(*(tensor[k].numpy() for tensor in whole.inputs[:2]), strict=True)
        assert {(x.tobytes(), t.tobytes()) for x, t in drawn} <= known
    if objective == "sampled":
        assert torch.allclose(whole.inputs[1].sum(-1), torch.ones(5, 200))  # no row of padding
        assert (whole.inputs[2] == 1).all()


def test_a_watched_fold_says_the_mean_ndcg_at_10_of_its_queries_alone() -> None:
    batches, module = Batches(HONEST, TABLES, CONFIG, torch.device("cpu")), Members(CONFIG, 5, 0, torch.float32)
    reference = pytest.importorskip("sklearn.metrics", reason="scikit-learn, the reference, is not installed")
    scores = module.score(torch.from_numpy(TABLES.queries)).numpy()
    for k, found in enumerate(batches.watched_ndcg(module).tolist()):
        own = HONEST[k].watch
        wanted = reference.ndcg_score(np.array(GAINS)[TABLES.labels[own]], scores[k, own], k=10)
        assert found == pytest.approx(wanted, rel=0, abs=1e-9)  # the label is worth 0.7, not fp32's neighbour of it
    more = world.config(weak={**world.TOY["weak"], "queries": 100})
    assert Batches(HONEST, TABLES, more, torch.device("cpu")).queries == batches.queries == 15 + 12


def test_two_methods_are_compared_by_hand() -> None:
    ours, theirs = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, 0.5, 0.9, 0.9], [0.5, 0.3, 0.8, 1.0]))
    found = tables_of.compared("tower", ours, "popularity", theirs, np.array([0, 0, 1, 2]))
    assert (found["difference"]["mean"], found["difference"]["std"]) == (0.033333, 0.11547)  # of 0.1, 0.1, -0.1
    assert (found["queries_won"], found["queries_lost"], found["beats"]) == (2, 1, False)
    better = {**found, "against": "LambdaRank", "beats": True}
    said = tables_of.verdict([found, better, {**found, "against": "random"}], "tower", [])
    assert said.startswith("tower does not beat popularity outside the fold-to-fold spread: popularity by +0.0333")
    assert "random" not in said
    assert [t95(degrees) for degrees in (1, 30)] == [12.706, 2.042]
    assert [t95(degrees) for degrees in (31, 100)] == pytest.approx([2.0395, 1.9840], abs=4e-3)
    shown = tables_of.text(
        [{"protocol": "honest", "note": "", "methods": [tables_of.absent("LambdaRank", "no LightGBM")]}]
    )
    assert "| LambdaRank | no LightGBM |" in shown


def test_a_phase_is_measured_by_its_own_steps_their_median_and_the_most_memory() -> None:
    own = [(8, None, 1.0), (9, 2.0, 3.0), (10, 3.0, 2.0), (11, 7.0, 2.0)]
    records: list[dict[str, Any]] = [{"phase": "folds", "step": 6, "step_ms": 9.0, "mem_gb": 9.0}]
    records += [{"phase": "refit", "step": step, "step_ms": ms, "mem_gb": gb} for step, ms, gb in own]
    records = [{**dict.fromkeys(metrics.KEYS), **record} for record in records]
    (found,) = results.measured([phase("refit", first=6)], records)
    assert found == {"phase": "refit", "steps": 5, "step_ms": 3.0, "memory_gb": 3.0}


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
