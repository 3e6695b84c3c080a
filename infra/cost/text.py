"""Tables of plain ASCII."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> Iterator[str]:
    """Heads, a rule, and the rows; the columns of `right` flush right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()
