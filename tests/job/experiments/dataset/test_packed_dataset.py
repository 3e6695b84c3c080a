"""From conversations to packed rows: what is cut, counted, packed, held out, and refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset import packed
from gpufleet.job.experiments.dataset.chat import GeneratedPairs, JsonlChats
from gpufleet.job.experiments.dataset.packing import PackedRows, Packing, evened, first_fit_decreasing, order
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.dataset.rendering import (
    TEMPLATES,
    FileTokenizer,
    Renderer,
    WordTokenizer,
    open_chat_tokenizer,
)
from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.sft.conversations import prepare_sft
from gpufleet.job.experiments.sft.spec import ChatData, RowEval, SftConfig
from tests.job.sft_world import CHATML, LLAMA, bpe, jsonl

CONFIG = SftConfig(
    model=DecoderConfig(vocab=512, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=176),
    data=ChatData(source="generated-pairs", examples=600, row=128, longest=64),
    eval=RowEval(prompts=3),
)


PAIRS = [{"instruction": f"what is {i}", "response": f"the answer {i} " * (1 + i % 7)} for i in range(80)]


def rows_of(folder: Path, manifest: DatasetManifest) -> list[list[tuple[int, ...]]]:
    """The examples of every training row, as tuples of ids."""
    split = PackedRows(folder, manifest, "train")
    found = []
    for tokens, marks in zip(split.tokens, split.marks, strict=True):
        numbers = range(1, int(marks.max() >> 1) + 1)
        found.append([tuple(int(t) for t in tokens[marks >> 1 == n]) for n in numbers])
    return found


def test_every_example_is_packed_whole_and_once(tmp_path: Path) -> None:
    manifest = prepare_sft(tmp_path / "data", CONFIG)
    pairs = GeneratedPairs(600, CONFIG.seed)
    renderer = Renderer(TEMPLATES["llama"], WordTokenizer.from_text(pairs.text(), TEMPLATES["llama"]))
    wanted = sorted(tuple(r.tokens) for r in renderer.render(list(pairs.conversations())))
    train = [example for row in rows_of(tmp_path / "data", manifest) for example in row]
    held = PackedRows(tmp_path / "data", manifest, "validation")
    held_examples = [
        tuple(int(t) for t in tokens[marks >> 1 == n])
        for tokens, marks in zip(held.tokens, held.marks, strict=True)
        for n in range(1, int(marks.max() >> 1) + 1)
    ]
    assert sorted(train + held_examples) == wanted
    assert len(held_examples) == manifest.facts["held_out_examples"] == 6
    assert len(train) == manifest.facts["examples"] == 594
    lengths = sorted(map(len, train))
    assert sum(lengths) == manifest.facts["tokens"]
    assert (manifest.facts["mean_tokens"], manifest.facts["p95_tokens"]) == (round(sum(lengths) / 594, 1), lengths[564])
    assert 0.95 < manifest.facts["fill"] <= 1.0


def test_the_loss_counts_the_answer_alone_or_everything_but_the_first_token(tmp_path: Path) -> None:
    path, file = jsonl(tmp_path, *PAIRS), bpe(tmp_path, *LLAMA)
    renderer = Renderer(TEMPLATES["llama"], FileTokenizer(file))
    for loss_on in ("response", "all"):
        how = Packing(row=256, longest=256, loss_on=loss_on)
        folder = tmp_path / loss_on
        manifest = packed.prepare_packed(
            folder, JsonlChats(path), renderer.tokenizer, renderer.template, how, model_vocab=512
        )
        split = PackedRows(folder, manifest, "train")
        tokens, marks = split.tokens[0], split.marks[0]
        first = marks >> 1 == 1
        counted = [int(t) for t in tokens[first & (marks & 1 == 1)]]
        if loss_on == "all":
            assert counted == [int(t) for t in tokens[first]][1:]
        else:
            assert renderer.tokenizer.decode(counted).startswith("the answer")
            assert counted[-1] == renderer.end
        assert split.counted(np.arange(len(split))) == manifest.facts["loss_tokens"]
        assert len(PackedRows(folder, manifest, "validation")) == manifest.facts["held_out_rows"]


def test_generated_pairs_for_base_weights_are_in_their_tokenizers_ids(tmp_path: Path) -> None:
    manifest = prepare_sft(tmp_path / "data", CONFIG, tokenizer=bpe(tmp_path, *LLAMA))
    assert manifest.facts["tokenizer"] == "tokenizer.json"


def test_the_same_input_gives_the_same_bytes_and_is_recognised(tmp_path: Path) -> None:
    said: list[str] = []
    one = prepare_sft(tmp_path / "one", CONFIG)
    two = prepare_sft(tmp_path / "two", CONFIG)
    assert one.sha256 == two.sha256
    prepare_sft(tmp_path / "one", CONFIG, say=said.append)
    assert said[0].endswith("is prepared already")
    assert "594 examples" in said[1]
    other = prepare_sft(tmp_path / "one", replace(CONFIG, seed=3))
    assert other.sha256 != one.sha256


def test_a_folder_that_cannot_be_replaced_is_said_before_anything_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_sft(tmp_path / "data", CONFIG)
    (tmp_path / "data" / "mine.jsonl").write_text("{}")
    monkeypatch.setattr(packed, "_read", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(ValueError, match=r"holds mine\.jsonl besides the dataset"):
        prepare_sft(tmp_path / "data", replace(CONFIG, seed=3))
    assert (tmp_path / "data" / "mine.jsonl").exists()


def test_long_examples_are_cut_and_reported_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    long = {"instruction": "what is the sum of two numbers " * 40, "response": "the answer"}
    path, file = jsonl(tmp_path, *PAIRS, long), bpe(tmp_path, *LLAMA)
    config = replace(CONFIG, data=ChatData(row=128, longest=40))
    said: list[str] = []
    manifest = prepare_sft(tmp_path / "data", config, text=path, tokenizer=file, say=said.append)
    assert manifest.facts["dropped"] == 1
    assert manifest.facts["truncated"] > 1
    assert max(len(e) for row in rows_of(tmp_path / "data", manifest) for e in row) == 40
    assert f"truncated at 40: {manifest.facts['truncated']}" in said[0]


def test_without_packing_each_row_holds_one_example(tmp_path: Path) -> None:
    config = replace(CONFIG, measures=replace(CONFIG.measures, packing=False))
    manifest = prepare_sft(tmp_path / "data", config)
    assert manifest.facts["rows"] == manifest.facts["examples"]
    assert manifest.facts["most_examples"] == 1
    assert manifest.facts["fill"] < 0.4


def test_held_out_examples_that_are_trained_on_too_are_said(tmp_path: Path) -> None:
    said, config = list[str](), replace(CONFIG, data=ChatData(row=128, longest=64, held_out=0.1))
    tokenizer = bpe(tmp_path, *LLAMA)
    prepare_sft(tmp_path / "once", config, text=jsonl(tmp_path, *PAIRS), tokenizer=tokenizer, say=said.append)
    assert "warning" not in "".join(said)
    lines = jsonl(tmp_path, *[PAIRS[0]] * 50)
    prepare_sft(tmp_path / "copies", config, text=lines, tokenizer=tokenizer, say=said.append)
    assert "warning: held-out examples that are trained on as well: 5 of 5, which makes the validation loss" in said[-1]


def test_held_out_questions_are_kept_with_their_answers(tmp_path: Path) -> None:
    manifest = prepare_sft(tmp_path / "data", CONFIG)
    prompts = [json.loads(line) for line in (tmp_path / "data" / packed.PROMPTS).read_text().splitlines()]
    assert len(prompts) == 3 == manifest.facts["prompts"]
    held = PackedRows(tmp_path / "data", manifest, "validation").tokens.tolist()
    tokenizer = open_chat_tokenizer(manifest.facts["tokenizer"], tmp_path / "data")
    for prompt in prompts:
        asked = prompt["prompt"].removeprefix("Reverse this list of numbers: ").split()
        assert prompt["reference"].split() == asked[::-1]
        assert tokenizer.decode(prompt["tokens"]).endswith("assistant")
        assert any(str(prompt["tokens"])[1:-1] in str(row) for row in held)


def test_no_question_is_longer_than_an_example_of_training(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "the answer"}]
    endless = {"messages": turn * 30}  # its first answer lies within data.longest, its last question far beyond
    path, file = jsonl(tmp_path, *PAIRS, *[endless] * 40), bpe(tmp_path, *LLAMA)
    config = replace(CONFIG, data=ChatData(row=128, longest=64, held_out=0.5), eval=RowEval(prompts=200))
    manifest = prepare_sft(tmp_path / "data", config, text=path, tokenizer=file)
    prompts = [json.loads(line) for line in (tmp_path / "data" / packed.PROMPTS).read_text().splitlines()]
    assert max(len(prompt["tokens"]) for prompt in prompts) <= 64
    assert 20 < len(prompts) == manifest.facts["prompts"] < manifest.facts["held_out_examples"]


def test_keys_that_say_something_and_are_not_read_are_named_with_their_lines(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "d"}]
    extra = [{"context": "c", "input": "", "id": n} for n in range(3)] + [{"input": "only here", "\ud800": 1}]
    lines = [{"instruction": "a", "response": "b", **keys} for keys in extra] + [{"messages": turns, "tools": []}]
    path, said = jsonl(tmp_path, *lines), list[str]()
    prepare_sft(tmp_path / "data", CONFIG, text=path, tokenizer=bpe(tmp_path, *LLAMA), say=said.append)
    assert "not used in training: context (3 lines), id (3 lines), input (1" in "".join(said)
    assert "messages.name (1" in "".join(said)
    assert "\\ud800 (1 line)" in "".join(said)  # which no output takes as it is
    assert "tools" not in "".join(said)


@pytest.mark.parametrize("key", ["weight", "train", "training"])
@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_an_answer_that_is_not_to_be_learned_is_context_alone(
    loss_on: Literal["response", "all"], key: str, tmp_path: Path
) -> None:
    turns = [
        ("user", "a", {}),
        ("assistant", "the lie", {key: 0}),
        ("user", "b", {}),
        ("assistant", "the sum", {key: 1}),
    ]
    lines = [{"messages": [{"role": role, "content": text, **more} for role, text, more in turns]}] * 3
    said: list[str] = []
    config = replace(CONFIG, data=replace(CONFIG.data, loss_on=loss_on))
    tokenizer = bpe(tmp_path, *LLAMA)
    prepare_sft(tmp_path / "data", config, text=jsonl(tmp_path, *lines), tokenizer=tokenizer, say=said.append)
    assert "not learned, because the file says so: 3 answers" in said
    rows = PackedRows(tmp_path / "data", read_manifest(tmp_path / "data"), "train")
    bpe_ids = FileTokenizer(tokenizer)
    learned = bpe_ids.decode(rows.tokens[0][(rows.marks[0] & 1) == 1].tolist())
    assert "the lie" not in learned
    assert learned.count("the sum") == 2
    assert ("user" in learned) is (loss_on == "all")


@pytest.mark.parametrize(("family", "specials", "kept"), [("llama", LLAMA, False), ("qwen3", CHATML, True)])
def test_blanks_are_kept_or_counted_as_the_familys_template_has_them(
    family: Literal["llama", "qwen3"], specials: tuple[str, ...], kept: bool, tmp_path: Path
) -> None:
    said: list[str] = []
    config = replace(CONFIG, model=replace(CONFIG.model, family=family))
    lines = [{"instruction": "def add(a, b):", "response": "    total = a + b\n    return total\n"}] * 3
    tokenizer = bpe(tmp_path, *specials)
    prepare_sft(tmp_path / "data", config, text=jsonl(tmp_path, *lines), tokenizer=tokenizer, say=said.append)
    counted = "without the blanks around them, as template llama-3 has them: 3 turns" in "".join(said)
    assert counted is not kept
    prompt = json.loads((tmp_path / "data" / packed.PROMPTS).read_text().splitlines()[0])
    assert prompt["reference"].startswith("    total")
    rows = PackedRows(tmp_path / "data", read_manifest(tmp_path / "data"), "train")
    learned = FileTokenizer(tokenizer).decode(rows.tokens[0][(rows.marks[0] & 1) == 1].tolist())
    assert learned.startswith(
        "    total = a + b\n    return total\n" if kept else "total = a + b\n    return totaltotal"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": None, "tokenizer": None}, "name the file, gpufleet prepare STACK examples.jsonl"),
        ({"tokenizer": None}, "storage.base_weights"),
        ({"vocab": 200}, r"the model's vocabulary \(job.parameters.model.vocab\) is 200"),
        ({"specials": CHATML}, r"no token <\|eot_id\|>"),
        ({"lines": ()}, "empty; give one JSON object per line"),
        (
            {"lines": PAIRS[:1]},
            r"examples\.jsonl: examples with .* data\.longest, 64 tokens: 1; at least 2",
        ),
    ],
)
def test_what_cannot_be_prepared_says_what_to_do(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    asked = {"text": jsonl(tmp_path, *change.get("lines", PAIRS)), "specials": LLAMA, "vocab": 512, **change}
    tokenizer = asked.get("tokenizer", bpe(tmp_path, *asked["specials"]))
    config = replace(CONFIG, data=ChatData(row=128, longest=64), model=replace(CONFIG.model, vocab=asked["vocab"]))
    with pytest.raises(ValueError, match=words):
        prepare_sft(tmp_path / "data", config, text=asked["text"], tokenizer=tokenizer)
    assert not (tmp_path / "data").exists()


def test_examples_longer_than_a_row_are_a_mistake_of_the_config() -> None:
    config = replace(CONFIG, data=replace(CONFIG.data, longest=129))
    assert [path for path, _ in config.problems()] == ["data.longest"]


def slow_first_fit(lengths: list[int], row: int) -> list[int]:
    room: list[int] = []
    found = [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((r for r, left in enumerate(room) if left >= lengths[i]), len(room))
        if place == len(room):
            room.append(row)
        room[place] -= lengths[i]
        found[i] = place
    return found


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_first_fit_decreasing(seed: int) -> None:
    source = np.random.default_rng(seed)
    lengths = source.integers(1, 65, 400)
    assert first_fit_decreasing(lengths, 64).tolist() == slow_first_fit(lengths.tolist(), 64)


@pytest.mark.parametrize(
    ("mean", "sigma", "before", "after"),
    [(361, 0.7, 72, 36), (361, 1.2, 213, 43), (40, 0.5, 277, 277), (40, 0.9, 489, 306)],
    ids=["realistic", "wide", "all short", "short and wide"],
)
def test_crowded_rows_trade_short_examples_for_a_long_one_of_as_many_tokens(
    mean: float, sigma: float, before: int, after: int
) -> None:
    drawn = np.random.default_rng(20261121).lognormal(np.log(mean) - sigma**2 / 2, sigma, 6000)
    lengths = np.clip(np.rint(drawn), 8, 1024).astype(np.int64)
    first = first_fit_decreasing(lengths, 4096)
    row_of = evened(lengths, first)
    assert (np.bincount(row_of, weights=lengths) == np.bincount(first, weights=lengths)).all()
    assert (np.bincount(first).max(), np.bincount(row_of).max()) == (before, after)
    assert (row_of == evened(lengths, first)).all()


def test_rows_of_which_none_is_crowded_stay_as_they_are() -> None:
    lengths = np.random.default_rng(1).integers(4, 65, 400)
    first = first_fit_decreasing(lengths, 128)
    assert (evened(lengths, first) == first).all()


def test_an_order_is_a_permutation_that_seed_and_epoch_change() -> None:
    first = order(1, 0, 1000)
    assert sorted(first.tolist()) == list(range(1000))
    assert not (first == order(1, 1, 1000)).all()
    assert not (first == order(2, 0, 1000)).all()
    assert first.tolist()[:3] == [591, 281, 773]  # on every machine: a run may go on on another


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    class Wide:
        kind, id, vocab, files = "words", "wide", 128_256, dict[str, bytes]()

        def special(self, name: str) -> int:
            return 128_000 + len(name)

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [[100_000 + len(text)] * 3 for text in texts]

        def decode(self, ids: Sequence[int]) -> str:
            return ""

    how = Packing(row=64, longest=64)
    manifest = packed.prepare_packed(
        tmp_path / "data", GeneratedPairs(50, 1), Wide(), TEMPLATES["llama"], how, model_vocab=128_256
    )
    ids = PackedRows(tmp_path / "data", manifest, "train").tokens
    assert ids.dtype == np.uint32
    assert {128_000 + len("<|eot_id|>"), 128_000 + len("<|begin_of_text|>")} <= set(ids.ravel().tolist())
