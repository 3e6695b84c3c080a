"""VPC, subnets, internet gateway and the S3 endpoint; and how EC2 resources are tagged."""

from __future__ import annotations

from typing import Any

from rehearsal.handlers.table import Aws, Handler, Properties, absent, fields, tag_diff, tag_list, tagged


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


def _create_vpc(aws: Aws, inputs: Properties) -> str:
    vpc = aws.ec2.create_vpc(CidrBlock=inputs["cidrBlock"], TagSpecifications=tag_specification("vpc", inputs))["Vpc"]
    _update_vpc(aws, vpc["VpcId"], {"tags": inputs.get("tags")}, inputs)
    return str(vpc["VpcId"])


def _update_vpc(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    for name in ("enableDnsSupport", "enableDnsHostnames"):
        if name in new and new[name] != old.get(name):
            aws.ec2.modify_vpc_attribute(VpcId=resource_id, **{name[0].upper() + name[1:]: {"Value": new[name]}})
    retag(aws, resource_id, old, new)


def _read_vpc(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(lambda: aws.ec2.describe_vpcs(VpcIds=[resource_id]), "InvalidVpcID.NotFound")
    if answer is None:
        return None
    vpc = answer["Vpcs"][0]
    live = {"cidrBlock": vpc["CidrBlock"], "arn": aws.arn("ec2", f"vpc/{resource_id}"), **tagged(vpc.get("Tags"))}
    for name in ("enableDnsSupport", "enableDnsHostnames"):
        if name in like:
            key = name[0].upper() + name[1:]
            live[name] = aws.ec2.describe_vpc_attribute(VpcId=resource_id, Attribute=name)[key]["Value"]
    return live


def _create_subnet(aws: Aws, inputs: Properties) -> str:
    subnet = aws.ec2.create_subnet(
        VpcId=inputs["vpcId"],
        CidrBlock=inputs["cidrBlock"],
        AvailabilityZone=inputs["availabilityZone"],
        TagSpecifications=tag_specification("subnet", inputs),
    )["Subnet"]
    _update_subnet(aws, subnet["SubnetId"], {"tags": inputs.get("tags")}, inputs)
    return str(subnet["SubnetId"])


def _update_subnet(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    public = new.get("mapPublicIpOnLaunch", False)
    if public != old.get("mapPublicIpOnLaunch", False):
        aws.ec2.modify_subnet_attribute(SubnetId=resource_id, MapPublicIpOnLaunch={"Value": public})
    retag(aws, resource_id, old, new)


def _read_subnet(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(lambda: aws.ec2.describe_subnets(SubnetIds=[resource_id]), "InvalidSubnetID.NotFound")
    if answer is None:
        return None
    subnet = answer["Subnets"][0]
    return {
        "vpcId": subnet["VpcId"],
        "cidrBlock": subnet["CidrBlock"],
        "availabilityZone": subnet["AvailabilityZone"],
        "mapPublicIpOnLaunch": subnet["MapPublicIpOnLaunch"],
        "arn": aws.arn("ec2", f"subnet/{resource_id}"),
        **tagged(subnet.get("Tags")),
    }


def _create_gateway(aws: Aws, inputs: Properties) -> str:
    specification = tag_specification("internet-gateway", inputs)
    gateway = aws.ec2.create_internet_gateway(TagSpecifications=specification)["InternetGateway"]["InternetGatewayId"]
    aws.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=inputs["vpcId"])
    return str(gateway)


def _read_gateway(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(
        lambda: aws.ec2.describe_internet_gateways(InternetGatewayIds=[resource_id]),
        "InvalidInternetGatewayID.NotFound",
    )
    if answer is None:
        return None
    gateway = answer["InternetGateways"][0]
    attached = [attachment["VpcId"] for attachment in gateway["Attachments"]]
    return {
        "vpcId": attached[0] if attached else None,
        "arn": aws.arn("ec2", f"internet-gateway/{resource_id}"),
        **tagged(gateway.get("Tags")),
    }


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


def _read_endpoint(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(
        lambda: aws.ec2.describe_vpc_endpoints(VpcEndpointIds=[resource_id]), "InvalidVpcEndpointId.NotFound"
    )
    found = [e for e in answer["VpcEndpoints"] if e["State"] not in ("deleted", "deleting")] if answer else []
    if not found:
        return None
    endpoint = found[0]
    return {
        "vpcId": endpoint["VpcId"],
        "serviceName": endpoint["ServiceName"],
        "vpcEndpointType": endpoint["VpcEndpointType"],
        "routeTableIds": endpoint["RouteTableIds"],
        "policy": endpoint["PolicyDocument"],
        "state": endpoint["State"],
        "arn": aws.arn("ec2", f"vpc-endpoint/{resource_id}"),
        **tagged(endpoint.get("Tags")),
    }


HANDLERS = {
    "aws:ec2/vpc:Vpc": Handler(
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
    "aws:ec2/subnet:Subnet": Handler(
        source="ec2/vpc_subnet",
        required=fields("vpcId cidrBlock availabilityZone"),
        optional=fields("mapPublicIpOnLaunch tags"),
        replaces=fields("vpcId cidrBlock availabilityZone"),
        computed=fields("arn tagsAll"),
        create=_create_subnet,
        read=_read_subnet,
        update=_update_subnet,
        delete=lambda aws, resource_id, state: aws.ec2.delete_subnet(SubnetId=resource_id),
    ),
    "aws:ec2/internetGateway:InternetGateway": Handler(
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
    "aws:ec2/vpcEndpoint:VpcEndpoint": Handler(
        source="ec2/vpc_endpoint",
        required=fields("vpcId serviceName vpcEndpointType policy"),
        optional=fields("routeTableIds tags"),
        replaces=fields("vpcId serviceName vpcEndpointType"),
        computed=fields("arn state tagsAll"),
        allowed={"vpcEndpointType": fields("Gateway")},
        create=_create_endpoint,
        read=_read_endpoint,
        update=_update_endpoint,
        delete=lambda aws, resource_id, state: aws.ec2.delete_vpc_endpoints(VpcEndpointIds=[resource_id]),
    ),
}
