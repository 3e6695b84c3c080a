"""nDCG and MRR agree with scikit-learn's and with their definitions, ties included."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from gpufleet.job.experiments.two_tower.ranking_metrics import ndcg, reciprocal_rank


@pytest.fixture(scope="module")
def reference() -> Any:
    """sklearn.metrics; its import takes a second."""
    return pytest.importorskip("sklearn.metrics", reason="scikit-learn, the reference, is not installed")


def fixture(seed: int, *, tied: bool, queries: int = 40, models: int = 57) -> tuple[Tensor, Tensor]:
    """Scores (a few values only when `tied`) and gains 0, 0.7, 1."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, models, generator=g, dtype=torch.float64)
    if tied:
        scores = scores.round()
    gains = torch.tensor([0.0, 0.0, 0.0, 0.7, 1.0], dtype=torch.float64)[
        torch.randint(0, 5, (queries, models), generator=g)
    ]
    return scores, gains


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("k", [5, 10, 57, 100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ndcg_is_scikit_learns(reference: Any, seed: int, k: int, tied: bool) -> None:
    scores, gains = fixture(seed, tied=tied)
    ours = ndcg(scores, gains, k)
    for mine, s, t in zip(ours.tolist(), scores.numpy(), gains.numpy(), strict=True):
        assert abs(mine - reference.ndcg_score(t[None], s[None], k=k)) < 1e-9


def test_scores_that_are_all_equal_are_worth_the_mean_order(reference: Any) -> None:
    _, gains = fixture(3, tied=True)
    scores = torch.zeros_like(gains)
    for mine, s, t in zip(ndcg(scores, gains, 10).tolist(), scores.numpy(), gains.numpy(), strict=True):
        assert abs(mine - reference.ndcg_score(t[None], s[None], k=10)) < 1e-9


def test_a_query_without_a_relevant_model_scores_zero() -> None:
    scores, gains = fixture(4, tied=False, queries=2)
    gains[0] = 0
    assert ndcg(scores, gains, 10)[0] == 0
    assert reciprocal_rank(scores, gains)[0] == 0
    assert ndcg(scores, gains, 10)[1] > 0
    assert reciprocal_rank(scores, gains)[1] > 0


def test_reciprocal_rank_of_one_relevant_model_is_scikit_learns_average_precision(reference: Any) -> None:
    scores, _ = fixture(5, tied=False)
    gains = torch.zeros_like(scores)
    gains[torch.arange(40), torch.arange(40)] = 0.7
    average = reference.label_ranking_average_precision_score((gains > 0).numpy(), scores.numpy())
    assert abs(reciprocal_rank(scores, gains).mean().item() - average) < 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_reciprocal_rank_of_ties_is_the_mean_over_their_orders(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (6,), generator=g).double()
    gains = torch.randint(0, 2, (6,), generator=g).double()
    gains[int(torch.randint(0, 6, (1,), generator=g))] = 1.0
    seen = []
    for order in itertools.permutations(range(6)):
        ranked = sorted(order, key=lambda model: -scores[model].item())  # stable: ties in this order
        first = next(place for place, model in enumerate(ranked) if gains[model] > 0)
        seen.append(1 / (first + 1))
    assert abs(reciprocal_rank(scores, gains).item() - sum(seen) / len(seen)) < 1e-9


def test_members_and_folds_are_only_more_dimensions() -> None:
    scores, gains = fixture(6, tied=True, queries=12)
    for metric in (lambda s, g: ndcg(s, g, 5), reciprocal_rank):
        whole = metric(scores.view(3, 4, -1), gains.view(3, 4, -1))
        assert torch.equal(whole.flatten(), metric(scores, gains))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_are_refused_as_scikit_learn_refuses_them(reference: Any, value: float) -> None:
    scores, gains = fixture(7, tied=False, queries=3)
    scores[1, gains[1].argmax()] = value
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        reference.ndcg_score(gains.numpy(), scores.numpy(), k=10)
    for metric in (lambda s, g: ndcg(s, g, 10), reciprocal_rank):
        with pytest.raises(ValueError, match="scores of 1 of 3 queries are NaN or infinite"):
            metric(scores, gains)
