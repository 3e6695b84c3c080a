"""Lists the rights that a user needs for `up`, `refresh` and `destroy`, and checks whether the caller has them.

For each resource type that the program declares, rights.csv lists the calls that the provider makes. AWS's policy
simulator says whether the caller may make them. The simulator knows the organisation's policies and the caller's
boundary, but neither the policies of a session nor rights that are limited to certain EC2 resources.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from gpufleet.infra.account.aws import pages
from gpufleet.infra.account.checks import Check
from gpufleet.infra.definition.bake import is_builder
from gpufleet.infra.definition.model import StackDefinition

AT_ONCE = 50  # the most actions in one request
COMMANDS = "gpufleet's own"  # the value of the column `when` for a request that gpufleet's commands make


def declared(definition: StackDefinition) -> dict[str, list[str]]:
    """The resource types that the program declares, each with the actions that the provider needs."""
    own_network = definition.account.vpc is None
    holds = {
        "": True,
        "own network": own_network,
        "NAT gateway": own_network and definition.fleet.cards == "all",
        "several nodes": any(part.nodes > 1 for part in definition.parts),
        "state machine": definition.changes_fleets,
        "e-mail": definition.notify.email is not None,
        "bake": is_builder(definition) and definition.storage.data is None,
        "bake of data": is_builder(definition) and definition.storage.data is not None,
        "own lifecycle": definition.storage.keep.lifecycle == "own",
        COMMANDS: False,
    }
    return {row["type"]: row["actions"].split() for row in _rows() if holds[row["when"]]}


def needed(definition: StackDefinition) -> list[str]:
    actions = {action for group in declared(definition).values() for action in group}
    if definition.account.kms_key:
        actions |= {"kms:Decrypt", "kms:GenerateDataKey"}  # for the encryption of the bucket's objects
    if definition.account.permissions_boundary:
        actions.add("iam:PutRolePermissionsBoundary")
    return sorted(actions)


def _rows() -> list[dict[str, str]]:
    text = Path(__file__).with_name("rights.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def policy(definition: StackDefinition) -> str:
    """An IAM policy as JSON, for whoever grants rights: the actions of `up` and of gpufleet's own commands."""
    (commands,) = (row["actions"] for row in _rows() if row["when"] == COMMANDS)
    statements = [
        {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": "*"}
        for sid, actions in (("PulumiUp", needed(definition)), ("GpufleetCommands", commands.split()))
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)


def check(definition: StackDefinition, sts: Any, iam: Any) -> Iterator[Check]:
    """Whether the caller has these rights. Raises botocore's errors if the caller may not ask."""
    who = str(sts.get_caller_identity()["Arn"])
    account, name = who.split(":")[4], who.rpartition(":")[2]
    if name == "root":
        return
    if name.startswith("assumed-role/"):
        who = str(iam.get_role(RoleName=name.split("/")[1])["Role"]["Arn"])
    elif not name.startswith("user/"):
        sentence = f"cannot tell whether {name} may do all that `up` does: AWS simulates only users and roles"
        yield Check("rights", sentence, "warning")
        return
    context = {"aws:RequestedRegion": definition.fleet.region, "iam:PassedToService": "ec2.amazonaws.com"}
    if boundary := definition.account.permissions_boundary:
        context["iam:PermissionsBoundary"] = boundary
    missing, unsure = set[str](), set[str]()
    by_resource = sorted(needed(definition), key=lambda action: _resource(definition, action, account))
    for resource, group in groupby(by_resource, lambda action: _resource(definition, action, account)):
        actions = list(group)
        for start in range(0, len(actions), AT_ONCE):
            answers = pages(
                iam,
                "simulate_principal_policy",
                "EvaluationResults",
                PolicySourceArn=who,
                ActionNames=actions[start : start + AT_ONCE],
                ResourceArns=[resource],
                ContextEntries=[
                    {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                    for key, value in context.items()
                ],
            )
            for answer in answers:
                if answer["EvalDecision"] != "allowed":
                    open_ = answer["EvalDecision"] == "implicitDeny" and (
                        resource == "*" or answer.get("MissingContextValues")
                    )
                    (unsure if open_ else missing).add(str(answer["EvalActionName"]))
    command = f"gpufleet doctor {definition.argument} --rights"
    fix = f"{command} prints all of them as a policy, for the person who grants rights."
    if missing:
        sentence = f"`up` needs rights that {name} lacks: {', '.join(sorted(missing))}"
        yield Check("rights", sentence, "problem", fix)
    if unsure:
        sentence = f"{name} lacks these, or has them only for some resources or conditions: {', '.join(sorted(unsure))}"
        yield Check("rights", sentence, "warning", fix)
    if not missing | unsure:
        yield Check("rights", f"{name} may do all that `up` and `destroy` do")


def _resource(definition: StackDefinition, action: str, account: str) -> str:
    """The ARN of the resource for which the action is checked. The resource has a name as in this stack; resources of
    EC2 have no names.
    """
    service, _, verb = action.partition(":")
    made, place = f"gpufleet-{definition.name}-0000000", f"{definition.fleet.region}:{account}"
    of_profile = "InstanceProfile" in verb and verb != "ListInstanceProfilesForRole"
    named = {
        "s3": f"arn:aws:s3:::{made}" + ("/object" if "Object" in verb and "Bucket" not in verb else ""),
        "iam": f"arn:aws:iam::{account}:{'instance-profile' if of_profile else 'role'}/{made}",
        "logs": f"arn:aws:logs:{place}:log-group:{made}",
        "scheduler": f"arn:aws:scheduler:{place}:"
        + (f"schedule/{made}/stop" if verb.endswith("Schedule") else f"schedule-group/{made}"),
        "states": f"arn:aws:states:{place}:stateMachine:{made}",
        "sns": f"arn:aws:sns:{place}:{made}",
        "events": f"arn:aws:events:{place}:rule/{made}",
        "kms": str(definition.account.kms_key),
    }
    return named.get(service, "*")
