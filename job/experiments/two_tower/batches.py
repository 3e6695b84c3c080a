"""The members' data on the training device: the batch of one step of all members, and the watched folds.

Legend: K members, R rows of a member, Q queries of a step, V watched queries, M models, S sentence width, B sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpufleet.job.experiments.engine.data import mix
from gpufleet.job.experiments.engine.experiment import Micro, Work
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.two_tower.folds import Member, rows_of, watched
from gpufleet.job.experiments.two_tower.members import ALONE, Members, Share
from gpufleet.job.experiments.two_tower.model import Noise, draw_noise
from gpufleet.job.experiments.two_tower.ranking import Tables
from gpufleet.job.experiments.two_tower.ranking_metrics import ndcg
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig


class Batches:
    """The data of one phase, with the weak labels."""

    def __init__(
        self,
        members: Sequence[Member],
        tables: Tables,
        config: TwoTowerConfig,
        device: torch.device,
        world: World = ALONE,
    ) -> None:
        """`members`: all of the phase, of which this rank has its share."""
        self._device, self._share = device, (share := Share.of_rank(len(members), world))
        self._idle = share.total == 1 and not world.first  # rank 0 trains the only member; here it has no gradients
        own = members[share.own]
        weak = min(config.weak.queries, len(tables.discovery))
        self.queries = max(len(member.train) for member in members) + weak  # rows of each member, with padding
        rows = [rows_of(member, tables, config.weak, self.queries) for member in own]
        # number of weakly labelled queries of each member
        self.weak: list[int] = share.gather(
            torch.tensor([of_member.weak for of_member in rows], device=device)
        ).tolist()
        self._x_KRS = self._placed(np.stack([of_member.sentences for of_member in rows]))
        self._targets_KRM = self._placed(np.stack([of_member.targets for of_member in rows]))
        self._weights_KR = self._placed(np.stack([of_member.weights for of_member in rows]))
        if config.objective == "sampled":
            self._drawn_from_KR = share.gather(
                self._weights_KR
            )  # of all members, so that any number of ranks draws alike
        if any(len(member.watch) for member in members):
            queries_KV, gains_KVM, weights_KV = (part[share.own] for part in watched(members, tables))
            self._watched_x_KVS = self._placed(tables.queries[queries_KV])
            self._watched_gains_KVM = self._placed(gains_KVM)
            self._watched_weights_KV = self._placed(weights_KV)

    def work(self, config: TwoTowerConfig, place: int, micro: int) -> Work:
        """The data of one step of all members, in chunks of `micro` queries: every query, or the queries that the
        objective samples by (seed, `place`). The random bits of dropout are made for all chunks at once.
        """
        generator = torch.Generator(self._device).manual_seed(mix(config.seed, place))
        members, models, own = self._share.total, self._targets_KRM.shape[2], self._share.own
        x_KQS, targets_KQM, weights_KQ, draws = self._x_KRS, self._targets_KRM, self._weights_KR, None
        if config.objective == "sampled":
            batch = config.sampled.batch
            chosen_KB = torch.multinomial(self._drawn_from_KR, batch, replacement=True, generator=generator)[own]
            rows = torch.arange(self._share.count, device=self._device)[:, None]
            x_KQS, targets_KQM = x_KQS[rows, chosen_KB], targets_KQM[rows, chosen_KB]
            weights_KQ = torch.ones(self._share.count, batch, device=self._device)
            size = (members, batch, 1 + 2 * config.sampled.negatives)
            draws = torch.rand(size, generator=generator, device=self._device)[own]
        if self._idle:
            weights_KQ = torch.zeros_like(weights_KQ)
        noise = draw_noise(config.towers, members, x_KQS.shape[1], models, generator)
        noise = None if noise is None else Noise(noise.query[own], noise.model[own])
        return Work(_chunks(x_KQS, targets_KQM, weights_KQ, noise, draws, micro), x_KQS.shape[1])

    def watched_ndcg(self, module: Members) -> Tensor:
        """The mean nDCG@10 of all members, each on the fold that it watches, float64 [K]."""
        values_KV = ndcg(module.score(self._watched_x_KVS), self._watched_gains_KVM, 10)
        return self._share.gather((values_KV * self._watched_weights_KV).sum(-1))

    def _placed(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _chunks(
    x_KQS: Tensor, targets_KQM: Tensor, weights_KQ: Tensor, noise: Noise | None, draws: Tensor | None, micro: int
) -> Iterator[Micro]:
    for first in range(0, x_KQS.shape[1], micro):
        part = slice(first, first + micro)
        rows = x_KQS[:, part], targets_KQM[:, part], weights_KQ[:, part]
        bits = (None, None) if noise is None else (noise.query[:, part], noise.model)
        extra = () if draws is None else (draws[:, part],)
        yield Micro((*rows, *bits, *extra), rows[0].shape[1], first)
