"""Tables whose columns are defined once. The forms for a terminal, HTML, Markdown and JSON use the same columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import date
from decimal import Decimal
from operator import attrgetter
from typing import Any, NamedTuple

from gpufleet.infra import text


class Column(NamedTuple):
    """One column: one value of each row's object."""

    key: str  # the column's name for programs, by which a table selects it
    head: str | None = None  # the heading for people; if it is None, `key` is the heading
    unit: str = ""  # the unit of the numbers in the column, which are right-aligned; empty if the column has text
    digits: int | Callable[[Any], str] = str  # decimals, or a function that formats the value for people
    # a function that returns the value for an object, or None; by default the value is the attribute `key`
    of: Callable[[Any], Any] | None = None
    places: int = 4  # decimals of a float for programs

    def value(self, thing: Any) -> Any:
        return (self.of or attrgetter(self.key))(thing)

    def text(self, thing: Any) -> str:
        """The value for people; `-` if not known."""
        value = self.value(thing)
        if value is None:
            return "-"
        return self.digits(value) if callable(self.digits) else f"{value:.{self.digits}f}"


@dataclass(slots=True)
class Sheet:
    """A table: its columns and the texts of its rows."""

    columns: Sequence[Column]
    rows: list[tuple[str, ...]]
    spare: Sequence[str] = ()  # keys of columns that a narrow terminal leaves out, in this order

    @classmethod
    def build(
        cls, columns: Sequence[Column], things: Iterable[Any], *more: tuple[str, ...], spare: Sequence[str] = ()
    ) -> Sheet:
        """A sheet with a row for each object, followed by the rows `more`."""
        return cls(columns, [*(tuple(column.text(thing) for column in columns) for thing in things), *more], spare)

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(column.key if column.head is None else column.head for column in self.columns)

    @property
    def right(self) -> list[int]:
        """The numbers of the right-aligned columns."""
        return [at for at, column in enumerate(self.columns) if column.unit]

    def text(self) -> Iterator[str]:
        """The table's lines for a terminal."""
        keys = [column.key for column in self.columns]
        return text.table(self.heads, self.rows, right=self.right, spare=[keys.index(key) for key in self.spare])

    def markdown(self) -> Iterator[str]:
        """The table's lines in Markdown. The cells must already be Markdown."""
        rule = ("---:" if column.unit else "---" for column in self.columns)
        yield "".join(f"| {head} " if head else "| " for head in self.heads) + "|"
        yield f"|{'|'.join(rule)}|"
        yield from (f"| {' | '.join(row)} |" for row in self.rows)


def record(columns: Iterable[Column], thing: Any) -> dict[str, Any]:
    """An object with the columns' values, for programs."""
    return {column.key: plain(column.value(thing), digits=column.places) for column in columns}


def plain(value: Any, *names: str, digits: int = 4) -> Any:
    """`value` for JSON: decimals as strings, floats with `digits` digits, dates as ISO 8601. From an object, the
    attributes `names` are taken, or all attributes.
    """
    match value:
        case Decimal():
            return str(value)
        case float():
            return round(value, digits)
        case date():
            return value.isoformat()
        case Mapping():
            return {key: plain(part, digits=digits) for key, part in value.items()}
        case tuple() | list():
            return [plain(part, *names, digits=digits) for part in value]
    if is_dataclass(value):
        names = names or tuple(field.name for field in fields(value))
        return {name: plain(getattr(value, name), digits=digits) for name in names}
    return value
