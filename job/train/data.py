"""Token windows from a prepared dataset, held on the training device. No loader, no worker processes, no state.

The windows of step s are a pure function of (seed, s): those of the whole global batch are drawn first, then cut into
micro-batches by position. Resuming needs nothing but the step. Legend: B windows, T sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from job.dataset.prepare import DatasetManifest, read_manifest
from job.dataset.shards import HEADER, read_header
from job.dataset.tokenizer import Tokenizer, open_tokenizer

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014)


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
        places = starts_B.to(self._tokens.device)[:, None] + torch.arange(sequence + 1, device=self._tokens.device)
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

    def micro_batches(self, seed: int, step: int, sequences: int, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The global batch of a step in micro-batches of at most `micro` windows, in order."""
        starts_B = draw(seed, step, sequences, len(self.train) - self.sequence)
        for part in torch.split(starts_B, micro):
            yield self.train.windows(part, self.sequence)

    def fixed(self, windows: int, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same validation windows every time, evenly spread over the held-out stories."""
        last = len(self.validation) - self.sequence - 1
        starts_B = torch.arange(windows, dtype=torch.int64) * last // max(1, windows - 1)
        for part in torch.split(starts_B, micro):
            yield self.validation.windows(part, self.sequence)


def draw(seed: int, step: int, count: int, below: int) -> Tensor:
    """`count` numbers in [0, below), int64: a hash of (seed, step, position), the same on every machine and torch."""
    mask = (1 << 64) - 1
    start = _mix(np.array([(seed * GOLDEN + step) & mask], dtype=np.uint64))
    counters = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return torch.from_numpy((_mix(counters) % np.uint64(below)).astype(np.int64))


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
