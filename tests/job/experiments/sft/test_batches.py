"""Packed rows as micro-batches: every row once per epoch, the same tokens for any number of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.dataset.rendering import TEMPLATES, Renderer, open_chat_tokenizer
from gpufleet.job.experiments.engine.experiment import IGNORED
from gpufleet.job.experiments.engine.packed_rows import PackedBatches
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.models import decoder
from gpufleet.job.experiments.models.decoder import positions
from gpufleet.job.experiments.sft.conversations import prepare_sft
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.kind import from_json
from tests.job import sft_world as sft
from tests.job.decoder_models import FAMILIES, generator, slow_varlen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = from_json("sft-h100", sft.config(data={"examples": 400}))
    assert isinstance(config, SftConfig)
    prepare_sft(path := tmp_path_factory.mktemp("packed") / "data", config)
    return path


def batches(folder: Path, rank: int = 0, size: int = 1) -> PackedBatches:
    world = World(rank=rank, size=size)
    return PackedBatches(folder, read_manifest(folder), world, torch.device("cpu"))


def test_every_row_is_visited_once_per_epoch_in_an_order_of_its_own(folder: Path) -> None:
    found = batches(folder)
    count = len(found.splits["train"])
    steps = found.steps(7, 3)
    visited = np.concatenate([found.step(1, step, 7, 3) for step in range(steps)])
    assert len(visited) == 3 * count
    epochs = visited.reshape(3, count)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(count))
    assert not (epochs[0] == epochs[1]).all()
    assert not (epochs[0] == batches(folder).step(2, 0, count, 1)).all()


def test_the_rows_of_a_step_depend_on_nothing_before_it(folder: Path) -> None:
    one, two = batches(folder), batches(folder)
    for step in range(5):
        one.step(3, step, 4, 2)
    assert one.step(3, 5, 4, 2).tolist() == two.step(3, 5, 4, 2).tolist()


@pytest.mark.parametrize("rows", [16, 13])
def test_the_rows_of_all_ranks_are_those_of_one(folder: Path, rows: int) -> None:
    chosen = batches(folder).step(1, 0, rows, 1)
    alone = list(batches(folder).work("train", chosen, 2).micros)
    wanted = sorted(map(tuple, torch.cat([m.inputs[0] for m in alone]).tolist()))
    for size in (2, 4, 8):
        works = [batches(folder, rank, size).work("train", chosen, 2) for rank in range(size)]
        assert {work.total for work in works} == {sum(m.tokens for m in alone)}
        micros = [list(work.micros) for work in works]
        assert len({len(found) for found in micros}) == 1  # ranks meet in every one
        tokens = torch.cat([m.inputs[0] for found in micros for m in found])
        targets = torch.cat([m.inputs[1] for found in micros for m in found])
        real = (tokens != 0).any(-1)
        assert sorted(map(tuple, tokens[real].tolist())) == wanted
        assert (targets[~real] == IGNORED).all()
        assert sum(m.tokens for found in micros for m in found) == works[0].total


def test_targets_are_the_answers_next_tokens_within_one_example(folder: Path) -> None:
    found = batches(folder)
    rows = found.step(1, 0, 6, 1)
    for micro in found.work("train", rows, 3).micros:
        tokens, targets, documents, *_ = micro.inputs
        counted = targets != IGNORED
        assert micro.tokens == int(counted.sum()) > 0
        assert torch.equal(targets[:, :-1][counted[:, :-1]], tokens[:, 1:][counted[:, :-1]])
        assert not counted[:, -1].any()
        assert not (counted[:, :-1] & (documents[:, 1:] != documents[:, :-1])).any()


def test_starts_are_where_positions_are_zero_and_keep_their_length(folder: Path) -> None:
    found = batches(folder)
    lengths = set()
    for step in range(6):
        for micro in found.work("train", found.step(1, step, 4, 2), 2).micros:
            tokens, _, documents, starts, _ = micro.inputs
            assert starts.dtype == torch.int32
            lengths.add(len(starts))
            begins = (positions(documents).flatten() == 0).nonzero().flatten().tolist()
            assert starts[: len(begins)].tolist() == begins
            assert set(starts[len(begins) :].tolist()) == {tokens.numel()}
    assert len(lengths) == 1


def test_no_two_starts_are_farther_apart_than_an_example_and_no_loss_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_json("sft-h100", sft.config(data={"longest": 40, "held_out": 0.1}))
    assert isinstance(config, SftConfig)
    prepare_sft(tmp_path / "data", config)
    shape = replace(FAMILIES["llama"], vocab=512)
    module = decoder.build(shape, compute=torch.float64, dtype=torch.float64, generator=generator())
    last = batches(tmp_path / "data", rank=1, size=2)  # of three rows, one: another is padding alone
    works = [last.work("train", np.arange(3), 2), last.work("validation", np.array([0, 1, 1]), 2)]
    micros = [micro for work in works for micro in work.micros]
    assert any((micro.inputs[2][-1] == 0).all() for micro in micros)
    assert len({len(micro.inputs[3]) for micro in micros}) == 1
    for micro in micros:
        tokens, targets, documents, starts, longest = micro.inputs
        assert longest == 40
        assert max(end - start for start, end in itertools.pairwise(starts.tolist())) <= longest
        assert starts[-1] == tokens.numel()
        masked = module(tokens, targets, documents).loss_sum
        with monkeypatch.context() as patched:
            patched.setattr(decoder, "varlen_runs", lambda device, compute: True)
            patched.setattr("gpufleet.job.experiments.models.decoder.varlen.varlen_attn", slow_varlen)
            torch.testing.assert_close(module(*micro.inputs).loss_sum, masked, rtol=1e-12, atol=0)


def test_a_row_of_one_short_example_has_room_for_its_padding_in_pieces(tmp_path: Path) -> None:
    parameters = sft.config(data={"examples": 20, "row": 512, "longest": 64}, measures={"packing": False})
    config = from_json("sft-h100", parameters)
    assert isinstance(config, SftConfig)
    prepare_sft(tmp_path / "data", config)
    found = batches(tmp_path / "data")
    for micro in found.work("train", np.arange(len(found.splits["train"])), 4).micros:
        tokens, _, _, starts, longest = micro.inputs
        assert starts[-1] == tokens.numel()
        assert starts.diff().max() <= longest == 64


def test_validation_rows_are_spread_and_fixed(folder: Path) -> None:
    found = batches(folder)
    count = len(found.splits["validation"])
    assert found.fixed(count + 5).tolist() == list(range(count))
    assert found.fixed(2).tolist() == [0, count // 2]


@pytest.mark.parametrize("source", ["generated-pairs", "jsonl"])
def test_rows_tokenised_while_training_are_the_prepared_ones(source: str, tmp_path: Path) -> None:
    given = sft.config(measures={"pretokenised": False}, data={"longest": 40, "source": source})
    config = from_json("sft-h100", given)
    assert isinstance(config, SftConfig)
    pairs = [{"instruction": f"what\u2028is\u2029{i}\u0085?", "response": "the answer"} for i in range(60)]
    file = sft.jsonl(tmp_path, *pairs) if source == "jsonl" else None
    tokenizer_file = sft.bpe(tmp_path, *sft.LLAMA)
    manifest = prepare_sft(tmp_path / "data", config, text=file, tokenizer=tokenizer_file)
    tokenizer = open_chat_tokenizer(manifest.facts["tokenizer"], tmp_path / "data")
    renderer = Renderer(TEMPLATES["llama"], tokenizer)
    device = torch.device("cpu")
    plain = PackedBatches(tmp_path / "data", manifest, World(), device)
    anew = PackedBatches(tmp_path / "data", manifest, World(), device, renderer)
    rows = np.arange(len(plain.splits["train"]))
    for one, two in zip(plain.work("train", rows, 4).micros, anew.work("train", rows, 4).micros, strict=True):
        assert one.tokens == two.tokens
        assert all(torch.equal(a, b) for a, b in zip(one.inputs[:4], two.inputs[:4], strict=True))
        assert one.inputs[4] == two.inputs[4] == 40
    assert anew.waited_s > 0
