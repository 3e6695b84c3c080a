"""Turns YAML text into a tree. Every scalar in the tree is still text, and every node has its place in the file.

PyYAML only parses, so that `yes`, `3e-4`, `2026-11-21` and `3.10` reach the schema as written. Features that no
definition file needs are refused: aliases, tags, several documents, deep nesting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from gpufleet.infra.errors import DefinitionError, GpufleetError, Problem, short

MAX_BYTES = 256 * 1024  # a definition is about 2 kB
MAX_DEPTH = 12
NULLS = ("", "~", "null")  # unquoted texts that mean null


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """One value as written. `start` and `end` are its character offsets in the text, including quotes."""

    path: str
    line: int  # the line of the value's key, counted from 1
    text: str
    style: str | None = None  # the quote or block character; None for plain text
    start: int = 0
    end: int = 0

    @property
    def is_null(self) -> bool:
        return self.style is None and self.text in NULLS


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    path: str
    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """A section, whose keys are unique."""

    path: str
    line: int
    entries: dict[str, Node] = field(default_factory=dict)


Node = Scalar | Items | Mapping


class UnreadableError(Exception):
    """The text cannot be read as the YAML of a definition file. The error has all problems up to the place where
    reading stopped.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def decode(raw: bytes) -> str:
    """The text of a file. Raises UnreadableError if it is too large or not UTF-8."""
    if len(raw) > MAX_BYTES:
        raise UnreadableError(
            _problem(1, f"{len(raw)} bytes", f"at most {MAX_BYTES} bytes", "Is this a definition file?")
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start : error.start + 1]
        raise UnreadableError(_problem(line, f"byte 0x{byte.hex()}", "UTF-8 text", "Save the file as UTF-8.")) from None


def read(text: str, *, holds: str = "sections (run:, job:, fleet:, ...)", see: str = "stacks/") -> Mapping:
    """The tree of a file. `holds`: what the file should contain, as a phrase for messages. Raises UnreadableError with
    all duplicate keys, or with the first other problem.
    """
    lines = text.splitlines()
    problems: list[Problem] = []
    try:
        tree = _build(_events(text), problems)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = text[error.position : error.position + 1]
        raise UnreadableError(_problem(line, character, "printable UTF-8 text")) from None
    except yaml.MarkedYAMLError as error:
        # PyYAML notices an unclosed quote or bracket only at the end of the file, but the mistake is at the place where
        # it opens.
        open_quote = "quoted scalar" in (error.context or "")
        bracket = error.context or "" if "flow" in (error.context or "") else ""
        no_colon = "simple key" in (error.context or "")  # PyYAML notices a missing colon only on a later line
        begins = open_quote or bracket or no_colon
        mark = (error.context_mark if begins else None) or error.problem_mark or error.context_mark
        number = mark.line + 1 if mark else 1
        written = lines[number - 1].strip() or "an empty line" if number <= len(lines) else "the end of the file"
        allowed = "YAML, `key: value` lines indented by spaces"
        hint = "A quote opens here and is not closed." if open_quote else f"This is not YAML: {error.problem}."
        if "\\t" in (error.problem or "") or "\t" in (lines[number - 1] if number <= len(lines) else ""):
            hint = "Indent with spaces: YAML takes no tabs."
        elif "escape character" in (error.problem or ""):
            allowed = "text between single quotes, '...'"
            hint = "Between double quotes a backslash begins a YAML escape, but YAML has no such escape."
        elif bracket:
            opened = re.findall(r"[\[{]", "".join(lines[number - 1 : number])[: mark.column + 1]) if mark else []
            hint = f"A {opened[-1] if opened else '[ or {'} opens here and is not closed, or a comma is missing in it."
        elif "mapping values" in (error.problem or "") and mark and re.search(r":\s", lines[mark.line][: mark.column]):
            hint = "A value that contains a colon and a space needs quotes."
        elif no_colon:
            hint = "This is not `key: value`: a colon and a space are missing."
        elif "block" in (error.problem or "") or "mapping values" in (error.problem or ""):
            hint = _indentation(lines, number) or hint
        raise UnreadableError(_problem(number, written, allowed, hint)) from None
    if problems:
        raise UnreadableError(*problems)
    if not isinstance(tree, Mapping):
        written = lines[tree.line - 1].strip() if tree and tree.line <= len(lines) else "an empty file"
        raise UnreadableError(_problem(tree.line if tree else 1, written, holds, f"See {see}"))
    return tree


def open_file(path: Path) -> tuple[str, Mapping]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GpufleetError(f"{path} cannot be read: {error.strerror}") from None
    return parse(raw, path)


def parse(raw: bytes, path: Path) -> tuple[str, Mapping]:
    try:
        text = decode(raw)
        return text, read(text)
    except UnreadableError as error:
        raise DefinitionError(str(path), error.problems) from None


def _indentation(lines: list[str], number: int) -> str:
    """A sentence about a mistake in the line before, or about the two lines' different indentations."""

    def spaces(at: int) -> int:
        return len(lines[at - 1]) - len(lines[at - 1].lstrip(" "))

    before = next(
        (at for at in range(number - 1, 0, -1) if lines[at - 1].strip() and lines[at - 1].strip()[0] != "#"), 0
    )
    if not before or number > len(lines):
        return ""
    written = lines[before - 1].strip()
    item = lines[before - 1].lstrip().startswith("- ")
    bare = not item and not re.search(r":(\s|$)", lines[before - 1])
    if bare and spaces(before) < spaces(number):
        return f"Line {before}, `{short(written)}`, is not a section: a colon is missing at its end."
    if bare and spaces(before) == spaces(number):
        return f"Line {before}, `{short(written)}`, is not `key: value`: a colon and a space are missing."
    if item and spaces(before) == spaces(number):
        return f"Line {before} is an item of a list, but line {number} is a key: one block cannot have both."
    if spaces(before) == spaces(number):
        return ""
    return (
        f"Line {before} is indented by {spaces(before)}, line {number} by {spaces(number)}: keys of one section need "
        "the same indentation."
    )


