"""Plain HTML tables for notebooks; every cell is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    notes: Iterable[str] = (),
    *,
    right: Sequence[int] = (),
) -> str:
    """A table, and sentences below it. Numbers and the columns of `right` are aligned right."""

    def cell(at: int, value: object) -> str:
        style = ' style="text-align: right"' if at in right or isinstance(value, int | float) else ""
        return f"<td{style}>{escape(shown(value))}</td>"

    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(cell(at, value) for at, value in enumerate(row))}</tr>" for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def shown(value: object) -> str:
    """A cell: two decimals, more where a figure is small; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"
    return "" if value is None else str(value)
