"""Conversations and where they come from: JSONL files of instructions and answers, or generated pairs.

User mistakes raise ValueError with line numbers.
"""

from __future__ import annotations

import codecs
import json
import random
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from gpufleet.job import atomic, progress
from gpufleet.job.experiments.dataset.encodings import foreign, not_utf8
from gpufleet.job.text import counted

ROLES = ("system", "user", "assistant")
# keys that say whether to learn an assistant's message, as OpenAI and axolotl name them
LEARNED = ("weight", "train", "training")
OTHERS = {  # names of the keys in other tools
    "instruction": ("prompt", "question", "query", "input"),
    "response": ("completion", "answer", "output"),
}
SHOWN = 20  # at most this many problems of a file are printed
GENERATED = (3, 16)  # the least and the most numbers in a generated list
_HALF = re.compile("[\ud800-\udfff]")
T = TypeVar("T")


class Turn(NamedTuple):
    """One message. `learned`: False if the file excludes this message from the loss."""

    role: str
    text: str
    learned: bool = True


# ValueErrors of the decoder are not collected, because a bad character is not a mistake of one line
Conversation = Sequence[Turn]


class Chats(Protocol):
    """Conversations, and a name that says everything on which the conversations depend."""

    @property
    def name(self) -> str: ...
    def conversations(self) -> Iterator[Conversation]: ...


@dataclass(frozen=True)
class JsonlChats:
    """One JSON object per line: `instruction` and `response`, with or without `system`; or `messages` with `role` and
    `content`, with or without `weight`.

    Other keys are ignored. After the file is read to its end, `left_out` has, for each ignored key, the number of lines
    with a value. Blank lines are skipped.
    """

    path: Path
    left_out: Counter[str] = field(default_factory=Counter, init=False, compare=False)

    @cached_property
    def name(self) -> str:
        return f"chat jsonl: sha256 {hashed(self.path)}"

    def conversations(self) -> Iterator[Conversation]:
        """Yields the conversations. Raises ValueError as `lines_of` does."""
        ignored = Counter[str]()
        for tree, conversation in lines_of(self.path, _line, "instruction and response"):
            ignored.update(_left_out(tree))
            yield conversation
        self.left_out.clear()
        self.left_out.update(ignored)


@dataclass(frozen=True)
class GeneratedPairs:
    """`count` seeded "reverse this list of numbers" pairs."""

    count: int
    seed: int

    @property
    def name(self) -> str:
        return f"generated pairs: {self.count} from seed {self.seed}"

    def conversations(self) -> Iterator[Conversation]:
        draw = random.Random(f"pairs {self.seed}")
        for _ in range(self.count):
            numbers = [str(draw.randrange(100)) for _ in range(draw.randint(*GENERATED))]
            yield (
                Turn("user", "Reverse this list of numbers: " + " ".join(numbers)),
                Turn("assistant", " ".join(reversed(numbers))),
            )

    def text(self) -> str:
        """Every text that a conversation may contain."""
        return " ".join(("Reverse this list of numbers:", *map(str, range(100))))


class FormError(ValueError):
    """The form of the whole file is wrong: it has another encoding, or every line has the keys of another tool."""


def hashed(path: Path) -> str:
    """The sha256 of a file that belongs to the user. Raises ValueError."""
    try:
        with progress.shown(f"hashing {path}", path.stat().st_size) as advance:
            return atomic.sha256(path, advance)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error


