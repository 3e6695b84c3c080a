"""The README and the pages cannot rot: commands are run, shown outputs are compared, every command and page is there.

```sh          run here, in the checkout
```console     `$ command` and what it prints, compared with what it prints now; `...` stands for lines left out;
               in docs/compare.md too
```sh setup    the two make commands; CI runs them
```sh aws      needs an account: only checked to name commands that exist
```sh own      in another repository, with the wheel; tests/test_wheel.py runs it
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from repository import ROOT

from gpufleet.infra.cli import COMMANDS
from gpufleet.infra.definition.loader import PROGRAM, SCHEMA
from gpufleet.job.kind import EXPERIMENTS

README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
LOOSE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
BLOCK = re.compile(r"^```(sh|console)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)\s]*\)")
CODE = re.compile(r"`([^`\n]+)`")
OF_OTHERS = (f"{PROGRAM}/__main__.py", SCHEMA)  # what `gpufleet init` writes into their repositories
MAKE_COMMANDS = ("make rehearse", "make test")
BRANCH = (("steps_per_phase: 1000", "steps_per_phase: 2000"), ("capacity: spot", "capacity: on-demand"))


def blocks(kind: str, marker: str = "") -> list[str]:
    """The README's blocks of that kind and marker, in order."""
    return [body for name, more, body in BLOCK.findall(README) if (name, more.strip()) == (kind, marker)]


