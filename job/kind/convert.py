"""Turns text into the dataclasses of a definition or of a kind of job: and checks the values.

A field's rule is its metadata (`minimum`, `maximum`) or a `Rule`. This module reads JSON. infra.definition.schema reads
YAML, in which every value is text with a line number, by the same rules and with the same words.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The allowed values of a key beyond its type: a closed range in `unit`, a pattern, or a number of items."""

    minimum: float | None = None
    maximum: float | None = None
    unit: str = ""
    pattern: str = ""
    allowed: str = ""  # the allowed values in words, if there is a pattern
    # advice if the value does not match; it may be made from the text in the file
    hint: str | Callable[[str], str] = ""
    most: int | None = None  # the most items of a list or section
    one: bool = False  # whether a single text is accepted as a list of one
    moment: bool = False  # for a time: whether a span such as `in 10 h` is refused

    def includes(self, value: float | Decimal) -> bool:
        """Whether the value is within the range."""
        low, high = (None if bound is None else Decimal(str(bound)) for bound in (self.minimum, self.maximum))
        exact = Decimal(str(value))
        return (low is None or exact >= low) and (high is None or exact <= high)


def key_of(name: str) -> str:
    """The field's key in a definition file: `from` for `from_`, because Python keeps `from` for itself."""
    return name.rstrip("_")


@functools.cache
def hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)  # cached, because it is slow and every scenario needs it


def unwrap(hint: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether None is allowed. A deadline has two types, of which this is the first."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(arm for arm in typing.get_args(hint) if arm is not types.NoneType), True
    return hint, False


def rule_of(spec: Field[Any]) -> Rule:
    of = spec.metadata
    return Rule(minimum=of.get("minimum"), maximum=of.get("maximum"), one=of.get("one", False))


def describe(hint: Any, rule: Rule) -> str:
    """The allowed values in words: `a number from 0.01 to 720 (hours)`."""
    hint, optional = unwrap(hint)
    if rule.pattern:
        return rule.allowed
    if typing.get_origin(hint) is tuple:
        return f"a list, each {describe(typing.get_args(hint)[0], rule)}"
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    words = {
        int: "a whole number",
        float: "a number",
        Decimal: "a number",
        bool: "true or false",
        datetime: "a time with its zone, such as 2026-12-31T18:00:00Z"
        + ("" if rule.moment else ", or hours after the first `up`, as in 10 h"),
        str: "text",
    }.get(hint, "a section")
    if rule.minimum is not None or rule.maximum is not None:
        words += f" from {_shown(rule.minimum)} to {_shown(rule.maximum)}"
    if rule.unit:
        words += f" ({rule.unit})"
    return words + (", or nothing" if optional else "")


def from_json(cls: type[T], tree: Any, path: str, default: T) -> T:
    """The dataclass in the JSON at `path`; keys that are missing in `tree` have the value in `default`. Raises
    ValueError, which names every unknown key and every value that is not allowed.
    """
    problems: list[str] = []
    built: T = _build(cls, tree, path, problems, default)
    if problems:
        raise ValueError("; ".join(problems))
    return built


def _build(cls: type[Any], tree: Any, path: str, problems: list[str], default: Any) -> Any:
    if not isinstance(tree, dict):
        problems.append(f"{path}: {tree!r:.80} is not a section of keys")
        return default
    known = {f.name: f for f in fields(cls)}
    typed = hints(cls)  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable
    if unknown := sorted(set(tree) - set(known)):
        problems.append(f"{path}: unknown keys {', '.join(unknown)}")
    converted = {
        key: _value(typed[key], tree[key], f"{path}.{key}", rule_of(spec), problems, getattr(default, key))
        for key, spec in known.items()
        if key in tree
    }
    return replace(default, **converted)


def _value(hint: Any, value: Any, path: str, rule: Rule, problems: list[str], default: Any = None) -> Any:
    """The typed value. If the value is not allowed, the function adds a problem and returns the value unchanged."""
    inner, optional = unwrap(hint)
    if value is None and optional:
        return None
    if is_dataclass(inner) and isinstance(inner, type):
        return _build(inner, value, path, problems, default if isinstance(default, inner) else inner())
    if typing.get_origin(inner) is tuple and isinstance(value, list | tuple):
        arm = typing.get_args(inner)[0]
        return tuple(_value(arm, item, f"{path}[{index}]", rule, problems) for index, item in enumerate(value))
    if typing.get_origin(inner) is dict and isinstance(value, dict):
        arm = typing.get_args(inner)[1]
        return {key: _value(arm, item, f"{path}.{key}", rule, problems) for key, item in value.items()}
    if inner is float and type(value) is int and abs(value) < 2**53:  # larger whole numbers are refused
        value = float(value)
    if not _is_allowed(inner, value, rule):
        problems.append(f"{path}: {value!r:.80} is not {describe(inner, rule)}")
    return value


def _is_allowed(hint: Any, value: Any, rule: Rule) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        return False
    return hint not in (int, float) or rule.includes(value)


def _shown(value: float | None) -> str:
    return "any" if value is None else f"{value:,g}" if abs(value) < 1e6 and value != int(value) else f"{value:,.0f}"
