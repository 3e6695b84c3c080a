"""Where a dataset's stories come from, and which tokenizer fits them: a text file, TinyStories, or a seed.

Each source has a `name` that says everything its stories depend on, so that a prepared folder can be recognised.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from job.dataset import fetch
from job.dataset.encodings import not_utf8, require_text
from job.dataset.stories import stories
from job.dataset.tokenizer import BYTES_VOCAB, END_OF_TEXT, GPT2_VOCAB, Bytes, Gpt2, Tokenizer, Words

TINYSTORIES_STORY_BYTES = 1000  # 908 on average, 2.12 M stories in 1.92 GB; a first guess of how much to fetch
OWN_TEXT = "text: sha256 "  # begins the name of every TextFile
Named = tuple[Tokenizer, str, str]  # tokenizer, kind, id


class Source(Protocol):
    """Two stories or more, and the tokenizer for them. Both may fetch, and raise ValueError."""

    @property
    def name(self) -> str: ...
    def stories(self) -> list[str]: ...
    def tokenizer(self) -> Named: ...


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Small stories from a seed, one id per word."""

    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"generated stories: {self.count} from seed {self.seed}"

    def stories(self) -> list[str]:
        return stories(self.count, self.seed)

    def tokenizer(self) -> Named:
        words = Words.from_text(" ".join(self.stories()))
        return words, "words", "words-" + hashlib.sha256("\n".join(words.words).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """GPT-2's BPE where the model can hold it, bytes where it cannot. Never bytes because a file is lacking: with 257
    ids instead of 50,257 it would be another job than the bill's.
    """

    model_vocab: int
    cache: Path  # where fetched files are kept
    file: Path | None = None  # a tokenizer.json given by hand
    url: str = fetch.GPT2_URL
    say: Callable[[str], None] = field(default=lambda line: None)

    def choose(self) -> Named:
        """Raises ValueError: a file given by hand is not GPT-2's, GPT-2's cannot be had, or its package is lacking."""
        if self.file is not None:
            return self._gpt2(self.file)
        if self.model_vocab < GPT2_VOCAB:
            why = f"the model's vocabulary, {self.model_vocab}, is below GPT-2's {GPT2_VOCAB}"
            self.say(f"tokenizer: bytes, {BYTES_VOCAB} ids, because {why}")
            return Bytes(), "bytes", "bytes-1"
        try:
            return self._gpt2(fetch.fetch(self.url, self.cache / "gpt2-tokenizer.json"))
        except fetch.FetchError as error:
            raise ValueError(
                f"job.parameters.model.vocab is {self.model_vocab}, that is GPT-2's tokenizer, and its tokenizer.json "
                f"could not be fetched ({error}): download {self.url} where there is internet and give it with "
                f"--tokenizer FILE, {self._or_bytes}"
            ) from error

    @property
    def _or_bytes(self) -> str:
        return f"or set model.vocab: {BYTES_VOCAB} to train, and be billed for, a model of plain bytes"

    def _gpt2(self, file: Path) -> Named:
        try:
            tokenizer = Gpt2(file)
        except ImportError as error:
            raise ValueError(
                f"GPT-2's tokenizer needs the `tokenizers` package: pip install tokenizers, {self._or_bytes}"
            ) from error
        self.say(f"tokenizer: GPT-2 BPE from {file}")
        return tokenizer, "gpt2", "gpt2-" + hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """Any UTF-8 text file. Stories end with <|endoftext|>; in a text without it, with a blank line."""

    path: Path
    text_tokenizer: TextTokenizer

    @property
    def name(self) -> str:
        return f"{OWN_TEXT}{hashlib.sha256(self._content()).hexdigest()}"

    def stories(self) -> list[str]:
        content = self._content()
        try:
            text = content.decode("utf-8-sig").replace("\r\n", "\n")  # a model need not learn line ends twice
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {not_utf8(content, error)}") from error
        require_text(text, self.path)
        found = split(text)
        if not found:
            raise ValueError(f"{self.path}: empty; give a text with stories separated by blank lines or {END_OF_TEXT}")
        if len(found) < 2:
            raise ValueError(
                f"{self.path}: 1 story; at least 2 are needed, since the last 1 % is held out: separate them by blank "
                f"lines or {END_OF_TEXT}"
            )
        return found

    def tokenizer(self) -> Named:
        self.stories()  # a wrong text is said before anything is fetched for it
        return self.text_tokenizer.choose()

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True)
class TinyStories:
    """The first `count` stories of TinyStories (Eldan and Li 2023, CDLA-Sharing-1.0), fetched as far as needed."""

    count: int
    text_tokenizer: TextTokenizer
    cache: Path
    url: str = fetch.TINYSTORIES_URL
    total_bytes: int = fetch.TINYSTORIES_BYTES
    say: Callable[[str], None] = field(default=lambda line: None)

    @property
    def name(self) -> str:
        return f"{self.url}: the first {self.count} stories"

    def stories(self) -> list[str]:
        """Raises ValueError with what to do when there is no way to the server."""
        wanted = min(self.count * TINYSTORIES_STORY_BYTES, self.total_bytes)
        path = self.cache / "TinyStories-train.txt"
        while True:
            self.say(f"TinyStories: the first {wanted / 1e6:,.0f} MB of {self.url}")
            try:
                fetch.fetch(self.url, path, first_bytes=wanted, total_bytes=self.total_bytes, say=self.say)
            except fetch.FetchError as error:
                raise ValueError(
                    f"TinyStories could not be fetched: {error}\n"
                    "Run the same command where there is internet and copy the dataset folder here, give a text file "
                    "of your own (gpufleet prepare STACK stories.txt), or set job.parameters.data.source: "
                    "generated-stories."
                ) from error
            content = path.read_bytes()
            whole = len(content) >= self.total_bytes
            found = split(content.decode(errors="ignore" if not whole else "strict"))
            if not whole:
                found = found[:-1]  # cut somewhere in the middle
            if len(found) >= self.count or whole:
                return found[: self.count]
            wanted = min(2 * wanted, self.total_bytes)

    def tokenizer(self) -> Named:
        return self.text_tokenizer.choose()


def split(text: str) -> list[str]:
    """The stories of a text, stripped, without empty ones."""
    parts = text.split(END_OF_TEXT) if END_OF_TEXT in text else re.split(r"\n\s*\n", text)
    return [story for part in parts if (story := part.strip())]
