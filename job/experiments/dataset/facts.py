"""The facts that dataset.json must have for each kind of dataset, because some code needs them. Other facts are only
for people. A dataset of windows has, in addition to the files: tokenizer {kind, vocab, id}, tokens {train, validation},
stories {train, validation}. The facts of packed rows, characters and rankings are in their own sections below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import Fields


def _windows(fields: Fields) -> None:
    tokenizer = fields.section("tokenizer")
    tokenizer.need("kind", reading.text)
    tokenizer.need("vocab", reading.whole_number)
    tokenizer.need("id", reading.text)
    for counts in (fields.section("tokens"), fields.section("stories")):
        for split in ("train", "validation"):
            counts.need(split, reading.whole_number)


def _all_of(**facts: Callable[[Any], object]) -> Callable[[Fields], None]:
    def read(fields: Fields) -> None:
        for fact, value in facts.items():
            fields.need(fact, value)

    return read


FACTS: Mapping[
    str, Callable[[Fields], object]
] = {  # windows come first, because a dataset.json without a kind is a dataset of windows
    "windows": _windows,
    "packed": _all_of(
        **dict.fromkeys(("row", "longest", "most_examples", "rows", "examples", "tokens", "vocab"), reading.several),
        **dict.fromkeys(("held_out_examples", "held_out_rows", "loss_tokens", "prompts", "stop"), reading.whole_number),
        **dict.fromkeys(("loss_on", "template", "tokenizer", "tokenizer_id"), reading.text),
        **dict.fromkeys(("packing", "texts"), reading.flag),
    ),
    "characters": _all_of(
        train_characters=reading.several, validation_characters=reading.several, vocab=reading.several
    ),
    "ranking": _all_of(queries=reading.several, models=reading.several, width=reading.several, encoder=reading.text),
}
