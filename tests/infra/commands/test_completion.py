"""The tab key offers the words that may follow, and quickly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.infra import cli
from gpufleet.infra.commands.completion import SHELLS
from tests.repository import ROOT


def offered(line: str, folder: Path = ROOT) -> list[str]:
    """The words that the shell's completion function gets for a command line."""
    here, there = os.pipe()
    asked = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "PYTHONPATH": str(ROOT),
    }
    program = f"exec {sys.executable} -m gpufleet.infra.cli 8>&{there} 9>/dev/null"
    done = subprocess.run(["bash", "-c", program], env={**os.environ, **asked}, pass_fds=[there], cwd=folder)
    os.close(there)
    with os.fdopen(here) as answer:
        assert done.returncode == 0
        return [word.strip() for word in answer.read().split("\n") if word]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("gpufleet rep", {"replay", "report"}),
        ("gpufleet cost t", {"tinystories-growth", "two-tower"}),
        ("gpufleet cost ./stacks/two", {"./stacks/two-tower.yaml"}),
        ("gpufleet cost pretrain-d64 --scenario d64", {"d64-true", "d64-true-3000"}),
        ("gpufleet cost no-such-stack --scenario d", set()),
        ("gpufleet replay --j", {"--json"}),
        ("gpufleet prices --region us-w", {"us-west-2"}),
        ("gpufleet completion ", {*SHELLS, "-h", "--help"}),
    ],
)
def test_a_tab_offers(line: str, wanted: set[str]) -> None:
    assert set(offered(line)) == wanted


def test_runs_are_those_that_left_something_here(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "mine.yaml").write_text("run: {id: r3}\n")
    (tmp_path / "results" / "mine" / "r1").mkdir(parents=True)
    (tmp_path / "receipts" / "mine").mkdir(parents=True)
    (tmp_path / "receipts" / "mine" / "r2.json").write_text("{}")
    assert set(offered("gpufleet status mine --run ", tmp_path)) == {"r1", "r2"}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_lines_that_name_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "gpufleet" in capsys.readouterr().out


def test_bash_takes_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    program = f"{capsys.readouterr().out}\ncomplete -p gpufleet"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert "_python_argcomplete" in done.stdout
