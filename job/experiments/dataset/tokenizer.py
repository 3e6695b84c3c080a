"""Text to token ids and back: GPT-2's BPE, plain bytes, or the words of the generated stories.

A prepared dataset contains what its tokenizer needs, so that the job can print samples without a network. The
`tokenizers` package is imported only for GPT-2; everything else needs only the standard library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

END_OF_TEXT = "<|endoftext|>"
GPT2_VOCAB = 50257
BYTES_VOCAB = 257  # 256 ids for bytes, and one for the end of a story
_WORD = re.compile(r"\w+|[^\w\s]")


class Tokenizer(Protocol):
    """The methods that preparation and sampling need. `end` is the id that closes every story."""

    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class Bytes:
    """UTF-8 bytes as ids. This works for any text, and needs no files."""

    vocab = BYTES_VOCAB
    end = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@dataclass(frozen=True)
class Words:
    """One id per word or punctuation mark; unknown words are `<unk>`. Id 0 ends a story."""

    words: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str) -> Words:
        """A tokenizer with every word of `text`, sorted."""
        return cls((END_OF_TEXT, "<unk>", *sorted(set(_WORD.findall(text)))))

    @property
    def vocab(self) -> int:
        return len(self.words)

    @property
    def end(self) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, 1) for word in _WORD.findall(text)]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def decode(self, ids: list[int]) -> str:
        """The text, with blanks between words and no blanks before punctuation. Ids that are not in the list become
        `<unk>`, because the model's table may be larger than the list.
        """
        words = [self.words[i] if i < len(self.words) else "<unk>" for i in ids]
        return re.sub(r" ([.,!?;:])", r"\1", " ".join(words))


class Gpt2:
    """GPT-2's BPE from its tokenizer.json. Raises ValueError if the file belongs to another tokenizer."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Bpe

        try:
            self._bpe: Any = Bpe.from_file(str(file))
        except Exception as error:  # the package raises no more specific error
            raise ValueError(f"{file}: not a tokenizer.json ({error})") from error
        self.file = file
        self.vocab: int = self._bpe.get_vocab_size()
        end = self._bpe.token_to_id(END_OF_TEXT)
        if self.vocab != GPT2_VOCAB or end is None:
            raise ValueError(f"{file}: {self.vocab} tokens; GPT-2's tokenizer.json has {GPT2_VOCAB} with {END_OF_TEXT}")
        self.end: int = end

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of many texts, computed on all cores."""
        return [encoding.ids for encoding in self._bpe.encode_batch(texts)]

    def decode(self, ids: list[int]) -> str:
        text: str = self._bpe.decode(ids, skip_special_tokens=False)
        return text


def open_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """The tokenizer with which a dataset was prepared, from the dataset's folder."""
    if kind == "gpt2":
        return Gpt2(folder / "tokenizer.json")
    if kind == "words":
        return Words(tuple(json.loads((folder / "vocab.json").read_text())))
    if kind == "bytes":
        return Bytes()
    raise ValueError(f"{folder}: tokenizer {kind!r} is not one of gpt2, bytes, words")
