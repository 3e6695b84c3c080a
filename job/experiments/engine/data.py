"""The order of data, for every experiment, and windows of ids on the training device. There is no loader, no worker and
no state. The rows of step s are a pure function of (seed, s): the rows of the whole global batch are chosen first (at
random by `draw`, or in turn by `in_epochs`), and then split over ranks and micro-batches by position (`split`). A
resume needs only the step. Legend: B windows, T sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.packing import GOLDEN, mix64
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.dataset.shards import HEADER, read_header
from gpufleet.job.experiments.dataset.tokenizer import Tokenizer, open_tokenizer
from gpufleet.job.experiments.engine.experiment import IGNORED, Micro, Work
from gpufleet.job.experiments.engine.parallel import World

Ids = NDArray[np.int64]


class Part(NamedTuple):
    """One micro-batch of this rank."""

    rows: range  # the rows' places in the global batch
    missing: int  # number of rows without targets that are added after the part's own rows


def split(total: int, world: World, micro: int) -> list[Part]:
    """This rank's micro-batches of a global batch of `total` rows: consecutive, at most `micro` rows each.

    All ranks get the same number of micro-batches of the same size, because sharded ranks go through the model
    together. Rows without targets are added where rows are missing.
    """
    share = -(-total // world.size)
    first = world.rank * share
    parts = []
    for place in range(first, first + share, micro):
        size = min(micro, first + share - place)
        real = max(0, min(size, total - place))
        parts.append(Part(range(place, place + real), size - real))
    return parts


class Windows:
    """The ids of one split as one stream on the training device, from which windows of `sequence` ids are taken."""

    def __init__(self, ids: NDArray[Any], sequence: int, device: torch.device) -> None:
        """`ids`: unsigned integers of one, two or four bytes."""
        assert sys.byteorder == "little"  # the byte order of shards
        # torch cannot gather unsigned integers of more than one byte
        signed = ids if ids.itemsize == 1 else ids.view(f"i{ids.itemsize}")
        self._ids, self._mask = torch.from_numpy(signed).to(device), (1 << 8 * ids.itemsize) - 1
        self.sequence = sequence

    def __len__(self) -> int:
        return self._ids.numel()

    def windows(self, starts_B: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and targets, each [B, T] int64 on the device. The targets are the ids shifted by one."""
        places = starts_B.to(self._ids.device, non_blocking=True)[:, None] + torch.arange(
            self.sequence + 1, device=self._ids.device
        )
        ids = self._ids[places].to(torch.int64) & self._mask
        return ids[:, :-1], ids[:, 1:]

    def fixed(self, count: int) -> Tensor:
        """The first positions of `count` windows, evenly spread from the first id to the last. The positions are always
        the same.
        """
        last = len(self) - self.sequence - 1
        return torch.arange(count, dtype=torch.int64) * last // max(1, count - 1)

    def work(self, starts_B: Tensor, world: World, micro: int) -> Work:
        """This rank's share of a global batch, in micro-batches of at most `micro` windows."""
        micros = (self._micro(starts_B, part) for part in split(len(starts_B), world, micro))
        return Work(micros, len(starts_B) * self.sequence)

    def _micro(self, starts_B: Tensor, part: Part) -> Micro:
        real = starts_B[part.rows.start : part.rows.stop]
        tokens_BT, targets_BT = self.windows(torch.cat([real, real.new_zeros(part.missing)]) if part.missing else real)
        if part.missing:
            targets_BT = targets_BT.clone()  # copied first, because the ids use the same memory
            targets_BT[len(real) :] = IGNORED
        return Micro((tokens_BT, targets_BT), len(real) * self.sequence, part.rows.start)


class TokenDataset:
    """A prepared dataset of tokens on the training device. Raises ValueError if the dataset does not fit the run."""

    def __init__(self, folder: Path, *, vocab: int, sequence: int, device: torch.device) -> None:
        self.manifest: DatasetManifest = read_manifest(folder)
        tokenizer = self.manifest.facts["tokenizer"]
        if (ids := tokenizer["vocab"]) > vocab:
            raise ValueError(
                f"{folder}: {ids} token ids, but the model's vocabulary (model.vocab) is {vocab}: "
                f"raise it to at least {ids} or prepare the dataset with a smaller tokenizer"
            )
        self.train = Windows(read_tokens(folder, self.manifest.train), sequence, device)
        self.validation = Windows(read_tokens(folder, self.manifest.validation), sequence, device)
        for name, own in (("train", self.train), ("validation", self.validation)):
            if len(own) <= sequence:
                raise ValueError(
                    f"{folder}: {len(own)} {name} tokens, a window needs {sequence + 1}: "
                    "prepare more text or lower data.sequence"
                )
        self.tokenizer: Tokenizer = open_tokenizer(tokenizer["kind"], folder)

    def batch(self, seed: int, step: int, sequences: int, micro: int, world: World) -> Work:
        """This rank's part of the global batch of a step: windows that begin at random positions."""
        return self.train.work(draw(seed, step, sequences, len(self.train) - self.train.sequence), world, micro)

    def fixed(self, windows: int, micro: int, world: World) -> Work:
        """The validation windows as micro-batches, always the same, evenly spread over the held-out stories."""
        return self.validation.work(self.validation.fixed(windows), world, micro)


def read_tokens(folder: Path, names: Sequence[str]) -> NDArray[Any]:
    """The joined shards of one split, as unsigned integers of two or four bytes per token. Raises ValueError."""
    widths = {read_header(folder / name).token_bytes for name in names}
    if len(widths) != 1:
        raise ValueError(f"{folder}: {len(names)} shards of {len(widths)} token sizes; prepare the dataset again")
    kind = np.dtype(f"<u{widths.pop()}")
    return np.concatenate([np.fromfile(folder / name, dtype=kind, offset=HEADER.size) for name in names])


def in_epochs(places: Ids, count: int, order: Callable[[int], Ids]) -> Ids:
    """The entries at `places` of an endless list: epochs of `count` entries, each in the order of `order(epoch)`."""
    entries = np.empty(len(places), dtype=np.int64)
    for epoch in np.unique(places // count):
        here = places // count == epoch
        entries[here] = order(int(epoch))[places[here] % count]
    return entries


def draw(seed: int, step: int, count: int, below: int) -> Tensor:
    """`count` numbers in [0, below), int64. Each is a hash of (seed, step, position), which is the same on every
    machine and with every version of torch.
    """
    mask = (1 << 64) - 1
    start = mix64(np.array([(seed * GOLDEN + step) & mask], dtype=np.uint64))
    counters = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return torch.from_numpy((mix64(counters) % np.uint64(below)).astype(np.int64))


def mix(*words: int) -> int:
    """One number in [0, 2**63) that is made from several numbers. This number seeds random generators."""
    mixed = np.zeros(1, dtype=np.uint64)
    for word in words:
        mixed = mix64(mixed * np.uint64(GOLDEN) + np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    return int(mixed[0]) >> 1
