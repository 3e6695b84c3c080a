"""The sources of a dataset's stories, each with its tokenizer: a text file, TinyStories, or a seed.

A source's `name` contains everything on which its stories depend, so that a prepared folder can be recognised. Public
files are downloaded over HTTPS as far as needed, and a download continues where an earlier one stopped.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpufleet.job import progress
from gpufleet.job.experiments.dataset.encodings import not_utf8, require_text
from gpufleet.job.experiments.dataset.tokenizer import (
    BYTES_VOCAB,
    END_OF_TEXT,
    GPT2_VOCAB,
    Bytes,
    Gpt2,
    Tokenizer,
    Words,
)

if TYPE_CHECKING:
    import http.client

TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"  # 2024-08-12, the newest in 2026-11
TINYSTORIES_URL = (
    f"https://huggingface.co/datasets/roneneldan/TinyStories/resolve/{TINYSTORIES_REVISION}/TinyStories-train.txt"
)
TINYSTORIES_BYTES = 1_924_281_556
GPT2_REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
GPT2_URL = f"https://huggingface.co/openai-community/gpt2/resolve/{GPT2_REVISION}/tokenizer.json"
TIMEOUT_S = 30.0
CHUNK = 1 << 20


class FetchError(ValueError):
    """A file could not be downloaded. The part that arrived stays; the next attempt continues it."""


def fetch(url: str, path: Path, *, first_bytes: int | None = None, total_bytes: int | None = None) -> Path:
    """Makes `path` contain the file, or at least its first `first_bytes` (the whole file if it is shorter).
    `total_bytes`: the size that the whole file must have on the server. For one path, all calls must fetch the whole
    file, or all must fetch only its beginning. Raises FetchError.
    """
    if path.exists() and (first_bytes is None or path.stat().st_size >= first_bytes):
        return path
    import http.client  # imported here, because it takes 20 ms, and a bill imports this module but downloads nothing
    import urllib.error

    path.parent.mkdir(parents=True, exist_ok=True)
    part, note = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.json")
    if path.exists():  # an earlier call has fetched a shorter part of the same file
        path.replace(part)
    try:
        _continue(url, part, note, first_bytes, total_bytes)
    except urllib.error.HTTPError as error:
        raise FetchError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    part.replace(path)
    if first_bytes is None:
        note.unlink(missing_ok=True)
    return path


def _continue(url: str, part: Path, note: Path, first_bytes: int | None, total_bytes: int | None) -> None:
    import urllib.request

    known = json.loads(note.read_text()) if note.exists() and part.exists() else {}
    have = part.stat().st_size if known.get("etag") else 0
    wanted = min((size for size in (first_bytes, known.get("bytes")) if size is not None), default=None)
    if have and wanted is not None and have >= wanted:
        # 416 means that the request begins at the end of the file: the file is complete, but an earlier attempt was
        # killed before it could rename it
        return
    headers = {"User-Agent": "gpufleet"}
    if have or first_bytes:
        headers["Range"] = f"bytes={have}-{first_bytes - 1 if first_bytes else ''}"
    if have:
        headers["If-Range"] = known["etag"]
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
        # the server sends the whole file, because it does not support ranges, or because the file has changed
        if answer.status != 206:
            have = 0
        size, wanted = _sizes(answer, first_bytes)
        if total_bytes is not None and size is not None and size != total_bytes:
            raise FetchError(f"{url}: {size} bytes on the server, but {total_bytes} expected: the file has changed")
        note.write_text(json.dumps({"etag": answer.headers.get("ETag"), "bytes": size}))
        left_bytes = None if wanted is None else wanted - have
        with part.open("r+b" if have else "wb") as file, progress.shown(f"fetching {url}", left_bytes) as advance:
            file.seek(have)
            file.truncate()
            while (wanted is None or have < wanted) and (block := answer.read(CHUNK)):
                file.write(block)
                have += len(block)
                advance(len(block))
    if wanted is not None and have < wanted:
        raise FetchError(f"{url}: the connection ended after {have} of {wanted} bytes; run the command again to go on")


def _sizes(answer: http.client.HTTPResponse, first_bytes: int | None) -> tuple[int | None, int | None]:
    """Returns the bytes of the whole file, and the bytes that must be on the disk at the end; None if the server does
    not send them.
    """
    size: int | None = None
    if answer.status == 206:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        size = int(total) if total.isdigit() else None
    elif length := answer.headers.get("Content-Length"):
        size = int(length)
    if first_bytes is None or size is None:
        return size, size
    return size, min(size, first_bytes)


# first guess of the bytes to fetch per story; the mean is 908 (1.92 GB of 2.12 M stories)
TINYSTORIES_STORY_BYTES = 1000
OWN_TEXT = "text: sha256 "  # the prefix of every TextFile's name
Named = tuple[Tokenizer, str, str]  # a tokenizer, its kind and its id


class Source(Protocol):
    """At least two stories, and their tokenizer. Both methods may download, and raise ValueError."""

    @property
    def name(self) -> str: ...
    def stories(self) -> list[str]: ...
    def tokenizer(self) -> Named: ...


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Small stories that are generated from a seed; each word has one id."""

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
    """GPT-2's BPE if the model's vocabulary is large enough; otherwise bytes. If GPT-2's file is missing, bytes are not
    used instead, because a job with 257 ids instead of 50,257 would differ from the job in the bill.
    """

    model_vocab: int
    cache: Path  # the folder in which fetched files are kept
    file: Path | None = None  # a tokenizer.json that the user gave
    url: str = GPT2_URL
    say: Callable[[str], None] = field(default=lambda line: None)

    def choose(self) -> Named:
        """The tokenizer. Raises ValueError if it or its package is missing, or if the user's file is not GPT-2's."""
        if self.file is not None:
            return self._gpt2(self.file)
        if self.model_vocab < GPT2_VOCAB:
            why = f"the model's vocabulary, {self.model_vocab}, is below GPT-2's {GPT2_VOCAB}"
            self.say(f"tokenizer: bytes, {BYTES_VOCAB} ids, because {why}")
            return Bytes(), "bytes", "bytes-1"
        try:
            return self._gpt2(fetch(self.url, self.cache / "gpt2-tokenizer.json"))
        except FetchError as error:
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
            text = content.decode("utf-8-sig").replace(
                "\r\n", "\n"
            )  # line ends are made equal, so that the model does not have to learn two kinds
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {not_utf8(content, error)}") from error
        require_text(text, self.path)
        texts = split(text)
        if not texts:
            raise ValueError(f"{self.path}: empty; give a text with stories separated by blank lines or {END_OF_TEXT}")
        if len(texts) < 2:
            raise ValueError(
                f"{self.path}: 1 story; at least 2 are needed, since the last 1 % is held out: separate them by blank "
                f"lines or {END_OF_TEXT}"
            )
        return texts

    def tokenizer(self) -> Named:
        self.stories()  # reads the text first, so that a wrong text is reported before a tokenizer is downloaded
        return self.text_tokenizer.choose()

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True)
class TinyStories:
    """The first `count` stories of TinyStories (Eldan and Li 2023, CDLA-Sharing-1.0), downloaded as far as needed."""

    count: int
    text_tokenizer: TextTokenizer
    cache: Path
    url: str = TINYSTORIES_URL
    total_bytes: int = TINYSTORIES_BYTES
    say: Callable[[str], None] = field(default=lambda line: None)

    @property
    def name(self) -> str:
        return f"{self.url}: the first {self.count} stories"

    def stories(self) -> list[str]:
        """The stories; raises ValueError with what to do if the server cannot be reached."""
        wanted = min(self.count * TINYSTORIES_STORY_BYTES, self.total_bytes)
        path = self.cache / "TinyStories-train.txt"
        while True:
            self.say(f"TinyStories: the first {wanted / 1e6:,.0f} MB of {self.url}")
            try:
                fetch(self.url, path, first_bytes=wanted, total_bytes=self.total_bytes)
            except FetchError as error:
                raise ValueError(
                    f"TinyStories could not be fetched: {error}\n"
                    "Run the same command where there is internet and copy the dataset folder here, give a text file "
                    "of your own (gpufleet prepare STACK stories.txt), or set job.parameters.data.source: "
                    "generated-stories."
                ) from error
            content = path.read_bytes()
            whole = len(content) >= self.total_bytes
            texts = split(content.decode(errors="ignore" if not whole else "strict"))
            if not whole:
                texts = texts[:-1]  # the last story may be cut off
            if len(texts) >= self.count or whole:
                return texts[: self.count]
            wanted = min(2 * wanted, self.total_bytes)

    def tokenizer(self) -> Named:
        return self.text_tokenizer.choose()


