"""The list of guards that can be taken out, bench/guards.toml, is that of docs/guarantees.md, and of the code."""

from __future__ import annotations

import re

import guards
import pytest

from tests.repository import ROOT

LISTED = guards.guards()
ROWS = re.findall(r"^\| (?!Sentence )(\S.*?) \| (.*?) \|", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)


def plain(text: str) -> str:
    """Without links and code's marks."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text).replace("`", "")


@pytest.mark.parametrize(("sentence", "shown_by"), ROWS, ids=[plain(row[0])[:40] for row in ROWS])
def test_each_test_that_a_row_names_is_said_to_fail_without_one_of_its_guards(sentence: str, shown_by: str) -> None:
    tests = " ".join(test for each in LISTED if plain(sentence).startswith(each.row) for test in each.tests)
    assert [name for name in re.findall(r"`(tests/\S+?|test_\w+)`", shown_by) if name not in tests] == []


def test_each_guard_is_of_a_row_and_stands_in_the_code_once() -> None:
    assert [each.row for each in LISTED if not any(plain(row[0]).startswith(each.row) for row in ROWS)] == []
    found = {each.guard: (ROOT / each.file).read_text().count(each.old) for each in LISTED}
    assert found == dict.fromkeys(found, 1)
