"""Writes what `gpufleet doctor --pin` found into a definition file; comments and every other byte stay."""

from __future__ import annotations

from pathlib import Path

from infra.definition.yaml_tree import Mapping, Scalar, find_node, open_file, parse
from infra.errors import DefinitionError, Problem
from job import atomic


def pin(path: Path, *, ami: str, image: str) -> None:
    """Writes the AMI and the image with its digest into the file; every other byte stays. Atomic.

    Without `ami` it gets a line above `region`. Raises DefinitionError when the file is not plain enough for that (a
    folded value, a section in braces without the key).
    """
    target = path.resolve()
    text, tree = open_file(target)
    edits: list[tuple[int, int, str]] = []
    problems: list[Problem] = []
    for where, value, example in (("fleet.ami", ami, "unpinned"), ("job.image", image, "registry/repository:tag")):
        node = find_node(tree, where)
        if where == "fleet.ami" and node is None and (line := _above_region(text, tree, value)):
            edits.append(line)
        elif not isinstance(node, Scalar):
            section, _, key = where.partition(".")
            hint = f"Add the line `{key}: {example}` under `{section}:`, then pin again."
            problems.append(Problem(path=where, value="", allowed="a value to replace", hint=hint))
        elif node.style in ("|", ">"):
            hint = f"Write `{where.partition('.')[2]}: {example}` on one line, then pin again."
            problems.append(Problem(path=where, value=node.text.strip(), allowed="one line", hint=hint, line=node.line))
        else:
            quote = node.style or ""
            blank = " " if node.start == node.end and text[node.start - 1 : node.start] == ":" else ""  # `ami:` alone
            edits.append((node.start, node.end, f"{blank}{quote}{value}{quote}"))
    if problems:
        raise DefinitionError(str(path), problems)
    pinned = text
    for start, end, value in sorted(edits, reverse=True):
        pinned = pinned[:start] + value + pinned[end:]
    _, again = parse(pinned.encode(), path)
    written = [
        node.text if isinstance(node, Scalar) else None
        for node in (find_node(again, "fleet.ami"), find_node(again, "job.image"))
    ]
    assert written == [ami, image], written
    if pinned != text:
        mode = target.stat().st_mode
        atomic.write_bytes(target, pinned.encode())
        target.chmod(mode)


def _above_region(text: str, tree: Mapping, ami: str) -> tuple[int, int, str] | None:
    """The line that a file without `ami` gets; None where `region` is not on a line of its own in block style."""
    region = find_node(tree, "fleet.region")
    lines = text.splitlines(keepends=True)
    if region is None or region.line > len(lines):
        return None
    line, before = lines[region.line - 1], "".join(lines[: region.line - 1])
    indent = line[: len(line) - len(line.lstrip(" "))]
    if not indent or not line.startswith(f"{indent}region:") or before.rstrip().endswith(("{", ",")):
        return None
    end = line[len(line.rstrip("\r\n")) :] or "\n"
    return len(before), len(before), f"{indent}ami: {ami}{end}"
