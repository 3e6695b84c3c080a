"""Which room may import which: a room imports those below it alone, and no import leads back in a circle.

Imports within functions count like those at a file's head, and those for types alone too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.repository import ROOT

PACKAGES = ("job", "infra", "rehearsal")
# From the ground up. A name with a dot is a room by itself, apart from the one that it lies in.
ROOMS = {
    "job": (
        *(
            "text",
            "atomic",
            "progress",
            "gpus",
            "foreign",
            "between",
            "contract",
            "clock",
            "kind",
            "contract.run",
            "ledger",
            "measured",
        ),
        *("node", "supervisor.store", "supervisor.machine", "command", "supervisor", "probe", "__main__"),
        *("experiments.dataset", "experiments.spec", "experiments.engine", "experiments.models", "experiments.tuning"),
        *("experiments.student", "experiments.growth", "experiments.sft", "experiments.pretrain"),
        *("experiments.kernel", "experiments.two_tower", "experiments"),
    ),
    "infra": (
        *(
            "text",
            "errors",
            "progress",
            "envelope",
            "show",
            "catalog",
            "prices",
            "market",
            "definition",
            "inputs",
            "search",
            "discover",
            "evidence",
            "risk",
        ),
        *("bill", "review", "compare", "report", "program", "account", "canary", "commands", "cli", "__main__"),
    ),
    "rehearsal": (
        *("clock", "environment", "timeline", "account", "standins", "launch", "fleet", "imds", "habits"),
        *("controller", "aws_answers", "schedules", "registry", "gate", "cloud", "handlers", "provider", "inprocess"),
        *("engine", "scratch", "images", "node", "watch", "evidence", "own", "pace", "plumbing", "report", "block"),
        *("undisturbed", "rehearse", "fis", "canary"),
    ),
    "gpufleet": (),
}
ALONE = {"gpufleet.infra.__main__"}  # the Pulumi program, which is a user's: it stands on the public API


@cache
def modules() -> dict[str, str]:
    """The text of every module by its name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("gpufleet", *parts)).removesuffix(".__init__")] = path.read_text()
    for path in (ROOT / "gpufleet").glob("*.py"):
        found[f"gpufleet.{path.stem}".removesuffix(".__init__")] = path.read_text()
    return found


@cache
def imported() -> dict[str, frozenset[str]]:
    """By module what it imports of the project, at its head or further down; what is no module of ours under the name
    that is written.
    """
    known = modules()

    def names(text: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in known else node.module

    ours = ("gpufleet", *PACKAGES)
    return {
        module: frozenset(name for name in names(text) if name.partition(".")[0] in ours and name != module)
        for module, text in known.items()
        if module not in ALONE
    }


def room(module: str) -> tuple[str, str]:
    """The package and the room of a module; of the package itself its own name alone."""
    package, _, rest = module.removeprefix("gpufleet.").partition(".")
    if package not in PACKAGES:
        return "gpufleet", ""
    fitting = [name for name in ROOMS[package] if f"{rest}.".startswith(f"{name}.")]
    return package, max(fitting, key=len, default=rest)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_stands_in_a_room(package: str) -> None:
    there = {name for of, name in map(room, modules()) if of == package and name}
    assert there == set(ROOMS[package])


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_up(package: str) -> None:
    order = ("", *ROOMS[package])
    wrong = {
        (module, name)
        for module, names in imported().items()
        for name in names
        if room(module)[0] == room(name)[0] == package and order.index(room(module)[1]) < order.index(room(name)[1])
    }
    assert wrong == set()


def test_no_import_leads_back_in_a_circle() -> None:
    try:
        TopologicalSorter(imported()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("package", "ground"),
    [
        ("job", {"job"}),
        ("infra", {"job", "infra", "rehearsal"}),  # its commands import the rehearsal when they are asked for one
        ("rehearsal", {"job", "infra", "rehearsal"}),
        ("gpufleet", {"job", "infra", "gpufleet"}),
    ],
)
def test_a_package_stands_on_no_other(package: str, ground: set[str]) -> None:
    """Neither on the public API, nor on a `job` or an `infra` that may be anybody's."""
    stands_on = {
        (module, name)
        for module, names in imported().items()
        for name in names
        if room(module)[0] == package and (room(name)[0] not in ground or not name.startswith("gpufleet"))
    }
    assert stands_on == set()


def test_only_the_ready_made_jobs_import_one_of_them() -> None:
    wrong = {
        (module, name)
        for module, names in imported().items()
        for name in names
        if ".job.experiments" in name and ".job.experiments" not in module
    }
    assert wrong == set()


def test_the_public_api_imports_no_command() -> None:
    above = ("gpufleet.infra.commands", "gpufleet.infra.cli", "gpufleet.infra.__main__")
    own = {
        name
        for module, names in imported().items()
        if room(module)[0] == "gpufleet" and module != "gpufleet.__main__"  # `python -m gpufleet`: the command line
        for name in names
    }
    assert {name for name in own if name.startswith(above)} == set()
