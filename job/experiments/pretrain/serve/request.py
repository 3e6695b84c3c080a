"""Checks POST /generate's body, field by field. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpufleet.job.experiments.pretrain.spec import SYMBOLS

MAX_TOKENS, MAX_TEMPERATURE, MAX_TOP_K = 2048, 2.0, 32
MAX_SEED = 2**63 - 1


class Refused(ValueError):
    """A request that cannot be served: an HTTP status and a sentence that says what is allowed."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """POST /generate's body. Temperature 0 is greedy; If `seed` is None, each answer is a different sample."""

    prompt: str
    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = None
    stop_on_newline: bool = False
    seed: int | None = None
    stream: bool = False


def parse(body: bytes, *, longest: int) -> GenerateRequest:
    """The request. Raises Refused, naming all problems at once. `longest`: the longest prompt in characters."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f'the body is not JSON ({error}); send an object like {{"prompt": "123+456"}}') from None
    if not isinstance(tree, dict):
        raise Refused(400, f"the body is a JSON {_kind(tree)}, but an object with a prompt is needed")
    checks: dict[str, Callable[[Any], str | None]] = {
        "prompt": lambda v: _prompt(v, longest),
        "max_tokens": lambda v: _integer(v, 1, MAX_TOKENS),
        "temperature": _temperature,
        "top_k": lambda v: None if v is None else _integer(v, 1, MAX_TOP_K, "or null"),
        "stop_on_newline": _boolean,
        "seed": lambda v: None if v is None else _integer(v, 0, MAX_SEED, "or null"),
        "stream": _boolean,
    }
    problems = [f"{_short(key)}: unknown; known are {', '.join(checks)}" for key in tree if key not in checks]
    if "prompt" not in tree:
        problems.append("prompt: missing")
    problems += [f"{key}: {problem}" for key in checks if key in tree and (problem := checks[key](tree[key]))]
    if problems:
        raise Refused(400, "; ".join(problems))
    return GenerateRequest(**tree)


def _prompt(value: Any, longest: int) -> str | None:
    allowed = f"1 to {longest} of the characters {SYMBOLS!r}"
    if not isinstance(value, str):
        return f"a {_kind(value)}; allowed: a string, {allowed}"
    if not 1 <= len(value) <= longest:
        return f"{len(value)} characters; allowed: {allowed}"
    foreign = next(((i, c) for i, c in enumerate(value) if c not in SYMBOLS), None)
    return None if foreign is None else f"{foreign[1]!r} at position {foreign[0]}; allowed: {allowed}"


def _integer(value: Any, least: int, most: int, otherwise: str = "") -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return None
    shown = value if isinstance(value, int | float) else f"a {_kind(value)}"
    return f"{_short(shown)}; allowed: a whole number from {least} to {most} {otherwise}".rstrip()


def _temperature(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TEMPERATURE:
        return None
    shown = value if isinstance(value, int | float) and not isinstance(value, bool) else f"a {_kind(value)}"
    return f"{_short(shown)}; allowed: a number from 0 (greedy) to {MAX_TEMPERATURE:g}"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"a {_kind(value)}; allowed: true or false"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _kind(value: Any) -> str:
    """The name of a value's type in JSON."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names[type(value)]
