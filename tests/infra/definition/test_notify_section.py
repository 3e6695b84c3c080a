"""The definition's `notify`: its values, and that a change of the section needs a new run."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.model import Notify, StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.infra.program.run_guard import creation_digest
from tests.infra.commands_world import definition, project

ARNS = (
    "arn:aws:s3:::b",
    "arn:aws:logs:r:1:log-group:l",
    "arn:aws:scheduler:r:1:schedule/g/stop",
    "arn:aws:iam::1:role/s",
)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return project(tmp_path, monkeypatch)


def with_notify(stack: Path, **keys: Any) -> StackDefinition:
    stack.write_text(f"{stack.read_text()}notify: {json.dumps(keys)}\n")
    return definition(stack)


def test_it_loads_and_a_change_of_it_takes_a_new_run(stack: Path) -> None:
    before = definition(stack)
    assert before.notify == Notify()
    found = with_notify(stack, email="me@example.org", webhook="ssm:/team/hook", silent_hours=2)
    assert found.notify == Notify(email="me@example.org", webhook="ssm:/team/hook", silent_hours=Decimal(2))
    assert creation_digest(found) != creation_digest(before)
    assert creation_digest(replace(found, notify=Notify())) == creation_digest(before)


@pytest.mark.parametrize(
    ("keys", "path", "allowed"),
    [
        ({"email": "me"}, "notify.email", "one e-mail address"),
        ({"email": "a@b.org, c@d.org"}, "notify.email", "one e-mail address"),
        ({"webhook": "ssm:/team/hook"}, "notify.email", "an e-mail address, if any other key of notify is set"),
        ({"email": "me@b.org", "webhook": "https://hooks.example.org/T0"}, "notify.webhook", "URL is a secret"),
        ({"email": "me@b.org", "silent_hours": 0}, "notify.silent_hours", "0.25"),
        ({"mail": "me@b.org"}, "notify.mail", "Nearest: email."),
    ],
)
def test_what_it_refuses(stack: Path, keys: dict[str, Any], path: str, allowed: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        with_notify(stack, **keys)
    assert path in str(refused.value)
    assert allowed in str(refused.value)


def test_a_node_has_the_rights_that_it_takes_and_without_it_none_of_them(stack: Path) -> None:
    without = node_statements(definition(stack), *ARNS)
    found = with_notify(stack, email="me@example.org", webhook="ssm:/team/hook")
    more = [each for each in node_statements(found, *ARNS, "arn:aws:sns:r:1:t") if each not in without]
    assert [(each["Sid"], each["Resource"]) for each in more] == [
        ("Parameters", ["arn:aws:ssm:us-east-2:*:parameter/team/hook"]),
        ("MoveTheHour", ["arn:aws:scheduler:r:1:schedule/g/stop", "arn:aws:scheduler:r:1:schedule/g/silence"]),
        ("Tell", "arn:aws:sns:r:1:t"),
    ]
