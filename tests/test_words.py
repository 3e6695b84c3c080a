"""Names and docstrings are plain: what no reader can guess is refused."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for name in ("gpufleet", "infra", "job", "rehearsal", "bench", "policy")
    for path in (ROOT / name).rglob("*.py")
]
USERS = {"sixth", "own_code", "scripts", "program"}  # folders of what stands for their code
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if not USERS & set(path.parts)]
VAGUE = (
    "about above across after again alone along already also among apart around as aside at away before behind below "
    "beneath beside besides between beyond by down during else except for from here hereby in inside instead into "
    "kept held heed just later like near never of off on once only onto out outside over past since so still than then "
    "there through to together told toward towards twice under until upon via whole why with within without"
)

EMPTY = ("each", "found", "given", "kept", "left", "said", "told", "untold", "what")  # of a variable: of what?


Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class DefinedWords(NamedTuple):
    """What a file defines: functions and classes with their places, and the variables of its functions."""

    path: Path
    functions: list[str]
    classes: list[str]  # at the top level
    docstrings: list[str]
    variables: list[str]


@cache
def words() -> list[DefinedWords]:
    """Of source and tests; to parse them takes a second."""
    return [read(path) for path in (*SOURCES, *TESTS)]


def read(path: Path) -> DefinedWords:
    tree, where = ast.parse(path.read_text()), path.relative_to(ROOT)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    variables = (
        name for function in functions for name in ast.walk(function) if isinstance(name, ast.Name) and name.id in EMPTY
    )
    return DefinedWords(
        path=path,
        functions=[f"{where}:{node.lineno} {node.name}" for node in functions],
        classes=[f"{where}:{node.lineno} {node.name}" for node in tree.body if isinstance(node, ast.ClassDef)],
        docstrings=[
            f"{where}:{node.lineno} {node.name} {ast.get_docstring(node) or ''}"
            for node in nodes
            if isinstance(node, Node)
        ],
        variables=[f"{where}:{name.lineno} {name.id}" for name in variables if isinstance(name.ctx, ast.Store)],
    )


def test_no_function_is_named_by_a_bare_preposition_or_adverb() -> None:
    found = [each for file in words() for each in file.functions if each.split()[1].strip("_") in VAGUE.split()]
    assert found == []


def test_no_variable_has_a_name_that_does_not_say_what_it_holds() -> None:
    product = [
        file for file in words()[: len(SOURCES)] if not {"bench", "policy"} & set(file.path.relative_to(ROOT).parts)
    ]
    assert [each for file in product for each in file.variables] == []


def test_no_class_name_stands_for_two_things() -> None:
    places = defaultdict(list)
    for file in words():
        if (ROOT / "gpufleet") not in file.path.parents:  # whose public forms have the same names
            for each in file.classes:
                places[each.split()[1]].append(each)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_docstring_says_itself_what_comes_back() -> None:
    docstrings = [each for file in words()[: len(SOURCES)] for each in file.docstrings]
    assert [each for each in docstrings if each.split(" ", 2)[2].startswith(("Of ", "The same"))] == []


def test_no_comment_is_a_banner() -> None:
    banner = re.compile(r"^\s*#.*[-=*#]{4,}\s*$", re.MULTILINE)
    assert [path for path in (*SOURCES, *TESTS) if banner.search(path.read_text())] == []
