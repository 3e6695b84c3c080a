"""Which package may import which: none imports one that stands on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from repository import ROOT


def imported(package: str) -> Iterator[str]:
    """Every module that a file of the package names in an import, at its head or further down. Not those of the Pulumi
    program, which is a user's: it stands on the public API alone.
    """
    for path in {*(ROOT / package).rglob("*.py")} - {ROOT / "infra" / "__main__.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{each.name}" for each in node.names)


# From the ground up: a room imports those before it alone, and `errors` and `text`, which import none.
ROOMS = (
    "catalog",
    "prices",
    "definition",
    "inputs",
    "discover",
    "evidence",
    "risk",
    "bill",
    "review",
    "compare",
    "report",
    "program",
    "account",
    "commands",
    "cli",
    "__main__",
)


ALL = ("job", "infra", "rehearsal")  # infra's commands import the rehearsal when asked for one


@pytest.mark.parametrize(("package", "ground"), [("job", ("job",)), ("infra", ALL), ("rehearsal", ALL)])
def test_a_package_stands_on_no_other(package: str, ground: tuple[str, ...]) -> None:
    """Neither on the public API, nor on a `job` or an `infra` that may be anybody's."""
    below = tuple(f"gpufleet.{each}." for each in ground)
    ours = {name for name in imported(package) if name.split(".")[0] in {"gpufleet", *ALL}}
    assert {name for name in ours if not f"{name}.".startswith(below)} == set()
    assert ours


@pytest.mark.parametrize(
    ("package", "above"),
    [
        ("gpufleet", ("rehearsal", "infra.commands", "infra.cli", "infra.__main__")),
        *((f"infra/{room}", tuple(f"infra.{each}" for each in ROOMS[at + 1 :])) for at, room in enumerate(ROOMS[:-2])),
    ],
)
def test_no_import_runs_up(package: str, above: tuple[str, ...]) -> None:
    wrong = {name for name in imported(package) if f"{name}.".startswith(tuple(f"gpufleet.{each}." for each in above))}
    assert wrong == set()


def test_every_module_stands_in_a_room() -> None:
    there = {
        path.stem for path in (ROOT / "infra").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert there == {"__init__", "errors", "progress", "text", *ROOMS}
