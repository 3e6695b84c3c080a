"""Reads JSON that another process wrote, and trusts no value: a reader asks for each value by its key, and states its
kind and range. A kind is a function that returns the typed value, or raises DoubtError. `Fields` adds the value's path
in the document. `need` reads a required value, `take` an optional one. A wrong value is an error for `need` and for
`take`. But if the reader has `aside`, `aside` is called with a sentence, and the value is treated as missing. `filled`
reads a document into its dataclass: the type of each field is the kind of its value. The node's own Python uses this
file, so it must work with Python 3.9.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime, timezone
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")
D = TypeVar("D")
Kind = Callable[[Any], T]

MOST = 2**53  # JSON readers differ on larger whole numbers
MOST_USD = Decimal(10) ** 9  # no run has as many USD or seconds; arithmetic on smaller amounts is exact
NAME_BYTES = 255  # most bytes of one part of a path, on every Linux file system
KEY_BYTES = 1024  # most bytes of an S3 key


class DoubtError(ValueError):
    """A document has an impossible value. The message gives the place, the value and what is allowed."""


def parse(content: bytes) -> dict[str, Any]:
    """The JSON object in `content`. Raises DoubtError."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise DoubtError(f"it is not JSON ({why[:80]})") from None
    if not isinstance(tree, dict):
        raise DoubtError(f"it is {show(tree)}, not an object of keys")
    return tree


def show(value: Any) -> str:
    """A value for an error message: short, without terminal escapes."""
    if isinstance(value, (dict, list)):
        return "a list" if isinstance(value, list) else "an object"
    literal = ascii(value)
    return literal if len(literal) <= 60 else f"{literal[:57]}..."


class Fields:
    """The values of one JSON object, which is at `path` of its document. Raises DoubtError for anything else."""

    def __init__(self, tree: Any, path: str = "", aside: Callable[[str], None] | None = None) -> None:
        if not isinstance(tree, dict):
            raise DoubtError(f"{path or 'it'} is {show(tree)}, not an object of keys")
        self.tree: dict[str, Any] = tree
        self._path, self._aside = path, aside

    def need(self, key: str, kind: Kind[T]) -> T:
        """The value of `key`. Raises DoubtError if the value is missing or has the wrong kind."""
        if key not in self.tree:
            raise DoubtError(f"{self._key_path(key)} is missing")
        try:
            return kind(self.tree[key])
        except DoubtError as error:
            raise DoubtError(f"{self._key_path(key)} {error}") from None

    def take(self, key: str, kind: Kind[T], default: D) -> T | D:
        """The value of `key`; `default` if the value is missing or null, or if it is wrong and was passed to
        `aside`.
        """
        if self.tree.get(key) is None:
            return default
        try:
            return self.need(key, kind)
        except DoubtError as error:
            if self._aside is None:
                raise
            self._aside(str(error))
            return default

    def section(self, key: str) -> Fields:
        """The object at `key`, as Fields."""
        return Fields(self.need(key, anything), self._key_path(key), self._aside)

    def sections(self, key: str) -> list[Fields]:
        """The objects of the list at `key`, as Fields."""
        trees = self.need(key, listed(anything))
        return [Fields(tree, f"{self._key_path(key)}[{index}]", self._aside) for index, tree in enumerate(trees)]

    def table(self, key: str) -> dict[str, Fields]:
        """The objects below `key`, by name."""
        section = self.section(key)
        return {name: section.section(name) for name in section.tree}

    def schema(self, known: int) -> None:
        """Raises DoubtError if the document's schema is not the one that this code reads."""
        if self.tree.get("schema") != known or isinstance(self.tree.get("schema"), bool):
            raise DoubtError(f"it has schema {show(self.tree.get('schema'))}, this code reads {known}")

    def _key_path(self, key: str) -> str:
        where = key if key.isprintable() and len(key) <= 60 else show(key)
        return f"{self._path}.{where}" if self._path else where


