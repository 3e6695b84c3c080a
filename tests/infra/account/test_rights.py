"""The rights that `up` needs: for every resource that the program declares, and for every call beside these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import rights
from gpufleet.infra.account.checks import Check
from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess
from gpufleet.rehearsal.gate import USER_KEY
from tests import forked
from tests.rehearsal.engine_world import STACK, edit, pinned, project

NOW = datetime.now(UTC)
PLAIN = ""
FULL = """
  capacity: spot
  fallback: on-demand
"""


def definition(file: Path) -> StackDefinition:
    return load(file, now=NOW)


def with_all(file: Path) -> None:
    """The file with a fallback and with an address for notices."""
    edit(file, "  capacity: spot\n", FULL)
    edit(file, "limits:\n", "limits:\n  deadline: in 6 h\n")
    file.write_text(file.read_text() + "notify: {email: me@example.org}\n")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[Cloud, Path]]:
    file = pinned(project(tmp_path / "project"))
    with forked.programs(tmp_path), Cloud(tmp_path / "cloud", clock=ManualClock(NOW)) as cloud:
        yield cloud, file


@pytest.mark.parametrize("full", [False, True], ids=["plain", "fallback and notify"])
def test_all_that_is_declared_and_called_for_it_is_asked_for(world: tuple[Cloud, Path], full: bool) -> None:
    cloud, file = world
    if full:
        with_all(file)
    with Engine.open(file.parents[1], cloud.environment(), STACK, real=False) as engine:
        assert isinstance(engine, InProcess)
        created = engine.up()
        assert created.ok, created.text
        declared = {each["type"] for each in engine.declared()}
        assert engine.destroy().ok
    asked = definition(file)
    assert declared == set(rights.declared(asked))
    assert cloud._gate is not None
    called = {action for key, action in cloud._gate.calls if key == USER_KEY} - {"GetCallerIdentity", ""}
    assert called - {each.partition(":")[2] for each in rights.needed(asked)} == set()

    def states() -> list[str]:
        return [each.state for each in rights.check(asked, cloud.client("sts"), cloud.client("iam"))]

    assert states() == ["ok"]
    cloud.deny("CreateSchedule")
    assert states() == ["problem"]


class Simulator:
    """Stands for IAM's simulator, with given decisions by action. It allows all other actions."""

    def __init__(self, **decisions: dict[str, Any]) -> None:
        self.decisions, self.resources = decisions, dict[str, str]()

    def get_role(self, RoleName: str) -> dict[str, Any]:
        return {"Role": {"Arn": f"arn:aws:iam::111122223333:role/team/{RoleName}"}}

    def get_paginator(self, operation: str) -> Simulator:
        assert operation == "simulate_principal_policy"
        return self

    def paginate(self, **asked: Any) -> list[dict[str, Any]]:
        assert asked["PolicySourceArn"].endswith(("user/me", "role/team/Admin"))
        self.resources |= dict.fromkeys(asked["ActionNames"], asked["ResourceArns"][0])
        answers = [
            {"EvalActionName": name, "EvalDecision": "allowed", **self.decisions.get(name.partition(":")[2], {})}
            for name in asked["ActionNames"]
        ]
        return [{"EvaluationResults": answers[:1]}, {"EvaluationResults": answers[1:]}]


class Caller:
    def __init__(self, name: str) -> None:
        self.arn = f"arn:aws:iam::111122223333:{name}"

    def get_caller_identity(self) -> dict[str, str]:
        return {"Arn": self.arn}


IMPLICIT, EXPLICIT = {"EvalDecision": "implicitDeny"}, {"EvalDecision": "explicitDeny"}
CONDITION = {**IMPLICIT, "MissingContextValues": ["aws:RequestTag/team"]}
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {
    "all of it": ("user/me", {}, [("ok", "user/me may do all")]),
    "a role": ("assumed-role/Admin/me", {}, [("ok", "assumed-role/Admin/me may do all")]),
    "root": ("root", {}, []),
    "federated": ("federated-user/me", {}, [("warning", "cannot tell whether federated-user/me")]),
    "validation": (
        "user/me",
        {"ValidateStateMachineDefinition": IMPLICIT, "CreateSchedule": EXPLICIT},
        [("problem", "lacks: scheduler:CreateSchedule, states:ValidateStateMachineDefinition")],
    ),
    "on some EC2 resources": ("user/me", {"CreateVpc": IMPLICIT}, [("warning", "conditions: ec2:CreateVpc")]),
    "on a condition": ("user/me", {"CreateRole": CONDITION}, [("warning", "conditions: iam:CreateRole")]),
    "denied in EC2": ("user/me", {"CreateFleet": EXPLICIT}, [("problem", "lacks: ec2:CreateFleet")]),
}


@pytest.mark.parametrize(("who", "decisions", "expected"), CASES.values(), ids=CASES)
def test_what_the_caller_lacks_is_a_problem_and_what_nobody_can_tell_a_warning(
    tmp_path: Path, who: str, decisions: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    file = project(tmp_path / "project")
    with_all(file)
    iam = Simulator(**decisions)
    checks: list[Check] = list(rights.check(definition(file), Caller(who), iam))
    assert len(checks) == len(expected)
    for check, (state, words) in zip(checks, expected, strict=True):
        assert check.state == state
        assert words in check.found
        assert ("--rights" in check.fix) == (state != "ok" and "cannot" not in words)
    if iam.resources:
        bucket = f"arn:aws:s3:::gpufleet-{STACK}-0000000"
        assert (iam.resources["s3:ListBucket"], iam.resources["s3:PutObject"]) == (bucket, f"{bucket}/object")


def test_doctor_prints_them_as_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project(tmp_path / "project").parents[1])
    assert main(["doctor", STACK, "--rights"]) == 0
    up, commands = json.loads(capsys.readouterr().out)["Statement"]
    assert {"ec2:CreateFleet", "iam:PassRole", "scheduler:CreateSchedule"} <= set(up["Action"])
    assert "states:CreateStateMachine" not in up["Action"]
    assert "iam:SimulatePrincipalPolicy" in commands["Action"]
