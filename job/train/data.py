"""Data order, for every experiment, and token windows held on the training device. No loader, no workers, no state.

The rows of step s are a pure function of (seed, s): those of the whole global batch are drawn first (`draw`), then cut
over ranks and micro-batches by position (`split`). Resuming needs nothing but the step. Legend: B windows, T sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from job.dataset.packing import GOLDEN, mix64
from job.dataset.prepare import DatasetManifest, read_manifest
from job.dataset.shards import HEADER, read_header
from job.dataset.tokenizer import Tokenizer, open_tokenizer
from job.train.experiment import Micro, Work
from job.train.parallel import World


class Corpus:
    """One split's tokens as one stream, two or four bytes each."""

    def __init__(self, folder: Path, names: tuple[str, ...], device: torch.device) -> None:
        headers = [read_header(folder / name) for name in names]
        dtypes = {header.token_bytes for header in headers}
        if len(dtypes) != 1:
            raise ValueError(f"{folder}: {len(names)} shards of {len(dtypes)} token sizes; prepare the dataset again")
        kind = np.dtype("<i2" if dtypes == {2} else "<i4")
        parts = [np.fromfile(folder / name, dtype=kind, offset=HEADER.size) for name in names]
        assert sys.byteorder == "little"  # what torch runs on
        self._tokens = torch.from_numpy(np.concatenate(parts)).to(device)
        self._mask = 0xFFFF if dtypes == {2} else 0xFFFFFFFF  # the shards are unsigned, torch gathers signed ones

    def __len__(self) -> int:
        return self._tokens.numel()

    def windows(self, starts_B: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), each [B, T] int64: targets are the tokens one position on."""
        places = starts_B.to(self._tokens.device, non_blocking=True)[:, None] + torch.arange(
            sequence + 1, device=self._tokens.device
        )
        tokens = self._tokens[places].to(torch.int64) & self._mask
        return tokens[:, :-1], tokens[:, 1:]


class Dataset:
    """A prepared dataset on the training device. Raises ValueError when it does not fit the run."""

    def __init__(self, folder: Path, *, vocab: int, sequence: int, device: torch.device) -> None:
        self.manifest: DatasetManifest = read_manifest(folder)
        if self.manifest.vocab > vocab:
            raise ValueError(
                f"{folder}: {self.manifest.vocab} token ids, but the model's vocabulary (model.vocab) is {vocab}: "
                f"raise it to at least {self.manifest.vocab} or prepare the dataset with a smaller tokenizer"
            )
        self.sequence = sequence
        self.train = Corpus(folder, self.manifest.train, device)
        self.validation = Corpus(folder, self.manifest.validation, device)
        for split, corpus in (("train", self.train), ("validation", self.validation)):
            if len(corpus) <= sequence:
                raise ValueError(
                    f"{folder}: {len(corpus)} {split} tokens, a window needs {sequence + 1}: "
                    "prepare more text or lower data.sequence"
                )
        self.tokenizer: Tokenizer = open_tokenizer(self.manifest.tokenizer, folder)

    def batch(self, seed: int, step: int, sequences: int, micro: int, world: World) -> Work:
        """This rank's part of the global batch of a step, in micro-batches of at most `micro` windows, in order."""
        return self._work(self.train, draw(seed, step, sequences, len(self.train) - self.sequence), micro, world)

    def fixed(self, windows: int, micro: int, world: World) -> Work:
        """The same validation windows every time, evenly spread over the held-out stories."""
        last = len(self.validation) - self.sequence - 1
        starts_B = torch.arange(windows, dtype=torch.int64) * last // max(1, windows - 1)
        return self._work(self.validation, starts_B, micro, world)

    def _work(self, corpus: Corpus, starts_B: Tensor, micro: int, world: World) -> Work:
        sequence = self.sequence
        micros = (
            Micro(corpus.windows(starts_B[part.start : part.stop], sequence), len(part) * sequence, part.start)
            for part in split(len(starts_B), world, micro)
        )
        return Work(micros, len(starts_B) * sequence)


def split(total: int, world: World, micro: int) -> list[range]:
    """This rank's micro-batches of a global batch of `total` rows, as places in it: consecutive, at most `micro` rows
    each, and equally many on every rank, because sharded ranks pass through the model together.

    Raises ValueError where that leaves a rank without a row.
    """
    start, stop = (total * rank // world.size for rank in (world.rank, world.rank + 1))
    most = (total + world.size - 1) // world.size
    parts = (most + micro - 1) // micro
    if total // world.size < parts:
        raise ValueError(
            f"{total} rows cannot be cut into {parts} micro-batches on each of {world.size} GPUs: choose a batch that "
            f"is a multiple of {world.size}"
        )
    rows = stop - start
    if rows > (parts - 1) * micro:
        return [range(place, min(place + micro, stop)) for place in range(start, stop, micro)]
    return [range(start + rows * part // parts, start + rows * (part + 1) // parts) for part in range(parts)]


def draw(seed: int, step: int, count: int, below: int) -> Tensor:
    """`count` numbers in [0, below), int64: a hash of (seed, step, position), the same on every machine and torch."""
    mask = (1 << 64) - 1
    start = mix64(np.array([(seed * GOLDEN + step) & mask], dtype=np.uint64))
    counters = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return torch.from_numpy((mix64(counters) % np.uint64(below)).astype(np.int64))


def mix(*words: int) -> int:
    """One number in [0, 2**63) from several: what random generators are seeded with."""
    mixed = np.zeros(1, dtype=np.uint64)
    for word in words:
        mixed = mix64(mixed * np.uint64(GOLDEN) + np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    return int(mixed[0]) >> 1
