"""How well scores order models for a query: nDCG@k and MRR, as scikit-learn computes them. Legend: Q queries, M models.

Equal scores share their places: each model of a tie gets the mean over the tie's orders, in nDCG (as scikit-learn's
`ndcg_score` averages ties) and in MRR. A query without a relevant model scores 0. All values are float64. Scores that
are NaN or infinite cannot be ranked. Such scores raise LossNotFiniteError, which is a ValueError, as in scikit-learn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpufleet.job.experiments.engine.experiment import LossNotFiniteError


def ndcg(scores_QM: Tensor, gains_QM: Tensor, k: int) -> Tensor:
    """nDCG@k per query, [..., Q], in [0, 1]. Gains are not negative."""
    _require_finite(scores_QM)
    gains = gains_QM.double()
    places = torch.arange(gains.shape[-1], device=gains.device, dtype=torch.float64)
    discounts_M = torch.where(places < k, 1 / torch.log2(places + 2), 0.0)
    ordered_QM, order_QM = scores_QM.sort(-1, descending=True)
    dcg = (_mean_over_ties(ordered_QM, gains.gather(-1, order_QM)) * discounts_M).sum(-1)
    best = (gains.sort(-1, descending=True).values * discounts_M).sum(-1)
    return torch.where(best > 0, dcg / best.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def reciprocal_rank(scores_QM: Tensor, gains_QM: Tensor) -> Tensor:
    """1 / the place of the first model with gain > 0, per query, [..., Q]; in a tie, the mean over all orders of the
    tie.
    """
    _require_finite(scores_QM)
    relevant = gains_QM > 0
    top = scores_QM.masked_fill(~relevant, -torch.inf).amax(-1, keepdim=True)
    above = (scores_QM > top).sum(-1).double()
    tied = (scores_QM == top).sum(-1).double()
    wanted = ((scores_QM == top) & relevant).sum(-1).double()
    # Among `tied` places in random order, the first of `wanted` is at place j with probability C(tied - j - 1, wanted -
    # 1) / C(tied, wanted). The loop goes through the places. At each place the probability is survival (nothing wanted
    # came before) times hazard (something wanted comes here).
    mean, alive = torch.zeros_like(above), torch.ones_like(above)
    for j in range(int((tied - wanted).max().item()) + 1):
        untried = (tied - j).clamp(min=1)
        hazard = (wanted / untried).clamp(max=1.0)
        mean += alive * hazard / (above + j + 1)
        alive = alive * (1 - hazard)
    return torch.where(relevant.any(-1), mean, 0.0)


def _require_finite(scores_QM: Tensor) -> None:
    wrong_Q = ~scores_QM.isfinite().all(-1)
    if wrong_Q.any():
        raise LossNotFiniteError(
            f"scores of {int(wrong_Q.sum())} of {wrong_Q.numel()} queries are NaN or infinite; only finite ones can be "
            "ranked"
        )


def _mean_over_ties(scores_QM: Tensor, gains_QM: Tensor) -> Tensor:
    """Gains in order of descending scores, each replaced by the mean over the models of equal score."""
    new = torch.ones_like(scores_QM, dtype=torch.int64)
    new[..., 1:] = (scores_QM[..., 1:] != scores_QM[..., :-1]).long()
    group = new.cumsum(-1) - 1
    sums = torch.zeros_like(gains_QM).scatter_add_(-1, group, gains_QM)
    counts = torch.zeros_like(gains_QM).scatter_add_(-1, group, torch.ones_like(gains_QM))
    return (sums / counts.clamp(min=1)).gather(-1, group)
