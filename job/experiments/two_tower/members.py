"""All members of a phase for the engine: their objective, each member's best weights, and the scores of earlier phases.
Legend: K members, Q queries of a chunk, M models, S sentence width, B sampled queries, F families, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gpufleet.job.experiments.engine.data import mix
from gpufleet.job.experiments.engine.parallel import World, local
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
ALONE = World()


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The members of one rank: `count` of `total`, from `first` on."""

    first: int
    count: int
    total: int
    world: World = ALONE

    @classmethod
    def of_rank(cls, total: int, world: World) -> Share:
        """This rank's part. A single member trains on every rank, because nobody else would have anything to do."""
        if total == 1:
            return cls(first=0, count=1, total=1)
        most = -(-total // world.size)
        first = min(most * world.rank, total)
        return cls(first=first, count=min(most, total - first), total=total, world=world)

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.count)

    def padded(self, own: Tensor) -> Tensor:
        """The rows [total, ...], which are 0 for other ranks' members: the sum over ranks has all of them."""
        if self.count == self.total:
            return own
        rows = own.new_zeros(self.total, *own.shape[1:])
        rows[self.own] = own
        return rows

    def gather(self, own: Tensor) -> Tensor:
        """The rows [total, ...] of all members, from each rank's own. Every rank calls it."""
        return self.world.sum(self.padded(own))

    def placed(self, own: Tensor) -> Tensor:
        """The tensor of all members, of which this rank holds its own."""
        shape = torch.Size((self.total, *own.shape[1:]))
        return DTensor.from_local(own, self.world.mesh, [Shard(0)], run_check=False, shape=shape, stride=own.stride())


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

    def __init__(
        self, config: TwoTowerConfig, count: int, first: int, compute: torch.dtype, world: World = ALONE
    ) -> None:
        """`count`: of all members. `first`: the first of the seeds of their weights."""
        super().__init__()
        self.config, self.share = config, (share := Share.of_rank(count, world))
        seeds = [mix(config.seed, first + index) for index in range(share.first, share.first + share.count)]
        alone = [
            initialise(
                TwoTowerModel(config.towers, config.data.models, compute=compute), torch.Generator().manual_seed(seed)
            )
            for seed in seeds
        ]
        self.stack = Stack(alone)
        self.register_buffer("best", self.stack.packed() if share.total > 1 else torch.empty(0))

    def spread(self) -> Members:
        """The module, on its device, whose parameters are those of all members, of which this rank holds its own."""
        if self.share.count < self.share.total:
            for module in self.stack.members.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(self.share.placed(parameter.detach())))
            self.best = self.share.placed(self.best)
        return self

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
        return MembersOutput(
            losses_K.sum() / self.share.total, {"losses": self.share.padded(losses_K.detach()) / x_KQS.shape[1]}
        )

    @torch.no_grad()
    def score(self, x_KQS: Tensor) -> Tensor:
        """Scores [K, Q, M] without dropout, as for ranking; if `x` is [Q, S], all members get the same queries."""
        towered: Towered = self.stack(x_KQS)
        return towered.query @ towered.model.mT

    @torch.no_grad()
    def keep(self, better: Sequence[int]) -> None:
        """Makes the present parameters the best parameters of these members."""
        best = local(self.best)
        own = torch.tensor(
            [k - self.share.first for k in better if 0 <= k - self.share.first < self.share.count],
            dtype=torch.int64,
            device=best.device,
        )
        best[own] = self.stack.packed()[own]


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
    are only measured. Returns the norms of this rank's members before the scaling, [K].
    """
    shared = [parameter.grad for parameter in parameters if parameter.grad is not None]
    count, gradients = shared[0].shape[0], [local(gradient) for gradient in shared]
    norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    norms_K: Tensor = count * torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors_K = torch.full_like(norms_K, float(count))
    if limit:
        factors_K *= (limit / (norms_K + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors_K.view(-1, *[1] * (gradient.dim() - 1)))
    return norms_K
