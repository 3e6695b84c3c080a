"""What of a stack is still in the account: of each thing what it is, what it costs, how it is removed. Reads only.

Tags alone are not enough: a maintained fleet tags neither its spot nodes' disks nor their network interfaces, so this
walks from instances to their disks, and from the VPC to what is in it. It looks in the definition's region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from infra.catalog import load_catalog
from infra.commands import aws
from infra.cost.lines import MONTH_H, gp3_usd_per_month
from infra.definition import StackDefinition
from infra.errors import PriceMissing
from infra.resources.tags import RUN_TAG, STACK_TAG
from job.text import counted

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """One thing that is still there."""

    kind: str
    id: str
    note: str = ""
    usd_per_month: Decimal = Decimal(0)
    asked_for: bool = False  # the definition keeps it
    ours: bool = True  # False: it looks like ours, but nothing proves it
    remove: str = ""  # the command that removes it, but for the region
    owner: str = ""  # as its tag says, where that is another than the definition's
    launches: bool = False  # costs nothing now, and may launch a node at any time
    unseen: bool = False  # AWS does not show it; id or note is its answer

    @property
    def bills(self) -> bool:
        return bool(self.usd_per_month) or self.launches


def look(definition: StackDefinition, client: Callable[[str, str], Any], now: datetime) -> Iterator[Left]:
    """Everything found, dearest kinds first, and last what AWS would not show: one right that is missing must not hide
    a node that runs.
    """
    region, unseen = definition.fleet.region, list[Left]()
    ec2 = client("ec2", region)

    def seen(what: str, part: Callable[[], Iterable[_T]]) -> list[_T]:
        """As much of `part` as AWS shows."""
        found = list[_T]()
        try:
            found.extend(part())
        except ClientError as error:
            unseen.append(Left(kind=what, id=str(aws.refusal(error)), unseen=True))
        return found

    fleets = seen("fleets", lambda: aws.fleets(ec2, definition, every_run=True))
    fleets = [fleet for fleet in fleets if fleet["FleetState"] != "deleted"]
    nodes = seen("instances", lambda: _nodes(ec2, definition, [fleet["FleetId"] for fleet in fleets]))
    yield from _fleets(fleets, definition, now)
    yield from _instances(nodes, definition)
    for what, part in (
        ("volumes", lambda: _volumes(ec2, definition, {node["InstanceId"]: node for node in nodes})),
        ("network", lambda: _interfaces(ec2, definition)),
        ("addresses", lambda: _addresses(ec2, definition)),
        ("buckets", lambda: _buckets(client("s3", region), definition)),
        ("log groups", lambda: _log_groups(client("logs", region), definition)),
        ("free parts", lambda: _free_parts(ec2, definition)),
        ("roles", lambda: _roles(client("iam", region), definition)),
        ("instance profiles", lambda: _profiles(client("iam", region), definition)),
    ):
        yield from seen(what, part)
    yield from unseen


def _nodes(ec2: Any, definition: StackDefinition, fleets: list[str]) -> list[dict[str, Any]]:
    alive = ("instance-state-name", ["pending", "running", "shutting-down", "stopping", "stopped"])
    found = aws.instances(ec2, [(f"tag:{STACK_TAG}", [definition.name]), alive])
    if fleets:
        found += aws.instances(ec2, [("tag:aws:ec2:fleet-id", fleets), alive])
    return list({node["InstanceId"]: node for node in found}.values())


def _fleets(fleets: list[dict[str, Any]], definition: StackDefinition, now: datetime) -> Iterator[Left]:
    for fleet in fleets:
        expired, launches = aws.expired(fleet, now), aws.may_launch(fleet, now)
        note = f"{fleet['FleetState']}, wants {aws.wants(fleet)}"
        note += ": it can launch a node at any time" if launches else ", expired" if expired else ""
        command = f"aws ec2 delete-fleets --terminate-instances --fleet-ids {fleet['FleetId']}" if launches else ""
        owner = _other_owner(fleet, definition)
        yield Left(kind="fleet", id=fleet["FleetId"], note=note, remove=command, owner=owner, launches=launches)


def _instances(nodes: list[dict[str, Any]], definition: StackDefinition) -> Iterator[Left]:
    region = definition.fleet.region
    for node in nodes:
        state = node["State"]["Name"]
        hourly = Decimal(0) if state in ("stopped", "shutting-down") else _hourly(node["InstanceType"], region)
        address = _price("public_ipv4", region) if node.get("PublicIpAddress") else Decimal(0)
        yield Left(
            kind="instance",
            id=node["InstanceId"],
            note=f"{node['InstanceType']}, {state}, run {aws.tags_of(node).get(RUN_TAG)}; at the on-demand price",
            usd_per_month=(hourly + address) * MONTH_H,
            remove=f"aws ec2 terminate-instances --instance-ids {node['InstanceId']}",
            owner=_other_owner(node, definition),
        )


def _volumes(ec2: Any, definition: StackDefinition, nodes: dict[str, dict[str, Any]]) -> Iterator[Left]:
    region = definition.fleet.region
    found = list(aws.pages(ec2, "describe_volumes", "Volumes", Filters=_tagged(definition)))
    if nodes:
        attached = [{"Name": "attachment.instance-id", "Values": list(nodes)}]
        found += aws.pages(ec2, "describe_volumes", "Volumes", Filters=attached)
    known = {volume["VolumeId"]: volume for volume in found}
    loose = [{"Name": "status", "Values": ["available"]}]
    for volume in aws.pages(ec2, "describe_volumes", "Volumes", Filters=loose):
        if volume["VolumeId"] not in known and _resembles(volume, definition):
            yield _volume(volume, region, ours=False)
    for volume in known.values():
        node = next((nodes[at["InstanceId"]] for at in volume["Attachments"] if at["InstanceId"] in nodes), {})
        owner = _other_owner(volume, definition) or _other_owner(node, definition)
        yield _volume(volume, region, ours=True, owner=owner)


def _resembles(volume: dict[str, Any], definition: StackDefinition) -> bool:
    """A loose, untagged disk in one of our zones, of exactly one of our sizes: a node's disk that outlived it."""
    disks = [definition.storage.root, *([definition.storage.data] if definition.storage.data else [])]
    sizes = {(disk.size_gib, disk.iops, disk.throughput_mibps) for disk in disks}
    size = (volume["Size"], volume.get("Iops"), volume.get("Throughput"))
    return not volume.get("Tags") and volume["AvailabilityZone"] in definition.fleet.zones and size in sizes


