"""AWS's recorded answers beside the embedded AWS's own: shape by shape, field by field.

Until a file of a real account is there, the examples in AWS's own documentation, as botocore brings them, stand in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from gpufleet.infra.canary.facts import redacted

STANDS_IN = "the examples in AWS's documentation, for want of a canary on a real account"
_LACKING = "lacking"
_KINDS = ((bool, "true or false"), ((int, float), "number"), (str, "text"), (object, "nothing"))

Answers = Mapping[str, Any]  # by SERVICE.Operation, or SERVICE.Operation CODE for a refusal


class AnswerDifference(NamedTuple):
    """A field of an answer."""

    call: str
    field: str
    aws: str  # kind of value
    embedded: str


def differences(recorded: Answers, own: Answers) -> Iterator[AnswerDifference]:
    """The fields of AWS's that the embedded AWS lacks, or answers with another kind of value. Only calls that both
    answered count, and lists that both filled.
    """
    for call in sorted(recorded.keys() & own.keys()):
        theirs, ours = (_kinds(answers[call]) for answers in (recorded, own))
        for field, kind in theirs.items():
            above, inside, _ = field.rpartition("[]")
            if inside and ours.get(above) != "list":
                continue  # AWS omits the list, or it is empty
            if (has := ours.get(field, _LACKING)) != kind and "empty list" not in (kind, has):
                yield AnswerDifference(call, field, kind, has)


def documented(calls: Iterable[str]) -> dict[str, Any]:
    """The answers in AWS's documented examples of these calls, as a canary's file would have them."""
    answers: dict[str, Any] = {}
    for call in calls:
        service, _, operation = call.partition(".")
        for example in _examples(service).get(operation, []):
            if output := example.get("output"):
                answers.setdefault(call, redacted(output))
    return answers


@cache
def _examples(service: str) -> dict[str, list[dict[str, Any]]]:
    from botocore.exceptions import DataNotFoundError
    from botocore.loaders import Loader

    try:
        return dict(Loader().load_service_model(service, "examples-1")["examples"])
    except DataNotFoundError:
        return {}


def _kinds(answer: Any, path: str = "") -> dict[str, str]:
    """The kind of value by the path of each field: Fleets[].FleetId."""
    if isinstance(answer, Mapping):
        kinds = {path: "object"} if path else {}
        for key, value in answer.items():
            kinds |= _kinds(value, f"{path}.{key}" if path else key)
        return kinds
    if isinstance(answer, list):
        kinds = {path: "list" if answer else "empty list"}
        for item in answer:
            kinds |= _kinds(item, f"{path}[]")
        return kinds
    return {path: next(kind for of, kind in _KINDS if isinstance(answer, of))}