def lines_of(path: Path, read: Callable[[bytes], T], wanted: str) -> Iterator[T]:
    """Yields the result of `read` for each line that is not blank. The reading goes on after a mistake, and at the end
    raises a ValueError with all mistakes and their lines. `wanted`: the keys that a line may have.
    """
    require_lines(path)
    problems: dict[str, list[int]] = {}
    more = ""
    empty = True
    with path.open("rb") as file, progress.shown(f"reading {path}", path.stat().st_size) as advance:
        for number, line in enumerate(file, 1):
            advance(len(line))
            if is_blank(line):
                continue
            empty = False
            try:
                parsed = read(line)
            except ValueError as error:
                problems.setdefault(str(error), []).append(number)
                if isinstance(error, FormError):  # a wrong form concerns the whole file, not one line
                    break
                if len(problems) == SHOWN:
                    more = f"\n{path}: lines after {number} were not checked"
                    break
                continue
            if not problems:
                yield parsed
    if problems:
        messages = (f"{path}:{first}: {why}{_repeated_note(others)}" for why, (first, *others) in problems.items())
        raise ValueError("\n".join(messages) + more)
    if empty:
        raise ValueError(f"{path}: empty; give one JSON object per line, with {wanted}")


def _repeated_note(lines: list[int]) -> str:
    """The other lines with the same mistake, as text."""
    return f" (and in {counted(f'{len(lines):,}', 'more line')}, the next is {lines[0]})" if lines else ""


def require_lines(path: Path) -> None:
    """Raises ValueError if the file is a table, one JSON array, or has objects that are longer than a line, because
    otherwise every line would be reported as a mistake.
    """
    with path.open("rb") as file:
        begins = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
        if path.suffix.lower() == ".csv" and not begins.startswith(b"{"):
            made = f"pandas.read_csv({path.name!r}).to_json({path.stem + '.jsonl'!r}, orient='records', lines=True)"
            raise ValueError(f"{path}: this is a table; write one JSON object per line: {made}")
        if not begins.startswith((b"[", b"{")):
            return
        file.seek(0)
        lines = (line.removeprefix(codecs.BOM_UTF8) for line in file if not is_blank(line))
        first, more = next(lines), next(lines, None)
    ends = False  # True if the first line ends before its JSON object ends
    if more is not None:
        try:
            json.loads(first)
            return  # the object ends on its own line, so the mistake is on this line
        except json.JSONDecodeError as error:
            ends = error.pos >= len(error.doc.rstrip())
        except (ValueError, RecursionError):
            pass
    name = shlex.quote(path.name)
    made = shlex.quote(f"{path.stem}{'-lines' if path.suffix == '.jsonl' else ''}.jsonl")
    if begins.startswith(b"{"):
        if ends:
            raise ValueError(
                f"{path}: an object spans several lines; write one object per line: `jq -c . {name} > {made}`"
            )
        return
    raise ValueError(f"{path}: this is a JSON array; write one object per line: `jq -c '.[]' {name} > {made}`")


def is_blank(line: bytes) -> bool:
    """Whether the line is blank, except for a byte-order mark."""
    return not line.removeprefix(codecs.BOM_UTF8).strip()


def require_characters(text: str, path: str) -> None:
    """Raises ValueError for half of a surrogate pair. JSON can contain it as an escape, but no tokenizer or
    file can.
    """
    if (half := _HALF.search(text)) is not None:
        raise ValueError(
            f"{path}: \\u{ord(half[0]):04x} at character {half.start()} is half of a surrogate pair and not a"
            " character; "
            "write both halves, or leave it out"
        )


def object_of(line: bytes, wanted: str = "instruction and response, or messages") -> dict[str, Any]:
    """One line's object. Raises ValueError."""
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise FormError(not_utf8(line, error)) from error
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        if todo := foreign(line):
            raise FormError(f"not JSON; {todo}") from error
        why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"not JSON ({why}); give one object per line, with {wanted}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"not an object; give {wanted}")
    return tree


def _line(line: bytes) -> tuple[dict[str, Any], Conversation]:
    tree = object_of(line)
    return tree, _conversation(tree)


def _conversation(tree: dict[str, Any]) -> Conversation:
    if "messages" in tree:
        return _messages(tree["messages"])
    _other_keys(tree)
    turns = [Turn("system", text_at(tree, "system"))] if tree.get("system") else []
    return (*turns, Turn("user", text_at(tree, "instruction")), Turn("assistant", text_at(tree, "response")))


