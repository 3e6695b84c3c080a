"""Formats output for a terminal: lines are folded between words at the terminal's width, the answer is bold, and
problems are coloured. In a pipe, or with NO_COLOR, the words are the same, but they are not formatted.
"""

from __future__ import annotations

import os
import re
import textwrap
from typing import Any, TextIO

from gpufleet.infra.envelope import Envelope
from gpufleet.infra.progress import Screen
from gpufleet.infra.text import columns
from gpufleet.job.text import printable

COLOURS = (
    (re.compile(r"gpufleet:|\s*PROBLEM\b|FAILED\b"), "31"),
    (re.compile(r"\s*[Ww]arning\b|Before you launch\b"), "33"),
    (re.compile(r"\s*ok\b"), "32"),
)  # how a line begins, and the colour that such a line has in the terminal's palette


class Shown:
    """A stream that removes terminal escapes, except its own, because much of what commands show was written by others:
    a job, a node, AWS, anybody with access to the bucket.
    """

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream, self._screen = stream, screen
        self._is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colour = self._is_terminal and not os.environ.get("NO_COLOR")
        self.answers_first = False  # whether the next line is the command's answer
        self.envelope: Envelope | None = None  # the object into which a command with --json writes its output
        self.folds = True  # whether lines wider than the terminal may be folded; False for text for programs

    def write(self, text: str) -> int:
        """Writes the text, formatted for the terminal."""
        text = printable(text)
        if self._is_terminal and self.folds:
            text = "\n".join(map(self._line, text.split("\n")))
        return self._screen.write(self._stream, text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _line(self, line: str) -> str:
        if not line:
            return line
        indent = line[: len(line) - len(line.lstrip())]
        folded = textwrap.wrap(
            line,
            columns(most=1000),
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text, is_answer = "\n".join(folded), self.answers_first
        self.answers_first = False
        if not self._has_colour:
            return text
        if is_answer:
            return f"\x1b[1m{text}\x1b[0m"
        for begins, colour in COLOURS:
            if match := begins.match(text):
                return f"\x1b[{colour}m{match[0]}\x1b[0m{text[match.end() :]}"
        return text
