"""docs/node.md says what the script does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import infra

ROOT = Path(infra.__file__).parent.parent
PAGE = (ROOT / "docs/node.md").read_text()
SCRIPT = (ROOT / "infra/boot/node.sh").read_text()


@pytest.mark.parametrize("code", re.findall(r"^  (\d+)\)", SCRIPT, re.MULTILINE))
def test_each_exit_code_the_script_knows_is_explained(code: str) -> None:
    assert re.search(rf"^\| {code} \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize("reason", sorted(set(re.findall(r"(?:[;|] |^ +)over ([a-z-]+) ", SCRIPT, re.MULTILINE))))
def test_each_reason_the_script_gives_is_named(reason: str) -> None:
    assert f"`{reason}`" in PAGE


def test_the_numbers_of_the_page_are_the_scripts() -> None:
    assert "at most 15 min" in PAGE
    assert "i < 180; i++)); do sleep 5" in SCRIPT
    assert "last 200 lines" in PAGE
    assert "tail -n 200" in SCRIPT
    assert "(115 s)" in PAGE
    assert "docker stop -t 115" in SCRIPT
    assert "in 180 s" in PAGE
    assert "bounded 180 docker stop" in SCRIPT
