"""Where nodes run: VPC, subnets, gateway, S3 endpoint, routes, the security group; and how EC2 resources are tagged.

A security group's rules are resources of their own, so it starts with none.
"""

from __future__ import annotations

from typing import Any

from gpufleet.rehearsal.handlers.table import (
    Aws,
    Properties,
    ResourceHandler,
    absent,
    api,
    described,
    fields,
    tag_diff,
    tag_list,
)


def tag_specification(kind: str, inputs: Properties) -> list[dict[str, Any]]:
    """TagSpecifications of a create call."""
    tags = inputs.get("tags")
    return [{"ResourceType": kind, "Tags": tag_list(tags)}] if tags else []


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
    vpc = aws.ec2.create_vpc(CidrBlock=inputs["cidrBlock"], TagSpecifications=tag_specification("vpc", inputs))["Vpc"]
    _update_vpc(aws, vpc["VpcId"], {"tags": inputs.get("tags")}, inputs)
    return str(vpc["VpcId"])


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
    subnet = aws.ec2.create_subnet(
        VpcId=inputs["vpcId"],
        CidrBlock=inputs["cidrBlock"],
        TagSpecifications=tag_specification("subnet", inputs),
        **{api(key): inputs[key] for key in ("availabilityZone", "availabilityZoneId") if key in inputs},
    )["Subnet"]
    _update_subnet(aws, subnet["SubnetId"], {"tags": inputs.get("tags")}, inputs)
    return str(subnet["SubnetId"])


def _update_subnet(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    public = new.get("mapPublicIpOnLaunch", False)
    if public != old.get("mapPublicIpOnLaunch", False):
        aws.ec2.modify_subnet_attribute(SubnetId=resource_id, MapPublicIpOnLaunch={"Value": public})
    retag(aws, resource_id, old, new)


def _create_gateway(aws: Aws, inputs: Properties) -> str:
    specification = tag_specification("internet-gateway", inputs)
    gateway = aws.ec2.create_internet_gateway(TagSpecifications=specification)["InternetGateway"]["InternetGatewayId"]
    aws.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=inputs["vpcId"])
    return str(gateway)


