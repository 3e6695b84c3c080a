"""Where nodes run: VPC, subnets, gateway, S3 endpoint, routes, the security group; and how EC2 resources are tagged.

A security group's rules are resources of their own, so it starts with none.
"""

from __future__ import annotations

from typing import Any

from gpufleet.rehearsal.handlers.table import (
    Aws,
    Calls,
    Properties,
    absent,
    api,
    created,
    deleted,
    described,
    tag_diff,
    tag_list,
    tag_specification,
    to_api,
)


def retag(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    gone, changed = tag_diff(old, new)
    if gone:
        aws.ec2.delete_tags(Resources=[resource_id], Tags=[{"Key": key} for key in gone])
    if changed:
        aws.ec2.create_tags(Resources=[resource_id], Tags=tag_list(changed))


_VPC = described("describe_vpcs", "VpcIds", "Vpcs", "InvalidVpcID.NotFound", arn="vpc")
_GATEWAY = described(
    "describe_internet_gateways", "InternetGatewayIds", "InternetGateways", "InvalidInternetGatewayID.NotFound",
    arn="internet-gateway",
)  # fmt: skip
_GROUP = described(
    "describe_security_groups", "GroupIds", "SecurityGroups", "InvalidGroup.NotFound",
    arn="security-group", name="groupName",
)  # fmt: skip


_RULE = described(
    "describe_security_group_rules", "SecurityGroupRuleIds", "SecurityGroupRules",
    "InvalidSecurityGroupRuleId.NotFound", "InvalidGroup.NotFound",
    arn="security-group-rule", securityGroupId="groupId",
)  # fmt: skip
_NAT = described("describe_nat_gateways", "NatGatewayIds", "NatGateways", "NatGatewayNotFound", arn="natgateway")


def _create_vpc(aws: Aws, inputs: Properties) -> str:
    vpc = created("create_vpc", "vpc", "Vpc.VpcId", "cidrBlock")(aws, inputs)
    _update_vpc(aws, vpc, {"tags": inputs.get("tags")}, inputs)
    return vpc


def _update_vpc(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    for name in ("enableDnsSupport", "enableDnsHostnames"):
        if name in new and new[name] != old.get(name):
            aws.ec2.modify_vpc_attribute(VpcId=resource_id, **{api(name): {"Value": new[name]}})
    retag(aws, resource_id, old, new)


def _read_vpc(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _VPC(aws, resource_id, like)
    for name in ("enableDnsSupport", "enableDnsHostnames"):
        if live is not None and name in like:
            answer = aws.ec2.describe_vpc_attribute(VpcId=resource_id, Attribute=name)
            live[name] = answer[api(name)]["Value"]
    return live


def _create_subnet(aws: Aws, inputs: Properties) -> str:
    keys = "vpcId cidrBlock availabilityZone availabilityZoneId"
    subnet = created("create_subnet", "subnet", "Subnet.SubnetId", keys)(aws, inputs)
    _update_subnet(aws, subnet, {"tags": inputs.get("tags")}, inputs)
    return subnet


def _update_subnet(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    public = new.get("mapPublicIpOnLaunch", False)
    if public != old.get("mapPublicIpOnLaunch", False):
        aws.ec2.modify_subnet_attribute(SubnetId=resource_id, MapPublicIpOnLaunch={"Value": public})
    retag(aws, resource_id, old, new)


def _create_gateway(aws: Aws, inputs: Properties) -> str:
    made = "InternetGateway.InternetGatewayId"
    gateway = created("create_internet_gateway", "internet-gateway", made, "")(aws, inputs)
    aws.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=inputs["vpcId"])
    return gateway


def _read_gateway(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _GATEWAY(aws, resource_id, like)
    return live and {**live, "vpcId": next((each["vpcId"] for each in live["attachments"]), None)}


def _delete_gateway(aws: Aws, resource_id: str, state: Properties) -> None:
    if state.get("vpcId"):
        aws.ec2.detach_internet_gateway(InternetGatewayId=resource_id, VpcId=state["vpcId"])
    aws.ec2.delete_internet_gateway(InternetGatewayId=resource_id)


def _create_endpoint(aws: Aws, inputs: Properties) -> str:
    keys = "vpcId serviceName vpcEndpointType routeTableIds policyDocument"
    create = created("create_vpc_endpoint", "vpc-endpoint", "VpcEndpoint.VpcEndpointId", keys)
    return create(aws, {**inputs, "policyDocument": inputs["policy"]})


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
    retag(aws, resource_id, old, new)


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


def _create_group(aws: Aws, inputs: Properties) -> str:
    create = created("create_security_group", "security-group", "GroupId", "groupName description vpcId")
    group = create(aws, {**inputs, "groupName": inputs["name"]})
    # The provider removes the rule that AWS adds to every new group: everything out.
    rules = aws.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissionsEgress"]
    if rules:
        aws.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=rules)
    return group


def _read_group(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _GROUP(aws, resource_id, like)
    return live and {**live, "ingress": [_permission(rule) for rule in live["ipPermissions"]]}


def _permission(rule: dict[str, Any]) -> Properties:
    return {
        "protocol": rule["ipProtocol"],
        "fromPort": rule.get("fromPort", 0),
        "toPort": rule.get("toPort", 0),
        "cidrBlocks": [block["cidrIp"] for block in rule.get("ipRanges", [])],
    }


def _rule(inputs: Properties) -> dict[str, Any]:
    said = {"Description": inputs.get("description", "")}
    ports = {api(key): inputs[key] for key in ("fromPort", "toPort") if key in inputs}
    if "cidrIpv4" in inputs:
        peers: dict[str, Any] = {"IpRanges": [{"CidrIp": inputs["cidrIpv4"], **said}]}
    else:
        peers = {"UserIdGroupPairs": [{"GroupId": inputs["referencedSecurityGroupId"], **said}]}
    return {"IpProtocol": inputs["ipProtocol"], **ports, **peers}


def _read_rule(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _RULE(aws, resource_id, like)
    if live is None:
        return None
    group = (live.get("referencedGroupInfo") or {}).get("groupId")
    said = live.get("description") or (like.get("description") if group else None)  # moto drops it beside a group
    return {**live, "referencedSecurityGroupId": group, "description": said}


def _update_rule(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    keys = ("ipProtocol", "fromPort", "toPort", "cidrIpv4", "description")
    if any(old.get(key) != new.get(key) for key in keys):
        rule = {api(key): new[key] for key in keys if key in new}
        change = {"SecurityGroupRuleId": resource_id, "SecurityGroupRule": rule}
        aws.ec2.modify_security_group_rules(GroupId=new["securityGroupId"], SecurityGroupRules=[change])
    retag(aws, resource_id, old, new)


def _rules(way: str) -> Calls:
    """The calls of rules `ingress` or `egress`."""

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

    return Calls(create, _read_rule, delete, _update_rule)


def _read_nat(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _NAT(aws, resource_id, like)
    return live and {**live, "allocationId": live["natGatewayAddresses"][0]["allocationId"]}


CALLS = {
    "aws:ec2/vpc:Vpc": Calls(_create_vpc, _read_vpc, deleted("ec2", "delete_vpc", "VpcId"), _update_vpc),
    "aws:ec2/subnet:Subnet": Calls(
        _create_subnet,
        described("describe_subnets", "SubnetIds", "Subnets", "InvalidSubnetID.NotFound", arn="subnet"),
        deleted("ec2", "delete_subnet", "SubnetId"),
        _update_subnet,
    ),
    "aws:ec2/internetGateway:InternetGateway": Calls(_create_gateway, _read_gateway, _delete_gateway, retag),
    "aws:ec2/vpcEndpoint:VpcEndpoint": Calls(
        _create_endpoint,
        described(
            "describe_vpc_endpoints",
            "VpcEndpointIds",
            "VpcEndpoints",
            "InvalidVpcEndpointId.NotFound",
            arn="vpc-endpoint",
            policy="policyDocument",
        ),
        lambda aws, resource_id, state: aws.ec2.delete_vpc_endpoints(VpcEndpointIds=[resource_id]),
        _update_endpoint,
    ),
    "aws:ec2/routeTable:RouteTable": Calls(
        created("create_route_table", "route-table", "RouteTable.RouteTableId", "vpcId"),
        described(
            "describe_route_tables", "RouteTableIds", "RouteTables", "InvalidRouteTableID.NotFound", arn="route-table"
        ),
        deleted("ec2", "delete_route_table", "RouteTableId"),
        retag,
    ),
    "aws:ec2/route:Route": Calls(
        _create_route,
        _read_route,
        lambda aws, resource_id, state: aws.ec2.delete_route(
            RouteTableId=state["routeTableId"], DestinationCidrBlock=state["destinationCidrBlock"]
        ),
        lambda aws, resource_id, old, new: aws.ec2.replace_route(**_target(new)),
    ),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": Calls(
        lambda aws, inputs: str(aws.ec2.associate_route_table(**to_api(inputs))["AssociationId"]),
        _read_association,
        deleted("ec2", "disassociate_route_table", "AssociationId"),
    ),
    "aws:ec2/securityGroup:SecurityGroup": Calls(
        _create_group, _read_group, deleted("ec2", "delete_security_group", "GroupId"), retag
    ),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": _rules("egress"),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _rules("ingress"),
    "aws:ec2/eip:Eip": Calls(
        created("allocate_address", "elastic-ip", "AllocationId", "domain"),
        described("describe_addresses", "AllocationIds", "Addresses", "InvalidAllocationID.NotFound", arn="elastic-ip"),
        deleted("ec2", "release_address", "AllocationId"),
        retag,
    ),
    "aws:ec2/natGateway:NatGateway": Calls(
        created("create_nat_gateway", "natgateway", "NatGateway.NatGatewayId", "allocationId subnetId"),
        _read_nat,
        deleted("ec2", "delete_nat_gateway", "NatGatewayId"),
        retag,
    ),
}