def _left_out(tree: dict[str, Any]) -> list[str]:
    """The ignored keys of a line that have a value, each only once and in printable form; keys of a message begin with
    `messages.`.
    """
    read = ("messages",) if "messages" in tree else ("system", "instruction", "response")
    entries = [(key, value) for key, value in tree.items() if key not in read]
    for message in tree.get("messages", ()):
        read = ("role", "content", *(LEARNED if message["role"] == "assistant" else ()))
        entries += [(f"messages.{key}", value) for key, value in message.items() if key not in read]
    ignored = dict.fromkeys(key for key, value in entries if value not in (None, "", [], {}))
    return [key.encode(errors="backslashreplace").decode() for key in ignored]  # half of a surrogate pair


def _other_keys(tree: dict[str, Any]) -> None:
    """Raises FormError for the keys of ShareGPT, Alpaca, TRL and others, with the names to use instead."""
    if "conversations" in tree and "instruction" not in tree:
        raise FormError(
            "conversations is called messages here: a list of role (for human: user, for gpt: assistant) and content"
            " (for value); or give instruction and response"
        )
    theirs = {
        called: ours
        for ours, others in OTHERS.items()
        if ours not in tree and (called := next((key for key in others if key in tree), ""))
    }
    if theirs:
        are, them = ("is", "it") if len(theirs) == 1 else ("are", "them")
        joined = tree.get("input") and "input" not in theirs
        raise FormError(
            f"{' and '.join(theirs)} {are} called {' and '.join(theirs.values())} here: rename {them}"
            f"{', and write what is in input at the end of instruction' if joined else ''}; or give messages, a list of"
            " role and content"
        )


def _messages(messages: Any) -> Conversation:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages: not a list of objects with role and content")
    turns = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            raise FormError(f"messages[{number}].content: a list of parts; write their text as one text")
        if role in ("tool", "function") or (message.get("tool_calls") and not content):
            raise FormError(
                f"messages[{number}]: tool calls are not read: leave such conversations out, or write call and result "
                "as text of the assistant and the user"
            )
        if role not in ROLES:
            raise ValueError(f"messages[{number}].role: {role!r} is not one of {', '.join(ROLES)}")
        if role == "system" and number:
            raise ValueError(f"messages[{number}].role: system only as the first message")
        if role == "system" and not message.get("content"):
            continue  # an empty `system` beside `instruction` is ignored
        learned = role != "assistant" or _learned(message, f"messages[{number}].")
        turns.append(Turn(role, text_at(message, "content", f"messages[{number}]."), learned))
    if not turns or turns[-1].role != "assistant":
        raise ValueError("messages: the last message must have the role assistant, because it is the answer to learn")
    if all(turn.role != "user" for turn in turns):
        raise ValueError("messages: an answer has no question before it")
    return tuple(turns)


def _learned(message: dict[str, Any], path: str) -> bool:
    """Whether the model should learn the answer. Raises ValueError for a weight between 0 and 1."""
    for key in LEARNED:
        if message.get(key) not in (None, 0, 1):
            raise ValueError(f"{path}{key}: {message[key]!r:.60}; allowed: 1 (learned) or 0 (not learned)")
    return 0 not in (message.get(key) for key in LEARNED)


def text_at(tree: dict[str, Any], key: str, path: str = "") -> str:
    """The text under a key of one line's object. Raises ValueError."""
    if key not in tree:
        raise ValueError(f"{path}{key}: missing; it has {', '.join(sorted(tree)) or 'no keys'}")
    if not isinstance(tree[key], str) or not tree[key].strip():
        raise ValueError(f"{path}{key}: {tree[key]!r:.60} is not a text, or empty")
    require_characters(tree[key], f"{path}{key}")
    return str(tree[key])