def _read_gateway(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _GATEWAY(aws, resource_id, like)
    return live and {**live, "vpcId": next((each["vpcId"] for each in live["attachments"]), None)}


def _delete_gateway(aws: Aws, resource_id: str, state: Properties) -> None:
    if state.get("vpcId"):
        aws.ec2.detach_internet_gateway(InternetGatewayId=resource_id, VpcId=state["vpcId"])
    aws.ec2.delete_internet_gateway(InternetGatewayId=resource_id)


def _create_endpoint(aws: Aws, inputs: Properties) -> str:
    answer = aws.ec2.create_vpc_endpoint(
        VpcId=inputs["vpcId"],
        ServiceName=inputs["serviceName"],
        VpcEndpointType=inputs.get("vpcEndpointType", "Gateway"),
        RouteTableIds=inputs.get("routeTableIds", []),
        PolicyDocument=inputs["policy"],
        TagSpecifications=tag_specification("vpc-endpoint", inputs),
    )
    return str(answer["VpcEndpoint"]["VpcEndpointId"])


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


def _create_table(aws: Aws, inputs: Properties) -> str:
    specification = tag_specification("route-table", inputs)
    table = aws.ec2.create_route_table(VpcId=inputs["vpcId"], TagSpecifications=specification)
    return str(table["RouteTable"]["RouteTableId"])


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


def _create_association(aws: Aws, inputs: Properties) -> str:
    answer = aws.ec2.associate_route_table(RouteTableId=inputs["routeTableId"], SubnetId=inputs["subnetId"])
    return str(answer["AssociationId"])


def _read_association(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    table = _table(aws, like["routeTableId"])
    for association in table["Associations"] if table else []:
        if association["RouteTableAssociationId"] == resource_id:
            return {"routeTableId": like["routeTableId"], "subnetId": association.get("SubnetId")}
    return None


def _create_group(aws: Aws, inputs: Properties) -> str:
    group = aws.ec2.create_security_group(
        GroupName=inputs["name"],
        Description=inputs["description"],
        VpcId=inputs["vpcId"],
        TagSpecifications=tag_specification("security-group", inputs),
    )["GroupId"]
    # The provider removes the rule that AWS adds to every new group: everything out.
    rules = aws.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissionsEgress"]
    if rules:
        aws.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=rules)
    return str(group)


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


def _rules(way: str) -> ResourceHandler:
    """The handler of rules `ingress` or `egress`."""

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

    return ResourceHandler(
        source=f"ec2/vpc_security_group_{way}_rule",
        required=fields("securityGroupId ipProtocol"),
        optional=fields("fromPort toPort cidrIpv4 referencedSecurityGroupId description tags"),
        replaces=fields("securityGroupId"),
        computed=fields("arn securityGroupRuleId tagsAll"),
        create=create,
        read=_read_rule,
        update=_update_rule,
        delete=delete,
    )


def _create_address(aws: Aws, inputs: Properties) -> str:
    specification = tag_specification("elastic-ip", inputs)
    return str(aws.ec2.allocate_address(Domain=inputs["domain"], TagSpecifications=specification)["AllocationId"])


def _create_nat(aws: Aws, inputs: Properties) -> str:
    answer = aws.ec2.create_nat_gateway(
        AllocationId=inputs["allocationId"],
        SubnetId=inputs["subnetId"],
        TagSpecifications=tag_specification("natgateway", inputs),
    )
    return str(answer["NatGateway"]["NatGatewayId"])


def _read_nat(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    live = _NAT(aws, resource_id, like)
    return live and {**live, "allocationId": live["natGatewayAddresses"][0]["allocationId"]}


HANDLERS = {
    "aws:ec2/vpc:Vpc": ResourceHandler(
        source="ec2/vpc_",
        required=fields("cidrBlock"),
        optional=fields("enableDnsSupport enableDnsHostnames tags"),
        replaces=fields("cidrBlock"),
        computed=fields("arn tagsAll"),
        create=_create_vpc,
        read=_read_vpc,
        update=_update_vpc,
        delete=lambda aws, resource_id, state: aws.ec2.delete_vpc(VpcId=resource_id),
    ),
    "aws:ec2/subnet:Subnet": ResourceHandler(
        source="ec2/vpc_subnet",
        required=fields("vpcId cidrBlock"),
        optional=fields("availabilityZone availabilityZoneId mapPublicIpOnLaunch tags"),
        replaces=fields("vpcId cidrBlock availabilityZone availabilityZoneId"),
        computed=fields("arn tagsAll"),
        create=_create_subnet,
        read=described("describe_subnets", "SubnetIds", "Subnets", "InvalidSubnetID.NotFound", arn="subnet"),
        update=_update_subnet,
        delete=lambda aws, resource_id, state: aws.ec2.delete_subnet(SubnetId=resource_id),
    ),
    "aws:ec2/internetGateway:InternetGateway": ResourceHandler(
        source="ec2/vpc_internet_gateway; the provider moves a gateway between VPCs, here it is replaced",
        required=fields("vpcId"),
        optional=fields("tags"),
        replaces=fields("vpcId"),
        computed=fields("arn tagsAll"),
        create=_create_gateway,
        read=_read_gateway,
        update=retag,
        delete=_delete_gateway,
    ),
    "aws:ec2/vpcEndpoint:VpcEndpoint": ResourceHandler(
        source="ec2/vpc_endpoint",
        required=fields("vpcId serviceName vpcEndpointType policy"),
        optional=fields("routeTableIds tags"),
        replaces=fields("vpcId serviceName vpcEndpointType"),
        computed=fields("arn state tagsAll"),
        allowed={"vpcEndpointType": fields("Gateway")},
        create=_create_endpoint,
        read=described(
            "describe_vpc_endpoints",
            "VpcEndpointIds",
            "VpcEndpoints",
            "InvalidVpcEndpointId.NotFound",
            arn="vpc-endpoint",
            policy="policyDocument",
        ),
        update=_update_endpoint,
        delete=lambda aws, resource_id, state: aws.ec2.delete_vpc_endpoints(VpcEndpointIds=[resource_id]),
    ),
    "aws:ec2/routeTable:RouteTable": ResourceHandler(
        source="ec2/vpc_route_table; routes are resources of their own",
        required=fields("vpcId"),
        optional=fields("tags"),
        replaces=fields("vpcId"),
        computed=fields("arn tagsAll"),
        create=_create_table,
        read=described(
            "describe_route_tables", "RouteTableIds", "RouteTables", "InvalidRouteTableID.NotFound", arn="route-table"
        ),
        update=retag,
        delete=lambda aws, resource_id, state: aws.ec2.delete_route_table(RouteTableId=resource_id),
    ),
    "aws:ec2/route:Route": ResourceHandler(
        source="ec2/vpc_route",
        required=fields("routeTableId destinationCidrBlock"),
        optional=fields("gatewayId natGatewayId"),
        replaces=fields("routeTableId destinationCidrBlock"),
        computed=fields("state origin"),
        create=_create_route,
        read=_read_route,
        update=lambda aws, resource_id, old, new: aws.ec2.replace_route(**_target(new)),
        delete=lambda aws, resource_id, state: aws.ec2.delete_route(
            RouteTableId=state["routeTableId"], DestinationCidrBlock=state["destinationCidrBlock"]
        ),
    ),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": ResourceHandler(
        source="ec2/vpc_route_table_association; another table changes the id, so here it replaces",
        required=fields("routeTableId subnetId"),
        replaces=fields("routeTableId subnetId"),
        create=_create_association,
        read=_read_association,
        delete=lambda aws, resource_id, state: aws.ec2.disassociate_route_table(AssociationId=resource_id),
    ),
    "aws:ec2/securityGroup:SecurityGroup": ResourceHandler(
        source="ec2/vpc_security_group; rules are resources of their own",
        required=fields("vpcId description"),
        optional=fields("name tags"),
        replaces=fields("vpcId description name"),
        computed=fields("arn ingress tagsAll"),
        name="name",
        create=_create_group,
        read=_read_group,
        update=retag,
        delete=lambda aws, resource_id, state: aws.ec2.delete_security_group(GroupId=resource_id),
    ),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": _rules("egress"),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": _rules("ingress"),
    "aws:ec2/eip:Eip": ResourceHandler(
        source="ec2/ec2_eip",
        required=fields("domain"),
        optional=fields("tags"),
        replaces=fields("domain"),
        computed=fields("arn allocationId publicIp tagsAll"),
        create=_create_address,
        read=described(
            "describe_addresses", "AllocationIds", "Addresses", "InvalidAllocationID.NotFound", arn="elastic-ip"
        ),
        update=retag,
        delete=lambda aws, resource_id, state: aws.ec2.release_address(AllocationId=resource_id),
    ),
    "aws:ec2/natGateway:NatGateway": ResourceHandler(
        source="ec2/vpc_nat_gateway",
        required=fields("allocationId subnetId"),
        optional=fields("tags"),
        replaces=fields("allocationId subnetId"),
        computed=fields("arn publicIp tagsAll"),
        create=_create_nat,
        read=_read_nat,
        update=retag,
        delete=lambda aws, resource_id, state: aws.ec2.delete_nat_gateway(NatGatewayId=resource_id),
    ),
}
