"""Reads a folder of training code as it would be shipped: its files, their syntax trees, the file of each module.
Nothing of the folder is run or imported. A file is parsed only when its tree is needed, so that a large repository
costs no more time than the files that are needed.
"""

from __future__ import annotations

import ast
import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpufleet.infra.definition.loader import CANARY, PROGRAM
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.code import files_in

MOST_BYTES = 1_000_000  # larger files are data or generated
_SKIPPED = {"node_modules", "site-packages", "build", "dist", ".tox"}
_OURS = (f"/{PROGRAM}/", f"/{CANARY}/")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact in the code, with its place."""

    value: str
    where: str  # its place, such as train.py:42


class CodeFolder:
    """The files of a folder by name, except installed packages and what `gpufleet init` wrote. Raises GpufleetError if
    `folder` is not a folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise GpufleetError(f"--code: {path} is not a folder; name the folder that holds your training script")
        self.path = path
        self._trees: dict[str, ast.Module | None] = {}

    @cached_property
    def files(self) -> frozenset[str]:
        listed = (name for name, _ in files_in(self.path) if not any(own in f"/{name}" for own in _OURS))
        return frozenset(name for name in listed if not _SKIPPED & set(name.split("/")[:-1]))

    @cached_property
    def python(self) -> list[str]:
        return sorted(name for name in self.files if name.endswith(".py"))

    def text(self, name: str) -> str:
        """The text of file `name`; empty if the file cannot be read, or is too large to be code."""
        path = self.path / name
        try:
            return path.read_text(errors="replace") if path.stat().st_size <= MOST_BYTES else ""
        except OSError:
            return ""

    def tree(self, name: str) -> ast.Module | None:
        """The syntax tree of file `name`; None if the folder has no such Python file, or it cannot be parsed."""
        if name not in self._trees:
            self._trees[name] = None
            if name in self.files:
                with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
                    self._trees[name] = ast.parse((self.path / name).read_bytes()) if self.text(name) else ast.parse("")
        return self._trees[name]

    def module(self, dotted: str, roots: tuple[str, ...]) -> str:
        """The file of the module `dotted`; empty if the module is not in the folder. `roots`: the folders in which
        Python searches, in this order; they are relative to this folder, which itself is "".
        """
        place = dotted.replace(".", "/")
        for root in roots:
            for name in (f"{place}.py", f"{place}/__init__.py"):
                if (joined := f"{root}/{name}" if root else name) in self.files:
                    return joined
        return ""