def _volume(volume: dict[str, Any], region: str, *, ours: bool, owner: str = "") -> Left:
    size, iops, mibps = (int(volume.get(key) or 0) for key in ("Size", "Iops", "Throughput"))
    return Left(
        kind="volume",
        id=volume["VolumeId"],
        note=f"{size} GiB {volume['VolumeType']}, {volume['State']}",
        usd_per_month=gp3_usd_per_month(load_catalog(), region, size, iops, mibps),
        ours=ours,
        owner=owner,
        remove=f"aws ec2 delete-volume --volume-id {volume['VolumeId']}" if volume["State"] == "available" else "",
    )


def _interfaces(ec2: Any, definition: StackDefinition) -> Iterator[Left]:
    for vpc in aws.pages(ec2, "describe_vpcs", "Vpcs", Filters=_tagged(definition)):
        inside, owner = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}], _other_owner(vpc, definition)
        for found in aws.pages(ec2, "describe_network_interfaces", "NetworkInterfaces", Filters=inside):  # without tags
            yield Left(kind="network interface", id=found["NetworkInterfaceId"], note=found["Status"], owner=owner)


def _addresses(ec2: Any, definition: StackDefinition) -> Iterator[Left]:
    for address in ec2.describe_addresses(Filters=_tagged(definition))["Addresses"]:
        yield Left(
            kind="elastic address",
            id=address["AllocationId"],
            usd_per_month=_price("public_ipv4", definition.fleet.region) * MONTH_H,
            remove=f"aws ec2 release-address --allocation-id {address['AllocationId']}",
            owner=_other_owner(address, definition),
        )


