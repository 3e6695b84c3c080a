"""Asks IAM's simulator about the role of a stack's nodes. role_rights.yaml lists what the role may do, and what it must
not.

No command can act as the role, because only EC2 may assume it. The simulator takes the tags of resources from the
request, and does not know the policies of S3 buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpufleet.infra.account import aws
from gpufleet.infra.canary.observations import FlightFacts
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.tags import own_tags
from gpufleet.job.contract import bucket as keys
from gpufleet.job.contract.workdir import RUN

FILE = Path(__file__).with_name("role_rights.yaml")
_KEYS = {
    name: getattr(keys, name)
    for name in ("ATTEMPTS", "CHECKPOINTS", "DONE", "FLEETS", "GRAPHS", "HEARTBEATS", "INPUTS")
} | {"RUN": RUN}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleRights:
    """One row: the actions on a resource that the role may do, and those that it must not."""

    of: str
    tags: str = ""  # whose tags the resource has: `own`, `another`, or none
    context: Mapping[str, str]
    may: tuple[str, ...]
    may_not: tuple[str, ...]


@cache
def known() -> tuple[RoleRights, ...]:
    """All rows, in the file's order."""
    return tuple(
        RoleRights(
            of=row["of"],
            tags=row.get("tags", ""),
            context=row.get("context", {}),
            may=tuple(row.get("may", "").split()),
            may_not=tuple(row.get("may_not", "").split()),
        )
        for row in yaml.safe_load(FILE.read_text(encoding="utf-8"))
    )


def ask(facts: FlightFacts, stack: StackDefinition, iam: Any, role: str, places: Mapping[str, str]) -> None:
    """Adds the rights that the role lacks, and those that it has but must not have. `role`: its ARN. `places`: the ARNs
    of the run's resources, by their names in the file.
    """
    answers = [answer for row in known() for answer in _asked(row, stack, iam, role, places)]
    for fact, expected in (("role.lacks", True), ("role.exceeds", False)):
        wrong = [name for name, wanted, allowed in answers if wanted == expected != allowed]
        facts.add(fact, ", ".join(wrong) or "nothing")
    facts.add("role.asked", len(answers))


def _asked(
    row: RoleRights, stack: StackDefinition, iam: Any, role: str, places: Mapping[str, str]
) -> Iterator[tuple[str, bool, bool]]:
    """Yields each action, its resource, whether the role should have this right, and whether the simulator says so."""
    fill: Callable[[str], str] = lambda text: text.format(**places, **_KEYS, run=stack.run.id)  # noqa: E731
    tags = {f"aws:ResourceTag/{key}": value for key, value in own_tags(stack).items()} if row.tags else {}
    if row.tags == "another":
        tags = dict.fromkeys(tags, "another")
    context = tags | {key: fill(value) for key, value in row.context.items()}
    answers = aws.pages(
        iam,
        "simulate_principal_policy",
        "EvaluationResults",
        PolicySourceArn=role,
        ActionNames=[*row.may, *row.may_not],
        ResourceArns=[fill(row.of)],
        ContextEntries=[
            {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
            for key, value in context.items()
        ],
    )
    for answer in answers:
        action = answer["EvalActionName"]
        yield f"{action} on {row.of}", action in row.may, answer["EvalDecision"] == "allowed"
