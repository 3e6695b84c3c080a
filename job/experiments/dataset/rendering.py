"""Turns conversations into token ids: chat templates, and the tokenizers that fit these templates.

A template is only data: the special tokens that open and close a turn. The content of a turn is tokenised separately,
so that text can never become a special token. (Added tokens that are not special, like Qwen3's `<think>`, are still
read as tokens.) The text before a content ends, and the text after it begins, with a line break or a special token. So
byte-level BPEs give the same ids as for the joined text. The only exception is content in ChatML that begins with a
line break; its ids are those of a generated answer that begins with a line break. Nothing is added to the data: no
default system prompt, no date, no empty thoughts.

`tokenizers` is imported only for a tokenizer.json. User mistakes raise ValueError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpufleet.job import atomic
from gpufleet.job.experiments.dataset.chat import ROLES, Conversation
from gpufleet.job.experiments.dataset.tokenizer import Words


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """How a family of models writes a conversation. Special tokens begin with `<|`, and `{role}` is replaced."""

    name: str
    begin: tuple[str, ...]
    header: tuple[str, ...]  # the tokens before a turn's content
    end: str  # the special token that closes a turn; generation stops at it
    gap: str  # the text between turns
    trims: bool  # whether blanks around a turn's content are removed, as the family's own template does

    @property
    def specials(self) -> tuple[str, ...]:
        """The template's special tokens, each once."""
        pieces = (*self.begin, *self.header, self.end)
        return tuple(dict.fromkeys(piece for piece in pieces if piece.startswith("<|")))


_LLAMA3 = Template(  # Llama 3.1 model card, "prompt formats" (2024-07-23)
    name="llama-3",
    begin=("<|begin_of_text|>",),
    header=("<|start_header_id|>", "{role}", "<|end_header_id|>", "\n\n"),
    end="<|eot_id|>",
    gap="",
    trims=True,
)
_CHATML = Template(  # Qwen documentation, "chat template" (2025-04)
    name="chatml", begin=(), header=("<|im_start|>", "{role}\n"), end="<|im_end|>", gap="\n", trims=False
)
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATES = {"llama": _LLAMA3, "qwen2": _CHATML, "qwen3": _CHATML}  # the template by model.family


def jinja(template: Template) -> str:
    """The template in Jinja for `transformers`: prompts made with it have the form of the data."""
    before, after = "".join(template.header).split("{role}")
    gap, asked = json.dumps(template.gap), json.dumps(template.gap + before + "assistant" + after)
    content = 'message["content"]' + (" | trim" if template.trims else "")
    turn = f'{json.dumps(before)} + message["role"] + {json.dumps(after)} + {content}'
    return (
        f"{{{{ {json.dumps(''.join(template.begin))} }}}}{{% for message in messages %}}"
        f'{{{{ ("" if loop.first else {gap}) + {turn} + {json.dumps(template.end)} }}}}{{% endfor %}}'
        f"{{% if add_generation_prompt %}}{{{{ {asked} }}}}{{% endif %}}"
    )


def chat_template(folder: Path) -> str:
    """The chat template of the weights in `folder`; empty if there is none."""
    try:
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return str((atomic.read_object(folder / "tokenizer_config.json") or {}).get("chat_template") or "")


def foreign(template: Template, folder: Path) -> bool:
    """Whether the weights in `folder` come with a different chat template, which does not contain the closing token of
    `template`.
    """
    theirs = chat_template(folder)
    return theirs != "" and template.end not in theirs


def tokenizer_of(weights: Path | None, tokenizer: Path | None = None) -> Path | None:
    """The tokenizer.json beside the base weights in the folder `weights`; if there is none, `tokenizer`. Raises
    ValueError if both exist and differ.
    """
    beside = None if weights is None else weights / FileTokenizer.kind
    if beside is None or not beside.is_file():
        return tokenizer
    if tokenizer is not None and tokenizer.is_file() and tokenizer.read_bytes() != beside.read_bytes():
        raise ValueError(f"{tokenizer} is not {beside}, the tokenizer of the base weights; leave out --tokenizer")
    # A missing file is not handled here, because opening it raises a clearer error.
    return tokenizer if tokenizer is not None and not tokenizer.is_file() else beside