def commands(marker: str) -> list[str]:
    """The lines of the `sh` blocks with that marker, comments and blank lines left out."""
    lines = [line.strip() for body in blocks("sh", marker) for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def shown() -> dict[str, list[str]]:
    """Command -> the lines that the README, or the page about comparing, shows of its output."""
    found = {}
    compared = [
        body for name, _, body in BLOCK.findall((ROOT / "docs" / "compare.md").read_text()) if name == "console"
    ]
    for body in (*blocks("console"), *compared):
        first, *lines = body.splitlines()
        found[first.removeprefix("$ ")] = lines
    return found


def ran(command: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """The command as a user types it in `folder`: no credentials, nothing of this session's environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bare = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=bare, capture_output=True, text=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stacks and nothing prepared, measured or refreshed, in a repository with the branches main and longer."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "stacks", folder / "stacks")
    git = "git -c user.name=me -c user.email=me@example.org -c commit.gpgsign=false"
    begin = f"git init -q && git checkout -q -b main && git add -A && {git} commit -qm one && git checkout -q -b longer"
    assert ran(begin, folder, folder).returncode == 0
    growth = folder / "stacks" / "tinystories-growth.yaml"
    text = growth.read_text()
    for before, after in BRANCH:
        assert before in text
        text = text.replace(before, after, 1)
    growth.write_text(text)
    assert ran(f"{git} commit -qam two && git checkout -q main", folder, folder).returncode == 0
    return folder


def same(line: str) -> str:
    """Without what every day changes."""
    return re.sub(r"\d+ days old", "N days old", line.rstrip())


def test_every_block_is_run_here_or_marked_as_needing_aws() -> None:
    marked = {(name, marker.strip()) for name, marker, _ in BLOCK.findall(README)}
    assert marked == {("sh", ""), ("sh", "setup"), ("sh", "aws"), ("sh", "own"), ("console", "")}


def test_the_two_make_commands_are_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert commands("setup") == list(MAKE_COMMANDS)
    for command in MAKE_COMMANDS:
        assert re.search(rf"^{command}( |$)", ci, re.MULTILINE), f".ci/run does not run `{command}`"


@pytest.mark.parametrize("command", commands(""))
def test_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    done = ran(command, ROOT, tmp_path)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout, f"{command} printed nothing"


@pytest.mark.parametrize("command", shown())
def test_an_output_shown_is_what_the_command_prints(command: str, project: Path, tmp_path: Path) -> None:
    done = ran(command, project, tmp_path)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    printed = [same(line) for line in done.stdout.splitlines()]
    at, skipping = 0, False
    for line in shown()[command]:
        if line == "...":
            skipping = True
            continue
        place = printed.index(same(line), at) if same(line) in printed[at:] else -1
        assert place >= 0, f"`{command}` no longer prints, or not in this place:\n{line}\n\n{done.stdout}"
        assert skipping or place == at, f"`{command}` prints more before this line; show it or write `...`:\n{line}"
        at, skipping = place + 1, False
    assert skipping or at == len(printed), f"`{command}` prints more after what is shown: write `...`"


def cells(lines: list[str]) -> dict[str, dict[str, str]]:
    """Scenario -> column -> cell of the table that begins with these lines: heads, dashes, rows."""
    spans = [match.span() for match in re.finditer("-+", lines[1])]
    rows = [[line[a:b].strip() for a, b in spans] for line in lines[2:] if line]
    return {row[0]: dict(zip([lines[0][a:b].strip() for a, b in spans], row, strict=True)) for row in rows}


def test_the_scenarios_on_the_page_about_comparing_are_those_that_the_command_prints(
    project: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    shown_rows = cells(re.findall(r"^```\n(scenario .*?)^```$", page, re.MULTILINE | re.DOTALL)[0].splitlines())
    printed = cells(
        ran("gpufleet compare pretrain-d64 --all", project, tmp_path).stdout.partition("\n\n")[0].splitlines()
    )
    assert "d64-true" in shown_rows
    for name, row in shown_rows.items():
        assert row == {column: printed[name][column] for column in row}


def test_the_table_has_every_experiment_with_its_node_bound_and_todays_p50(project: Path, tmp_path: Path) -> None:
    row = r"^\| `([a-z0-9-]+)` \|[^|]*\| ([a-z0-9.]+), \d x [^|,]+, (spot|on demand) \| ([0-9.]+) \| ([0-9.]+) \|"
    rows = re.findall(row, README, re.MULTILINE)
    assert sorted(stack for stack, *_ in rows) == sorted(EXPERIMENTS)
    for stack, node, capacity, p50, bound in rows:
        bill = json.loads(ran(f"gpufleet cost {stack} --json", project, tmp_path).stdout)
        assert (bill["type"], bill["capacity"].replace("-", " ")) == (node, capacity), stack
        assert Decimal(bill["usd"]["p50"]).quantize(Decimal("0.01")) == Decimal(p50), stack
        assert Decimal(bill["cap"]["max_usd"]) == Decimal(bound), stack


def test_commands_that_need_aws_name_commands_that_exist() -> None:
    used = {line.split()[1] for line in commands("aws") if line.startswith("gpufleet ")}
    assert used, "the README shows no gpufleet command on real AWS"
    assert used <= set(COMMANDS)


def words(text: str) -> int:
    """Without what only draws a table."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def test_the_readme_and_all_pages_together_stay_short() -> None:
    assert words(README) < 1_800
    assert sum(words(page.read_text()) for page in PAGES) < 31_500  # decisions are records, and grow


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall(README))
    assert {f"docs/{page.name}" for page in PAGES} <= linked


@pytest.mark.parametrize("page", [*LOOSE, *PAGES, *DECISIONS], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", [*LOOSE, *PAGES], ids=lambda page: page.name)
def test_every_file_and_command_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in CODE.findall(page.read_text()):
        path = code.partition("::")[0]
        if re.fullmatch(r"(infra|job|rehearsal|stacks|tests|bench|policy|docs)/(?:[\w-][\w.-]*/?)*", path):
            assert (ROOT / path).exists() or path in OF_OTHERS, f"{page.name}: `{code}`"
        if match := re.match(r"make ([a-z-]+)", code):
            assert match[1] in targets, f"{page.name}: `{code}`"
        if match := re.match(r"gpufleet ([a-z]+)", code):
            assert match[1] in COMMANDS, f"{page.name}: `{code}`"


@pytest.mark.parametrize("page", [*LOOSE, *PAGES, *DECISIONS], ids=lambda page: page.name)
def test_every_test_a_page_names_exists(page: Path) -> None:
    named = {name for code in CODE.findall(page.read_text()) for name in re.findall(r"\btest_\w+\b(?![.\w])", code)}
    assert named <= defined_tests()


@functools.cache
def defined_tests() -> set[str]:
    """Names of the functions."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}


def test_make_help_lists_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}  # `make test`
    listed = subprocess.run(["make", "help"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == targets.split()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_explained_somewhere(command: str) -> None:
    shows = re.compile(rf"gpufleet {command}\b|^## ([a-z]+ and )?{command}\b", re.MULTILINE)
    text = "".join(page for page in (README, *(path.read_text() for path in PAGES)) if shows.search(page))
    assert f"gpufleet {command}" in text, f"no page shows gpufleet {command}"
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"gpufleet.infra.commands.{command}").arguments(parser)
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                assert re.search(rf"{option}\b", text), f"no page about gpufleet {command} says what {option} does"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_page_names_a_place_of_one_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(home|root|Users|work)/", page.read_text())
