"""The definition's `account`: what it accepts, what a change of it does to a run, and what `doctor` says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import network_and_boundary, quotas
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Account, StackDefinition, Vpc
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.resources.tags import own_tags, tags
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import account, definition, project

VPC = "vpc-0123456789abcdef0"
SUBNETS = {"us-east-2a": "subnet-0123456789abcdef0", "us-east-2b": "subnet-0123456789abcdef1"}
KEY = "arn:aws:kms:us-east-2:111122223333:key/0a1b"


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return project(tmp_path, monkeypatch)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with account(tmp_path, monkeypatch) as cloud:
        yield cloud


def with_account(stack: Path, **keys: Any) -> StackDefinition:
    stack.write_text(f"{stack.read_text()}account: {json.dumps(keys)}\n")
    return definition(stack)


def test_all_of_it_loads_and_a_file_without_it_has_none(stack: Path) -> None:
    assert definition(stack).account == Account()
    boundary = "arn:aws:iam::111122223333:policy/team/boundary"
    keys = {"tags": {"CostCenter": "1234", "e": ""}, "permissions_boundary": boundary, "kms_key": KEY}
    found = with_account(stack, **keys, vpc={"id": VPC, "subnets": SUBNETS})
    assert found.account == Account(
        tags={"CostCenter": "1234", "e": ""},
        permissions_boundary=boundary,
        kms_key=KEY,
        vpc=Vpc(id=VPC, subnets=SUBNETS),
    )
    assert tags(found) == {**own_tags(found), "CostCenter": "1234", "e": ""}


@pytest.mark.parametrize(
    ("keys", "path", "allowed"),
    [
        ({"tag": {"a": "b"}}, "account.tag", "Nearest: tags."),
        ({"tags": ["a=b"]}, "account.tags", "a section of tags"),
        ({"tags": {"a": "b*"}}, "account.tags.a", "each value up to 256"),
        ({"tags": {"gpufleet:owner": "me"}}, "account.tags.gpufleet:owner", "not Name, aws:... or gpufleet:..."),
        ({"tags": {"Name": "x"}}, "account.tags.Name", "not Name"),
        ({"tags": {"aws:x": "x"}}, "account.tags.aws:x", "not Name"),
        ({"tags": {f"t{n}": "x" for n in range(8)}}, "account.tags", "at most 7"),
        ({"permissions_boundary": "boundary"}, "account.permissions_boundary", "a policy's ARN"),
        ({"kms_key": "alias/mine"}, "account.kms_key", "An alias does not work"),
        ({"kms_key": KEY.replace("us-east-2", "us-west-2")}, "account.kms_key", "a key of us-east-2"),
        ({"vpc": {"id": VPC}}, "account.vpc.subnets", "a subnet-... for each of fleet.zones"),
        ({"vpc": {"subnets": SUBNETS}}, "account.vpc.id", "vpc-... of the fleet's region"),
        ({"vpc": {"id": VPC, "subnets": list(SUBNETS.values())}}, "account.vpc.subnets", "us-east-2a: subnet-..."),
        (
            {"vpc": {"id": VPC, "subnets": {"us-east-2a": SUBNETS["us-east-2a"]}}},
            "account.vpc.subnets",
            "one subnet for each of fleet.zones: us-east-2a, us-east-2b",
        ),
        ({"vpc": {"id": VPC, "subnets": {**SUBNETS, "us-east-2b": "mine"}}}, "account.vpc.subnets.us-east-2b", "sub"),
    ],
)
def test_what_it_does_not_accept_is_said_at_the_key(stack: Path, keys: dict[str, Any], path: str, allowed: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        with_account(stack, **keys)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert allowed in f"{problem.allowed}. {problem.hint}"


def test_a_run_without_it_keeps_its_digest_and_a_change_of_it_is_another_run(stack: Path) -> None:
    plain = definition(stack)
    without = creation_digest(plain)
    assert creation_digest(replace(plain, account=Account())) == without
    assert creation_digest(replace(plain, account=Account(kms_key=KEY))) != without


def private(cloud: Cloud) -> None:
    for name in SUBNETS.values():
        cloud.client("ec2").modify_subnet_attribute(SubnetId=name, MapPublicIpOnLaunch={"Value": False})


def test_what_it_costs_elsewhere_is_said_as_not_priced(stack: Path, tmp_path: Path) -> None:
    plain = bill_of(definition(stack), tmp_path, load_catalog())
    found = bill_of(with_account(stack, vpc={"id": VPC, "subnets": SUBNETS}, kms_key=KEY), tmp_path, load_catalog())
    network, key = sorted(set(found.warnings) - set(plain.warnings))
    assert network.startswith("not priced: NAT gateways and endpoints of account.vpc")
    assert key.startswith("not priced: account.kms_key")
    assert found.usd == plain.usd


def table_of(cloud: Cloud) -> str:
    wanted = [{"Name": "vpc-id", "Values": [VPC]}]
    return str(cloud.client("ec2").describe_route_tables(Filters=wanted)["RouteTables"][0]["RouteTableId"])


def no_way_out(cloud: Cloud) -> None:
    cloud.client("ec2").delete_route(RouteTableId=table_of(cloud), DestinationCidrBlock="0.0.0.0/0")


def through_nat(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    no_way_out(cloud)
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    nat = ec2.create_nat_gateway(SubnetId=SUBNETS["us-east-2a"], AllocationId=address)["NatGateway"]["NatGatewayId"]
    ec2.create_route(RouteTableId=table_of(cloud), DestinationCidrBlock="0.0.0.0/0", NatGatewayId=nat)


@pytest.mark.parametrize(
    ("change", "state", "said"),
    [
        pytest.param(lambda cloud: None, "ok", "out through igw-", id="public"),
        pytest.param(private, "problem", "gives nodes no public address", id="no addresses"),
        pytest.param(no_way_out, "warning", "cannot tell how nodes reach", id="no route"),
        pytest.param(through_nat, "warning", "through nat-", id="a NAT for S3 too"),
    ],
)
def test_the_network_that_is_there_is_looked_at(cloud: Cloud, stack: Path, change: Any, state: str, said: str) -> None:
    cloud.has(Account(vpc=Vpc(id=VPC, subnets=SUBNETS)))
    change(cloud)
    found = with_account(stack, vpc={"id": VPC, "subnets": SUBNETS})
    checks = list(network_and_boundary.network(found, cloud.client("ec2")))
    assert [check.state for check in checks] == [state, state]
    assert all(said in check.found for check in checks)
    assert list(quotas.vpc_quota(found, cloud.client("ec2"), None)) == []


@pytest.mark.parametrize(
    ("vpc", "subnets", "said"),
    [
        (VPC, {zone: name[:-1] + "9" for zone, name in SUBNETS.items()}, "does not exist in the fleet's region"),
        (VPC[:-1] + "1", SUBNETS, f"is in {VPC}, not in vpc-0123456789abcdef1"),
        (VPC, dict(zip(SUBNETS, reversed(SUBNETS.values()), strict=True)), "not in us-east-2a"),
    ],
    ids=["not there", "another VPC", "another zone"],
)
def test_a_subnet_that_is_elsewhere_is_a_problem(
    cloud: Cloud, stack: Path, vpc: str, subnets: dict[str, str], said: str
) -> None:
    cloud.has(Account(vpc=Vpc(id=VPC, subnets=SUBNETS)))
    found = with_account(stack, vpc={"id": vpc, "subnets": subnets})
    check, _ = network_and_boundary.network(found, cloud.client("ec2"))
    assert check.state == "problem"
    assert said in check.found


def allow(*actions: str, resource: str = "*", **condition: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions), "Resource": resource, "Condition": condition}


ALL = allow("s3:*", "logs:*", "ec2:*", "ssm:*", "ssmmessages:*", "kms:*", "scheduler:*", "iam:PassRole")


@pytest.mark.parametrize(
    ("statements", "state", "said"),
    [
        ([ALL], "ok", "allows everything that a node does"),
        ([allow("s3:*", "logs:*", "ssm:*", "ssmmessages:*")], "problem", "ec2:DeleteFleets"),
        ([ALL, {**allow("ec2:TerminateInstances"), "Effect": "Deny"}], "problem", "a node ec2:TerminateInstances"),
        ([ALL, {**allow("s3:*", StringNotEquals={"aws:PrincipalOrgID": "o-1"}), "Effect": "Deny"}], "warning", "s3:"),
        ([ALL, {**allow("s3:Get*", resource="arn:aws:s3:::*/inputs/*"), "Effect": "Deny"}], "problem", "a node s3:Get"),
        ([ALL, {**allow("*", resource="arn:aws:s3:::payroll/*"), "Effect": "Deny"}], "ok", "allows everything"),
        ([ALL, {**allow("ec2:*", StringNotEquals={"ec2:Region": "eu-west-1"}), "Effect": "Deny"}], "warning", "ec2:"),
    ],
)
def test_the_boundary_is_held_against_what_a_node_may_do(
    cloud: Cloud, stack: Path, statements: list[dict[str, Any]], state: str, said: str
) -> None:
    iam = cloud.client("iam")
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    arn = iam.create_policy(PolicyName="boundary", PolicyDocument=document)["Policy"]["Arn"]
    (check,) = network_and_boundary.boundary(with_account(stack, permissions_boundary=arn, kms_key=KEY), iam)
    assert (check.state, said in check.found) == (state, True), check.found


def test_a_boundary_that_is_not_there_is_a_problem(cloud: Cloud, stack: Path) -> None:
    arn = f"arn:aws:iam::{cloud.account}:policy/none"
    (check,) = network_and_boundary.boundary(with_account(stack, permissions_boundary=arn), cloud.client("iam"))
    assert (check.state, check.found) == ("problem", f"{arn} does not exist")
