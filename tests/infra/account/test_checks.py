"""Whether the roles of fleet and nodes may use a customer managed KMS key, as far as policies and grants show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from gpufleet.infra.account import checks
from gpufleet.infra.account.checks import Check
from gpufleet.infra.definition.model import Account, StackDefinition
from tests.infra.commands_world import definition


class AccountAnswers:
    """A client that gives recorded answers, each checked against the service's own model."""

    def __init__(self, service: str, *answers: tuple[str, dict[str, Any]]) -> None:
        self.client = boto3.client(service, region_name="us-east-2", aws_access_key_id="x", aws_secret_access_key="x")
        stub = Stubber(self.client)
        for operation, answer in answers:
            stub.add_response(operation, answer, {"KeyId": KEY} if operation in ("list_grants",) else None)
        stub.activate()


OWN = "111122223333"
KEY = f"arn:aws:kms:us-east-2:{OWN}:key/0a"
FLEET_ROLE, SPOT_ROLE = (
    f"arn:aws:iam::{OWN}:role/aws-service-role/{service}.amazonaws.com/AWSServiceRoleFor{name}"
    for service, name in (("ec2fleet", "EC2Fleet"), ("spot", "EC2Spot"))
)
ROLES = [FLEET_ROLE, SPOT_ROLE]
ROOT = f"arn:aws:iam::{OWN}:root"
USE = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]


def said(principal: Any, *actions: str, effect: str = "Allow", **condition: Any) -> dict[str, Any]:
    """A statement of a key's policy. By default it allows everything that a launch needs."""
    named = {"AWS": principal} if principal != "*" else "*"
    what = list(actions) or [*USE, "kms:CreateGrant"]
    return {"Effect": effect, "Principal": named, "Action": what, "Resource": "*", "Condition": condition}


def grants(*roles: str, operations: str = checks.GRANT_OPERATIONS, **more: Any) -> list[dict[str, Any]]:
    return [{"GranteePrincipal": role, "Operations": operations.split(), **more} for role in roles]


def disk_key(
    definition: StackDefinition,
    *statements: dict[str, Any],
    granted: list[dict[str, Any]] | None = None,
    manager: str = "CUSTOMER",
    chosen: str = KEY,
    snapshot: bool = False,
) -> list[Check]:
    metadata = {"KeyId": "0a", "Arn": KEY, "KeyManager": manager, "Enabled": True}
    policy = json.dumps({"Statement": [said(ROOT, "kms:*"), *statements]})
    role = {"RoleName": "r", "Path": "/", "RoleId": "A" * 20, "CreateDate": "2026-01-01T00:00:00Z"}
    default = "alias/aws/ebs" if snapshot else chosen
    return list(
        checks.disk_key(
            definition,
            AccountAnswers(
                "ec2",
                *([("get_ebs_default_kms_key_id", {"KmsKeyId": default})] * (not definition.account.kms_key)),
                ("describe_snapshots", {"Snapshots": [{"Encrypted": True, "KmsKeyId": KEY}]}),
            ).client,
            AccountAnswers(
                "kms",
                ("describe_key", {"KeyMetadata": metadata}),
                ("list_grants", {"Grants": granted or [], "Truncated": False}),
                ("get_key_policy", {"Policy": policy}),
                ("get_key_policy", {"Policy": policy}),
            ).client,
            AccountAnswers("iam", *(("get_role", {"Role": {**role, "Arn": arn}}) for arn in ROLES)).client,
        )
    )


THROUGH_EC2 = {"kms:ViaService": "ec2.us-east-2.amazonaws.com"}
ORG = {"aws:PrincipalOrgID": "o-1"}
FOR_AWS = {"kms:GrantIsForAWSResource": "true"}
OTHER = FLEET_ROLE.replace("ec2fleet", "spotfleet").replace("EC2Fleet", "EC2SpotFleet")


