"""Compares AWS's recorded answers with those of the embedded AWS, field by field.

While there is no file of a real account, the examples of AWS's documentation take its place. botocore contains these
examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from gpufleet.infra.canary.observations import redacted

STANDS_IN = "the examples in AWS's documentation, for want of a canary on a real account"
_LACKING = "lacking"
_KINDS = ((bool, "true or false"), ((int, float), "number"), (str, "text"), (object, "nothing"))

Answers = Mapping[str, Any]  # the recorded answers, by SERVICE.Operation, or by `SERVICE.Operation CODE` for a refusal


class AnswerDifference(NamedTuple):
    """A field in which two answers differ."""

    call: str
    field: str
    aws: str  # the kind of value in AWS's answer
    embedded: str


def differences(recorded: Answers, own: Answers) -> Iterator[AnswerDifference]:
    """Yields the fields of AWS's answers that the embedded AWS lacks, or that have another kind of value there.
    Compares only calls that both have answered, and only lists that are not empty in either answer.
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
    """The answers in AWS's documented examples of these calls, in the form of a canary's file."""
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
    """The kind of value of each field, by its path, such as Fleets[].FleetId."""
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
