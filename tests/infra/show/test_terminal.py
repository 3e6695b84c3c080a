"""Screens fit the terminal, and have colour only on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from tests.repository import ROOT

STYLE = re.compile(r"\x1b\[[0-9;]*m")


def screen(*words: str, columns: int = 60, folder: Path = ROOT, more: dict[str, str] | None = None) -> str:
    """The text that `python -m gpufleet WORDS` sends to a terminal of so many columns."""
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, columns))
    bare = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = {**bare, "TERM": "xterm", "PYTHONPATH": str(ROOT), **(more or {})}
    command = [sys.executable, "-m", "gpufleet", *words]
    with subprocess.Popen(command, stdin=there, stdout=there, stderr=there, cwd=folder, env=environment) as process:
        os.close(there)
        sent = b""
        with suppress(OSError):  # read to its end
            while part := os.read(here, 65536):
                sent += part
        os.close(here)
    assert process.returncode in (0, 2), sent.decode()
    return sent.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    "words", [("cost", "tinystories-growth", "--all"), ("cost", "sft-h100"), ("prices",), ("--help",), ("cost", "x")]
)
@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_wider_than_the_terminal_and_none_breaks_in_mid_word(words: tuple[str, ...], columns: int) -> None:
    lines = STYLE.sub("", screen(*words, columns=columns)).splitlines()
    assert max(map(len, lines)) <= columns
    if words == ("cost", "sft-h100"):  # the line is as long as the terminal allows
        return
    piped = subprocess.run([sys.executable, "-m", "gpufleet", *words], cwd=ROOT, capture_output=True, text=True)
    assert {word for line in lines for word in line.split()} <= set((piped.stdout + piped.stderr).split())


def test_what_programs_read_is_never_broken() -> None:
    assert max(map(len, screen("schema").splitlines())) > 60
    assert max(map(len, screen("cost", "two-tower", "--json").splitlines())) > 60


def test_the_answer_is_bold_and_an_error_red_unless_no_colour_is_asked_for() -> None:
    assert screen("cost", "two-tower").startswith("\x1b[1mtwo-tower: about ")
    assert screen("cost", "x").startswith("\x1b[31mgpufleet:\x1b[0m there is no stack 'x'")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        assert "\x1b" not in screen("cost", "two-tower", more={name: value})


def test_a_pipe_gets_no_colour() -> None:
    command = [sys.executable, "-m", "gpufleet", "cost", "two-tower"]
    assert b"\x1b" not in subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout


def test_what_others_wrote_has_no_power_over_the_terminal(tmp_path: Path) -> None:
    """The terminal obeys only gpufleet's own styles."""
    assert "\x1b[2J" not in screen("cost", "\x1b[2Jx", folder=tmp_path)
