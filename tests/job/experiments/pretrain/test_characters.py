"""Characters: what is refused and where, what a shard holds, and in which order its rows are trained on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpufleet.job.experiments.engine.experiment import IGNORED
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.pretrain import characters
from gpufleet.job.experiments.pretrain.characters import Sums, encode, prepare_characters
from gpufleet.job.experiments.pretrain.rows import Rows
from gpufleet.job.experiments.pretrain.spec import SYMBOLS, CharData

DATA = CharData(source="generated-sums", characters=5000, sequence=16)
CPU = torch.device("cpu")


def rows(folder: Path, data: CharData = DATA) -> Rows:
    prepare_characters(folder, data, seed=3)
    return Rows(folder / characters.TRAIN, sequence=data.sequence, device=CPU)


def test_every_symbol_has_its_place_in_the_vocabulary() -> None:
    assert list(encode(SYMBOLS.encode())) == list(range(17))
    assert characters.decode(list(range(17))) == "0123456789+-HBL.\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12+3\n4=7", "'=' at position 6 (line 2, column 2)"),
        ("1\r\n", r"'\r' at position 1 (line 1, column 2)"),
        ("\ufeff1", r"'\ufeff' at position 0 (line 1, column 1)"),
        ("h", "'h' at position 0"),
        ("12 ", "' ' at position 2"),
        ("1\n\n−2", "'−' at position 3 (line 3, column 1)"),
    ],
)
def test_any_other_character_is_refused_with_its_position(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="is not one of the 17 symbols") as caught:
        encode(text.encode())
    assert said in str(caught.value)


def test_a_byte_that_is_no_text_is_refused_with_its_position() -> None:
    with pytest.raises(ValueError, match="byte 0xff at position 2"):
        encode(b"12\xff")


def test_a_text_as_windows_writes_it_is_the_same_text(tmp_path: Path) -> None:
    text, made = tmp_path / "numbers.txt", []
    for content in (b"12+3\n15\n" * 100, b"\xef\xbb\xbf" + b"12+3\r\n15\r\n" * 100):
        text.write_bytes(content)
        made.append(prepare_characters(tmp_path / "data", replace(DATA, source="text"), seed=1, text=text).sha256)
    assert made[0] == made[1]


def test_a_text_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    text = tmp_path / "s.txt"
    for content, reason in (("hello", "the character 'h' at position 0"), ("1", "characters in train.bin")):
        text.write_text(content)
        with pytest.raises(ValueError, match=f"^{re.escape(str(text))}: .*{reason}"):
            prepare_characters(tmp_path / "data", replace(DATA, source="text"), seed=1, text=text)


def test_the_last_five_percent_are_held_out_by_characters(tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text("0123456789" * 100)
    manifest = prepare_characters(tmp_path / "data", replace(DATA, source="text"), seed=1, text=text)
    assert (manifest.kind, manifest.facts["train_characters"], manifest.facts["validation_characters"]) == (
        "characters",
        950,
        50,
    )
    kept = b"".join((tmp_path / "data" / name).read_bytes()[64:] for name in (characters.TRAIN, characters.VALIDATION))
    assert kept == encode(text.read_bytes())


def test_the_same_text_gives_the_same_dataset_and_another_seed_another(tmp_path: Path) -> None:
    made = [
        prepare_characters(tmp_path / name, DATA, seed=seed).sha256 for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(("held_out", "short"), [(0.01, "validation.bin"), (0.4, "train.bin")])
def test_a_text_too_short_for_a_row_is_refused(tmp_path: Path, held_out: float, short: str) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text("1" * 50)
    data = CharData(source="text", sequence=16, held_out=held_out)
    with pytest.raises(ValueError, match=short):
        prepare_characters(tmp_path / "data", data, seed=1, text=text)


@pytest.mark.parametrize("held_out", [31, 32, 33, 34])  # of 100 characters; rows of 16 need 33
def test_what_is_prepared_the_trainer_opens(tmp_path: Path, held_out: int) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text("1" * 100)
    data = CharData(source="text", sequence=16, held_out=held_out / 100)
    if held_out < 33:
        with pytest.raises(ValueError, match=f"{held_out} characters in validation.bin"):
            prepare_characters(tmp_path / "data", data, seed=1, text=text)
        return
    prepare_characters(tmp_path / "data", data, seed=1, text=text)
    for name in (characters.TRAIN, characters.VALIDATION):
        assert Rows(tmp_path / "data" / name, sequence=16, device=CPU).per_epoch >= 1


def test_generated_sums_are_right() -> None:
    text = Sums(count=3000, seed=9).characters().decode()
    assert len(text) == 3000
    records = text.split("\n\n")[:-1]
    assert len(records) > 200
    for record in records:
        task, result = record.split("\n")
        sign = "+" if "+" in task else "-"
        a, b = task.split(sign, 1)
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_a_shard_of_another_kind_is_refused(tmp_path: Path) -> None:
    from gpufleet.job.experiments.dataset.shards import write_shard

    write_shard(tmp_path / "train.bin", [1, 2, 3] * 100, 18)
    with pytest.raises(ValueError, match="not a shard of characters"):
        Rows(tmp_path / "train.bin", sequence=16, device=CPU)


def test_every_row_of_an_epoch_is_visited_once(tmp_path: Path) -> None:
    found = rows(tmp_path)
    per_step = 8
    steps = -(-3 * found.per_epoch // per_step)
    starts = torch.cat([found.step(1, step, per_step) for step in range(steps)])
    orders = []
    for epoch in range(3):
        own = starts[epoch * found.per_epoch : (epoch + 1) * found.per_epoch]
        offset = int(own.min())
        assert 0 <= offset <= 16
        assert sorted(own.tolist()) == [offset + 17 * i for i in range(found.per_epoch)]
        assert own.max() + 17 <= len(found)
        orders.append((offset, own.tolist()))
    assert len({offset for offset, _ in orders}) > 1  # shifted by another offset each time
    assert sorted(orders[0][1]) != orders[0][1]  # permuted
    assert [(s - orders[0][0]) // 17 for s in orders[0][1]] != [(s - orders[1][0]) // 17 for s in orders[1][1]]


def test_rows_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    a, b = rows(tmp_path / "a"), rows(tmp_path / "b")
    a.step(1, 900, 8)
    assert torch.equal(a.step(1, 5, 8), b.step(1, 5, 8))
    assert not torch.equal(a.step(1, 5, 8), a.step(2, 5, 8))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("batch", "micro"), [(16, 2), (16, 3), (11, 2), (5, 4)])
def test_the_rows_of_all_ranks_together_are_the_batch_of_one(
    tmp_path: Path, ranks: int, batch: int, micro: int
) -> None:
    found = rows(tmp_path)
    starts = found.step(1, 40, batch)
    tokens, targets = found.windows(starts)
    seen: dict[int, tuple[list[int], list[int]]] = {}
    passes, counted = set(), 0
    for rank in range(ranks):
        work = found.work(starts, World(rank=rank, size=ranks), micro)
        micros = list(work.micros)
        passes.add(tuple(len(m.inputs[0]) for m in micros))
        assert work.total == batch * 16
        for part in micros:
            assert len(part.inputs[0]) <= micro
            assert (part.inputs[0] >= 0).all()  # padding rows too: they are only ignored as targets
            counted += part.tokens
            assert part.tokens == int((part.inputs[1] != IGNORED).sum())
            for i, (row, target) in enumerate(zip(*part.inputs, strict=True)):
                if (target != IGNORED).all():
                    assert part.place + i not in seen
                    seen[part.place + i] = row.tolist(), target.tolist()
    assert len(passes) == 1  # ranks meet in every pass
    assert counted == batch * 16
    assert [seen[i] for i in range(batch)] == list(zip(tokens.tolist(), targets.tolist(), strict=True))


def test_fixed_windows_reach_from_the_first_character_to_the_last(tmp_path: Path) -> None:
    prepare_characters(tmp_path, DATA, seed=3)
    held_out = Rows(tmp_path / characters.VALIDATION, sequence=16, device=CPU)
    starts = held_out.fixed(7)
    assert (int(starts[0]), int(starts[-1]) + 17) == (0, len(held_out))
    assert held_out.windows(starts)[1][-1, -1] == (tmp_path / characters.VALIDATION).read_bytes()[-1]
