"""Characters for pretrain-d64: a text of 17 symbols, or generated sums, as two shards of one byte per character.

    dataset.json     kind "characters"; facts: train_characters, validation_characters, held_out, vocab, symbols [..]
    train.bin, validation.bin       the header of shards.py, then ids 0 to 16 as uint8

The split is by characters, the last part for validation; records (separated by a blank line) are ignored. Standard
library only. User mistakes raise ValueError with the choice to make.
"""

from __future__ import annotations

import codecs
import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.experiments.dataset import prepare
from gpufleet.job.experiments.dataset.shards import read_header, write_payload
from gpufleet.job.experiments.pretrain.spec import SYMBOLS, CharData

BOS = len(SYMBOLS)  # the id of <|bos|>, which occurs in no text
VOCAB = BOS + 1
TRAIN, VALIDATION = "train.bin", "validation.bin"
_IDS = bytes.maketrans(SYMBOLS.encode(), bytes(range(len(SYMBOLS))))
_FOREIGN = re.compile(b"[^" + re.escape(SYMBOLS.encode()) + b"]")


@dataclass(frozen=True, kw_only=True)
class CharacterFile:
    """A file of only the 17 symbols. A byte-order mark and carriage returns are removed. `name` contains everything on
    which the characters depend.
    """

    path: Path

    @property
    def name(self) -> str:
        return f"text: sha256 {hashlib.sha256(self.characters()).hexdigest()}"

    def characters(self) -> bytes:
        try:
            return self.path.read_bytes().removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True)
class Sums:
    """`count` characters of sums and differences, which are generated from a seed: `12+34`, the result on the next
    line, and a blank line.
    """

    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"generated sums: {self.count} characters from seed {self.seed}"

    def characters(self) -> bytes:
        draw = random.Random(f"sums {self.seed}")
        parts: list[str] = []
        remaining = self.count
        while remaining > 0:
            a, b = (draw.randrange(10 ** draw.randint(1, 3)) for _ in range(2))
            parts.append(f"{a}+{b}\n{a + b}\n\n" if draw.random() < 0.5 else f"{a}-{b}\n{a - b}\n\n")
            remaining -= len(parts[-1])
        return "".join(parts)[: self.count].encode()


def prepare_characters(
    folder: Path, data: CharData, *, seed: int, text: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> DatasetManifest:
    """The prepared dataset in `folder`, made if it does not exist. `text` takes precedence over `data.source`. Raises
    ValueError if there is no text, a character is outside the symbols (with its position), or both parts have too few
    characters for one row of `data.sequence` + 1.
    """
    source: CharacterFile | Sums
    sequence, held_out = data.sequence, data.held_out
    if text is not None:
        source = CharacterFile(path=text)
    elif data.source == "generated-sums":
        source = Sums(count=data.characters, seed=seed)
    else:
        raise ValueError(
            f"{folder}: not prepared, and job.parameters.data.source is text: name the file of characters (gpufleet "
            "prepare STACK TEXT), or set data.source: generated-sums"
        )
    where = source.name if text is None else str(text)
    ids = encode(source.characters(), where)
    cut = len(ids) - round(len(ids) * held_out)
    parts = {TRAIN: ids[:cut], VALIDATION: ids[cut:]}
    least = 2 * sequence + 1  # the trainer's minimum for each part (rows.py)
    for name in (TRAIN, VALIDATION):
        if len(parts[name]) < least:
            raise ValueError(
                f"{where}: {len(parts[name])} characters in {name}, at least {least} are needed for rows of "
                f"{sequence} + 1: give more text, lower data.sequence, or change data.held_out ({held_out:g})"
            )

    def write(made: Path) -> None:
        for name, payload in parts.items():
            write_payload(made / name, payload, VOCAB, token_bytes=1)

    return prepare.publish(
        folder,
        kind="characters",
        source=source.name,
        facts={
            "train_characters": cut,
            "validation_characters": len(ids) - cut,
            "held_out": held_out,
            "vocab": VOCAB,
            "symbols": list(SYMBOLS),
        },
        write=write,
        train=(TRAIN,),
        validation=(VALIDATION,),
        say=say,
    )


def encode(text: bytes, where: str = "text") -> bytes:
    """The ids of characters, one byte each. Raises ValueError naming the first foreign character and its position."""
    if foreign := _FOREIGN.search(text):
        at = foreign.start()
        line = text.count(b"\n", 0, at) + 1
        column = at - (text.rfind(b"\n", 0, at) + 1) + 1
        raise ValueError(
            f"{where}: {_shown(text, at)} at position {at} (line {line}, column {column}) is not one of the "
            f"{len(SYMBOLS)} symbols {SYMBOLS!r}; remove or replace it"
        )
    return text.translate(_IDS)


def decode(ids: list[int]) -> str:
    return "".join(SYMBOLS[i] for i in ids)


def check_header(path: Path) -> int:
    """The number of characters in a shard. Raises ValueError if the file is no shard of characters."""
    header = read_header(path)
    if header.token_bytes != 1 or header.vocab != VOCAB:
        raise ValueError(f"{path}: not a shard of characters; prepare the dataset again")
    return header.tokens


def _shown(text: bytes, at: int) -> str:
    """The character at a byte position; the complete character if the text is UTF-8."""
    for length in range(1, 5):
        try:
            return f"the character {text[at : at + length].decode()!r}"
        except UnicodeDecodeError:
            continue
    return f"the byte 0x{text[at]:02x}"
