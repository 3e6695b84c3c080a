"""Whole examples packed into rows of one length: the data of sft-h100 and kernel-sft.

    dataset.json           kind "packed"; facts: examples, tokens, mean_tokens, p95_tokens, fill, truncated, rows, ...
    train_00000.bin        rows of token ids, one after the other (shards.py; 2 bytes each, 4 above 65,536 ids)
    marks_train_00000.bin  2 bytes per token: 2 x number of the example in its row, from 1; + 1 where the loss counts
                           the token; 0: padding
    validation_*, marks_validation_*   the same for the examples held out
    prompts.jsonl          held-out questions in ids, with the answer that the data gives
    texts.jsonl            only on request: the conversations of each training row, one row per line
    tokenizer.json or words.json

packing.py fills the rows. The same input gives the same bytes. No torch. User mistakes raise ValueError with the choice
to make.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset import prepare
from gpufleet.job.experiments.dataset.chat import Chats
from gpufleet.job.experiments.dataset.packing import Example, Packing, Split, held_out_of, order, pack
from gpufleet.job.experiments.dataset.rendering import ChatTokenizer, Rendered, Renderer, Template
from gpufleet.job.experiments.dataset.shards import write_payload
from gpufleet.job.text import counted

PROMPTS, TEXTS = "prompts.jsonl", "texts.jsonl"
BATCH = 1000  # number of conversations that are tokenised at once
# this version is raised when the code makes other tokens from the same file, so that an older dataset is prepared again
RENDERED = 2
UNCLOSED = 0.1  # warns if a larger share of examples has no closing token, because the model would learn not to stop


@dataclass(slots=True)
class _Counts:
    """Numbers of examples that were changed or dropped while the source was read."""

    truncated: int = 0
    dropped: int = 0  # examples that were cut so short that nothing of the answer is left
    unclosed: int = 0  # examples whose answer was cut
    unlearned: int = 0  # answers that the file excludes from the loss
    trimmed: int = 0  # turns from which blanks were removed
    examples: list[Example] = field(default_factory=list)
    conversations: list[int] = field(default_factory=list)  # each example's number in the source


def prepare_packed(
    folder: Path,
    chats: Chats,
    tokenizer: ChatTokenizer,
    template: Template,
    how: Packing,
    *,
    model_vocab: int,
    say: Callable[[str], None] = lambda line: None,
) -> DatasetManifest:
    """The packed dataset in `folder`, which is made if it does not exist. Prints a report. Raises ValueError."""
    if tokenizer.vocab > model_vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab} ids, the model's vocabulary (job.parameters.model.vocab) is "
            f"{model_vocab}: name the tokenizer of these base weights, or raise model.vocab"
        )
    source = f"{chats.name}; {tokenizer.id}, {template.name}; {how.words()}; tokens {RENDERED}"
    existing = prepare.existing_dataset(folder)
    if existing is not None and existing.source == source:
        say(f"{folder} is prepared already")
        report(existing, say)
        return existing
    renderer = Renderer(template, tokenizer)
    read = _read(chats, renderer, how)
    count = len(read.examples)
    held = set(order(how.seed, count, count)[: held_out_of(count, how.held_out)].tolist())
    splits: dict[Split, list[Example]] = {
        "train": [example for i, example in enumerate(read.examples) if i not in held],
        "validation": [read.examples[i] for i in sorted(held)],
    }
    rows = {split: pack(examples, how) for split, examples in splits.items()}
    names = {split: _names(split, len(split_rows), how.row) for split, split_rows in rows.items()}
    prompts = _prompts(chats, [read.conversations[i] for i in sorted(held)], renderer, how)

    def write(made: Path) -> None:
        for split, examples in splits.items():
            _write_rows(made, names[split], examples, rows[split], how.row, tokenizer.vocab)
        (made / PROMPTS).write_text("".join(prompts), encoding="utf-8")
        if how.texts:
            numbers = [number for i, number in enumerate(read.conversations) if i not in held]
            _write_texts(made / TEXTS, chats, [[numbers[i] for i in row] for row in rows["train"]])
        for name, content in tokenizer.files.items():
            (made / name).write_bytes(content)

    facts = _facts(splits, rows, how, read) | {
        "vocab": tokenizer.vocab,
        "tokenizer": tokenizer.kind,
        "tokenizer_id": tokenizer.id,
        "template": template.name,
        "stop": renderer.end,
        "prompts": len(prompts),
    }
    manifest = prepare.publish(
        folder,
        kind="packed",
        source=source,
        facts=facts,
        write=write,
        train=names["train"],
        validation=names["validation"],
    )
    report(manifest, say)
    if twice := _learned_too(splits):
        say(
            f"warning: held-out examples that are trained on as well: {twice:,} of {len(held):,}, which makes the"
            " validation loss look better; keep each text in the file only once"
        )
    if how.prompts and not prompts:
        say(f"no held-out question is within data.longest, {how.longest} tokens: none is answered after training")
    return manifest


def cut(rendered: Rendered, loss_on: str, longest: int) -> Example:
    """The first `longest` tokens, and which of them are included in the loss. The first token never is, because it is
    not predicted.
    """
    tokens = np.array(rendered.tokens[:longest], dtype=np.uint32)
    counted = np.array(rendered.answered if loss_on == "response" else rendered.left, dtype=np.bool_)[:longest]
    counted ^= loss_on == "all"  # all tokens except those of excluded answers
    counted[0] = False
    return Example(tokens, counted)


def _read(chats: Chats, renderer: Renderer, how: Packing) -> _Counts:
    read = _Counts()
    stream = enumerate(chats.conversations())
    while batch := list(itertools.islice(stream, BATCH)):
        for (number, turns), rendered in zip(batch, renderer.render([turns for _, turns in batch]), strict=True):
            read.unlearned += sum(not turn.learned for turn in turns)
            read.trimmed += renderer.template.trims and sum(turn.text != turn.text.strip() for turn in turns)
            read.truncated += len(rendered.tokens) > how.longest
            example = cut(rendered, how.loss_on, how.longest)
            if not example.counted.any():
                read.dropped += 1
                continue
            read.unclosed += not (example.counted & (example.tokens == renderer.end)).any()
            read.examples.append(example)
            read.conversations.append(number)
    if len(read.examples) < 2:
        raise ValueError(
            f"{getattr(chats, 'path', chats.name)}: examples with an answer within data.longest, {how.longest} tokens: "
            f"{len(read.examples)}; at least 2 are needed, one of them is held out"
        )
    return read


def _learned_too(splits: dict[Split, list[Example]]) -> int:
    """How many held-out examples have the same tokens as a training example."""
    held = [example.tokens.tobytes() for example in splits["validation"]]
    learned = set(held).intersection(example.tokens.tobytes() for example in splits["train"])
    return sum(tokens in learned for tokens in held)


def _facts(
    splits: dict[Split, list[Example]], rows: dict[Split, list[NDArray[np.int64]]], how: Packing, read: _Counts
) -> dict[str, Any]:
    lengths = np.array([len(example.tokens) for example in splits["train"]])
    held = sum(len(example.tokens) for example in splits["validation"])
    return {
        "examples": len(lengths),
        "tokens": int(lengths.sum()),
        "mean_tokens": round(float(lengths.mean()), 1),
        "p95_tokens": int(np.percentile(lengths, 95, method="higher")),
        "fill": round(float(lengths.sum()) / (len(rows["train"]) * how.row), 4),
        "truncated": read.truncated,
        "truncated_share": round(read.truncated / (len(read.examples) + read.dropped), 4),
        "dropped": read.dropped,
        "unclosed": read.unclosed,
        "unlearned": read.unlearned,
        "trimmed": read.trimmed,
        "rows": len(rows["train"]),
        "loss_tokens": int(sum(int(example.counted.sum()) for example in splits["train"])),
        "held_out_examples": len(splits["validation"]),
        "held_out_tokens": held,
        "held_out_rows": len(rows["validation"]),
        "row": how.row,
        "longest": how.longest,
        # The most examples in one row.
        "most_examples": max(len(row) for split_rows in rows.values() for row in split_rows),
        "loss_on": how.loss_on,
        "packing": how.packing,
        "texts": how.texts,
    }


def report(manifest: DatasetManifest, say: Callable[[str], None]) -> None:
    """Prints a report about the rows."""
    f = manifest.facts

    def quantity(key: str, noun: str) -> str:
        return counted(f"{f[key]:,}", noun)

    say(
        f"data: {quantity('examples', 'example')}, {f['tokens']:,} tokens ({f['loss_tokens']:,} with loss), mean "
        f"{f['mean_tokens']:,.0f}, p95 {f['p95_tokens']:,}; "
        f"{quantity('rows', 'row')} of {f['row']:,}, fill {f['fill']:.1%}; "
        f"truncated at {f['longest']:,}: {f['truncated']:,} ({f['truncated_share']:.1%}), dropped {f['dropped']:,}; "
        f"held out {quantity('held_out_examples', 'example')} in {quantity('held_out_rows', 'row')}; {f['tokenizer']}, "
        f"{f['vocab']:,} ids, template {f['template']}"
    )
    if unlearned := f.get("unlearned", 0):
        say(f"not learned, because the file says so: {counted(f'{unlearned:,}', 'answer')}")
    if trimmed := f.get("trimmed", 0):
        say(
            f"without the blanks around them, as template {f['template']} has them: "
            f"{counted(f'{trimmed:,}', 'turn')}; a first line's indentation, a last line's break"
        )
    examples = f["examples"] + f["held_out_examples"]
    if (unclosed := f.get("unclosed", 0)) > UNCLOSED * examples:
        say(
            f"warning: {unclosed:,} of {examples:,} examples are cut before their answer's closing token, and teach "
            f"never to stop: raise data.longest, {f['longest']:,} tokens (with kernel-sft data.row), or leave them out"
        )


def _names(split: Split, rows: int, row: int) -> tuple[str, ...]:
    return tuple(f"{split}_{i:05d}.bin" for i in range(math.ceil(rows / _shard_rows(row))))


def _shard_rows(row: int) -> int:
    return max(1, prepare.SHARD_TOKENS // row)


def _write_rows(
    folder: Path, names: tuple[str, ...], examples: list[Example], rows: list[NDArray[np.int64]], row: int, vocab: int
) -> None:
    per_shard = _shard_rows(row)
    kind = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    for shard, name in enumerate(names):
        part = rows[shard * per_shard : (shard + 1) * per_shard]
        tokens, marks = np.zeros((len(part), row), dtype=kind), np.zeros((len(part), row), dtype="<u2")
        for place, packed in enumerate(part):
            at = 0
            for number, index in enumerate(packed, 1):
                example = examples[index]
                end = at + len(example.tokens)
                tokens[place, at:end] = example.tokens
                marks[place, at:end] = 2 * number + example.counted
                at = end
        write_payload(folder / name, tokens.tobytes(), vocab, token_bytes=tokens.itemsize)
        write_payload(folder / f"marks_{name}", marks.tobytes(), 1 << 16, token_bytes=marks.itemsize)


def _prompts(chats: Chats, held_out: Sequence[int], renderer: Renderer, how: Packing) -> list[str]:
    """A line for each of the first held-out questions that are at most as long as a training example. Longer ones are
    left out: answers are generated in one batch, and one long conversation would take all the memory.
    """
    lines: list[str] = []
    remaining = set(held_out)
    for number, turns in enumerate(chats.conversations()):
        if len(lines) == how.prompts or not remaining:
            break
        if number not in remaining:
            continue
        remaining.remove(number)
        if not turns[-1].learned:
            continue
        tokens = renderer.prompt(turns)
        if len(tokens) <= how.longest:
            tree = {"prompt": turns[-2].text, "tokens": tokens, "reference": turns[-1].text}
            lines.append(json.dumps(tree, ensure_ascii=False) + "\n")
    return lines


def _write_texts(path: Path, chats: Chats, rows: list[list[int]]) -> None:
    by_number = dict(enumerate(chats.conversations()))
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps([by_number[number] for number in row], ensure_ascii=False) + "\n")
