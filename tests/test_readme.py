"""The README and the pages cannot rot: commands are run, shown outputs are compared, every command and page is there.

```sh          run here, in the checkout
```console     `$ command` and what it prints, compared with what it prints now; `...` stands for lines left out; in
               all pages
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
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.cli import COMMANDS
from gpufleet.infra.definition.loader import CANARY, PROGRAM, SCHEMA
from gpufleet.job.kind import EXPERIMENTS
from tests import pages
from tests.freezing import assert_frozen
from tests.pages import run
from tests.repository import ROOT

README = pages.README.read_text()
CODE = re.compile(r"`([^`\n]+)`")
OF_OTHERS = (
    f"{PROGRAM}/__main__.py",
    SCHEMA,
    f"{CANARY}.yaml",
    f"{CANARY}/",
    "stacks/mine.yaml",
)  # that `gpufleet init` writes elsewhere
MAKE_COMMANDS = ("make rehearse", "make test")
BRANCH = (("steps_per_phase: 1000", "steps_per_phase: 2000"), ("capacity: spot", "capacity: on-demand"))


def shown() -> dict[str, tuple[Path, list[str]]]:
    """Command -> the page that shows it, and the lines of its output; the tutorial has a test of its own."""
    by_page = {page: pages.console(page) for page in (pages.README, *pages.PAGES) if page != pages.TUTORIAL}
    return {command: (page, lines) for page, blocks in by_page.items() for command, lines in blocks.items()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stacks and nothing prepared, measured or refreshed, in a repository with the branches main and longer."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "stacks", folder / "stacks")
    other = folder / "stacks" / "sft-h100.yaml"  # whose own limit a review holds against what it costs by now
    limits = other.read_text()
    other.write_text(limits.replace("max_usd: 120", "max_usd: 1000"))
    git = "git -c user.name=me -c user.email=me@example.org -c commit.gpgsign=false"
    begin = f"git init -q && git checkout -q -b main && git add -A && {git} commit -qm one && git checkout -q -b longer"
    assert run(begin, folder, folder).returncode == 0
    growth = folder / "stacks" / "tinystories-growth.yaml"
    text = growth.read_text()
    for before, after in BRANCH:
        assert before in text
        text = text.replace(before, after, 1)
    growth.write_text(text)
    assert run(f"{git} commit -qam two && git checkout -q main", folder, folder).returncode == 0
    other.write_text(limits)
    return folder


def test_every_block_is_run_here_or_marked_as_needing_aws() -> None:
    marked = {(name, marker.strip()) for name, marker, _ in pages.BLOCK.findall(README)}
    assert marked == {("sh", ""), ("sh", "setup"), ("sh", "aws"), ("sh", "own"), ("console", "")}


def test_the_two_make_commands_are_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert pages.sh(pages.README, "setup") == list(MAKE_COMMANDS)
    for command in MAKE_COMMANDS:
        assert re.search(rf"^{command}( |$)", ci, re.MULTILINE), f".ci/run does not run `{command}`"


@pytest.mark.parametrize("command", pages.sh(pages.README, ""))
def test_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    done = run(command, ROOT, tmp_path)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout, f"{command} printed nothing"


@pytest.mark.parametrize("command", shown())
def test_an_output_shown_is_what_the_command_prints(command: str, project: Path, tmp_path: Path) -> None:
    done = run(command, project, tmp_path)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    page, lines = shown()[command]
    pages.assert_shown(page, command, lines, done.stdout)


def test_freezing_writes_down_new_figures_and_lines_and_no_other_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, command = tmp_path / "page.md", "gpufleet cost mine"
    page.write_text(f"```console\n$ {command}\ncompute  1.00\ntotal  1.00\n...\n```\n")
    monkeypatch.setenv("GPUFLEET_FREEZE", "1")

    def shown() -> list[str]:
        return pages.console(page)[command]

    pages.assert_shown(page, command, shown(), "compute  2.00\nsupport  0.50\ntotal    2.50\nmore\n")
    assert shown() == ["compute  2.00", "support  0.50", "total    2.50", "..."]
    with pytest.raises(ValueError, match="sum"):
        pages.assert_shown(page, command, ["sum  2.50"], "total  2.50\n")


def test_the_table_has_every_experiment_with_its_node_bound_and_todays_p50(project: Path, tmp_path: Path) -> None:
    row = r"^(\| `([a-z0-9-]+)` \|[^|]*\| ([a-z0-9.]+), \d x [^|,]+, (spot|on demand) \| )[0-9.]+ \| ([0-9.]+) \|"
    stacks = []

    def as_of_today(found: re.Match[str]) -> str:
        before, stack, node, capacity, bound = found.groups()
        stacks.append(stack)
        bill = json.loads(run(f"gpufleet cost {stack} --json", project, tmp_path).stdout)
        assert (bill["type"], bill["capacity"].replace("-", " ")) == (node, capacity), stack
        assert Decimal(bill["cap"]["max_usd"]) == Decimal(bound), stack
        return f"{before}{Decimal(bill['usd']['p50']):.2f} | {bound} |"

    assert_frozen(pages.README, re.sub(row, as_of_today, pages.README.read_text(), flags=re.MULTILINE))
    assert sorted(stacks) == sorted(EXPERIMENTS)


def test_the_readme_and_all_pages_together_stay_short() -> None:
    assert pages.words(README) <= 1_200
    assert sum(pages.words(page.read_text()) for page in (pages.README, *pages.PAGES)) <= 30_000  # decisions grow


def test_every_page_is_linked_from_the_readme() -> None:
    assert set(pages.PAGES) <= {file.resolve() for file, _ in pages.links(pages.README)}


@pytest.mark.parametrize(
    "page", [*pages.AT_THE_TOP, *pages.PAGES, *pages.DECISIONS, *pages.FIGURES], ids=lambda page: page.name
)
def test_every_link_leads_to_a_file_and_its_anchor_to_a_heading(page: Path) -> None:
    for file, anchor in pages.links(page):
        assert file.exists(), f"{page.name}: {file}"
        assert not anchor or anchor in pages.anchors(file), f"{page.name}: {file}#{anchor}"


@pytest.mark.parametrize("page", [*pages.AT_THE_TOP, *pages.PAGES], ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", [*pages.AT_THE_TOP, *pages.PAGES], ids=lambda page: page.name)
def test_no_list_begins_right_below_a_line_of_text(page: Path) -> None:
    """GitHub shows a list there, the site a line with hyphens."""
    text = re.sub(r"^#.*$", "", pages.prose(page), flags=re.MULTILINE)
    assert re.findall(r"^[^\s|-].*\n(?:- |1\. ).*", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", [*pages.AT_THE_TOP, *pages.PAGES, *pages.DECISIONS], ids=lambda page: page.name)
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
    text = "".join(page for page in (README, *(path.read_text() for path in pages.PAGES)) if shows.search(page))
    assert f"gpufleet {command}" in text, f"no page shows gpufleet {command}"
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(f"gpufleet.infra.commands.{command}").arguments(parser)
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                assert re.search(rf"{option}\b", text), f"no page about gpufleet {command} says what {option} does"


@pytest.mark.parametrize("page", [pages.README, *pages.PAGES], ids=lambda page: page.name)
def test_no_page_names_a_place_of_one_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(home|root|Users|work)/", page.read_text())