@pytest.mark.parametrize(
    ("statements", "granted", "state"),
    [
        pytest.param([], [], "problem", id="the account alone: the roles have no policy that allows it"),
        pytest.param([said(ROLES)], [], "ok", id="both roles by name"),
        pytest.param([said("*", StringEquals={**THROUGH_EC2, "kms:CallerAccount": OWN})], [], "ok", id="through EC2"),
        pytest.param([said("*", ArnLike={"aws:PrincipalArn": f"arn:aws:iam::{OWN}:role/aws-*"})], [], "ok", id="ARN"),
        pytest.param([said(ROLES, *USE), said(ROLES, "kms:CreateGrant", Bool=FOR_AWS)], [], "ok", id="as AWS says"),
        pytest.param([said(ROLES, Bool=FOR_AWS)], [], "problem", id="a condition that only a grant meets"),
        pytest.param([said(ROLES, Bool={"kms:GrantIsForAWSResource": True})], grants(*ROLES), "ok", id="granted too"),
        pytest.param([], grants(*ROLES), "ok", id="grants"),
        pytest.param([], grants(*ROLES, operations="Decrypt"), "problem", id="a grant that is too small"),
        pytest.param([], grants(OTHER), "problem", id="a grant to a role of a longer name"),
        pytest.param(
            [],
            grants(*ROLES, Constraints={"EncryptionContextSubset": {"aws:ebs:id": "vol-1"}}),
            "warning",
            id="a grant for some disks",
        ),
        pytest.param([said(ROLES, effect="Deny")], grants(*ROLES), "problem", id="a denial outweighs grants"),
        pytest.param([said(ROOT, effect="Deny")], grants(*ROLES), "problem", id="a denial of the whole account"),
        pytest.param(
            [said(ROLES), said("*", effect="Deny", StringNotEquals=ORG)], [], "warning", id="a denial not judged"
        ),
        pytest.param([said("*", StringEquals=ORG)], [], "warning", id="an organisation"),
        pytest.param([said("*", StringEqualsIfExists={"kms:ViaService": "rds"})], [], "problem", id="another service"),
        pytest.param([said(ROLES, StringNotLike={"kms:ViaService": "ec2.*"})], [], "problem", id="all but EC2"),
        pytest.param(
            [said(ROLES, StringEquals={"kms:ViaService": f"ec2.{OWN}.amazonaws.com"})], [], "problem", id="misspelled"
        ),
        pytest.param([said(ROLES, "kms:Decrypt", "kms:CreateGrant", "kms:Gen*")], [], "warning", id="most of it"),
        pytest.param([said(ROLES, "kms:DescribeKey")], [], "problem", id="named, and nothing allowed"),
    ],
)
def test_a_disk_key_of_ones_own_is_judged_as_far_as_its_policy_and_grants_are_certain(
    path: Path, statements: list[dict[str, Any]], granted: list[dict[str, Any]], state: str
) -> None:
    found = disk_key(definition(path), *statements, granted=granted)
    assert [check.state for check in found] == [state, state]


def test_what_puts_a_disk_key_right_is_a_grant_unless_its_policy_denies(path: Path) -> None:
    """ListGrants, GetKeyPolicy and CreateGrant take no alias."""
    alias = f"arn:aws:kms:us-east-2:{OWN}:alias/mine"
    bare, denied = (disk_key(definition(path), *policy, chosen=alias)[0] for policy in ([], [said("*", effect="Deny")]))
    assert bare.fix.startswith(
        f"aws kms create-grant --region us-east-2 --key-id {KEY} --grantee-principal {FLEET_ROLE} --operations Decrypt"
    )
    assert denied.fix.endswith(f"aws kms get-key-policy --region us-east-2 --key-id {KEY} --policy-name default")


def test_one_role_may_and_the_other_may_not(path: Path) -> None:
    found = disk_key(definition(path), granted=grants(FLEET_ROLE))
    assert [check.state for check in found] == ["ok", "problem"]
    assert "which AWSServiceRoleForEC2Spot may not use (CreateGrant, Decrypt, GenerateData" in found[1].found


def test_aws_s_own_key_is_fine(path: Path) -> None:
    assert [check.state for check in disk_key(definition(path), manager="AWS")] == ["ok"]


@pytest.mark.parametrize(
    ("statements", "states"),
    [
        ([said(ROLES)], ["ok", "ok", "ok"]),
        ([said(ROLES), said("*", "kms:GenerateDataKey", effect="Deny")], ["ok", "ok", "warning"]),
    ],
)
def test_the_file_s_key_stands_for_the_default_one_and_must_be_left_to_iam_for_the_nodes(
    path: Path, statements: list[dict[str, Any]], states: list[str]
) -> None:
    found = disk_key(with_key(definition(path)), *statements, chosen="alias/aws/ebs")
    assert [check.state for check in found] == states
    assert (found[0].name, found[-1].name) == ("disk key", "bucket key")


def with_key(definition: StackDefinition) -> StackDefinition:
    return replace(definition, account=Account(kms_key=KEY))


@pytest.mark.parametrize(
    ("manager", "own", "state"),
    [("AWS", False, "ok"), ("CUSTOMER", False, "problem"), ("CUSTOMER", True, "ok"), ("", False, "warning")],
)
def test_an_input_under_a_key_is_readable_if_the_key_is_aws_s_or_the_file_s(
    path: Path, manager: str, own: bool, state: str
) -> None:
    found = definition(path)
    s3 = AccountAnswers("s3", ("head_object", {"SSEKMSKeyId": KEY})).client
    kms = AccountAnswers("kms", ("describe_key", {"KeyMetadata": {"KeyId": "0a", "KeyManager": manager}})).client
    if not manager:
        kms.describe_key = refused
    (check,) = checks.inputs(with_key(found) if own else found, s3, None, kms)
    assert check.state == state


def refused(**_: Any) -> Any:
    raise ClientError({"Error": {"Code": "AccessDeniedException"}}, "DescribeKey")


def test_the_key_of_a_snapshot_is_asked_about_as_the_default_one_is(path: Path) -> None:
    path.write_text(
        path.read_text().replace("tokens}", "tokens, data: {size_gib: 50, snapshot: snap-0123456789abcdef0}}")
    )
    found = disk_key(definition(path), snapshot=True)
    assert [check.state for check in found] == ["ok", "problem", "problem"]
    assert found[1].found.startswith("the disk of snap-0123456789abcdef0 is encrypted with your key ")
