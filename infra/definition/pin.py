"""Writes the results of `gpufleet doctor --pin` into a definition file, and changes nothing else in it."""

from __future__ import annotations

from pathlib import Path

from gpufleet.infra.definition.model import SUPERVISOR_IMAGE
from gpufleet.infra.definition.yaml_tree import Mapping, Scalar, find_node, open_file, parse
from gpufleet.infra.errors import DefinitionError, Problem
from gpufleet.job import atomic

_EXAMPLES = {
    "fleet.ami": "unpinned",
    "fleet.baked_ami": "ami-...",
    "job.image": "registry/repository:tag",
    "job.supervisor_image": SUPERVISOR_IMAGE,
}
# If the file lacks one of these keys, it is written above the other key.
_ABOVE = {"fleet.ami": "fleet.region", "fleet.baked_ami": "fleet.region", "job.supervisor_image": "job.image"}


def pin(path: Path, *, ami: str, image: str, supervisor_image: str | None = None) -> None:
    """Writes the AMI and the images with their digests into the file, as write_values does."""
    wanted = {"fleet.ami": ami, "job.image": image}
    if supervisor_image is not None:
        wanted["job.supervisor_image"] = supervisor_image
    write_values(path, wanted)


def write_values(path: Path, wanted: dict[str, str]) -> None:
    """Writes values by key into the file, atomically; every other byte stays. A key of _ABOVE that the file lacks is
    added. Raises DefinitionError if the file is not plain enough for this (a folded value, or a section in braces
    without the key).
    """
    target = path.resolve()
    text, tree = open_file(target)
    edits: list[tuple[int, int, str]] = []
    problems: list[Problem] = []
    for where, value in wanted.items():
        node = find_node(tree, where)
        if node is None and (line := _line_above(_ABOVE.get(where, ""), text, tree, where, value)):
            edits.append(line)
        elif not isinstance(node, Scalar):
            section, _, key = where.partition(".")
            hint = f"Add the line `{key}: {_EXAMPLES[where]}` under `{section}:`, then pin again."
            problems.append(Problem(path=where, value="", allowed="a value to replace", hint=hint))
        elif node.style in ("|", ">"):
            hint = f"Write `{where.partition('.')[2]}: {_EXAMPLES[where]}` on one line, then pin again."
            problems.append(Problem(path=where, value=node.text.strip(), allowed="one line", hint=hint, line=node.line))
        else:
            quote = node.style or ""
            # a space is needed after a key without a value, such as `ami:`
            blank = " " if node.start == node.end and text[node.start - 1 : node.start] == ":" else ""
            edits.append((node.start, node.end, f"{blank}{quote}{value}{quote}"))
    if problems:
        raise DefinitionError(str(path), problems)
    pinned = text
    for start, end, value in sorted(edits, reverse=True):
        pinned = pinned[:start] + value + pinned[end:]
    _, again = parse(pinned.encode(), path)
    for where, value in wanted.items():
        written = find_node(again, where)
        assert isinstance(written, Scalar), where
        assert written.text == value, (where, written)
    if pinned != text:
        mode = target.stat().st_mode
        atomic.write_bytes(target, pinned.encode())
        target.chmod(mode)


def _line_above(neighbour: str, text: str, tree: Mapping, where: str, value: str) -> tuple[int, int, str] | None:
    """The line to add to a file that lacks the key; None if `neighbour` is not on a line of its own in block style."""
    beside, key, beside_key = find_node(tree, neighbour), where.rpartition(".")[2], neighbour.rpartition(".")[2]
    lines = text.splitlines(keepends=True)
    if not neighbour or beside is None or beside.line > len(lines):
        return None
    line, before = lines[beside.line - 1], "".join(lines[: beside.line - 1])
    indent = line[: len(line) - len(line.lstrip(" "))]
    if not indent or not line.startswith(f"{indent}{beside_key}:") or before.rstrip().endswith(("{", ",")):
        return None
    end = line[len(line.rstrip("\r\n")) :] or "\n"
    return len(before), len(before), f"{indent}{key}: {value}{end}"
