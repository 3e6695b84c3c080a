"""Finds modules that a script imports at its start but that the command's Python does not have.

The script itself does not run. If the script changes where Python looks for modules, or the command chooses its own
Python, nothing is reported: a wrong refusal would stop a working run.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpufleet.infra.discover.source import CodeFolder
from gpufleet.infra.discover.start import StartedProgram, starts
from gpufleet.infra.errors import GpufleetError

_CHOOSES = re.compile(  # words by which a command chooses its Python or its packages
    r"\b(activate|uv|poetry|pdm|pipenv|pixi|hatch|rye|conda|mamba|micromamba|install|PATH|PYTHONPATH)\b|/bin/"
)
_CHANGES = re.compile(r"sys\.path|addsitedir|[\"']pip[\"']")  # likewise in a script
_LOOK = """
import importlib.util, json, sys
print(json.dumps([name for name in json.loads(sys.argv[1]) if importlib.util.find_spec(name) is None]))
"""
LOOKS_S = 60


def lacking(folder: Path, command: str, python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Each module that `python` lacks, with the place of the import (train.py:3). Empty if it lacks none, or if that is
    not known.
    """
    code = CodeFolder(folder)
    try:
        programs = starts(code, re.sub(r"\{code\}/?", "", command))
    except GpufleetError:
        return {}
    if _CHOOSES.search(command) or any(program.through for program in programs):
        return {}
    own = {part.partition(".")[0] for name in code.files for part in name.split("/")}
    imports: dict[str, str] = {}
    for program in programs:
        for name, where in _imports(code, program):
            if name not in own and name not in sys.stdlib_module_names:
                imports.setdefault(name, where)
    if not imports or any(_CHANGES.search(code.text(where.partition(":")[0])) for where in imports.values()):
        return {}
    try:
        asked = [str(python), "-c", _LOOK, json.dumps(list(imports))]
        answer = subprocess.run(asked, cwd=folder, env=environment, capture_output=True, timeout=LOOKS_S, check=True)
        return {name: imports[name] for name in json.loads(answer.stdout)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _imports(code: CodeFolder, program: StartedProgram) -> Iterator[tuple[str, str]]:
    """Yields each module that the script, or a file of the folder that it imports, imports unconditionally at its top
    level: the first part of the module's name, and the place of the import.
    """
    waiting: list[str] = [program.script] if program.script else []
    seen: set[str] = set()
    while waiting:
        file = waiting.pop(0)
        if file in seen or (tree := code.tree(file)) is None:
            continue
        seen.add(file)
        for node in tree.body:
            roots = program.roots
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above, roots = (file.split("/")[: -node.level], ("",)) if node.level else ([], roots)
                module = ".".join([*above, *filter(None, [node.module])])
                modules = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for module in modules:
                if inner := code.module(module, roots):
                    waiting.append(inner)
                else:
                    yield module.partition(".")[0], f"{file}:{node.lineno}"
