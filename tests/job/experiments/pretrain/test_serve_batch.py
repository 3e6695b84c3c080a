"""Texts that are written together are those that are written alone."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from gpufleet.job.experiments.pretrain.model import CharGpt, CharRows, Kept, Text, generate
from gpufleet.job.experiments.pretrain.serve import batch
from gpufleet.job.experiments.pretrain.serve.batch import ROWS, TextWriter
from gpufleet.job.experiments.pretrain.spec import CharModel

WINDOW = 32


@pytest.fixture(params=[None, 1], ids=["every head", "shared keys"])
def module(request: pytest.FixtureRequest) -> CharGpt:
    made = CharGpt(CharModel(layers=2, width=64, head_dim=16, kv_heads=request.param)).eval().requires_grad_(False)
    for number, parameter in enumerate(made.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    return made


def texts() -> list[Text]:
    """Of unequal prompts and lengths, more than there are rows; some pass the window, some are greedy."""
    how: dict[str, Any] = {"allowed": 17, "window": WINDOW}
    return [
        Text(
            [n % 17 for n in range(1 + 5 * number)],
            max_tokens=10 + 15 * (number % 4),
            temperature=number % 3,
            seed=number,
            stop=[16] if number == 4 else (),
            **how,
        )
        for number in range(ROWS + 2)
    ]


def in_turns(written: list[Iterator[int]]) -> list[list[int]]:
    """All of them, read an id of each at a time, so that they are under way together."""
    rows = list(zip_longest(*written))
    return [[made for made in column if made is not None] for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("step", [8, CharRows.STEP])
def test_texts_written_together_are_those_written_alone(
    module: CharGpt, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CharRows, "STEP", step)
    alone = [list(generate(module, text)) for text in texts()]
    assert max(map(len, alone)) > WINDOW
    assert (
        in_turns([TextWriter.write(made, text) for made in [TextWriter(module, WINDOW)] for text in texts()]) == alone
    )


def test_neighbours_change_no_bit_of_a_text(module: CharGpt, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[Tensor]] = {}
    take = Text.take

    def noted(text: Text, logits_V: Tensor) -> int:
        seen.setdefault(id(text), []).append(logits_V)
        return take(text, logits_V)

    monkeypatch.setattr(Text, "take", noted)
    made, first, again = TextWriter(module, WINDOW), texts()[3], texts()[3]
    list(made.write(first))
    in_turns([made.write(each) for each in (*texts()[:3], again)])
    assert all(map(torch.equal, seen[id(first)], seen[id(again)]))
    assert len(seen[id(first)]) == len(seen[id(again)]) > WINDOW


def test_four_texts_read_the_weights_once_for_each_character(module: CharGpt, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = TextWriter._read

    def noted(made: TextWriter, tokens: list[list[int]], cache: Kept) -> Tensor:
        reads.append(len(tokens))
        return read(made, tokens, cache)

    monkeypatch.setattr(TextWriter, "_read", noted)
    made = TextWriter(module, WINDOW)
    waiting = [batch._Writing(Text([number], allowed=17, max_tokens=20, window=WINDOW)) for number in range(ROWS)]
    made._waiting, made._runs = waiting, True
    made._run()
    assert reads == [1] * ROWS + [ROWS] * 19


def test_a_text_that_its_reader_leaves_gives_its_row_to_the_next(module: CharGpt) -> None:
    made = TextWriter(module, WINDOW)
    endless = [made.write(Text([1], allowed=17, max_tokens=10**9, window=WINDOW)) for _ in range(ROWS)]
    for each in endless:
        next(each)
        assert isinstance(each, Generator)
        each.close()
    assert len(list(made.write(Text([1], allowed=17, max_tokens=3, window=WINDOW)))) == 3


def test_a_model_that_fails_ends_the_texts_under_way_and_no_later_one(
    module: CharGpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, text = TextWriter(module, WINDOW), Text([1], allowed=17, max_tokens=9, window=WINDOW)

    def failing(*args: Any) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(TextWriter, "_read", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        list(made.write(text))
    monkeypatch.undo()
    assert len(list(made.write(Text([1], allowed=17, max_tokens=3, window=WINDOW)))) == 3
