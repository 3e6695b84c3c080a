"""All members of a phase for the engine: their objective, each member's best weights, and the scores of earlier phases.
Legend: K members, Q queries of a chunk, M models, S sentence width, B sampled queries, F families, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpufleet.job.experiments.engine.data import mix
from gpufleet.job.experiments.two_tower.model import (
    Noise,
    Stack,
    Towered,
    TwoTowerModel,
    diversity,
    initialise,
    softmax_loss,
)
from gpufleet.job.experiments.two_tower.spec import Sampled, TwoTowerConfig

# Hard negatives are chosen from this number of irrelevant models with the best scores. The number is our choice,
# because the published record has none.
HARD_POOL = 50


class MembersOutput(NamedTuple):
    """`loss_sum` is the mean over members of the loss summed over the queries; members are independent."""

    loss_sum: Tensor
    aux: dict[str, Tensor]
    aux_loss: Tensor | None = None


class Members(nn.Module):
    """`forward` gives the objective for a chunk of every member's queries."""

    best: Tensor  # [K, P]: the parameters of each member at its best epoch so far
    # [F, folds, judged, M]: for each finished family, the scores of every query by the honest model of each fold
    scores: Tensor
    optimistic: Tensor  # [F, judged, M]: the scores of each query by the optimistic model of the query's own fold

    def __init__(self, config: TwoTowerConfig, count: int, first: int, compute: torch.dtype) -> None:
        """`first`: the first of the seeds of the members' weights."""
        super().__init__()
        self.config = config
        seeds = [mix(config.seed, first + index) for index in range(count)]
        alone = [
            initialise(
                TwoTowerModel(config.towers, config.data.models, compute=compute), torch.Generator().manual_seed(seed)
            )
            for seed in seeds
        ]
        self.stack = Stack(alone)
        self.register_buffer("best", self.stack.packed() if count > 1 else torch.empty(0))

    def forward(
        self,
        x_KQS: Tensor,
        targets_KQM: Tensor,
        weights_KQ: Tensor,
        query_noise: Tensor | None = None,
        model_noise: Tensor | None = None,
        draws_KBN: Tensor | None = None,
    ) -> MembersOutput:
        """The weights of a member's rows have the mean 1 over its whole batch. `draws`: uniform random numbers, for the
        objective `sampled`.
        """
        noise = None
        if query_noise is not None and model_noise is not None:
            noise = Noise(query_noise, model_noise)
        towered: Towered = self.stack(x_KQS, noise)
        if draws_KBN is None:
            losses_K = softmax_loss(towered, targets_KQM, weights_KQ)
        else:
            losses_K = (sampled_loss(towered, targets_KQM, draws_KBN, self.config.sampled) * weights_KQ).sum(-1)
        losses_K = losses_K + self.config.optim.head_diversity * (diversity(towered.heads) * weights_KQ).sum(-1)
        return MembersOutput(losses_K.mean(), {"losses": losses_K.detach() / x_KQS.shape[1]})

    @torch.no_grad()
    def score(self, x_KQS: Tensor) -> Tensor:
        """Scores [K, Q, M] without dropout, as for ranking; if `x` is [Q, S], all members get the same queries."""
        towered: Towered = self.stack(x_KQS)
        return towered.query @ towered.model.mT

    @torch.no_grad()
    def keep(self, better_K: Tensor) -> None:
        """Makes the present parameters the best parameters of the members where `better_K` is True."""
        self.best[better_K] = self.stack.packed()[better_K]


def sampled_loss(towered: Towered, targets_KBM: Tensor, draws_KBN: Tensor, sampled: Sampled) -> Tensor:
    """Cross-entropy of one relevant model against `negatives` irrelevant ones, [K, B].

    `draws` has 1 + 2 x negatives uniform random numbers for each query. They choose the relevant model (in proportion
    to its target), and for each negative whether it is hard, and which model it is. Hard negatives come from the
    HARD_POOL best-scored irrelevant models.
    """
    negatives = sampled.negatives
    scores_KBM = towered.query @ towered.model.mT
    upto_KBM = targets_KBM.cumsum(-1)
    # a random number may be 0
    positive = torch.searchsorted(upto_KBM, draws_KBN[..., :1] * upto_KBM[..., -1:], right=True)
    irrelevant = targets_KBM <= 0
    ranked = scores_KBM.detach().masked_fill(~irrelevant, -torch.inf).argsort(-1, descending=True)
    count = irrelevant.sum(-1, keepdim=True)
    hard, which = draws_KBN[..., 1 : 1 + negatives] < sampled.hard, draws_KBN[..., 1 + negatives :]
    place = (which * torch.where(hard, count.clamp(max=HARD_POOL), count)).long().clamp(max=scores_KBM.shape[-1] - 1)
    chosen = torch.cat([positive.clamp(max=scores_KBM.shape[-1] - 1), ranked.gather(-1, place)], dim=-1)
    loss_KB: Tensor = -torch.log_softmax(scores_KBM.gather(-1, chosen), dim=-1)[..., 0]
    return loss_KB


@torch.no_grad()
def clip_each(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Undoes the mean over members, then scales each member's gradient down to a norm of `limit`; if it is 0, the norms
    are only measured. Returns the norms before the scaling, [K].
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    count = gradients[0].shape[0]
    norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    norms_K: Tensor = count * torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors_K = torch.full_like(norms_K, float(count))
    if limit:
        factors_K *= (limit / (norms_K + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors_K.view(-1, *[1] * (gradient.dim() - 1)))
    return norms_K
