"""Folds, weak labels and baselines use what they may and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpufleet.job.experiments.two_tower import baselines
from gpufleet.job.experiments.two_tower.folds import (
    Member,
    fold_of,
    gains,
    members,
    refit_member,
    rows_of,
    watched,
    weak_labels,
)
from gpufleet.job.experiments.two_tower.ranking import generate
from gpufleet.job.experiments.two_tower.spec import Weak
from tests.job import two_tower_world as world
from tests.job.two_tower_world import TABLES, flipped

CONFIG = world.config()
DEALT = fold_of(23, 5, 42)


def of_fold(fold: int) -> list[Member]:
    return [member for member in members(CONFIG) if member.fold == fold]


def test_every_query_is_tested_once_per_protocol_and_folds_differ_by_one_at_most() -> None:
    for protocol in ("honest", "optimistic"):
        tested = np.concatenate([m.test for m in members(CONFIG) if m.protocol == protocol])
        assert sorted(tested.tolist()) == list(range(23))
    assert sorted(np.bincount(DEALT).tolist()) == [4, 4, 5, 5, 5]
    assert not np.array_equal(fold_of(23, 5, 43), DEALT)


def test_an_honest_member_watches_the_next_fold_and_learns_from_the_rest() -> None:
    for member in members(CONFIG):
        if member.protocol == "honest":
            assert (DEALT[member.watch] == (member.fold + 1) % 5).all()
            assert len(member.train) + len(member.watch) + len(member.test) == 23
        else:
            assert np.array_equal(member.watch, member.test)
            assert len(member.train) + len(member.test) == 23
        assert not set(member.train) & (set(member.watch) | set(member.test))


@pytest.mark.parametrize("fold", range(5))
def test_no_label_of_a_test_fold_reaches_what_its_members_learn_from_or_what_baselines_say(fold: int) -> None:
    other = flipped(int(np.flatnonzero(fold_of(23, 5, 42) == fold)[0]))
    for member in of_fold(fold):
        a, b = (rows_of(member, tables, CONFIG.weak, 35) for tables in (TABLES, other))
        assert a.weak > 0
        for name in ("sentences", "targets", "weights"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
        assert (baselines.popularity(member, TABLES) == baselines.popularity(member, other)).all()
    changed = [m for m in members(CONFIG) if m.protocol == "optimistic" and m.fold != fold]
    for member in changed:  # the flip itself is real
        a, b = (rows_of(member, tables, CONFIG.weak, 35) for tables in (TABLES, other))
        assert a.targets.tobytes() != b.targets.tobytes()


def test_a_training_querys_features_know_neither_its_own_label_nor_its_parts() -> None:
    tables = generate(60, 31, 12, 16, seed=3)
    train, axes = np.arange(0, 60, 2), baselines.principal_axes(tables.queries[::2])
    labels = tables.labels.copy()
    labels[train[4]] = (labels[train[4]] + 1) % 3
    a, b = (baselines.training_features(each, train, axes, seed=1) for each in (tables, replace(tables, labels=labels)))
    same = (a == b).all(axis=(1, 2))
    assert same[4]
    assert same.sum() in (3, 4)  # 30 queries in 8 parts
    # What a model's popularity says is one number for the part, whoever of it likes the model.
    assert (a[same][:, :, :3] == a[4][:, :3]).all()
    assert a.std(axis=(0, 1)).min() > 0


def test_features_are_made_of_the_known_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.array([[1, 0], [2, 0], [0, 2], [1, 1]], dtype=np.int8)
    queries = np.array([[1, 0], [0.6, 0.8], [-1, 0], [1, 0]], dtype=np.float32)
    tables = replace(TABLES, labels=labels, queries=queries)
    axes = np.array([[0, 1]], dtype=np.float32)
    first, second = baselines.features(tables, np.arange(3), np.array([3]), axes)[0]
    profile = np.array([1 + 0.7 * 0.6, 0.7 * 0.8])
    mean = 1.7 / 3
    near = (1 + 0.7 * 0.6) / 1.6
    assert np.allclose(first[:6], [2 / 3, mean, 1.49 / 3 - mean**2, near, profile[0] / np.linalg.norm(profile), 0])
    assert np.allclose(second[:6], [1 / 3, 0.7 / 3, 0.49 / 3 - (0.7 / 3) ** 2, 0, -1, 0])
    assert not first[6:].any()
    monkeypatch.setattr(baselines, "NEIGHBOURS", 1)
    assert baselines.features(tables, np.arange(3), np.array([3]), axes)[0, :, 3].tolist() == [1, 0]  # the nearest's


def test_the_axes_are_those_of_the_spread_and_not_of_the_mean() -> None:
    sentences = np.array([[9, 0, 0], [9, 1, 0], [9, -1, 0.5]], dtype=np.float32)
    axes = baselines.principal_axes(sentences)
    assert abs(axes[0, 1]) > 0.9
    assert np.allclose(axes[:2, 0], 0, atol=1e-6)


def test_a_single_training_query_has_features_of_nobody() -> None:
    axes = baselines.principal_axes(TABLES.queries[:1])
    found = baselines.training_features(TABLES, np.arange(1), axes, seed=1)
    assert not found[:, :, :5].any()


def test_weak_labels_are_the_similarity_weighted_mean_of_the_nearest_queries() -> None:
    queries = np.eye(3, dtype=np.float32)
    discovery = np.array([[0.8, 0.6, 0.0], [0.0, 0.3, 0.954], [0.2, 0.2, 0.2]], dtype=np.float32)
    wanted = np.array([[1.0, 0.0], [0.0, 0.7], [0.0, 1.0]], dtype=np.float32)
    weak = Weak(similarity=0.4, confidence=0.4, neighbours=2, queries=10)
    kept, found = weak_labels(discovery, queries, wanted, weak)
    # The first has two neighbours: (0.8 + 0.6) / 2 x 2/2 = 0.7. The second one: 0.954 x 1/2 = 0.477. The third none.
    assert kept.tolist() == [0, 1]
    assert np.allclose(found, [[0.8 / 1.4, 0.7 * 0.6 / 1.4], [0.0, 1.0]], atol=1e-6)
    assert weak_labels(discovery, queries, wanted, replace(weak, confidence=0.5))[0].tolist() == [0]
    assert weak_labels(discovery, queries, wanted, replace(weak, queries=1))[0].tolist() == [0]
    assert weak_labels(discovery, queries, wanted, replace(weak, similarity=0.8))[0].tolist() == [0, 1]  # 0.8 x 1/2
    assert weak_labels(discovery, queries, wanted, replace(weak, confidence=0.0))[0].tolist() == [0, 1]
    few = replace(weak, neighbours=5, confidence=0.25)  # of five asked for there are three: (0.8 + 0.6) / 2 x 2/5
    assert weak_labels(discovery, queries, wanted, few)[0].tolist() == [0]
    assert weak_labels(discovery, queries, wanted, replace(few, confidence=0.29))[0].tolist() == []
    assert weak_labels(discovery, queries, wanted, replace(weak, queries=0))[0].tolist() == []


def test_a_weak_label_is_made_of_no_query_that_points_away() -> None:
    queries = np.array([[1.0, 0.0], [-0.6, 0.8]], dtype=np.float32)
    weak = Weak(similarity=0.0, confidence=0.0, neighbours=2, queries=1)
    _, found = weak_labels(np.eye(2, dtype=np.float32)[:1], queries, np.eye(2, dtype=np.float32), weak)
    assert found.tolist() == [[1.0, 0.0]]


def test_a_least_similarity_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weak\.similarity"):
        world.config(weak={"similarity": -0.1})
    assert world.config(weak={"similarity": 0.0}).weak.similarity == 0


def test_a_members_rows_are_padded_with_rows_that_weigh_nothing() -> None:
    labels = TABLES.labels.copy()
    member = of_fold(0)[0]
    labels[member.train[0]] = 0
    rows = rows_of(member, replace(TABLES, labels=labels), replace(CONFIG.weak, queries=0), 35)
    learnt = len(member.train) - 1
    assert rows.weights[0] == 0
    assert (rows.weights[1 : len(member.train)] == np.float32(35 / learnt)).all()
    assert not rows.weights[len(member.train) :].any()
    assert not rows.sentences[len(member.train) :].any()
    assert np.allclose(rows.targets[1 : len(member.train)].sum(axis=1), 1)


def test_a_member_that_has_nothing_to_learn_is_refused_by_its_fold() -> None:
    labels = np.zeros_like(TABLES.labels)
    labels[DEALT == 2] = 1
    known = replace(TABLES, labels=labels)
    for member in members(CONFIG):
        if 2 in DEALT[member.train]:
            assert rows_of(member, known, CONFIG.weak, 35).weights.any()
            continue
        told = f"none of {len(member.train)} queries that the {member.protocol} model of fold {member.fold} learns"
        with pytest.raises(ValueError, match=told):
            rows_of(member, known, CONFIG.weak, 35)


def test_labels_are_worth_what_the_plan_says() -> None:
    assert gains(np.array([0, 1, 2], dtype=np.int8)).tolist() == [0.0, 1.0, np.float32(0.7)]


def test_watched_queries_weigh_one_together_however_many_there_are() -> None:
    queries, wanted, weights = watched(members(CONFIG), TABLES)
    assert np.allclose(weights.sum(axis=1), 1)
    assert wanted.tolist() == np.array([0.0, 1.0, 0.7])[TABLES.labels[queries]].tolist()  # as judged, in fp64


def test_the_refit_learns_from_every_query() -> None:
    assert refit_member(23).train.tolist() == list(range(23))


def test_popularity_is_the_mean_gain_and_knows_no_query() -> None:
    member = of_fold(3)[0]
    found = baselines.popularity(member, TABLES)
    assert np.allclose(found[0], gains(TABLES.labels[member.train]).mean(axis=0))
    assert (found == found[0]).all()


def test_models_with_the_same_labels_are_tied_in_popularity_whatever_the_order_of_the_queries() -> None:
    column = np.repeat(np.array([0, 1, 2], dtype=np.int8), [40, 31, 29])
    draw = np.random.default_rng(1)
    tables = replace(TABLES, labels=np.stack([draw.permutation(column) for _ in range(50)], axis=1))
    found = baselines.popularity(replace(refit_member(100), test=np.arange(1)), tables)
    assert found.shape == (1, 50)
    assert len(np.unique(found)) == 1


def test_random_order_is_seeded_and_different_for_every_fold() -> None:
    first, second = of_fold(0)[0], of_fold(1)[0]
    assert np.array_equal(baselines.random_order(first, TABLES, 1), baselines.random_order(first, TABLES, 1))
    assert not np.array_equal(
        baselines.random_order(first, TABLES, 1)[:4], baselines.random_order(second, TABLES, 1)[:4]
    )
