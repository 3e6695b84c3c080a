"""Writes a sheet as an HTML table; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gpufleet.infra.show.sheet import Sheet

LEFT, RIGHT = (f' style="text-align:{side};padding:.2em .8em"' for side in ("left", "right"))


def table(sheet: Sheet, *, caption: str = "", total: bool = False) -> str:
    """The table as HTML. If `total`, the last row is a total. If there is a `caption`, styles are inline, as a notebook
    needs them.
    """
    last = len(sheet.rows) - 1 if total else -1
    sides = (LEFT, RIGHT) if caption else ("", " class=number")
    body = "".join(
        f"<tr{' class=total' if at == last else ''}>{_cells(sheet, row, 'td', *sides)}</tr>"
        for at, row in enumerate(sheet.rows)
    )
    head = _cells(sheet, sheet.heads, "th", *sides)
    above = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    style = " style=border-collapse:collapse" if caption else ""
    return f"<table{style}>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _cells(sheet: Sheet, row: Iterable[str], kind: str, of_text: str, of_number: str) -> str:
    right = sheet.right
    return "".join(
        f"<{kind}{of_number if at in right else of_text}>{escape(text)}</{kind}>" for at, text in enumerate(row)
    )
