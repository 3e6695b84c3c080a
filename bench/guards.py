"""Removes each guard that docs/guarantees.md rests on, and checks that tests fail without it: `python bench/guards.py
[ROW] ...`, where ROW is a part of a row's sentence.

bench/guards.toml names the guards: for each a file, its text, the text without the guard, and tests, each of which must
fail then. The program changes the checkout itself and puts it back, so that a test's own processes see the change too.
It refuses a file with uncommitted changes. It writes the table of bench/results/guards.md to standard output, and the
tests that stay green to standard error; if a test stays green, the exit code is 1.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenGuard:
    """One entry of the list."""

    row: str  # the beginning of the row's sentence
    guard: str  # the removed guard, in words
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # names of tests in pytest's form
    hang_s: int = 900  # seconds that a test may wait for something that never comes without the guard

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """A context in which this guard is removed from the checkout. Raises SystemExit if the file is not as the list
        says.
        """
        path = ROOT / self.file
        whole = path.read_text()
        if (found := whole.count(self.old)) != 1:
            raise SystemExit(f"{LIST.name}, {self.guard}: {self.file} has this {found} times, not once:\n{self.old}")
        if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", path], cwd=ROOT).returncode:
            raise SystemExit(f"{self.file} has changes that are not committed: commit them, then take its guards out")
        path.write_text(whole.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(whole)

    def failed(self) -> dict[str, str]:
        """For each of `tests`, the first test that fails without this guard; empty if none fails."""
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", "-m", "not wheel"]
        told = {**os.environ, "HANG_S": str(self.hang_s)}  # tests/waiting.py
        with self.taken_out():
            said = {
                test: subprocess.run([*pytest, test], cwd=ROOT, capture_output=True, text=True, env=told).stdout
                for test in self.tests
            }
        return {test: "".join(FAILED.findall(text)).rpartition("::")[2] for test, text in said.items()}


def guards() -> list[TakenGuard]:
    """The list, in the order of the page."""
    listed = tomllib.loads(LIST.read_text())["guard"]
    return [TakenGuard(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def main(wanted: list[str]) -> int:
    """Prints the table; returns 1 if a test stayed green."""
    green = 0
    sys.stdout.write(
        "# Guards taken out\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}. `python bench/guards.py` wrote this, from `bench/guards.toml`: each guard was "
        "taken out of the code by itself, and the tests named here failed.\n\n"
        "| Row | Guard that was taken out | Where | Tests that failed |\n|---|---|---|---|\n"
    )
    for each in guards():
        if wanted and not any(part in each.row for part in wanted):
            continue
        failed = each.failed()
        for test in (test for test, name in failed.items() if not name):
            green += 1
            sys.stderr.write(f"stays green without the guard ({each.guard}): {test}\n")
        names = ", ".join(f"`{name}`" for name in failed.values() if name)
        sys.stdout.write(f"| {each.row} | {each.guard} | `{each.file}` | {names or 'none'} |\n")
        sys.stdout.flush()
    return int(green > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ctrl-C and SIGTERM must put back what was taken out
    sys.exit(main(sys.argv[1:]))
