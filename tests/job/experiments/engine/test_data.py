"""Batches are a pure function of (seed, step), however they are cut and whatever happened before."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from gpufleet.job.experiments.dataset.shards import HEADER, write_shard
from gpufleet.job.experiments.engine.data import TokenDataset, Windows, draw, mix, read_tokens, split
from gpufleet.job.experiments.engine.experiment import IGNORED, Work
from gpufleet.job.experiments.engine.parallel import World
from tests.job import train_world as world

CPU = torch.device("cpu")
SEQUENCE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.make(tmp_path_factory.mktemp("data")) / "data"


@pytest.fixture(scope="module")
def dataset(folder: Path) -> TokenDataset:
    return TokenDataset(folder, vocab=160, sequence=SEQUENCE, device=CPU)


def batch(dataset: TokenDataset, seed: int, step: int, micro: int = 8) -> torch.Tensor:
    return tokens_of(dataset.batch(seed, step, 8, micro, World()))


def tokens_of(work: Work) -> torch.Tensor:
    return torch.cat([micro.inputs[0] for micro in work.micros])


def windows(folder: Path, start: int, sequence: int, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
    return Windows(read_tokens(folder, names), sequence, CPU).windows(torch.tensor([start]))


def test_a_step_has_the_same_batch_whatever_was_drawn_before(dataset: TokenDataset) -> None:
    alone = batch(dataset, 1, 41)
    torch.manual_seed(0)
    for step in (40, 7, 41):
        after = batch(dataset, 1, step)
    assert torch.equal(alone, after)


def test_steps_and_seeds_have_different_batches(dataset: TokenDataset) -> None:
    batches = [batch(dataset, seed, step) for seed in (1, 2) for step in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_parts_of_all_ranks_together_are_the_global_batch_in_order(
    dataset: TokenDataset, ranks: int, micro: int
) -> None:
    works = [dataset.batch(1, 3, 8, micro, World(rank=rank, size=ranks)) for rank in range(ranks)]
    assert {work.total for work in works} == {8 * SEQUENCE}
    assert torch.equal(torch.cat([tokens_of(work) for work in works]), batch(dataset, 1, 3))


@pytest.mark.parametrize("total", [8, 9, 24, 100, 250])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", [1, 2, 3, 16])
def test_every_row_has_one_rank_and_the_ranks_meet_in_micro_batches_of_one_size(
    total: int, ranks: int, micro: int
) -> None:
    parts = [split(total, World(rank=rank, size=ranks), micro) for rank in range(ranks)]
    assert [place for own in parts for part in own for place in part.rows] == list(range(total))
    sizes = [[len(part.rows) + part.missing for part in own] for own in parts]
    assert all(own == sizes[0] for own in sizes)
    assert max(sizes[0]) <= micro
    assert sum(part.missing for own in parts for part in own) < ranks


def test_where_rows_run_short_some_without_targets_take_their_place(dataset: TokenDataset) -> None:
    works = [dataset.batch(1, 3, 5, 2, World(rank=rank, size=2)) for rank in range(2)]
    micros = [list(work.micros) for work in works]
    assert [[micro.tokens // SEQUENCE for micro in own] for own in micros] == [[2, 1], [2, 0]]
    assert (micros[1][-1].inputs[1] == IGNORED).all()
    assert {work.total for work in works} == {5 * SEQUENCE}


def test_a_micro_batch_that_does_not_divide_leaves_a_smaller_last_one(dataset: TokenDataset) -> None:
    micros = list(dataset.batch(1, 3, 8, 3, World()).micros)
    assert [(len(micro.inputs[0]), micro.place) for micro in micros] == [(3, 0), (3, 3), (2, 6)]


def test_the_seeds_of_micro_batches_differ_by_seed_step_and_place() -> None:
    seeds = {mix(seed, step, place) for seed in range(3) for step in range(20) for place in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert mix(1 << 40, 0, 0) not in seeds
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_the_rows_of_a_batch_are_different_windows() -> None:
    starts = draw(1337, 5, 64, 11_000_000)
    assert len(set(starts.tolist())) == 64


def test_starts_are_the_same_numbers_on_every_machine() -> None:
    # SplitMix64 worked out with Python's own integers
    assert draw(1337, 0, 3, 1_000_000).tolist() == [444244, 368635, 632269]


def test_starts_cover_the_corpus_evenly() -> None:
    starts = torch.cat([draw(7, step, 100, 10) for step in range(100)])
    assert torch.bincount(starts, minlength=10).min() > 900


def test_every_window_of_the_corpus_is_drawn(dataset: TokenDataset) -> None:
    short = copy.copy(dataset)
    short.train = Windows(np.arange(SEQUENCE + 2, dtype=np.uint16), SEQUENCE, CPU)
    assert set(batch(short, 1, 0)[:, 0].tolist()) == {0, 1}


def test_targets_are_the_tokens_one_position_on(dataset: TokenDataset) -> None:
    for micro in dataset.batch(1, 0, 4, 4, World()).micros:
        tokens, targets = micro.inputs
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_last_window_ends_with_the_last_token(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", list(range(20)), 50257)
    tokens, targets = windows(tmp_path, 20 - 16 - 1, 16, "a.bin")
    assert targets[0, -1] == 19
    assert tokens[0, 0] == 3


def test_ids_beyond_32767_survive_two_byte_shards_and_shards_join_into_one_stream(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", [40000, 50256], 50257)
    write_shard(tmp_path / "b.bin", [65535, 1], 65536)
    tokens, targets = windows(tmp_path, 0, 3, "a.bin", "b.bin")
    assert (tokens.tolist(), targets.tolist()) == ([[40000, 50256, 65535]], [[50256, 65535, 1]])
    assert tokens.dtype == torch.int64


def test_a_vocabulary_beyond_65536_takes_four_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", [70000, 3], 100_000)
    assert (tmp_path / "a.bin").stat().st_size == HEADER.size + 8
    assert windows(tmp_path, 0, 1, "a.bin")[0].tolist() == [[70000]]


def test_validation_windows_are_always_the_same_and_spread_over_the_held_out_text(dataset: TokenDataset) -> None:
    first, second = (tokens_of(dataset.fixed(4, micro, World())) for micro in (4, 3))
    assert torch.equal(first, second)
    assert first.shape == (4, SEQUENCE)
    assert len({tuple(row) for row in first.tolist()}) == 4


def test_a_vocabulary_smaller_than_the_datasets_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"132 token ids, but the model's vocabulary \(model.vocab\) is 100"):
        TokenDataset(folder, vocab=100, sequence=SEQUENCE, device=CPU)


def test_a_window_longer_than_the_held_out_text_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="validation tokens, a window needs 1025"):
        TokenDataset(folder, vocab=160, sequence=1024, device=CPU)


@pytest.mark.parametrize("bytes_more", [-2, 2])
def test_a_shard_of_other_tokens_than_its_header_says_is_refused(tmp_path: Path, bytes_more: int) -> None:
    world.make(tmp_path)
    path = tmp_path / "data" / "train_00000.bin"
    content = path.read_bytes()
    path.write_bytes((content + b"\0\0")[: len(content) + bytes_more])
    with pytest.raises(ValueError, match="the header says"):
        TokenDataset(tmp_path / "data", vocab=160, sequence=SEQUENCE, device=CPU)


def test_the_dataset_carries_its_tokenizer(dataset: TokenDataset) -> None:
    tokenizer = dataset.tokenizer
    assert tokenizer.decode(tokenizer.encode("One day, a dog")) == "One day, a dog"
