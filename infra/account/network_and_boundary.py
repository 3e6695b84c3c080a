"""Checks of `gpufleet doctor` for the definition's `account`: network and permissions boundary. The checks only
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gpufleet.infra.account import iam_policy, refusals
from gpufleet.infra.account.aws import pages
from gpufleet.infra.account.checks import Check
from gpufleet.infra.definition.model import StackDefinition, is_zone_id


def network(definition: StackDefinition, ec2: Any) -> Iterator[Check]:
    """Whether each zone's subnet exists in the VPC and the zone, has free addresses, and reaches port 443 outside."""
    if (vpc := definition.account.vpc) is None:
        return
    wanted = [{"Name": "subnet-id", "Values": list(vpc.subnets.values())}]
    subnets = {
        described["SubnetId"]: described for described in pages(ec2, "describe_subnets", "Subnets", Filters=wanted)
    }
    inside = [{"Name": "vpc-id", "Values": [vpc.id]}]
    tables = list(pages(ec2, "describe_route_tables", "RouteTables", Filters=inside))
    for zone, name in vpc.subnets.items():
        subnet = subnets.get(name)
        if wrong := _misplaced(subnet, vpc.id, zone):
            fix = "Correct account.vpc."
            yield Check("network", f"{name} {wrong}", "problem", fix)
        else:
            assert subnet is not None
            yield _way_out(subnet, _routes(tables, name))


def _misplaced(subnet: dict[str, Any] | None, vpc: str, zone: str) -> str:
    if subnet is None:
        return "does not exist in the fleet's region"
    if subnet["VpcId"] != vpc:
        return f"is in {subnet['VpcId']}, not in {vpc}"
    there = subnet["AvailabilityZoneId" if is_zone_id(zone) else "AvailabilityZone"]
    if there != zone:
        return f"is in {there}, not in {zone}"
    return "" if subnet["AvailableIpAddressCount"] else "has no free address"


def _routes(tables: list[dict[str, Any]], subnet: str) -> list[dict[str, Any]]:
    """The routes of the subnet's own route table, or of the VPC's main route table if the subnet has none."""
    for key, value in (("SubnetId", subnet), ("Main", True)):
        for table in tables:
            if any(association.get(key) == value for association in table["Associations"]):
                return [route for route in table["Routes"] if route.get("State", "active") == "active"]
    return []


def _way_out(subnet: dict[str, Any], routes: list[dict[str, Any]]) -> Check:
    name = f"{subnet['SubnetId']} in {subnet['AvailabilityZone']}"
    out = next((route for route in routes if route.get("DestinationCidrBlock") == "0.0.0.0/0"), None)
    endpoint = any(str(route.get("GatewayId", "")).startswith("vpce-") for route in routes)
    if out is None:
        return Check(
            "network",
            f"{name} has no route out: cannot tell how nodes reach S3, EC2, logs and the image's registry",
            "warning",
            "Nodes need port 443 to all of these, through a gateway or endpoints; they do not use a proxy.",
        )
    if str(out.get("GatewayId", "")).startswith("igw-"):
        if subnet["MapPublicIpOnLaunch"]:
            return Check("network", f"{name}, out through {out['GatewayId']}")
        return Check(
            "network",
            f"{name} routes to {out['GatewayId']} but gives nodes no public address: they could reach nothing",
            "problem",
            f"aws ec2 modify-subnet-attribute --subnet-id {subnet['SubnetId']} --map-public-ip-on-launch",
        )
    through = next((str(out[key]) for key in out if key.endswith("Id")), "another way")
    if endpoint:
        return Check("network", f"{name}, out through {through}, whose price is not on the bill")
    return Check(
        "network",
        f"{name}: data and checkpoints go through {through} too, whose price per GB is not on the bill",
        "warning",
        "Add a gateway endpoint for S3 to that route table: it costs nothing.",
    )


def boundary(definition: StackDefinition, iam: Any) -> Iterator[Check]:
    """Whether the nodes' rights lie within the permissions boundary."""
    if (arn := definition.account.permissions_boundary) is None:
        return
    # Imported here, because the provider's SDK takes a second to import.
    from gpufleet.infra.program.resources.fallback import may_begin
    from gpufleet.infra.program.resources.identity import node_statements
    from gpufleet.infra.program.resources.machine import may_modify
    from gpufleet.infra.program.resources.stop import schedule_arn, stop_statements

    def read() -> Any:
        version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
        return iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]

    if (document := refusals.absent(read, "NoSuchEntity")) is None:
        fix = "Correct account.permissions_boundary."
        yield Check("boundary", f"{arn} does not exist", "problem", fix)
        return
    limits = (json.loads(document) if isinstance(document, str) else document)["Statement"]
    limits = limits if isinstance(limits, list) else [limits]
    made = f"gpufleet-{definition.name}-0000000"
    schedule = schedule_arn(f"arn:aws:scheduler:{definition.fleet.region}:{_ANY_ACCOUNT}:schedule-group/{made}")
    role = f"arn:aws:iam::{_ANY_ACCOUNT}:role/{made}"
    log_group = f"arn:aws:logs:{definition.fleet.region}:{_ANY_ACCOUNT}:log-group:{made}"
    topic = f"arn:aws:sns:{definition.fleet.region}:{_ANY_ACCOUNT}:{made}" if definition.notify.email else ""
    fallback = [
        *may_begin(f"arn:aws:states:{definition.fleet.region}:{_ANY_ACCOUNT}:stateMachine:{made}")["Statement"],
        *may_modify(f"arn:aws:ec2:{definition.fleet.region}:{_ANY_ACCOUNT}:fleet/fleet-0")["Statement"],
    ]
    answers = {
        (wish.action, iam_policy.allowed(limits, wish))
        for statement in [
            *node_statements(definition, f"arn:aws:s3:::{made}", log_group, schedule, role, topic),
            *stop_statements(definition),
            *(fallback if definition.changes_fleets else []),
        ]
        if statement["Effect"] == "Allow"
        for wish in _wishes(statement)
    }
    refused, unsure = (sorted(name for name, answer in answers if answer is which) for which in (False, None))
    if refused:
        finding = f"{arn} does not let a node {', '.join(refused)}"
        fix = (
            "Let the boundary allow the rights in `gpufleet docs node`; otherwise nodes fail or cannot end their fleet."
        )
        yield Check("boundary", finding, "problem", fix)
    elif unsure:
        finding = (
            f"cannot tell whether {arn} lets a node {', '.join(unsure)}: it sets conditions that only AWS can judge"
        )
        yield Check("boundary", finding, "warning")
    else:
        yield Check("boundary", f"{arn} allows everything that a node does")


_ANY_ACCOUNT = "000000000000"


def _wishes(statement: dict[str, Any]) -> Iterator[iam_policy.AccessRequest]:
    """The requests that the statement is meant to allow: each of its actions on one resource, under its own
    conditions.
    """
    actions, resources = (
        [named] if isinstance(named := statement[key], str) else named for key in ("Action", "Resource")
    )
    context = {
        key: str(value[0] if isinstance(value, list) else value)
        for keys in statement.get("Condition", {}).values()
        for key, value in keys.items()
    }
    kinds = {"ec2:TerminateInstances": "instance/"}
    for action in actions:
        resource = next((candidate for candidate in resources if kinds.get(action, "") in candidate), resources[0])
        yield iam_policy.AccessRequest(action=action, resource=resource, context=context, complete=False)
