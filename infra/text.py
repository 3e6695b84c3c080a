"""Makes tables of plain ASCII, and wraps text to the terminal's width."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from decimal import Decimal


def hours(value: float) -> str:
    """The hours with two decimals; if they are very small, with two significant digits: 77.68, 0.0052."""
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"


def share(value: float) -> str:
    """The share in whole percent: 12%, 0%, or `under 1%` if it is small."""
    return "under 1%" if 0 < value < 0.005 else f"{value:.0%}"


def about_hours(value: Decimal) -> str:
    """The hours with two significant digits; if there are at least ten, as a whole number: 0.57, 1.8, 14."""
    return f"{value:.0f}" if value >= 10 else f"{float(value):.2g}"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), spare: Sequence[int] = ()
) -> Iterator[str]:
    """Yields the lines of a table: the headings, a rule, and the rows. `right`: columns to right-align. `spare`:
    columns that are left out, in this order, if the terminal is too narrow.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    shown = list(range(len(heads)))
    for column in spare:
        if sum(widths[at] + 2 for at in shown) - 2 > columns(most=10_000):
            shown.remove(column)
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [row[at].rjust(widths[at]) if at in right else row[at].ljust(widths[at]) for at in shown]
        yield "  ".join(cells).rstrip()


def columns(most: int = 100) -> int:
    """The greatest width of a line: the width of the terminal, but at most `most`. If there is no terminal, it is
    `most`.
    """
    return min(most, shutil.get_terminal_size((most, 24)).columns)


def wrap(text: str, width: int = 100, indent: int = 2) -> list[str]:
    """The text in lines of at most `width`, broken only between words; later lines are indented."""
    return textwrap.wrap(
        text, columns(width), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
