"""Decides whether policy statements allow one request. This module applies only those rules of IAM that are certain.

There are three answers: True, False, and None if a condition depends on something unknown or uses an operator that is
not implemented here. AWS itself cannot answer for a service-linked role: IAM's simulator accepts only users as callers
of a resource policy (API reference, SimulateCustomPolicy, CallerArn), and KMS's DryRun answers only for its caller.
Both pages were read on 2026-11-25.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Statement = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """One action that a request asks for. If a value in `context` is None, the request does not have this key. The
    request may have further keys, unless `complete` is set.
    """

    action: str
    resource: str = "*"
    # the caller's ARN; empty if the statements are the caller's own policy, which names no principal
    principal: str = ""
    context: Mapping[str, str | None] = field(default_factory=dict)
    complete: bool = True


def allowed(statements: Iterable[Statement], wish: AccessRequest) -> bool | None:
    """Whether a statement allows the request and no statement denies it."""
    answers = [(str(statement["Effect"]), speaks_of(statement, wish)) for statement in statements]
    denied, permitted = ({answer for effect, answer in answers if effect == which} for which in ("Deny", "Allow"))
    if True in denied or not permitted - {False}:
        return False
    return None if None in denied or True not in permitted else True


def speaks_of(statement: Statement, wish: AccessRequest) -> bool | None:
    """Whether the statement applies to the request: principal, action, resource and every condition."""
    parts = [
        _named(statement, "Action", wish.action.lower(), str.lower),
        _named(statement, "Resource", wish.resource, str),
        _principal(statement, wish) if wish.principal else True,
        *(
            _holds(operator, key, values, wish)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        ),
    ]
    return False if False in parts else None if None in parts else True


def matches_wildcard(text: str, pattern: str) -> bool:
    """Matches by IAM's wildcards: * stands for any text, including slashes, and ? for one character."""
    words = (".*" if letter == "*" else "." if letter == "?" else re.escape(letter) for letter in pattern)
    return re.fullmatch("".join(words), text, re.DOTALL) is not None


def _named(statement: Statement, key: str, text: str, spelled: Callable[[str], str]) -> bool:
    if f"Not{key}" in statement:
        return not any(matches_wildcard(text, spelled(pattern)) for pattern in _listed(statement[f"Not{key}"]))
    return any(matches_wildcard(text, spelled(pattern)) for pattern in _listed(statement.get(key, [])))


def _principal(statement: Statement, wish: AccessRequest) -> bool | None:
    """Whether the statement's principal is the caller. If the statement names the whole account, it can deny a role's
    request, but it cannot allow one: the role's own policies decide. The answer is None for sessions of roles and for
    NotPrincipal.
    """
    if "Principal" not in statement:
        return None
    named = statement["Principal"]
    names = ["*"] if named == "*" else _listed(named.get("AWS", []))
    names = [f"arn:aws:iam::{name}:root" if name.isdigit() else name for name in names]
    if "*" in names or wish.principal in names:
        return True
    if statement["Effect"] == "Deny" and f"arn:aws:iam::{wish.principal.split(':')[4]}:root" in names:
        return True
    return None if any(name.startswith("arn:aws:sts::") for name in names) else False


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": str.__eq__,
    "StringEqualsIgnoreCase": lambda text, value: text.lower() == value.lower(),
    "StringLike": matches_wildcard,
    "ArnEquals": matches_wildcard,
    "ArnLike": matches_wildcard,
    "Bool": lambda text, value: text.lower() == value.lower(),
}


def _holds(operator: str, key: str, values: Any, wish: AccessRequest) -> bool | None:
    name = operator.removesuffix("IfExists")
    match = _OPERATORS.get(name.replace("Not", "", 1))
    patterns = [str(value) for value in _listed(values)]
    context = {known.lower(): value for known, value in wish.context.items()}
    if key.lower() not in context and not wish.complete:
        return None
    value = context.get(key.lower())
    if operator == "Null":
        return str(value is None).lower() in patterns
    if match is None or any("${" in pattern for pattern in patterns):
        return None
    if value is None:
        return "Not" in name or operator != name
    return any(match(value, pattern) for pattern in patterns) != ("Not" in name)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
