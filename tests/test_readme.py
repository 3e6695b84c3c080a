"""The README cannot rot: every command block is run here, or is marked as needing AWS (```sh aws)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```sh([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE_COMMANDS = ("make rehearse", "make test")


def blocks() -> list[tuple[str, str]]:
    """(marker, commands) of each shell block of the README, in order."""
    return [(marker.strip(), body) for marker, body in BLOCK.findall((ROOT / "README.md").read_text())]


def commands(marker: str) -> list[str]:
    """The lines of the blocks with that marker, comments and blank lines left out."""
    lines = [line.strip() for found, body in blocks() if found == marker for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_every_block_is_run_here_or_marked_as_needing_aws() -> None:
    assert blocks(), "the README has no command blocks"
    assert {marker for marker, _ in blocks()} <= {"", "aws", "setup"}


def test_the_two_make_commands_are_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert commands("setup") == list(MAKE_COMMANDS)
    for command in MAKE_COMMANDS:
        assert re.search(rf"^{command}( |$)", ci, re.MULTILINE), f".ci/run does not run `{command}`"


@pytest.mark.parametrize("command", commands(""))
def test_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bare = {"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=bare, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout, f"{command} printed nothing"


def test_commands_that_need_aws_name_commands_that_exist() -> None:
    known = {path.stem for path in (ROOT / "infra" / "commands").glob("*.py")}
    used = {line.split()[1] for line in commands("aws") if line.startswith("gpufleet ")}
    assert used, "the README shows no gpufleet command on real AWS"
    assert used <= known
