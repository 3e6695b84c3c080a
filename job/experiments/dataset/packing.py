"""Packs whole examples into rows, puts the rows into a random order, and reads them back, without torch. Packing is
first-fit decreasing: each example, beginning with the longest, goes into the first row with room for it. Afterwards,
rows with very many short examples exchange some of them with other rows. packed.py describes the files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset.shards import HEADER, read_header

MOST_EXAMPLES = (1 << 15) - 1  # a row has at most this many examples, because a mark cannot hold a larger number
# A row exchanges examples if it has more than CROWDED of them, and more than CROWDED_MEANS times the mean.
CROWDED, CROWDED_MEANS = 32, 3
GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea, Flood 2014)
Split = Literal["train", "validation"]
Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised conversation. `counted`: the tokens whose prediction is included in the loss."""

    tokens: Ids
    counted: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How conversations are packed into rows."""

    row: int  # tokens per row
    longest: int  # tokens per example; the rest is cut off
    loss_on: Literal["response", "all"] = "response"
    held_out: float = 0.01  # the share of the examples that is held out for validation
    packing: bool = True  # False for one padded example per row
    prompts: int = 0  # number of held-out questions to keep
    texts: bool = False  # whether to keep the conversations of each training row, so that training can tokenise them
    seed: int = 0  # seed of the random choice of held-out examples

    def words(self) -> str:
        """Words that name everything on which the rows depend. These words are part of the source's name."""
        return ", ".join(f"{key} {getattr(self, key)}" for key in self.__slots__)


def held_out_of(count: int, share: float) -> int:
    """How many of `count` examples are held out for validation."""
    return max(1, round(count * share))


def pack(examples: list[Example], how: Packing) -> list[NDArray[np.int64]]:
    """The rows; each is a list of indices into `examples`."""
    lengths = np.array([len(example.tokens) for example in examples], dtype=np.int64)
    row_of = evened(lengths, first_fit_decreasing(lengths, how.row)) if how.packing else np.arange(len(lengths))
    order = np.argsort(row_of, kind="stable")
    edges = np.flatnonzero(np.diff(row_of[order])) + 1
    rows: list[NDArray[np.int64]] = np.split(order, edges)
    assert all(len(row) <= MOST_EXAMPLES for row in rows)
    return rows


def first_fit_decreasing(lengths: NDArray[np.int64], row: int) -> NDArray[np.int64]:
    """The row of each example. The longest example comes first, and each goes into the first row that has room for it.
    Examples of one length are placed together, since the first of them leaves every earlier row unchanged.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    room = np.empty(0, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        if not len(group):
            continue
        length = int(lengths[group[0]])
        assert 0 < length <= row, (length, row)
        fits = room // length
        total = np.cumsum(fits)
        reached = int(np.searchsorted(total, len(group))) + 1
        places = np.repeat(np.arange(len(fits))[:reached], fits[:reached])[: len(group)]
        unplaced = len(group) - len(places)
        fresh = len(room) + np.arange(unplaced) // (row // length)
        room = np.concatenate([room, np.full(math.ceil(unplaced / (row // length)), row)])
        row_of[group] = np.concatenate([places, fresh])
        room -= length * np.bincount(row_of[group], minlength=len(room))
    return row_of


def evened(lengths: NDArray[np.int64], row_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """The row of each example after exchanges that keep each row's length. After these, only few rows have many more
    examples than the mean. This is useful because the row with the most examples decides how much work the attention
    kernel launches for all rows, and first-fit decreasing puts the shortest examples together into the last rows. A
    crowded row gives several of its shortest examples for one example with exactly as many tokens, from a row that may
    have more examples. If there is no such example, the row stays crowded. If no row is crowded, nothing moves.
    """
    counts = np.bincount(row_of)
    most = max(CROWDED, math.ceil(CROWDED_MEANS * len(lengths) / len(counts)))
    crowded = np.flatnonzero(counts > most)
    if not len(crowded):
        return row_of
    row_of = row_of.copy()
    by_row, ends = np.lexsort((lengths, row_of)), np.cumsum(counts)
    members = [by_row[ends[row] - counts[row] : ends[row]] for row in crowded]  # the shortest examples first
    alike = np.argsort(lengths, kind="stable")
    edges = np.searchsorted(lengths[alike], np.arange(int(lengths.max()) + 2))
    asked = edges[:-1].copy()  # the next example in `alike` for each length, so that no example is used twice
    for row, own in zip(crowded, members, strict=True):
        gone, upto = 0, np.concatenate([[0], np.cumsum(lengths[own])])
        run = int(counts[row]) - most + 1
        while run > 1:
            run = min(run, most - 1, len(own) - gone)
            total = int(upto[gone + run] - upto[gone])
            while total < len(asked) and asked[total] < edges[total + 1]:
                other = alike[asked[total]]
                asked[total] += 1
                there = row_of[other]
                if counts[there] + run - 1 <= most:
                    row_of[own[gone : gone + run]], row_of[other] = there, row
                    counts[there] += run - 1
                    counts[row] -= run - 1
                    gone += run
                    run = int(counts[row]) - most + 2  # as many of the other examples as are needed
                    break
            run -= 1
    return row_of


def order(seed: int, salt: int, count: int) -> NDArray[np.int64]:
    """A permutation of `count`, sorted by a hash of (seed, salt, place); the same on every machine and version."""
    mask = (1 << 64) - 1
    start = np.array([((seed * GOLDEN) ^ (salt * 0xD1342543DE82EF95)) & mask], dtype=np.uint64)
    x = mix64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    permutation: NDArray[np.int64] = np.argsort(mix64(x), kind="stable")
    return permutation


class PackedRows:
    """One split of a packed dataset, in host memory. Raises ValueError for another kind of dataset, or for a damaged
    shard.
    """

    def __init__(self, folder: Path, manifest: DatasetManifest, split: Split) -> None:
        if manifest.kind != "packed":
            raise ValueError(f"{folder}: a dataset of {manifest.kind}, this experiment needs packed rows; prepare it")
        names = manifest.train if split == "train" else manifest.validation
        self.row = int(manifest.facts["row"])
        self.tokens = _load([folder / name for name in names], self.row)  # tokens as [rows, T]
        self.marks = _load([folder / f"marks_{name}" for name in names], self.row)

    def __len__(self) -> int:
        return len(self.tokens)

    def counted(self, rows: NDArray[np.int64]) -> int:
        """The number of targets in these rows that are included in the loss."""
        return int((self.marks[rows] & 1).sum())


def _load(paths: list[Path], row: int) -> NDArray[Any]:
    parts = []
    for path in paths:
        header = read_header(path)
        if header.tokens % row:
            raise ValueError(
                f"{path}: {header.tokens} tokens cannot be divided into rows of {row}; prepare the dataset again"
            )
        parts.append(np.fromfile(path, dtype=f"<u{header.token_bytes}", offset=HEADER.size).reshape(-1, row))
    return np.concatenate(parts)


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
