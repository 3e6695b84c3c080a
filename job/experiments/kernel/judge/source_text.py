"""Checks that the text of a candidate that is judged is also the text that runs, because Python and Triton each read
the text in their own way.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
from tokenize import TokenError

# The most characters of a source: twice the length of an answer with 2048 tokens, the default, of four characters each.
# The longest of our own kernels has 1500 characters. The slowest known text of this length, one kernel of 5000
# statements, takes stage 1 a second on a busy core.
MOST_CHARACTERS, LONGEST_S = 16_384, 2.0
COOKIE = re.compile(r"^[ \t\f]*#.*?coding[:=]", re.MULTILINE)  # PEP 263
BEGINS = re.compile(r"\s*def\b")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufeff\ud800-\udfff]")


def unreadable(source: str) -> str | None:
    """Why Python could read a different text when it reads the source from a file, or why the text is too long; None if
    neither is the case. Every source is checked in this way before a process gets it, even if other checks are left
    out.
    """
    if len(source) > MOST_CHARACTERS:
        return f"longer than {MOST_CHARACTERS:,} characters"
    if (match := CONTROL.search(source.replace("\r\n", "\n"))) is not None:
        return f"the character U+{ord(match.group()):04X}"
    if COOKIE.search("\n".join(source.split("\n", 2)[:2])):
        return "it declares an encoding, but must be UTF-8"
    return None


def lines(source: str) -> list[str]:
    """The lines of `source` with their line ends, as if they were read from a file."""
    return io.StringIO(source.replace("\r\n", "\n")).readlines()


def misread(function: ast.FunctionDef, lines: list[str]) -> str | None:
    """Why Triton would read a different function instead of this one; None if it reads the right one. Triton reads a
    kernel's lines again: when it compiles, from the first line that begins with "def"; when it interprets, from the
    last such line.
    """
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    own = function.lineno - first
    try:
        block = inspect.getblock(lines[first - 1 :])
        again = ast.parse("".join(block[own:])).body
    except (TokenError, SyntaxError):
        return "a kernel whose lines Triton could not read"
    begins = [number for number, line in enumerate(block) if BEGINS.match(line)]
    if begins != [own] or re.match(r"def\s+\w+\s*\(", block[own]) is None:
        return "a kernel with another line that begins with def, or without one of its own"
    alone = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "decorator_list": []})
    same = [ast.dump(node) for node in again] == [ast.dump(alone)]
    return None if same else "a kernel whose lines Triton would not read as Python does"