class ChatTokenizer(Protocol):
    """The methods that rendering and sampling need. `files` are written into the prepared dataset, from where
    `open_chat_tokenizer` reads them.
    """

    @property
    def kind(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def files(self) -> dict[str, bytes]: ...
    def special(self, name: str) -> int: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def file_id(content: bytes) -> str:
    """The identity of a tokenizer.json."""
    return "tokenizer-" + hashlib.sha256(content).hexdigest()[:16]


class FileTokenizer:
    """A tokenizer.json of base weights. Raises ValueError for any other file."""

    kind = "tokenizer.json"

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._content = file.read_bytes()
            self._bpe: Any = Tokenizer.from_str(self._content.decode())
        except OSError as error:
            raise ValueError(
                f"{file}: cannot be read ({error.strerror}); it belongs beside the base weights"
            ) from error
        except Exception as error:  # the package raises no more specific error
            raise ValueError(f"{file}: not a tokenizer.json ({error})") from error
        # special tokens in texts are tokenised as plain text, because only the template may write special tokens
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.file = file
        self.vocab: int = max(self._bpe.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.id = file_id(self._content)

    @property
    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._content}

    def special(self, name: str) -> int:
        """The special token's id. Raises ValueError if the tokenizer lacks it, because it then belongs to another
        family.
        """
        token_id = self._bpe.token_to_id(name)
        if token_id is None:
            raise ValueError(f"{self.file}: no token {name}, which the chat template needs; is model.family right?")
        return int(token_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, computed on all cores. Offsets are left out, because they are not needed."""
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._bpe.decode(list(ids), skip_special_tokens=True)
        return text


def own_tokenizer(file: Path | None) -> FileTokenizer:
    """The tokenizer of the base weights, from its file. Raises ValueError."""
    if file is None:
        raise ValueError(
            "no tokenizer: put the base weights with their tokenizer.json into the folder that storage.base_weights "
            "names, or give the file with --tokenizer"
        )
    return FileTokenizer(file)


class WordTokenizer:
    """One id for each of a template's special tokens, then one for each word."""

    kind = "words"

    def __init__(self, words: Words, specials: tuple[str, ...]) -> None:
        self._words, self._specials = words, specials
        self.vocab = len(specials) + words.vocab
        self.id = "words-" + hashlib.sha256("\n".join((*specials, *words.words)).encode()).hexdigest()[:16]

    @classmethod
    def from_text(cls, text: str, template: Template) -> WordTokenizer:
        """A tokenizer with every word of `text` and the roles."""
        return cls(Words.from_text(" ".join((text, *ROLES))), template.specials)

    @property
    def files(self) -> dict[str, bytes]:
        tree = {"specials": list(self._specials), "words": list(self._words.words)}
        return {"words.json": (json.dumps(tree, ensure_ascii=False) + "\n").encode()}

    def special(self, name: str) -> int:
        """The special token's id; raises ValueError if the token belongs to another template."""
        if name not in self._specials:
            raise ValueError(f"words were made for another chat template: no token {name}; prepare the dataset again")
        return self._specials.index(name)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[len(self._specials) + i for i in self._words.encode(text)] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._words.decode([i - len(self._specials) for i in ids if i >= len(self._specials)])


def open_chat_tokenizer(kind: str, folder: Path) -> ChatTokenizer:
    """The tokenizer with which a dataset was prepared, from the dataset's folder."""
    if kind == WordTokenizer.kind:
        tree = json.loads((folder / "words.json").read_text(encoding="utf-8"))
        return WordTokenizer(Words(tuple(tree["words"])), tuple(tree["specials"]))
    return FileTokenizer(folder / "tokenizer.json")


class Rendered(NamedTuple):
    """A conversation in ids; the places of the answers to learn (including their closing tokens), and of the answers
    that are excluded from the loss.
    """

    tokens: list[int]
    answered: list[bool]
    left: list[bool]


class Renderer:
    """Conversations in the ids of one template and tokenizer."""

    def __init__(self, template: Template, tokenizer: ChatTokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        self.end = tokenizer.special(template.end)
        self._begin = [tokenizer.special(name) for name in template.begin]
        self._gap = self._text(template.gap)
        self._headers = {role: self._header(role) for role in ROLES}

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        """The ids of whole conversations. All contents are tokenised in one call."""
        contents = iter(self._contents(conversations))
        rendered = []
        for conversation in conversations:
            tokens = list(self._begin)
            answered, unlearned = [False] * len(tokens), [False] * len(tokens)
            for number, turn in enumerate(conversation):
                before = (self._gap if number else []) + self._headers[turn.role]
                written = [*next(contents), self.end]
                tokens += before + written
                answered += [False] * len(before) + [turn.role == "assistant" and turn.learned] * len(written)
                unlearned += [False] * len(before) + [not turn.learned] * len(written)
            rendered.append(Rendered(tokens, answered, unlearned))
        return rendered

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids of the conversation before the content of the assistant's last turn."""
        asked = self.render([conversation[:-1]])[0].tokens
        return asked + self._gap + self._headers["assistant"]

    def _contents(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        texts = [turn.text for turns in conversations for turn in turns]
        return self.tokenizer.encode_batch([text.strip() for text in texts] if self.template.trims else texts)

    def _header(self, role: str) -> list[int]:
        ids: list[int] = []
        for piece in self.template.header:
            special = piece in self.template.specials
            ids += [self.tokenizer.special(piece)] if special else self._text(piece.replace("{role}", role))
        return ids

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode_batch([text])[0] if text else []
