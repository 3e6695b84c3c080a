"""Rows of characters, held on the training device: every row once per epoch, in an order from (seed, epoch).

In each epoch the corpus is shifted by a random offset, cut into rows of `sequence` + 1 characters, and the rows are
permuted; step s takes the next rows of that endless list. All rows of the global batch are known to every rank, which
takes its own by position, so the number of ranks changes nothing. No state: resuming needs nothing but the step.
Legend: B rows, T sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from job.dataset import characters
from job.dataset.shards import HEADER
from job.train.data import draw
from job.train.experiment import Micro, Work
from job.train.parallel import World

IGNORED = -100  # the target that F.cross_entropy counts as nothing
OFFSETS = 1 << 20  # in the seed of draws: keeps an epoch's offset apart from its permutation


class Rows:
    """One split. Raises ValueError when it is too short for one row."""

    def __init__(self, path: Path, *, sequence: int, device: torch.device) -> None:
        self.characters, self.sequence = characters.check_header(path), sequence
        width = sequence + 1
        self.per_epoch = (self.characters - sequence) // width  # leaves room for every offset below `width`
        if self.per_epoch < 1:
            raise ValueError(
                f"{path}: {self.characters} characters, rows of {sequence} + 1 need at least {2 * sequence + 1}: "
                "prepare more text or lower data.sequence"
            )
        ids = np.fromfile(path, dtype=np.uint8, offset=HEADER.size)
        self._ids = torch.from_numpy(ids).to(device)
        self._order = functools.lru_cache(maxsize=2)(self._epoch)

    def step(self, seed: int, step: int, rows: int) -> Tensor:
        """Where the rows of a step begin, [rows] int64 on the CPU. A step may reach into the next epoch."""
        places = np.arange(step * rows, (step + 1) * rows)
        epochs, inside = places // self.per_epoch, places % self.per_epoch
        starts = np.empty(rows, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self._order(seed, int(epoch))[inside[here]]
        return torch.from_numpy(starts)

    def fixed(self, windows: int) -> Tensor:
        """Where `windows` windows begin, evenly spread from the first character to the last; the same every time."""
        last = self.characters - self.sequence - 1
        return torch.arange(windows, dtype=torch.int64) * last // max(1, windows - 1)

    def work(self, starts_B: Tensor, world: World, micro: int) -> Work:
        """This rank's share of the global batch, in micro-batches of at most `micro` rows.

        All ranks get equally many, because they meet in each of them: where rows run short, one without targets is
        put in their place.
        """
        rows = len(starts_B)
        return Work(self._micros(starts_B, world, micro), rows * self.sequence)

    def _micros(self, starts_B: Tensor, world: World, micro: int) -> Iterator[Micro]:
        share = -(-len(starts_B) // world.size)
        first = world.rank * share
        mine = starts_B[first : first + share]
        for place in range(0, share, micro):
            real = mine[place : place + micro]
            missing = min(micro, share - place) - len(real)
            tokens_BT, targets_BT = self.windows(torch.cat([real, real.new_zeros(missing)]) if missing else real)
            if missing:
                targets_BT = targets_BT.clone()  # the characters are a view of the same memory
                targets_BT[len(real) :] = IGNORED
            yield Micro((tokens_BT, targets_BT), len(real) * self.sequence, first + place)

    def windows(self, starts_B: Tensor) -> tuple[Tensor, Tensor]:
        """(characters, the ones that follow), each [B, T] int64 on the device."""
        places = starts_B.to(self._ids.device, non_blocking=True)[:, None] + torch.arange(
            self.sequence + 1, device=self._ids.device
        )
        ids = self._ids[places].to(torch.int64)
        return ids[:, :-1], ids[:, 1:]

    def _epoch(self, seed: int, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Starts of the epoch's rows in order: sorted by a hash, which is the same on every machine and version."""
        width = self.sequence + 1
        offset = int(draw(seed + OFFSETS, epoch, 1, width)[0])
        keys = draw(seed, epoch, self.per_epoch, 1 << 63).numpy()
        order: np.ndarray[tuple[int], np.dtype[np.int64]] = offset + width * np.argsort(keys, kind="stable")
        return order
