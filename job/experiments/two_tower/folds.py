"""Folds, the members trained on them, weak labels, and the tensors of one step. The module uses numpy only, and has no
model and no training. A member is one model. A member has queries from which it learns, queries by which its epoch is
chosen (it watches them), and a fold on which it is tested.

| protocol | learns from | watches | tested on |
|---|---|---|---|
| honest | the other folds | fold k + 1 | fold k, once, at the chosen epoch |
| optimistic (the original plan's) | every fold but k | fold k | fold k, at its best epoch |

A member's arrays contain only its own training queries, so it cannot learn from the label of another query. Its weak
labels are made from the same queries. Legend: Q judged queries, N discovery queries, M models, S sentence width, T
training queries, R rows of a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gpufleet.job.experiments.two_tower.arrays import Floats, Labels
from gpufleet.job.experiments.two_tower.ranking import GAINS, Tables
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig, Weak

Protocol = Literal["honest", "optimistic", "refit"]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """`train`, `watch` and `test` are rows of the dataset, ascending."""

    protocol: Protocol
    fold: int  # number of discovery queries for each member
    train: Indices
    watch: Indices
    test: Indices


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRows:
    """The training rows of one member, padded to the length of the others."""

    sentences: Floats  # [R, S]; zero in padded rows
    targets: Floats  # [R, M]: gains that sum to 1, or all 0
    weights: Floats  # [R]: mean 1 over the rows, 0 for rows without a target
    weak: int  # number of these rows that are discovery queries


def fold_of(queries: int, folds: int, seed: int) -> Indices:
    """The fold of each query. Shuffled queries are put into the folds in turn."""
    fold_Q = np.empty(queries, dtype=np.int64)
    fold_Q[np.random.default_rng(seed).permutation(queries)] = np.arange(queries) % folds
    return fold_Q


def members(config: TwoTowerConfig) -> list[Member]:
    """The honest members by fold, then the optimistic ones by fold."""
    folds = config.data.folds
    fold_Q = fold_of(config.data.queries, folds, config.seed)

    def indices_where(mask: NDArray[np.bool_]) -> Indices:
        return np.flatnonzero(mask)

    def member(protocol: Protocol, fold: int) -> Member:
        watch = (fold + 1) % folds if protocol == "honest" else fold
        return Member(
            protocol=protocol,
            fold=fold,
            train=indices_where((fold_Q != fold) & (fold_Q != watch)),
            watch=indices_where(fold_Q == watch),
            test=indices_where(fold_Q == fold),
        )

    protocols: list[Protocol] = ["honest", "optimistic"] if config.optimistic else ["honest"]
    return [member(protocol, fold) for protocol in protocols for fold in range(folds)]


def refit_member(queries: int) -> Member:
    """The member that learns from every judged query and watches none."""
    none = np.empty(0, dtype=np.int64)
    return Member(protocol="refit", fold=-1, train=np.arange(queries), watch=none, test=none)


def gains(labels: Labels) -> Floats:
    return worth(labels).astype(np.float32)


def worth(labels: Labels) -> NDArray[np.float64]:
    """The gain of each label in fp64, for evaluation, because fp32's 0.7 would change nDCG by 1e-8."""
    return np.array(GAINS)[labels]


def weak_labels(discovery_NS: Floats, queries_TS: Floats, gains_TM: Floats, weak: Weak) -> tuple[Indices, Floats]:
    """Returns the discovery queries that get labels, in ascending order, and their gains.

    Neighbours are the `neighbours` most similar queries with cosine >= `similarity`. A label is the mean of the
    neighbours' labels, weighted by similarity. The `queries` most confident discovery queries with confidence >=
    `confidence` are kept; confidence is the mean similarity of the neighbours x their share of `neighbours`. The choice
    of the kept queries does not depend on labels.
    """
    cosine_NT = discovery_NS @ queries_TS.T
    count = min(weak.neighbours, cosine_NT.shape[1])
    nearest = np.argsort(-cosine_NT, axis=1, kind="stable")[:, :count]
    similar = np.take_along_axis(cosine_NT, nearest, axis=1)
    similar = np.where(similar >= weak.similarity, similar, 0.0).astype(np.float32)
    near = (similar > 0).sum(axis=1)
    mean = similar.sum(axis=1) / np.maximum(near, 1)
    confidence = mean * near / weak.neighbours
    order = np.argsort(-confidence, kind="stable")
    confident = np.sort(order[: weak.queries][confidence[order[: weak.queries]] >= max(weak.confidence, 1e-9)])
    shares_NT = np.zeros((len(confident), cosine_NT.shape[1]), dtype=np.float32)
    total = similar[confident].sum(axis=1, keepdims=True)
    np.put_along_axis(shares_NT, nearest[confident], similar[confident] / total, axis=1)
    return confident, shares_NT @ gains_TM


def require_relevant(member: Member, labels: Labels) -> None:
    """Raises ValueError if no training query of the member has a relevant model."""
    if not (labels[member.train] > 0).any():
        raise ValueError(
            f"labels.csv: none of {len(member.train)} queries that the {member.protocol} model of fold {member.fold}"
            " learns from has a label 1 or 2; judge more queries, or let job.parameters.seed deal other folds"
        )


def without_relevant(config: TwoTowerConfig, labels: Labels) -> list[int]:
    """Folds in which no query has a relevant model. Every epoch scores 0 on such a fold."""
    fold_Q = fold_of(config.data.queries, config.data.folds, config.seed)
    return [fold for fold in range(config.data.folds) if not (labels[fold_Q == fold] > 0).any()]


def rows_of(member: Member, tables: Tables, weak: Weak, rows: int) -> MemberRows:
    """The member's training queries, then its weakly labelled ones, padded. Raises ValueError if none is relevant."""
    require_relevant(member, tables.labels)
    gains_TM = gains(tables.labels[member.train])
    queries_TS = tables.queries[member.train]
    confident, weak_gains = weak_labels(tables.discovery, queries_TS, gains_TM, weak)
    real = len(member.train) + len(confident)
    assert real <= rows, (real, rows)
    sentences = np.zeros((rows, queries_TS.shape[1]), dtype=np.float32)
    targets = np.zeros((rows, gains_TM.shape[1]), dtype=np.float32)
    sentences[:real] = np.concatenate([queries_TS, tables.discovery[confident]])
    targets[:real] = np.concatenate([gains_TM, weak_gains])
    mass = targets.sum(axis=1, keepdims=True)
    np.divide(targets, mass, out=targets, where=mass > 0)
    learnt = (mass[:, 0] > 0).astype(np.float32)
    weights = learnt * np.float32(rows / learnt.sum())
    return MemberRows(sentences=sentences, targets=targets, weights=weights, weak=len(confident))


def watched(chosen: Sequence[Member], tables: Tables) -> tuple[Indices, NDArray[np.float64], NDArray[np.float64]]:
    """The queries [K, V] that each member watches, their gains [K, V, M], and their weights [K, V], which sum to 1. All
    are padded.
    """
    width = max(len(member.watch) for member in chosen)
    queries = np.zeros((len(chosen), width), dtype=np.int64)
    weights = np.zeros((len(chosen), width))
    for row, member in enumerate(chosen):
        queries[row, : len(member.watch)] = member.watch
        weights[row, : len(member.watch)] = 1 / len(member.watch)
    return queries, worth(tables.labels[queries]), weights
