"""Makes micro-batches of packed rows. Every row is used once per epoch, in an order that depends on (seed, epoch).
Every rank knows all rows of the global batch. So it knows without communication how many tokens are included in the
loss. Rows stay in host memory: a step needs some hundred kilobytes. Legend: R rows, T tokens of a row, N = R x T, K at
most the examples of a micro-batch plus one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.chat import Turn
from gpufleet.job.experiments.dataset.packed import TEXTS, cut
from gpufleet.job.experiments.dataset.packing import PackedRows, Split, order
from gpufleet.job.experiments.dataset.rendering import Renderer
from gpufleet.job.experiments.engine.data import Ids, Part, in_epochs, split
from gpufleet.job.experiments.engine.experiment import IGNORED, Micro, Work
from gpufleet.job.experiments.engine.parallel import World


class PackedBatches:
    """The training and the validation split of a packed dataset. `waited_s`: the sum of the seconds in which batches
    were made.

    With a `renderer`, training rows are tokenised from their texts at every step, with the same result, to measure what
    that costs.
    """

    def __init__(
        self,
        folder: Path,
        manifest: DatasetManifest,
        world: World,
        device: torch.device,
        renderer: Renderer | None = None,
    ) -> None:
        self.world, self.device = world, device
        self.splits: dict[Split, PackedRows] = {
            "train": PackedRows(folder, manifest, "train"),
            "validation": PackedRows(folder, manifest, "validation"),
        }
        self.row = self.splits["train"].row
        self.waited_s = 0.0
        self.longest = min(int(manifest.facts.get("longest", self.row)), self.row)  # the most tokens of an example
        # The most sequences in a row: its examples, and the pieces of padding at its end. A row that is only padding
        # has one example fewer.
        self._most = int(manifest.facts["most_examples"]) + math.ceil((self.row - 1) / self.longest)
        self._renderer, self._cut = renderer, (manifest.facts["loss_on"], self.longest)
        self._texts = [] if renderer is None else (folder / TEXTS).read_bytes().split(b"\n")
        self._order = lru_cache(maxsize=2)(order)

    def steps(self, per_step: int, epochs: int) -> int:
        """Optimizer steps that visit every row `epochs` times. A step may span two epochs; the last may be smaller."""
        return math.ceil(epochs * len(self.splits["train"]) / per_step)

    def step(self, seed: int, step: int, per_step: int, epochs: int) -> Ids:
        """The rows of the global batch after `step` steps."""
        count = len(self.splits["train"])
        places = np.arange(step * per_step, min((step + 1) * per_step, epochs * count))
        return in_epochs(places, count, lambda epoch: self._order(seed, epoch, count))

    def fixed(self, rows: int) -> Ids:
        """`rows` validation rows, always the same, evenly spread; all validation rows if there are fewer."""
        count = len(self.splits["validation"])
        wanted = min(rows, count)
        return np.arange(wanted, dtype=np.int64) * count // wanted

    def work(self, split: Split, rows: Ids, micro: int, *, per_step: int | None = None) -> Work:
        """This rank's share of the global batch, at most `micro` rows at once. `per_step`: rows of a full step."""
        full = len(rows) / per_step if per_step else 1.0
        return Work(self._micros(self.splits[split], rows, micro), self.splits[split].counted(rows), full)

    def _micros(self, rows: PackedRows, wanted: Ids, micro: int) -> Iterator[Micro]:
        for part in split(len(wanted), self.world, micro):
            began = time.perf_counter()
            made = self._micro(rows, wanted[part.rows.start : part.rows.stop], part)
            self.waited_s += time.perf_counter() - began
            yield made

    def _micro(self, rows: PackedRows, real: Ids, part: Part) -> Micro:
        """Returns tokens, targets, documents, starts and longest. The first three are [R, T] int64; starts is [K]
        int32, and longest is the largest distance between two starts.
        """
        size = len(real) + part.missing
        tokens = np.zeros((size, self.row), dtype=np.int64)
        marks = np.zeros((size, self.row), dtype=np.int64)
        if self._renderer is not None and rows is self.splits["train"]:
            for own, row in enumerate(real):
                self._tokenise(int(row), tokens[own], marks[own])
        else:
            tokens[: len(real)], marks[: len(real)] = rows.tokens[real], rows.marks[real]
        targets = np.full_like(tokens, IGNORED)
        # The first token of an example is never included in the loss.
        targets[:, :-1] = np.where(marks[:, 1:] & 1, tokens[:, 1:], IGNORED)
        documents = marks >> 1
        starts = _starts(documents, self.longest, size * self._most + 1)
        arrays = (torch.from_numpy(a) for a in (tokens, targets, documents, starts))
        inputs = tuple(array.to(self.device, non_blocking=True) for array in arrays)
        return Micro((*inputs, self.longest), int((marks & 1).sum()), part.rows.start)

    def _tokenise(self, row: int, tokens_T: Ids, marks_T: Ids) -> None:
        """Fills one row with the tokens of its conversations."""
        assert self._renderer is not None
        turns = [[Turn(*turn) for turn in conversation] for conversation in json.loads(self._texts[row])]
        at = 0
        for number, rendered in enumerate(self._renderer.render(turns), 1):
            example = cut(rendered, *self._cut)
            end = at + len(example.tokens)
            tokens_T[at:end], marks_T[at:end] = example.tokens, 2 * number + example.counted
            at = end


def _starts(documents: NDArray[np.int64], longest: int, length: int) -> NDArray[Any]:
    """The positions in the flat batch at which an example, or a piece of padding, begins, as [K] int32. The remaining
    entries are N, so that K never changes. Padding is cut into pieces that are not longer than an example, because for
    every sequence the kernel launches as much work as for the longest one, and the attention of padding is not used.
    """
    begins = np.ones(documents.shape, dtype=np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    padding = documents == 0
    begins |= padding & ((np.cumsum(padding, axis=1) - 1) % longest == 0)
    places = np.flatnonzero(begins)
    starts = np.full(length, documents.size, dtype=np.int32)
    starts[: len(places)] = places
    return starts
