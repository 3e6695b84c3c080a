"""Where nodes run: handlers for VPC, subnets, gateway, S3 endpoint, routes and security group, and for the tags of EC2
resources.

A security group's rules are separate resources, so a group starts without rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufleet.infra.account.refusals import absent
from gpufleet.rehearsal.handlers.calls import OwnCalls
from gpufleet.rehearsal.handlers.table import Aws, Properties, api, tag_specification

_DNS = ("enableDnsSupport", "enableDnsHostnames")


def _put_dns(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    for name in _DNS:
        if name in new and new[name] != old.get(name):
            aws.ec2.modify_vpc_attribute(VpcId=resource_id, **{api(name): {"Value": new[name]}})


def _dns(aws: Aws, like: Properties, live: Properties, raw: Mapping[str, Any]) -> Properties:
    def value(name: str) -> Any:
        return aws.ec2.describe_vpc_attribute(VpcId=live["vpcId"], Attribute=name)[api(name)]["Value"]

    return {name: value(name) for name in _DNS if name in like}


def _put_public(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    public = new.get("mapPublicIpOnLaunch", False)
    if public != old.get("mapPublicIpOnLaunch", False):
        aws.ec2.modify_subnet_attribute(SubnetId=resource_id, MapPublicIpOnLaunch={"Value": public})


def _delete_gateway(aws: Aws, resource_id: str, state: Properties) -> None:
    if state.get("vpcId"):
        aws.ec2.detach_internet_gateway(InternetGatewayId=resource_id, VpcId=state["vpcId"])
    aws.ec2.delete_internet_gateway(InternetGatewayId=resource_id)


def _update_endpoint(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    before, after = set(old.get("routeTableIds", [])), set(new.get("routeTableIds", []))
    changes: dict[str, Any] = {
        "AddRouteTableIds": sorted(after - before),
        "RemoveRouteTableIds": sorted(before - after),
    }
    if new["policy"] != old.get("policy"):
        changes["PolicyDocument"] = new["policy"]
    if changes := {key: value for key, value in changes.items() if value}:
        aws.ec2.modify_vpc_endpoint(VpcEndpointId=resource_id, **changes)


def _table(aws: Aws, table: str) -> dict[str, Any] | None:
    answer = absent(lambda: aws.ec2.describe_route_tables(RouteTableIds=[table]), "InvalidRouteTableID.NotFound")
    return answer["RouteTables"][0] if answer else None


def _target(inputs: Properties) -> dict[str, Any]:
    keys = ("routeTableId", "destinationCidrBlock", "gatewayId", "natGatewayId")
    return {api(key): inputs[key] for key in keys if key in inputs}


def _create_route(aws: Aws, inputs: Properties) -> str:
    aws.ec2.create_route(**_target(inputs))
    return f"r-{inputs['routeTableId']}-{inputs['destinationCidrBlock']}"


def _read_route(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    table = _table(aws, like["routeTableId"])
    for route in table["Routes"] if table else []:
        if route.get("DestinationCidrBlock") == like["destinationCidrBlock"]:
            return {
                "routeTableId": like["routeTableId"],
                "destinationCidrBlock": route["DestinationCidrBlock"],
                "gatewayId": route.get("GatewayId"),
                "natGatewayId": route.get("NatGatewayId"),
                "state": route.get("State", "active"),
                "origin": route.get("Origin", "CreateRoute"),
            }
    return None


def _read_association(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    table = _table(aws, like["routeTableId"])
    for association in table["Associations"] if table else []:
        if association["RouteTableAssociationId"] == resource_id:
            return {"routeTableId": like["routeTableId"], "subnetId": association.get("SubnetId")}
    return None


def _close(aws: Aws, resource_id: str, inputs: Properties) -> None:
    """Removes the rule that AWS adds to every new group (all traffic out), as the provider does."""
    rules = aws.ec2.describe_security_groups(GroupIds=[resource_id])["SecurityGroups"][0]["IpPermissionsEgress"]
    if rules:
        aws.ec2.revoke_security_group_egress(GroupId=resource_id, IpPermissions=rules)


def _permission(rule: dict[str, Any]) -> Properties:
    return {
        "protocol": rule["ipProtocol"],
        "fromPort": rule.get("fromPort", 0),
        "toPort": rule.get("toPort", 0),
        "cidrBlocks": [block["cidrIp"] for block in rule.get("ipRanges", [])],
    }


def _rule(inputs: Properties) -> dict[str, Any]:
    description = {"Description": inputs.get("description", "")}
    ports = {api(key): inputs[key] for key in ("fromPort", "toPort") if key in inputs}
    if "cidrIpv4" in inputs:
        peers: dict[str, Any] = {"IpRanges": [{"CidrIp": inputs["cidrIpv4"], **description}]}
    else:
        peers = {"UserIdGroupPairs": [{"GroupId": inputs["referencedSecurityGroupId"], **description}]}
    return {"IpProtocol": inputs["ipProtocol"], **ports, **peers}


def _peer(aws: Aws, like: Properties, live: Properties, raw: Mapping[str, Any]) -> Properties:
    group = (live.get("referencedGroupInfo") or {}).get("groupId")
    # moto drops the description of a rule that names a group
    text = live.get("description") or (like.get("description") if group else None)
    return {"referencedSecurityGroupId": group, "description": text}


def _update_rule(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    keys = ("ipProtocol", "fromPort", "toPort", "cidrIpv4", "description")
    if any(old.get(key) != new.get(key) for key in keys):
        rule = {api(key): new[key] for key in keys if key in new}
        change = {"SecurityGroupRuleId": resource_id, "SecurityGroupRule": rule}
        aws.ec2.modify_security_group_rules(GroupId=new["securityGroupId"], SecurityGroupRules=[change])


def _rules(way: str) -> OwnCalls:
    """The calls for rules of one direction, `ingress` or `egress`."""

    def create(aws: Aws, inputs: Properties) -> str:
        answer = getattr(aws.ec2, f"authorize_security_group_{way}")(
            GroupId=inputs["securityGroupId"],
            IpPermissions=[_rule(inputs)],
            TagSpecifications=tag_specification("security-group-rule", inputs),
        )
        return str(answer["SecurityGroupRules"][0]["SecurityGroupRuleId"])

    def delete(aws: Aws, resource_id: str, state: Properties) -> None:
        revoke = getattr(aws.ec2, f"revoke_security_group_{way}")
        revoke(GroupId=state["securityGroupId"], SecurityGroupRuleIds=[resource_id])

    return OwnCalls(create, delete=delete, change=_update_rule, seen=_peer)


OWN = {
    "aws:ec2/vpc:Vpc": OwnCalls(settle=_put_dns, seen=_dns),
    "aws:ec2/subnet:Subnet": OwnCalls(settle=_put_public),
    "aws:ec2/internetGateway:InternetGateway": OwnCalls(
        delete=_delete_gateway,
        made=lambda aws, gateway, inputs: aws.ec2.attach_internet_gateway(
            InternetGatewayId=gateway, VpcId=inputs["vpcId"]
        ),
        seen=lambda aws, like, live, raw: {
            "vpcId": next((attachment["vpcId"] for attachment in live["attachments"]), None)
        },
    ),
    "aws:ec2/vpcEndpoint:VpcEndpoint": OwnCalls(change=_update_endpoint),
    "aws:ec2/route:Route": OwnCalls(
        _create_route,
        _read_route,
        lambda aws, resource_id, state: aws.ec2.delete_route(
            RouteTableId=state["routeTableId"], DestinationCidrBlock=state["destinationCidrBlock"]
        ),
        change=lambda aws, resource_id, old, new: aws.ec2.replace_route(**_target(new)),
    ),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": OwnCalls(read=_read_association),
    "aws:ec2/securityGroup:SecurityGroup": OwnCalls(
        made=_close,
        seen=lambda aws, like, live, raw: {"ingress": [_permission(rule) for rule in live["ipPermissions"]]},
    ),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": _rules("egress"),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _rules("ingress"),
    "aws:ec2/natGateway:NatGateway": OwnCalls(
        seen=lambda aws, like, live, raw: {"allocationId": live["natGatewayAddresses"][0]["allocationId"]}
    ),
}
