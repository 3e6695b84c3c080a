"""What the towers must beat: popularity, LambdaRank and random order, on the same folds and the same training queries.

Each gives one row of scores per query, from a model that saw neither the query's fold nor its watched fold (LambdaRank
stops early on the latter, as the towers do). Legend: Q judged queries, T training queries, M models, F features.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from job.dataset.arrays import Floats, Labels, unit_rows
from job.dataset.ranking import GAINS, Tables
from job.experiments.two_tower_data import Indices, Member, gains

NEIGHBOURS = 10  # of the neighbour feature
PROJECTIONS = 8  # principal directions of the training queries' sentence vectors
MAX_TREES, PATIENCE = 100, 10  # a tree takes 0.2 core-seconds on 274 queries x 1131 models
LAMBDARANK = {
    "objective": "lambdarank",
    "label_gain": [GAINS[0], GAINS[2], GAINS[1]],  # of irrelevant, good, best
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
    """Mean gain of each model on the training queries: the same order for every query. [test, M]"""
    mean_M = gains(tables.labels[member.train]).mean(axis=0)
    return np.tile(mean_M, (len(member.test), 1))


def random_order(member: Member, tables: Tables, seed: int) -> Floats:
    """[test, M] of uniform numbers."""
    draw = np.random.default_rng([seed, member.fold])
    return draw.random((len(member.test), tables.labels.shape[1]), dtype=np.float32)


def lambdarank_missing() -> str | None:
    """Why there is no LambdaRank; None where there is."""
    if importlib.util.find_spec("lightgbm") is None:
        return "not installed (pip install 'gpufleet[ranking]')"
    try:
        importlib.import_module("lightgbm")
    except (ImportError, OSError) as error:  # scipy or a system library that it needs
        return f"cannot be imported: {error}"
    return None


def lambdarank(
    member: Member, tables: Tables, *, seed: int, threads: int, stop: Callable[[], None] = lambda: None
) -> Floats:
    """LightGBM's LambdaRank. `stop` is called after each tree and may raise. [test, M]"""
    lightgbm = importlib.import_module("lightgbm")
    train, watch, test = member.train, member.watch, member.test
    features = Features(tables, train)
    sets: dict[str, Any] = {}
    for name, queries in (("train", train), ("watch", watch)):
        relevance = np.array([0, 2, 1], dtype=np.int32)[tables.labels[queries]]
        sets[name] = lightgbm.Dataset(
            features.of(queries).reshape(-1, features.count),
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
    scores = ranker.predict(features.of(test).reshape(-1, features.count), num_threads=threads)
    found: Floats = np.asarray(scores, dtype=np.float32).reshape(len(test), -1)
    return found


class Features:
    """What LambdaRank sees of a query and a model, from training queries alone. A training query never counts itself.

    Popularity (share of training queries with a label), mean and variance of the gain, the gain of the NEIGHBOURS most
    similar training queries weighted by similarity, the cosine between the query and the gain-weighted mean query of
    the model, and the query's PROJECTIONS principal coordinates.
    """

    count = 5 + PROJECTIONS

    def __init__(self, tables: Tables, train: Indices) -> None:
        self._tables, self._train = tables, train
        self._gains_TM = gains(tables.labels[train])
        self._sentences_TS = tables.queries[train]
        self._sum_M, self._square_M = self._gains_TM.sum(axis=0), np.square(self._gains_TM).sum(axis=0)
        self._liked_M = (self._gains_TM > 0).sum(axis=0)
        self._profile_MS = self._gains_TM.T @ self._sentences_TS
        centred = self._sentences_TS - self._sentences_TS.mean(axis=0)
        self._axes = np.linalg.svd(centred, full_matrices=False)[2][:PROJECTIONS]

    def of(self, queries: Indices) -> Floats:
        """[queries, M, F]."""
        sentences = self._tables.queries[queries]
        labels: Labels = self._tables.labels
        found = np.zeros((len(queries), labels.shape[1], self.count), dtype=np.float32)
        cosine = sentences @ self._sentences_TS.T
        place = {query: row for row, query in enumerate(self._train.tolist())}
        for row, query in enumerate(queries.tolist()):
            own = place.get(query)
            left = len(self._train) - (own is not None)
            mine = np.zeros_like(self._sum_M) if own is None else self._gains_TM[own]
            near = cosine[row].copy()
            if own is not None:
                near[own] = -np.inf
            nearest = np.argsort(-near, kind="stable")[: min(NEIGHBOURS, left)]
            weight = np.maximum(near[nearest], 0)
            mean = (self._sum_M - mine) / left
            profile = unit_rows(self._profile_MS - np.outer(mine, sentences[row]).astype(np.float32))
            found[row, :, 0] = (self._liked_M - (mine > 0)) / left
            found[row, :, 1] = mean
            found[row, :, 2] = (self._square_M - mine**2) / left - mean**2
            found[row, :, 3] = weight @ self._gains_TM[nearest] / max(weight.sum(), 1e-9)
            found[row, :, 4] = profile @ sentences[row]
            coordinates = sentences[row] @ self._axes.T
            found[row, :, 5 : 5 + len(coordinates)] = coordinates
        return found
