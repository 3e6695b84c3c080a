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
    picture: str = "",
) -> str:
    """A table below `picture`, an SVG, and sentences below it. Numbers and the columns of `right` stand flush right."""

    def cell(kind: str, at: int, value: object) -> str:
        side = "right" if at in numbers else "left"
        return f'<{kind} style="text-align:{side};padding:.2em .8em">{escape(shown(value))}</{kind}>'

    def line(kind: str, row: Sequence[object]) -> str:
        return f"<tr>{''.join(cell(kind, at, value) for at, value in enumerate(row))}</tr>"

    rows = list(rows)
    numbers = {*right, *(at for row in rows for at, value in enumerate(row) if isinstance(value, int | float))}
    head, body = line("th", heads), "".join(line("td", row) for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f'{picture}<table style="border-collapse:collapse"><caption style="text-align:left">{escape(caption)}</caption>'
        f"<thead>{head}</thead><tbody>{body}</tbody></table>{below}"
    )


def shown(value: object) -> str:
    """A cell: two decimals, more where a figure is small; nothing for None."""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 0.1 or not value else f"{value:.2g}"
    return "" if value is None else str(value)