def merge(base: Node | None, overlay: Node) -> Node:
    """The tree `base` with the values of `overlay`: sections are merged key by key, and everything else is replaced.
    Nodes keep their paths.
    """
    if not isinstance(base, Mapping) or not isinstance(overlay, Mapping):
        return overlay
    entries = dict(base.entries)
    for key, node in overlay.entries.items():
        entries[key] = merge(entries.get(key), node)
    return replace(base, entries=entries)


def find_node(tree: Node, path: str) -> Node | None:
    """The node at a path such as `fleet.zones[1]`; None if there is none."""
    node: Node | None = tree
    for part in path.replace("[", ".[").split("."):
        if part.startswith("["):
            index = int(part[1:-1])
            node = node.items[index] if isinstance(node, Items) and index < len(node.items) else None
        elif part:
            node = node.entries.get(part) if isinstance(node, Mapping) else None
    return node


def dump(tree: Mapping) -> str:
    """The tree as YAML text, which `read` turns back into the same tree; it has no comments."""
    return yaml.serialize(_yaml_node(tree), Dumper=yaml.BaseDumper, width=120, allow_unicode=True)


def _yaml_node(node: Node) -> yaml.Node:
    if isinstance(node, Scalar):
        return yaml.ScalarNode("tag:yaml.org,2002:str", node.text, style=node.style)
    if isinstance(node, Items):
        flow = all(isinstance(item, Scalar) for item in node.items)
        return yaml.SequenceNode("tag:yaml.org,2002:seq", [_yaml_node(item) for item in node.items], flow_style=flow)
    pairs = [(_yaml_node(Scalar(path="", line=0, text=key)), _yaml_node(child)) for key, child in node.entries.items()]
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=not pairs)


@dataclass(slots=True)
class _Open:
    """A list or section that is being read."""

    node: Items | Mapping
    key: str | None = None  # the key of a mapping whose value is read next
    line: int = 0
    duplicates: int = 0


def _events(text: str) -> Iterable[yaml.Event]:
    """Raises yaml.YAMLError. The parser in C is tried first, because it takes a tenth of the time. The one in Python
    has better messages.
    """
    try:
        return [*yaml.parse(text, Loader=yaml.CSafeLoader)]
    except yaml.YAMLError:
        return yaml.parse(text, Loader=yaml.SafeLoader)


def _build(events: Iterable[yaml.Event], problems: list[Problem]) -> Node | None:
    """An explicit stack is used instead of recursion, so that nesting cannot exhaust Python's call stack."""
    stack: list[_Open] = []
    root: Node | None = None
    documents = 0
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise UnreadableError(_problem(line, "---", "one document per file"))
        elif isinstance(event, yaml.AliasEvent):
            raise UnreadableError(
                _problem(line, f"*{event.anchor}", "the value itself", "Aliases are not read: write it out.")
            )
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            node: Node = stack.pop().node
            root = _attach(stack, node, root)
        elif isinstance(event, yaml.NodeEvent):
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise UnreadableError(_problem(line, tag, "a value without a YAML tag", "Types come from the key."))
            if stack and isinstance(stack[-1].node, Mapping) and stack[-1].key is None:
                _open_key(stack[-1], event, line, problems)
                continue
            path, at_line = _position(stack, line)
            if isinstance(event, yaml.ScalarEvent):
                style = event.style or None
                assert event.start_mark is not None, "for mypy: PyYAML's parser always sets marks"
                assert event.end_mark is not None
                start, end = event.start_mark.index, event.end_mark.index
                scalar = Scalar(path=path, line=at_line, text=event.value, style=style, start=start, end=end)
                root = _attach(stack, scalar, root)
            else:
                kind = Mapping if isinstance(event, yaml.MappingStartEvent) else Items
                stack.append(_Open(kind(path=path, line=at_line)))
                if len(stack) > MAX_DEPTH:
                    raise UnreadableError(_problem(line, "...", f"at most {MAX_DEPTH} levels of nesting"))
    return root


def _open_key(current: _Open, event: yaml.NodeEvent, line: int, problems: list[Problem]) -> None:
    if not isinstance(event, yaml.ScalarEvent):
        raise UnreadableError(_problem(line, "a list or section as a key", "a name as a key"))
    name = event.value
    assert isinstance(current.node, Mapping)
    if name in current.node.entries:
        path = _join(current.node.path, name)
        first = current.node.entries[name].line
        problems.append(
            Problem(path=path, value=name, allowed="each key once", hint=f"First at line {first}.", line=line)
        )
        current.duplicates += 1
        name = f"{name}#{current.duplicates}"
    current.key, current.line = name, line


def _position(stack: list[_Open], line: int) -> tuple[str, int]:
    if not stack:
        return "", line
    current = stack[-1]
    if isinstance(current.node, Items):
        return f"{current.node.path}[{len(current.node.items)}]", line
    return _join(current.node.path, current.key or ""), current.line


def _attach(stack: list[_Open], node: Node, root: Node | None) -> Node | None:
    if not stack:
        return node
    current = stack[-1]
    if isinstance(current.node, Items):
        current.node.items.append(node)
    else:
        assert current.key is not None
        current.node.entries[current.key] = node
        current.key = None
    return root


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _problem(line: int, value: str, allowed: str, hint: str = "") -> Problem:
    return Problem(path="the file", value=value, allowed=allowed, hint=hint, line=line)
