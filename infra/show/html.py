"""A sheet as a table of HTML; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gpufleet.infra.show.sheet import Sheet

CLASS, STYLE = " class=number", ' style="text-align: right"'


def table(found: Sheet, *, caption: str = "", total: bool = False) -> str:
    """The table. With `total` the last row is one. A notebook's, which has no style sheet of ours, has a caption."""
    last = len(found.rows) - 1 if total else -1
    body = "".join(
        f"<tr{' class=total' if at == last else ''}>{_cells(found, row, 'td', STYLE if caption else CLASS)}</tr>"
        for at, row in enumerate(found.rows)
    )
    head = _cells(found, found.heads, "th", "" if caption else CLASS)
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _cells(found: Sheet, row: Iterable[str], kind: str, of_number: str) -> str:
    right = found.right
    return "".join(f"<{kind}{of_number if at in right else ''}>{escape(text)}</{kind}>" for at, text in enumerate(row))
