"""Which package may import which: none imports one that stands on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(package: str) -> Iterator[str]:
    """Every module that a file of the package names in an import, at its head or further down."""
    for path in (ROOT / package.replace(".", "/")).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{each.name}" for each in node.names)


TOP = ("infra.account", "infra.commands", "infra.program")


@pytest.mark.parametrize(
    ("package", "above"),
    [
        ("job", ("infra", "rehearsal")),
        ("infra.catalog", ("infra.bill", "infra.evidence", "infra.account", "infra.prices", "infra.commands")),
        ("infra.evidence", ("infra.bill", "infra.review", "infra.account", "infra.commands", "infra.pricing")),
        (
            "infra.risk",
            ("infra.bill", "infra.compare", "infra.review", "infra.account", "infra.commands", "infra.program"),
        ),
        (
            "infra.bill",
            ("infra.compare", "infra.review", "infra.account", "infra.commands", "infra.pricing", "infra.program"),
        ),
        ("infra.compare", TOP),
        ("infra.review", TOP),
        ("infra.program", ("infra.account", "infra.commands")),
        ("infra.account", ("infra.commands", "infra.cli")),
    ],
)
def test_no_import_runs_up(package: str, above: tuple[str, ...]) -> None:
    wrong = {name for name in imported(package) if f"{name}.".startswith(tuple(f"{each}." for each in above))}
    assert wrong == set()
