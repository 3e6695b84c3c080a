"""The tutorial's commands, typed in its order, print what it shows. tests/test_wheel.py installs and rehearses."""

from __future__ import annotations

import re
from pathlib import Path

from tests import pages

PAGE = pages.TUTORIAL.read_text()


def test_each_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)[0])
    for kind, marker, body in pages.BLOCK.findall(PAGE):
        if marker.strip():
            continue  # installed, rehearsed and on AWS: elsewhere
        if kind == "console":
            first, *lines = body.splitlines()
            done = pages.run(f"{first.removeprefix('$ ')} 2>&1", folder, tmp_path)
            pages.assert_shown(pages.TUTORIAL, first.removeprefix("$ "), lines, done.stdout)
        else:
            done = pages.run(body, folder, tmp_path)
            assert done.returncode == 0, f"{body}\n{done.stderr}"


def test_its_other_blocks_are_those_that_the_wheel_s_tests_type_and_commands_of_aws() -> None:
    assert {marker.strip() for _, marker, _ in pages.BLOCK.findall(PAGE)} == {"", "own", "varies", "aws"}
    typed = [line.partition("  #")[0].rstrip() for line in pages.sh(pages.README, "own")]
    assert pages.sh(pages.TUTORIAL, "own") == typed[:2]
    assert list(pages.console(pages.TUTORIAL, "varies")) == typed[4:5]