def _buckets(s3: Any, definition: StackDefinition) -> Iterator[Left]:
    keep = definition.storage.keep
    found, closed = aws.buckets(s3, definition.name)
    for name, refused in closed.items():
        yield Left(kind="bucket", id=name, note=str(refused), unseen=True)
    for bucket in found:
        sizes = [int(item["Size"]) for item in aws.pages(s3, "list_objects_v2", "Contents", Bucket=bucket["Name"])]
        gb = Decimal(sum(sizes)) / 10**9
        yield Left(
            kind="bucket",
            id=bucket["Name"],
            note=f"{counted(len(sizes), 'object')}, {gb:.3f} GB"
            + (f", expiring after {keep.days} days" if keep.bucket else ""),
            # A cent is the least that a bill shows, and an empty bucket costs nothing.
            usd_per_month=gb * _price("s3_storage", definition.fleet.region),
            asked_for=keep.bucket,
            remove=f"aws s3 rb --force s3://{bucket['Name']}",
            owner=_other_owner(bucket, definition),
        )


def _log_groups(logs: Any, definition: StackDefinition) -> Iterator[Left]:
    for group in aws.log_groups(logs, definition.name):
        stored = int(group.get("storedBytes") or 0)
        yield Left(
            kind="log group",
            id=group["logGroupName"],
            note=f"{stored / 1e6:.1f} MB",
            usd_per_month=Decimal(stored) / 10**9 * _price("logs_storage", definition.fleet.region),
            remove=f"aws logs delete-log-group --log-group-name {group['logGroupName']}",
            owner=_other_owner(group, definition),
        )


_FREE = (  # kind, operation, key, id
    ("launch template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("VPC endpoint", "describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
    ("internet gateway", "describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
    ("route table", "describe_route_tables", "RouteTables", "RouteTableId"),
    ("security group", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("subnet", "describe_subnets", "Subnets", "SubnetId"),
    ("VPC", "describe_vpcs", "Vpcs", "VpcId"),
)


def _free_parts(ec2: Any, definition: StackDefinition) -> Iterator[Left]:
    for kind, operation, key, identifier in _FREE:
        for item in aws.pages(ec2, operation, key, Filters=_tagged(definition)):
            if item.get("State", "").lower() not in ("deleting", "deleted"):  # endpoints stay listed for a while
                yield Left(kind=kind, id=item[identifier], owner=_other_owner(item, definition))


def _roles(iam: Any, definition: StackDefinition) -> Iterator[Left]:
    for role in aws.pages(iam, "list_roles", "Roles"):
        name = role["RoleName"]
        tagged = iam.list_role_tags(RoleName=name) if name.startswith(aws.prefix(definition.name)) else {}
        if aws.tags_of(tagged).get(STACK_TAG) == definition.name:
            yield Left(kind="role", id=name, owner=_other_owner(tagged, definition))


def _profiles(iam: Any, definition: StackDefinition) -> Iterator[Left]:
    for profile in aws.pages(iam, "list_instance_profiles", "InstanceProfiles"):
        name = profile["InstanceProfileName"]
        if not name.startswith(aws.prefix(definition.name)):
            continue
        described = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]  # lists leave the tags out
        if aws.tags_of(described).get(STACK_TAG) == definition.name:
            yield Left(kind="instance profile", id=name, owner=_other_owner(described, definition))


def _tagged(definition: StackDefinition) -> list[dict[str, Any]]:
    """Filters: what carries the stack's tag."""
    return [{"Name": f"tag:{STACK_TAG}", "Values": [definition.name]}]


def _other_owner(resource: dict[str, Any], definition: StackDefinition) -> str:
    """Whose it is by its tag, where that is another than the file's: two people may run the same file."""
    owner = aws.owner(resource)
    return "" if owner == definition.run.owner else owner


def _hourly(instance_type: str, region: str) -> Decimal:
    """On demand; where the region has no such price, the dearest that is known of the type must stand in."""
    catalog = load_catalog()
    try:
        return catalog.on_demand(instance_type, region).amount
    except PriceMissing:
        elsewhere = [price.amount for (kind, _), price in catalog.on_demand_prices.items() if kind == instance_type]
        spot = [
            each.price.amount
            for (kind, _), zones in catalog.spot_prices.items()
            if kind == instance_type
            for each in zones
        ]
        return max([*elsewhere, *spot], default=Decimal(1))  # a type without any price must not look free


def _price(item: str, region: str) -> Decimal:
    return load_catalog().price(item, region).amount
