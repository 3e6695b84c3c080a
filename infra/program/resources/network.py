"""The network of the nodes. By default it is a VPC of their own. It has one public subnet in each zone and a gateway to
S3, and nothing in it can be reached from outside. If the file names a VPC, its subnets and routes stay unchanged. The
stack always has its own security group for the nodes. Subnets are public because a NAT gateway costs more than a small
GPU's disk. No process on a node listens, and the security group has no ingress rule, except between several nodes of
one run. Nodes that use all of their network cards are in a private subnet behind a NAT gateway, because AWS gives no
public address to a node with several interfaces.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition, is_zone_id
from gpufleet.infra.program.resources.tags import named, tags

VPC_CIDR = ipaddress.IPv4Network("10.0.0.0/16")
# The default policy of gateway endpoints allows everything. It is stated here to show that it is intended, because
# image layers and packages come from other people's buckets too.
OPEN_POLICY = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"}]}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenVpc:
    """A network from the surrounding program, which takes precedence over the network in the file."""

    id: pulumi.Input[str]
    subnets: Mapping[str, pulumi.Input[str]]  # the subnets by zone, one for each of fleet.zones


class Network(pulumi.ComponentResource):
    """VPC, subnets, routes and the nodes' security group. `ready`: resources that must exist before a node boots."""

    subnets: dict[str, pulumi.Input[str]]  # the subnets' ids by zone
    security_group: aws.ec2.SecurityGroup
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        vpc: GivenVpc | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("gpufleet:infra:Network", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        label = named(tags(definition), f"gpufleet-{definition.name}")
        vpc_id: pulumi.Input[str]
        if network := vpc or definition.account.vpc:
            vpc_id, self.subnets, self.ready = network.id, dict(network.subnets), []
        else:
            vpc_id = self._own_vpc(name, definition, child)
        self.security_group = aws.ec2.SecurityGroup(
            f"{name}-node",
            vpc_id=vpc_id,
            # never change this text, because AWS refuses to change it
            description="gpufleet nodes: no ingress, egress 443 only",
            tags=label,
            opts=child,
        )
        egress = aws.vpc.SecurityGroupEgressRule(
            f"{name}-node-https",
            security_group_id=self.security_group.id,
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            cidr_ipv4="0.0.0.0/0",
            description="S3, the image registry, EC2, logs and Session Manager",
            tags=label,
            opts=child,
        )
        self.ready.append(egress)
        if any(part.fleet.is_gang for part in definition.parts):
            self.ready += self._between_nodes(name, label, child)
        self.register_outputs({"vpc_id": vpc_id})

    def _between_nodes(self, name: str, label: dict[str, str], child: pulumi.ResourceOptions) -> list[pulumi.Resource]:
        """Allows all traffic within the group. EFA needs both rules: without the outbound rule, nodes are cut off."""
        group = self.security_group.id
        rules: list[pulumi.Resource] = []
        for way, rule in (("in", aws.vpc.SecurityGroupIngressRule), ("out", aws.vpc.SecurityGroupEgressRule)):
            made = rule(
                f"{name}-node-{way}",
                security_group_id=group,
                referenced_security_group_id=group,
                ip_protocol="-1",
                description="the nodes of one run, among themselves",
                tags=label,
                opts=child,
            )
            rules.append(made)
        return rules

    def _own_vpc(self, name: str, definition: StackDefinition, child: pulumi.ResourceOptions) -> pulumi.Output[str]:
        """Declares the VPC, fills in `subnets` and `ready`, and returns the VPC's id."""
        labels = tags(definition)
        label = named(labels, f"gpufleet-{definition.name}")
        vpc = aws.ec2.Vpc(f"{name}-vpc", cidr_block=str(VPC_CIDR), enable_dns_support=True, tags=label, opts=child)
        gateway = aws.ec2.InternetGateway(f"{name}-gateway", vpc_id=vpc.id, tags=label, opts=child)
        table = aws.ec2.RouteTable(f"{name}-routes", vpc_id=vpc.id, tags=label, opts=child)
        outward = aws.ec2.Route(
            f"{name}-route-out",
            route_table_id=table.id,
            destination_cidr_block="0.0.0.0/0",
            gateway_id=gateway.id,
            opts=child,
        )
        tables = [table]
        if definition.fleet.cards == "all":
            tables.append(aws.ec2.RouteTable(f"{name}-routes-inner", vpc_id=vpc.id, tags=label, opts=child))
        endpoint = aws.ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=vpc.id,
            service_name=f"com.amazonaws.{definition.fleet.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[route_table.id for route_table in tables],
            policy=OPEN_POLICY,
            tags=label,
            opts=child,
        )
        self.subnets = {}
        associations: list[pulumi.Resource] = []
        for zone in definition.zones:
            subnet = aws.ec2.Subnet(
                f"{name}-{zone}",
                vpc_id=vpc.id,
                **_place(zone),
                cidr_block=subnet_cidr(zone),
                # The subnet gives nodes a public address, so that the template needs no network interface. An interface
                # could contradict the subnet in a fleet's override.
                map_public_ip_on_launch=True,
                tags=named(labels, f"gpufleet-{definition.name}-{zone}"),
                opts=child,
            )
            associations.append(
                aws.ec2.RouteTableAssociation(
                    f"{name}-{zone}-routes", subnet_id=subnet.id, route_table_id=table.id, opts=child
                )
            )
            self.subnets[zone] = subnet.id
            if len(tables) > 1:  # all nodes of a run are in one zone
                associations += self._behind_nat(name, definition, zone, vpc, subnet, tables[1], outward, child)
        self.ready = [outward, endpoint, *associations]
        return vpc.id

    def _behind_nat(
        self,
        name: str,
        definition: StackDefinition,
        zone: str,
        vpc: aws.ec2.Vpc,
        public: aws.ec2.Subnet,
        table: aws.ec2.RouteTable,
        outward: aws.ec2.Route,
        child: pulumi.ResourceOptions,
    ) -> list[pulumi.Resource]:
        """Declares a private subnet for the zone's nodes; returns everything that must exist before one of them boots.
        A destroy removes the NAT gateway first, because AWS refuses to remove its address or the outbound route before
        it.
        """
        label = named(tags(definition), f"gpufleet-{definition.name}-{zone}-inner")
        inner = aws.ec2.Subnet(
            f"{name}-{zone}-inner",
            vpc_id=vpc.id,
            **_place(zone),
            cidr_block=subnet_cidr(zone, inner=True),
            tags=label,
            opts=child,
        )
        address = aws.ec2.Eip(f"{name}-nat-address", domain="vpc", tags=label, opts=child)
        nat = aws.ec2.NatGateway(
            f"{name}-nat",
            allocation_id=address.id,
            subnet_id=public.id,
            tags=label,
            opts=pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(depends_on=[outward])),
        )
        route = aws.ec2.Route(
            f"{name}-route-nat",
            route_table_id=table.id,
            destination_cidr_block="0.0.0.0/0",
            nat_gateway_id=nat.id,
            opts=child,
        )
        routes = aws.ec2.RouteTableAssociation(
            f"{name}-{zone}-routes-inner", subnet_id=inner.id, route_table_id=table.id, opts=child
        )
        self.subnets[zone] = inner.id
        return [route, routes]


def _place(zone: str) -> dict[str, Any]:
    """The arguments that put a subnet into a zone, which is given by its name or its id."""
    return {"availability_zone_id" if is_zone_id(zone) else "availability_zone": zone}


def subnet_cidr(zone: str, *, inner: bool = False) -> str:
    """The subnet's range. The zone's letter determines a /20, so that a new zone never moves the others: us-east-2b
    always has 10.0.16.0/20, and 10.0.144.0/20 for its private subnet. A zone given by id, such as use2-az2, has a /22
    in the range that the letters a to f leave free, because a change from names to ids makes the new subnets before it
    deletes the old ones.
    """
    half = list(VPC_CIDR.subnets(new_prefix=17))[inner]
    if is_zone_id(zone):
        *_, free = half.subnets(new_prefix=19)
        return str(list(free.subnets(new_prefix=22))[int(zone[-1]) - 1])
    return str(list(half.subnets(new_prefix=20))[(ord(zone[-1]) - ord("a")) % 8])
