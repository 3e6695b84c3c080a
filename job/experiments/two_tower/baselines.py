"""The baselines that the towers must beat: popularity, LambdaRank and random order, on the same folds and the same
training queries.

Each baseline returns one row of scores for each query. Its model was trained on neither the query's fold nor the fold
that it watches (LambdaRank stops early by the watched fold, as the towers do). Legend: T training or known queries, M
models, S sentence width, P principal axes, F features.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpufleet.job.experiments.two_tower.arrays import Floats, Labels, unit_rows
from gpufleet.job.experiments.two_tower.folds import Indices, Member, fold_of, gains
from gpufleet.job.experiments.two_tower.ranking import GAINS, Tables
from gpufleet.job.experiments.two_tower.spec import MOST_RANKED

NEIGHBOURS = 10  # number of most similar queries in the neighbour feature
PROJECTIONS = 8  # principal directions of the training queries' sentence vectors
FEATURES = 5 + PROJECTIONS
PARTS = 8  # number of parts of the training queries; the features of each part are computed from the other seven
# the most trees, and trees without improvement until the stop; a tree takes 0.2 core-seconds for 274 queries x 1131
# models
MAX_TREES, PATIENCE = 100, 10
LAMBDARANK = {
    "objective": "lambdarank",
    "label_gain": [GAINS[0], GAINS[2], GAINS[1]],  # the gains of irrelevant, good and best models
    "metric": "ndcg",
    "eval_at": [10],
    "learning_rate": 0.1,
    "num_leaves": 31,
    "min_data_in_leaf": 50,
    "feature_fraction": 0.9,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
}


def popularity(member: Member, tables: Tables) -> Floats:
    """[test, M]: the mean gain of each model on the training queries; every query gets the same order."""
    mean_M = _mean(tables.labels[member.train], GAINS).astype(np.float32)
    return np.tile(mean_M, (len(member.test), 1))


def random_order(member: Member, tables: Tables, seed: int) -> Floats:
    draw = np.random.default_rng([seed, member.fold])
    return draw.random((len(member.test), tables.labels.shape[1]), dtype=np.float32)


def lambdarank_missing(models: int) -> str | None:
    """Why LambdaRank cannot run; None if it can."""
    if models > MOST_RANKED:
        return f"LightGBM ranks at most {MOST_RANKED:,} models per query, here are {models:,}"
    if importlib.util.find_spec("lightgbm") is None:
        return "not installed (pip install 'gpufleet[ranking]')"
    try:
        importlib.import_module("lightgbm")
    except (ImportError, OSError) as error:  # scipy or a system library is missing
        return f"cannot be imported: {error}"
    return None


def lambdarank(
    member: Member, tables: Tables, *, seed: int, threads: int, stop: Callable[[], None] = lambda: None
) -> Floats:
    """LightGBM's LambdaRank. `stop` is called after each tree, and may raise an error. Returns the scores [test, M]."""
    lightgbm = importlib.import_module("lightgbm")
    train, watch, test = member.train, member.watch, member.test
    axes_PS = principal_axes(tables.queries[train])
    splits = {
        "train": (train, training_features(tables, train, axes_PS, seed)),
        "watch": (watch, features(tables, train, watch, axes_PS)),
    }
    sets: dict[str, Any] = {}
    for name, (queries, seen) in splits.items():
        relevance = np.array([0, 2, 1], dtype=np.int32)[tables.labels[queries]]
        sets[name] = lightgbm.Dataset(
            seen.reshape(-1, FEATURES),
            label=relevance.reshape(-1),
            group=np.full(len(queries), relevance.shape[1]),
            reference=sets.get("train"),
            free_raw_data=False,
        )
    ranker = lightgbm.train(
        {**LAMBDARANK, "seed": seed, "num_threads": threads},
        sets["train"],
        num_boost_round=MAX_TREES,
        valid_sets=[sets["watch"]],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False), lambda environment: stop()],
    )
    asked = features(tables, train, test, axes_PS).reshape(-1, FEATURES)
    scores = ranker.predict(asked, num_threads=threads)
    predicted: Floats = np.asarray(scores, dtype=np.float32).reshape(len(test), -1)
    return predicted


def training_features(tables: Tables, train: Indices, axes_PS: Floats, seed: int) -> Floats:
    """Features [train, M, F] of the training queries. The queries are split into PARTS parts, and the features of each
    part are computed from the other parts. If only the query itself were left out, its features would reveal its
    labels, because exactly its relevant models would have one relevant query less. Trees would learn this difference,
    which does not exist for a test query.
    """
    features_TMF = np.zeros((len(train), tables.labels.shape[1], FEATURES), dtype=np.float32)
    parts = min(PARTS, len(train))
    part_T = fold_of(len(train), parts, seed)
    for part in range(parts):
        own = part_T == part
        features_TMF[own] = features(tables, train[~own], train[own], axes_PS)
    return features_TMF


def features(tables: Tables, known: Indices, queries: Indices, axes_PS: Floats) -> Floats:
    """LambdaRank's features of each query and model, [queries, M, F]. The features are computed from the judgements of
    the queries `known`, none of which is in `queries`.

    Popularity (share of known queries with a label), mean and variance of the gain, the gain of the NEIGHBOURS most
    similar known queries weighted by similarity, the cosine between the query and the gain-weighted mean query of the
    model, and the query's coordinates on `axes_PS`.
    """
    labels_TM, known_TS, sentences = tables.labels[known], tables.queries[known], tables.queries[queries]
    gains_TM = gains(labels_TM)
    mean_M = _mean(labels_TM, GAINS)
    cosine = sentences @ known_TS.T
    nearest = np.argsort(-cosine, axis=1, kind="stable")[:, :NEIGHBOURS]
    weight = np.maximum(np.take_along_axis(cosine, nearest, axis=1), 0)
    shares = np.zeros_like(cosine)
    np.put_along_axis(shares, nearest, weight / np.maximum(weight.sum(axis=1, keepdims=True), 1e-9), axis=1)
    coordinates = sentences @ axes_PS.T
    features_QMF = np.zeros((len(queries), labels_TM.shape[1], FEATURES), dtype=np.float32)
    features_QMF[:, :, 0] = _mean(labels_TM, [float(gain > 0) for gain in GAINS])
    features_QMF[:, :, 1] = mean_M
    features_QMF[:, :, 2] = _mean(labels_TM, [gain**2 for gain in GAINS]) - mean_M**2
    features_QMF[:, :, 3] = shares @ gains_TM
    features_QMF[:, :, 4] = sentences @ unit_rows(gains_TM.T @ known_TS).T
    features_QMF[:, :, 5 : 5 + coordinates.shape[1]] = coordinates[:, None, :]
    return features_QMF


def principal_axes(sentences_TS: Floats) -> Floats:
    """The directions in which the sentence vectors differ most, [at most PROJECTIONS, S]."""
    axes_PS: Floats = np.linalg.svd(sentences_TS - sentences_TS.mean(axis=0), full_matrices=False)[2][:PROJECTIONS]
    return axes_PS


def _mean(labels_TM: Labels, worth: Sequence[float]) -> NDArray[np.float64]:
    """The mean over the queries of the `worth` of labels 0, 1, 2, [M]; 0 if there are no queries. The mean is computed
    from counts, so models with the same counts get the same number; sums of gains would depend on the order of the
    queries.
    """
    total_M = np.zeros(labels_TM.shape[1])
    for label, label_worth in enumerate(worth):
        total_M += label_worth * (labels_TM == label).sum(axis=0)
    return total_M / max(1, len(labels_TM))