def text(value: Any) -> str:
    """A text that can be encoded in UTF-8."""
    if not isinstance(value, str):
        raise DoubtError(f"is {show(value)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DoubtError(f"is {show(value)}, which is not a text in UTF-8") from None
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise DoubtError(f"is {show(value)}, neither true nor false")
    return value


def whole_number(value: Any) -> int:
    """A whole number, 0 or more."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise DoubtError(f"is {show(value)}, not a whole number from 0 to {MOST}")
    return value


def several(value: Any) -> int:
    """A whole number, 1 or more."""
    if whole_number(value) == 0:
        raise DoubtError("is 0, not a number from 1 on")
    return int(value)


def step(value: Any) -> int:
    """A number of optimizer steps with at most eight digits, as in checkpoints' names."""
    if type(value) is not int or not 0 <= value < 10**8:
        raise DoubtError(f"is {show(value)}, not a number of steps")
    return value


def integer(value: Any) -> int:
    """A whole number, which may be negative."""
    return int(number(value))


def number(value: Any) -> float:
    """A finite number."""
    if type(value) not in (int, float) or not abs(value) <= MOST:
        raise DoubtError(f"is {show(value)}, not a number")
    return float(value)


def seconds(value: Any) -> float:
    """Seconds, 0 or more, as a number or a decimal text."""
    amount_s = float(amount(value)) if isinstance(value, str) else number(value)
    if not 0 <= amount_s < MOST_USD:
        raise DoubtError(f"is {show(value)}, not a number of seconds")
    return amount_s


def amount(value: Any) -> Decimal:
    """An exact amount of money or time: a decimal text, or a number."""
    digits = value if isinstance(value, str) else repr(value) if type(value) in (int, float) else ""
    try:
        decimal = Decimal(digits) if len(digits) <= 40 else None
    except InvalidOperation:
        decimal = None
    if decimal is None or not _is_exact(decimal):
        raise DoubtError(f"is {show(value)}, not an amount")
    return decimal


def unsigned(value: Any) -> Decimal:
    """An amount of 0 or more."""
    decimal = amount(value)
    if decimal < 0:
        raise DoubtError(f"is {show(value)}, less than 0")
    return decimal


def moment(value: Any) -> float:
    """An ISO time with a zone, as epoch seconds."""
    at_s = epoch(value)
    if at_s is None:
        raise DoubtError(f"is {show(value)}, not a time with its zone")
    return at_s


def name(value: Any) -> str:
    """The name of a file below a folder. No part of the name leads out of the folder. All names that other processes or
    people have written are checked here.
    """
    path = text(value)
    parts = path.split("/")
    if any(part in ("", ".", "..") or len(part.encode()) > NAME_BYTES for part in parts) or not path.isprintable():
        raise DoubtError(f"is {show(value)}, not a file's name below its folder")
    if len(path.encode()) > KEY_BYTES:
        raise DoubtError(f"is {show(value)}, longer than {KEY_BYTES} bytes")
    return path


def choice(*allowed: T) -> Kind[T]:
    """A kind: the value must be one of `allowed`."""

    def read(value: Any) -> T:
        for candidate in allowed:
            if type(value) is type(candidate) and value == candidate:
                return candidate
        raise DoubtError(f"is {show(value)}, not one of {', '.join(map(str, allowed))}")

    return read


def listed(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A kind: a list of values of this kind."""

    def read(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise DoubtError(f"is {show(value)}, not a list")
        return tuple(map(kind, value))

    return read


def mapping(kind: Kind[T]) -> Kind[dict[str, T]]:
    """A kind: an object whose values have this kind."""

    def read(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise DoubtError(f"is {show(value)}, not an object of keys")
        return {key: kind(child) for key, child in value.items()}

    return read


def epoch(value: Any) -> float | None:
    """Epoch seconds of an ISO time with a zone; None for any other value."""
    try:
        # Python 3.9 cannot read Z.
        time = datetime.fromisoformat(f"{value[:-1]}+00:00" if value[-1:] == "Z" else value)
        return time.timestamp() if time.tzinfo else None
    except (TypeError, ValueError, OverflowError):
        return None


def iso(at: float) -> str:
    """The text that `epoch` reads: UTC, milliseconds, Z."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_exact(decimal: Decimal) -> bool:
    """Whether the amount is finite, below the limit, and short enough for exact arithmetic."""
    exponent = decimal.as_tuple().exponent
    return isinstance(exponent, int) and -28 <= exponent <= 9 and abs(decimal) <= MOST_USD


def anything(value: Any) -> Any:
    return value


# Types of dataclass fields that allow less than Python's own types.
Amount = Annotated[Decimal, amount]
Integer = Annotated[int, integer]
Moment = Annotated[float, moment]
Name = Annotated[str, name]
Seconds = Annotated[float, seconds]
Step = Annotated[int, step]
KINDS: dict[str, Kind[Any]] = {
    "str": text,
    "bool": flag,
    "int": whole_number,
    "float": number,
    "Decimal": unsigned,
    "Any": anything,
}


def filled(cls: type[T], document: Fields, but: Collection[str] = (), **values: Any) -> T:
    """The dataclass of a document whose keys are its fields. A field without a default is required. Fields in `values`
    or `but` are not read. Raises DoubtError.
    """
    for field in fields(cls):  # type: ignore[arg-type]  # of dataclasses alone
        required = field.default is MISSING and field.default_factory is MISSING
        if field.name in values or field.name in but or not (required or field.name in document.tree):
            continue
        kind, part = _kind_of(cls.__module__, str(field.type))
        if part is not None:
            values[field.name] = tuple(filled(part, section) for section in document.sections(field.name))
        elif required:
            values[field.name] = document.need(field.name, kind)
        elif (value := document.take(field.name, kind, None)) is not None:
            values[field.name] = value
    return cls(**values)


@functools.cache
def _kind_of(module: str, hint: str) -> tuple[Kind[Any], type[Any] | None]:
    """The reader of a field whose type the module names; for a list of dataclasses also the class. The type is given as
    text, because Python 3.9 cannot evaluate it.
    """
    hint = hint.removesuffix(" | None")
    if parts := re.fullmatch(r"tuple\[(.*), \.\.\.\]", hint):
        kind, part = _kind_of(module, parts[1])
        return listed(kind), part
    if parts := re.fullmatch(r"(?:dict|Mapping)\[str, (.*)\]", hint):
        return mapping(_kind_of(module, parts[1])[0]), None
    named: Any = KINDS.get(hint) or vars(sys.modules[module])[hint]
    if get_origin(named) is Literal:
        return choice(*get_args(named)), None
    if isinstance(named, type) and is_dataclass(named):
        return anything, named
    return getattr(named, "__metadata__", [named])[0], None
