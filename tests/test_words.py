"""Names and docstrings are plain: what no reader can guess is refused."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def place(path: Path, node: ast.stmt) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_function_is_named_by_a_bare_preposition_or_adverb() -> None:
    found = [
        f"{place(path, node)} {node.name}"
        for path in (*SOURCES, *TESTS)
        for node in functions(ast.parse(path.read_text()))
        if node.name.strip("_") in VAGUE.split()
    ]
    assert found == []


def test_no_variable_has_a_name_that_does_not_say_what_it_holds() -> None:
    product = [path for path in SOURCES if not {"bench", "policy"} & set(path.relative_to(ROOT).parts)]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.id}"
        for path in product
        for function in functions(ast.parse(path.read_text()))
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY
    ]
    assert found == []


def test_no_class_name_stands_for_two_things() -> None:
    places = defaultdict(list)
    for path in (*SOURCES, *TESTS):
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.ClassDef) and (ROOT / "gpufleet") not in path.parents
            ):  # whose public forms have the same names
                places[node.name].append(place(path, node))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_docstring_says_itself_what_comes_back() -> None:
    found = [
        f"{place(path, node)} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (ast.get_docstring(node) or "").startswith(("Of ", "The same"))
    ]
    assert found == []


def test_no_comment_is_a_banner() -> None:
    banner = re.compile(r"^\s*#.*[-=*#]{4,}\s*$", re.MULTILINE)
    assert [path for path in (*SOURCES, *TESTS) if banner.search(path.read_text())] == []
