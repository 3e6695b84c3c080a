"""Rows of characters: every row once per epoch, in an order from (seed, epoch).

In each epoch the corpus is shifted by a random offset, cut into rows of `sequence` + 1 characters, and the rows are
permuted; step s takes the next rows of that endless list.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpufleet.job.experiments.dataset.shards import HEADER
from gpufleet.job.experiments.engine.data import Ids, Windows, draw, in_epochs
from gpufleet.job.experiments.pretrain import characters

OFFSETS = 1 << 20  # part of a seed, so that the offset of an epoch is independent of its permutation


class Rows(Windows):
    """One split. Raises ValueError if the split is too short for one row."""

    def __init__(self, path: Path, *, sequence: int, device: torch.device) -> None:
        count, self._width = characters.check_header(path), sequence + 1
        self.per_epoch = (count - sequence) // self._width  # leaves room for every offset below the width
        if self.per_epoch < 1:
            raise ValueError(
                f"{path}: {count} characters, but rows of {sequence} + 1 need at least {2 * sequence + 1}: "
                "prepare more text or lower data.sequence"
            )
        super().__init__(np.fromfile(path, dtype=np.uint8, offset=HEADER.size), sequence, device)
        self._order = functools.lru_cache(maxsize=2)(self._epoch)

    def step(self, seed: int, step: int, rows: int) -> Tensor:
        """The positions at which the rows of a step begin, as [rows] int64 on the CPU. A step may continue in the next
        epoch.
        """
        places = np.arange(step * rows, (step + 1) * rows)
        return torch.from_numpy(in_epochs(places, self.per_epoch, functools.partial(self._order, seed)))

    def _epoch(self, seed: int, epoch: int) -> Ids:
        """The beginnings of the epoch's rows in their order. The beginnings are sorted by a hash, which is the same on
        every machine and with every version.
        """
        offset = int(draw(seed + OFFSETS, epoch, 1, self._width)[0])
        keys = draw(seed, epoch, self.per_epoch, 1 << 63).numpy()
        order: Ids = offset + self._width * np.argsort(keys, kind="stable")
        return order
