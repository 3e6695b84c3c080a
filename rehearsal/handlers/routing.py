"""Route table, routes and which subnet follows which table."""

from __future__ import annotations

from typing import Any

from rehearsal.handlers.network import retag, tag_specification
from rehearsal.handlers.table import Aws, Handler, Properties, absent, fields, tagged


def _create_table(aws: Aws, inputs: Properties) -> str:
    specification = tag_specification("route-table", inputs)
    table = aws.ec2.create_route_table(VpcId=inputs["vpcId"], TagSpecifications=specification)
    return str(table["RouteTable"]["RouteTableId"])


def _table(aws: Aws, table: str) -> dict[str, Any] | None:
    answer = absent(lambda: aws.ec2.describe_route_tables(RouteTableIds=[table]), "InvalidRouteTableID.NotFound")
    return answer["RouteTables"][0] if answer else None


def _read_table(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    table = _table(aws, resource_id)
    if table is None:
        return None
    return {"vpcId": table["VpcId"], "arn": aws.arn("ec2", f"route-table/{resource_id}"), **tagged(table.get("Tags"))}


def _create_route(aws: Aws, inputs: Properties) -> str:
    target = {"DestinationCidrBlock": inputs["destinationCidrBlock"], "GatewayId": inputs["gatewayId"]}
    aws.ec2.create_route(RouteTableId=inputs["routeTableId"], **target)
    return f"r-{inputs['routeTableId']}-{inputs['destinationCidrBlock']}"


def _update_route(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    target = {"DestinationCidrBlock": new["destinationCidrBlock"], "GatewayId": new["gatewayId"]}
    aws.ec2.replace_route(RouteTableId=new["routeTableId"], **target)


def _read_route(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    table = _table(aws, like["routeTableId"])
    for route in table["Routes"] if table else []:
        if route.get("DestinationCidrBlock") == like["destinationCidrBlock"]:
            return {
                "routeTableId": like["routeTableId"],
                "destinationCidrBlock": route["DestinationCidrBlock"],
                "gatewayId": route.get("GatewayId"),
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


HANDLERS = {
    "aws:ec2/routeTable:RouteTable": Handler(
        source="ec2/vpc_route_table; routes are resources of their own",
        required=fields("vpcId"),
        optional=fields("tags"),
        replaces=fields("vpcId"),
        computed=fields("arn tagsAll"),
        create=_create_table,
        read=_read_table,
        update=retag,
        delete=lambda aws, resource_id, state: aws.ec2.delete_route_table(RouteTableId=resource_id),
    ),
    "aws:ec2/route:Route": Handler(
        source="ec2/vpc_route",
        required=fields("routeTableId destinationCidrBlock gatewayId"),
        replaces=fields("routeTableId destinationCidrBlock"),
        computed=fields("state origin"),
        create=_create_route,
        read=_read_route,
        update=_update_route,
        delete=lambda aws, resource_id, state: aws.ec2.delete_route(
            RouteTableId=state["routeTableId"], DestinationCidrBlock=state["destinationCidrBlock"]
        ),
    ),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": Handler(
        source="ec2/vpc_route_table_association; another table changes the id, so here it replaces",
        required=fields("routeTableId subnetId"),
        replaces=fields("routeTableId subnetId"),
        create=_create_association,
        read=_read_association,
        delete=lambda aws, resource_id, state: aws.ec2.disassociate_route_table(AssociationId=resource_id),
    ),
}