def split(text: str) -> list[str]:
    """The stories of a text without surrounding blanks, and without empty stories."""
    parts = text.split(END_OF_TEXT) if END_OF_TEXT in text else re.split(r"\n\s*\n", text)
    return [story for part in parts if (story := part.strip())]


_NAMES = (
    "Lily", "Tom", "Anna", "Ben", "Mia", "Sam", "Sue", "Max", "Ella", "Jack", "Rosie", "Leo", "Amy", "Tim",
    "Kate", "Fred",
)  # fmt: skip
_BEINGS = ("girl", "boy", "dog", "cat", "bird", "rabbit", "bear", "fox", "duck", "mouse", "frog", "pony")
_TRAITS = ("little", "brave", "kind", "happy", "shy", "clever", "funny", "tired", "sleepy", "curious")
_PLACES = ("park", "garden", "forest", "house", "school", "river", "beach", "hill", "barn", "kitchen")
_THINGS = (
    "ball", "kite", "book", "cake", "flower", "stone", "hat", "boat", "apple", "drum", "shell", "lamp", "key",
    "box", "toy",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "yellow", "white", "golden")
_OPENINGS = (
    "Once upon a time there was a {trait} {being} named {name}.",
    "Once upon a time, {name} the {being} lived near the {place}.",
    "One day, a {being} named {name} went to the {place}.",
    "The {trait} {being} was called {name}.",
    "One day, {name} found a {colour} {thing} in the {place}.",
)
_TURNS = (
    "{name} wanted to play with the {colour} {thing}, but it was lost.",
    "{name} saw {friend} and they looked for the {thing} together.",
    "The {thing} was in the {place} and {name} could not reach it.",
    "{friend} was sad because the {colour} {thing} was broken.",
    '{friend} said, "Do not cry, {name}. I will help you."',
    "They ran to the {place} and saw a {trait} {being}.",
    "{name} was scared, but {friend} was not.",
)
_ENDINGS = (
    "They were happy and went home.",
    "{name} smiled and gave the {thing} to {friend}.",
    "From that day they were best friends.",
    "{name} learned to share.",
    "Then it was time to sleep.",
)


def stories(count: int, seed: int) -> list[str]:
    """`count` stories that depend on the seed alone, the same on every machine."""
    draw = random.Random(f"stories {seed}")
    return [_story(draw) for _ in range(count)]


def _story(draw: random.Random) -> str:
    name, friend = draw.sample(_NAMES, 2)
    words = {
        "name": name,
        "friend": friend,
        "being": draw.choice(_BEINGS),
        "trait": draw.choice(_TRAITS),
        "place": draw.choice(_PLACES),
        "thing": draw.choice(_THINGS),
        "colour": draw.choice(_COLOURS),
    }
    turn = draw.choice(_TURNS)
    parts = (draw.choice(_OPENINGS), turn, draw.choice(_ENDINGS))
    return " ".join(part.format(**words) for part in parts)
