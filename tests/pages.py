"""What README and pages hold: their words, links and anchors, and the outputs that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.repository import ROOT

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
FIGURES = sorted((ROOT / "bench" / "results").glob("*.md"))
AT_THE_TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
BLOCK = re.compile(r"^```(sh|console)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)#?([^)\s]*)\)")


def words(text: str) -> int:
    """Their number, without what only draws a table."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """File and anchor (empty: none) of each link of the page that leads to no address."""
    for file, anchor in LINK.findall(prose(page)):
        if "://" not in file:
            yield (page.parent / file if file else page), anchor


def sh(page: Path, marker: str = "") -> list[str]:
    """The lines of the page's `sh` blocks with that marker, without comments and blank lines."""
    blocks = [body for kind, more, body in BLOCK.findall(page.read_text()) if (kind, more.strip()) == ("sh", marker)]
    lines = [line.strip() for body in blocks for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def console(page: Path, marker: str = "") -> dict[str, list[str]]:
    """Command -> the lines of its output, of the page's `console` blocks with that marker, in order."""
    shown = {}
    for kind, more, body in BLOCK.findall(page.read_text()):
        if (kind, more.strip()) == ("console", marker):
            first, *lines = body.splitlines()
            shown[first.removeprefix("$ ")] = lines
    return shown


def run(command: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """The command as a user types it in `folder`: no credentials, nothing of this session's environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bare = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=bare, capture_output=True, text=True)


def without_days(line: str) -> str:
    """The line without what every day changes."""
    return re.sub(r"\d+( to \d+)? days old", "N days old", line.rstrip())


def without_figures(line: str) -> str:
    """The line without what differs from machine to machine: numbers, ids, drawn ranges, how wide its columns are."""
    return re.sub(r"\s+", " ", re.sub(r"\bi-[0-9a-f]+|[][=|.!]{20,}|\d+([.:]\d+)*", "N", line)).strip()


def assert_shown(page: Path, command: str, shown: list[str], output: str) -> None:
    """Fails where the output no longer says the lines that the page shows. `make freeze` writes down new figures."""
    different = difference(shown, output)
    if different and os.environ.get("GPUFLEET_FREEZE"):
        block, fresh = "\n".join([f"$ {command}", *shown]), _refreshed(shown, output)
        page.write_text(page.read_text().replace(block, "\n".join([f"$ {command}", *fresh])))
        different = difference(fresh, output)
    assert not different, f"`{command}` {different}"


def _refreshed(shown: list[str], output: str) -> list[str]:
    """The lines shown with today's figures, and lines that are new between two of them. A line that says something else
    raises ValueError: somebody has to write it.
    """
    printed = output.splitlines()
    same, fresh, at, skipping = [without_figures(line) for line in printed], list[str](), 0, False
    for line in shown:
        if line == "...":
            fresh.append(line)
            skipping = True
            continue
        place = same.index(without_figures(line), at)
        fresh += printed[place if skipping else at : place + 1]
        at, skipping = place + 1, False
    return fresh if skipping else [*fresh, *printed[at:]]


def difference(shown: list[str], output: str, *, figures: bool = True) -> str:
    """What the output no longer says of the lines shown, in which `...` stands for lines left out; empty: it says all.
    `figures` False: numbers may differ.
    """
    rule = without_days if figures else without_figures
    printed = [rule(line) for line in output.splitlines()]
    at, skipping = 0, False
    for line in shown:
        if line == "...":
            skipping = True
            continue
        place = printed.index(rule(line), at) if rule(line) in printed[at:] else -1
        if place < 0:
            return f"no longer prints, or not in this place:\n{line}\n\n{output}"
        if not skipping and place != at:
            return f"prints more before this line; show it or write `...`:\n{line}"
        at, skipping = place + 1, False
    return "" if skipping or at == len(printed) else "prints more after what is shown: write `...`"
