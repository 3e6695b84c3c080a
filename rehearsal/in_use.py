"""What EC2 does not delete while it is in use, and moto does: each answers before moto's own action.

Words as the EC2 API answers; DependencyViolation throughout (EC2 API reference, error codes, read 2026-11-25).
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError


def subnet(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteSubnet: not from under a network interface. Its route table associations go with it."""
    subnet_id = asked["SubnetId"]
    if any(each.subnet.id == subnet_id for each in backend.enis.values()):
        raise _violation(f"The subnet '{subnet_id}' has dependencies and cannot be deleted.")
    for table in backend.route_tables.values():
        mine = [key for key, inside in table._associations.items() if inside == subnet_id]
        for key in mine:
            del table._associations[key]


def security_group(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteSecurityGroup: neither while an interface has it, nor while another group's rule names it."""
    group_id = asked.get("GroupId")
    worn = any(group.id == group_id for each in backend.enis.values() for group in each.group_set)
    named = any(
        (rule.source_group or {}).get("GroupId") == group_id
        for groups in backend.groups.values()
        for other in groups.values()
        if other.id != group_id
        for rule in (*other.ingress_rules, *other.egress_rules)
    )
    if worn or named:
        raise _violation(f"resource {group_id} has a dependent object")


def gateway(backend: Any, asked: dict[str, Any]) -> None:
    """DetachInternetGateway: not while a machine in the VPC has a public address."""
    vpc_id = asked["VpcId"]
    if any(each.subnet.vpc_id == vpc_id and each.public_ip for each in backend.enis.values()):
        raise _violation(
            f"Network {vpc_id} has some mapped public address(es). Please unmap those public address(es) before "
            "detaching the gateway."
        )


def vpc(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteVpc: not with a gateway, an endpoint or a security group of somebody's in it; moto itself knows subnets and
    route tables.
    """
    vpc_id = asked["VpcId"]
    inside = (
        *(each for each in backend.internet_gateways.values() if each.vpc and each.vpc.id == vpc_id),
        *(each for each in backend.vpc_end_points.values() if each.vpc_id == vpc_id and each.state != "deleted"),
        *(each for each in backend.groups[vpc_id].values() if each.name != "default"),
    )
    if inside:
        raise _violation(f"The vpc '{vpc_id}' has dependencies and cannot be deleted.")


REFUSALS = {
    "delete_subnet": subnet,
    "delete_security_group": security_group,
    "detach_internet_gateway": gateway,
    "delete_vpc": vpc,
}


def _violation(message: str) -> EC2ClientError:
    return EC2ClientError("DependencyViolation", message)
