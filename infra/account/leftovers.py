"""Lists the leftovers of a stack in the account: each resource, its cost, and the way to remove it. This module only
reads.

Tags alone are not enough, because a maintained fleet tags neither its spot nodes' disks nor their network interfaces.
So the module goes from instances to their disks, and from the VPC to its contents. Everything in the stack's VPC counts
as part of the stack, whatever owner its tag names. The module looks only in the definition's region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, refusals, removal
from gpufleet.infra.account.fleet import ENDED, find_instances, fleets_of, has_expired, may_launch, replaces, wants
from gpufleet.infra.account.run_folder import find_buckets, find_log_groups, name_prefix
from gpufleet.infra.bill.lines import MONTH_H, gp3_usd_per_month
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.bake import DATA_ENDING, ENDING
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import PriceMissing
from gpufleet.infra.program.resources.tags import DELETE_AFTER, RUN_TAG, STACK_TAG
from gpufleet.job.contract.aws import FLEET_TAG
from gpufleet.job.contract.reading import epoch
from gpufleet.job.text import counted

AMI, SNAPSHOT = "AMI", "snapshot"  # the kinds of resources that a bake keeps
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """One resource that is still in the account."""

    kind: str
    id: str
    note: str = ""
    usd_per_month: Decimal = Decimal(0)
    asked_for: bool = False  # whether the definition keeps the resource
    ours: bool = True  # False if the resource looks like one of the stack, but nothing proves it
    # whether it belongs to somebody else, but lies in the stack's VPC and so blocks its deletion
    foreign: bool = False
    # how to remove the resource; empty if it goes with another resource, or is being removed already
    steps: tuple[removal.Step, ...] = ()
    owner: str = ""  # the owner in the resource's tag, if it is not the definition's owner
    launches: bool = False  # whether it costs nothing now but may launch a node at any time
    unseen: bool = False  # whether AWS refuses to show resources of this kind; the id or the note has AWS's answer

    @property
    def bills(self) -> bool:
        return bool(self.usd_per_month) or self.launches

    @property
    def unwanted(self) -> bool:
        """Whether the resource belongs to the stack, and the definition does not keep it."""
        return self.ours and not (self.asked_for or self.foreign or self.owner or self.unseen)


def look(definition: StackDefinition, client: Callable[[str, str], Any], now: datetime) -> Iterator[Left]:
    """All leftovers: the most expensive kinds first, then parts of the network in the order in which AWS lets them be
    deleted, and last the kinds that AWS did not show. If the right to see one kind is missing, the others are still
    shown.
    """
    region, unseen = definition.fleet.region, list[Left]()
    ec2 = client("ec2", region)

    def collect_visible(kind: str, part: Callable[[], Iterable[_T]]) -> list[_T]:
        """The leftovers that `part` yields. If AWS refuses a request, `unseen` gets an entry instead."""
        visible = list[_T]()
        try:
            visible.extend(part())
        except ClientError as error:
            unseen.append(Left(kind=kind, id=str(refusals.refusal(error)), unseen=True))
        return visible

    vpcs = collect_visible("VPCs", lambda: aws.pages(ec2, "describe_vpcs", "Vpcs", Filters=_tagged(definition)))
    subnets = collect_visible("subnets", lambda: _resources_in(ec2, "describe_subnets", "Subnets", "vpc-id", vpcs))
    within = _Within(
        vpcs=frozenset(vpc["VpcId"] for vpc in vpcs if not _other_owner(vpc, definition)),
        subnets={subnet["SubnetId"]: subnet["VpcId"] for subnet in subnets},
        definition=definition,
    )
    fleets = collect_visible("fleets", lambda: fleets_of(ec2, definition, every_run=True))
    fleets = [fleet for fleet in fleets if fleet["FleetState"] != "deleted"]
    nodes = collect_visible("instances", lambda: _nodes(ec2, definition, [fleet["FleetId"] for fleet in fleets]))
    # An instant fleet stays in `deleted_terminating` for hours after its nodes have ended, and costs nothing.
    with_nodes = {aws.tags_of(node).get(FLEET_TAG) for node in nodes}
    fleets = [
        fleet
        for fleet in fleets
        if replaces(fleet) or fleet["FleetState"] not in ENDED or fleet["FleetId"] in with_nodes
    ]
    places = dict(
        collect_visible("launch templates", lambda: ((fleet["FleetId"], set(_subnets(ec2, fleet))) for fleet in fleets))
    )
    yield from _fleets(fleets, places, within, now)
    yield from _instances(nodes, within)
    for kinds, part in (
        ("volumes", lambda: _volumes(ec2, within, {node["InstanceId"]: node for node in nodes})),
        ("AMIs", lambda: _images(ec2, definition, now)),
        ("snapshots", lambda: _snapshots(ec2, definition, now)),
        ("NAT gateways", lambda: _nat_gateways(ec2, definition)),
        ("addresses", lambda: _addresses(ec2, definition)),
        ("buckets", lambda: _buckets(client("s3", region), definition)),
        ("log groups", lambda: _log_groups(client("logs", region), definition)),
        ("schedules", lambda: _schedules(client("scheduler", region), definition)),
        ("state machines", lambda: _machines(client("stepfunctions", region), definition)),
        ("network", lambda: _network(ec2, definition, vpcs, {node["InstanceId"] for node in nodes})),
        ("instance profiles", lambda: _profiles(client("iam", region), definition)),
        ("roles", lambda: _roles(client("iam", region), definition)),
    ):
        yield from collect_visible(kinds, part)
    yield from unseen


@dataclass(frozen=True, kw_only=True, slots=True)
class _Within:
    """Decides which owner a fleet or a node belongs to."""

    vpcs: frozenset[str]  # VPCs with the tags of the stack and of the file's owner
    subnets: dict[str, str]  # the VPC of each subnet in the stack's VPCs
    definition: StackDefinition

    def owner_of_fleet(self, fleet: dict[str, Any], subnets: Iterable[str]) -> str:
        inside = any(self.subnets.get(subnet) in self.vpcs for subnet in subnets)
        return "" if inside else _other_owner(fleet, self.definition)

    def owner_of_node(self, node: dict[str, Any]) -> str:
        return "" if node.get("VpcId") in self.vpcs else _other_owner(node, self.definition)


def _nodes(ec2: Any, definition: StackDefinition, fleets: list[str]) -> list[dict[str, Any]]:
    alive = ("instance-state-name", ["pending", "running", "shutting-down", "stopping", "stopped"])
    instances = find_instances(ec2, [(f"tag:{STACK_TAG}", [definition.name]), alive])
    if fleets:
        instances += find_instances(ec2, [(f"tag:{FLEET_TAG}", fleets), alive])
    return list({node["InstanceId"]: node for node in instances}.values())


def _subnets(ec2: Any, fleet: dict[str, Any]) -> Iterator[str]:
    """The subnets in which the fleet launches: the fleet's overrides name them, or, for several nodes, the interfaces
    of its launch template.
    """
    for config in fleet["LaunchTemplateConfigs"]:
        named = [override["SubnetId"] for override in config.get("Overrides", []) if "SubnetId" in override]
        yield from named or _subnets_of_interfaces(ec2, config["LaunchTemplateSpecification"])


def _subnets_of_interfaces(ec2: Any, template: dict[str, Any]) -> Iterator[str]:
    asked = {"LaunchTemplateId": template["LaunchTemplateId"], "Versions": [template["Version"]]}
    answer = refusals.absent(lambda: ec2.describe_launch_template_versions(**asked), "InvalidLaunchTemplateId.")
    for version in (answer or {}).get("LaunchTemplateVersions", []):
        interfaces = version["LaunchTemplateData"].get("NetworkInterfaces", [])
        yield from (interface["SubnetId"] for interface in interfaces)


def _fleets(
    fleets: list[dict[str, Any]], places: dict[str, set[str]], within: _Within, now: datetime
) -> Iterator[Left]:
    for fleet in fleets:
        expired, launches = has_expired(fleet, now), may_launch(fleet, now)
        note = f"{fleet['FleetState']}, wants {wants(fleet)}"
        note += ": it can launch a node at any time" if launches else ", expired" if expired else ""
        steps = () if fleet["FleetState"] in ENDED else (removal.end_fleet(fleet["FleetId"]),)
        owner = within.owner_of_fleet(fleet, places.get(fleet["FleetId"], ()))
        yield Left(kind="fleet", id=fleet["FleetId"], note=note, steps=steps, owner=owner, launches=launches)


def _instances(nodes: list[dict[str, Any]], within: _Within) -> Iterator[Left]:
    region = within.definition.fleet.region
    for node in nodes:
        state = node["State"]["Name"]
        in_block = node.get("InstanceLifecycle") == "capacity-block"
        free = in_block or state in ("stopped", "shutting-down")
        hourly = Decimal(0) if free else _hourly(node["InstanceType"], region)
        address = _price("public_ipv4", region) if node.get("PublicIpAddress") else Decimal(0)
        end = removal.ec2("terminate_instances", InstanceIds=[node["InstanceId"]])
        price = "its block is already paid" if in_block else "at the on-demand price"
        yield Left(
            kind="instance",
            id=node["InstanceId"],
            note=f"{node['InstanceType']}, {state}, run {aws.tags_of(node).get(RUN_TAG)}; {price}",
            usd_per_month=(hourly + address) * MONTH_H,
            steps=() if state == "shutting-down" else (end,),
            owner=within.owner_of_node(node),
        )


def _volumes(ec2: Any, within: _Within, nodes: dict[str, dict[str, Any]]) -> Iterator[Left]:
    definition, region = within.definition, within.definition.fleet.region
    volumes = list(aws.pages(ec2, "describe_volumes", "Volumes", Filters=_tagged(definition)))
    if nodes:
        attached = [{"Name": "attachment.instance-id", "Values": list(nodes)}]
        volumes += aws.pages(ec2, "describe_volumes", "Volumes", Filters=attached)
    known = {volume["VolumeId"]: volume for volume in volumes}
    loose = [{"Name": "status", "Values": ["available"]}]
    for volume in aws.pages(ec2, "describe_volumes", "Volumes", Filters=loose):
        if volume["VolumeId"] not in known and _resembles(volume, definition):
            yield _volume(volume, region, ours=False)
    for volume in known.values():
        node = next((nodes[at["InstanceId"]] for at in volume["Attachments"] if at["InstanceId"] in nodes), {})
        owner = within.owner_of_node(node) if node else _other_owner(volume, definition)
        yield _volume(volume, region, ours=True, owner=owner)


def _resembles(volume: dict[str, Any], definition: StackDefinition) -> bool:
    """Whether a node may have left this disk: it is detached and untagged, lies in one of the definition's zones, and
    is exactly as large as one of the definition's disks.
    """
    disks = [definition.storage.root, *([definition.storage.data] if definition.storage.data else [])]
    sizes = {(disk.size_gib, disk.iops, disk.throughput_mibps) for disk in disks}
    size = (volume["Size"], volume.get("Iops"), volume.get("Throughput"))
    places, zones = {volume["AvailabilityZone"], volume.get("AvailabilityZoneId")}, definition.zones
    return not volume.get("Tags") and bool(places & set(zones)) and size in sizes


def _volume(volume: dict[str, Any], region: str, *, ours: bool, owner: str = "") -> Left:
    size, iops, mibps = (int(volume.get(key) or 0) for key in ("Size", "Iops", "Throughput"))
    return Left(
        kind="volume",
        id=volume["VolumeId"],
        note=f"{size} GiB {volume['VolumeType']}, {volume['State']}",
        usd_per_month=gp3_usd_per_month(load_catalog(), region, size, iops, mibps),
        ours=ours,
        owner=owner,
        steps=(removal.ec2("delete_volume", VolumeId=volume["VolumeId"]),) if volume["State"] == "available" else (),
    )


def _images(ec2: Any, definition: StackDefinition, now: datetime) -> Iterator[Left]:
    """The AMIs of the stack, and those that its bake keeps until their day."""
    filters = _of_stack_and(definition, ENDING)
    for image in aws.pages(ec2, "describe_images", "Images", Owners=["self"], Filters=filters):
        gib = sum(int(disk["Ebs"]["VolumeSize"]) for disk in image["BlockDeviceMappings"] if "Ebs" in disk)
        delete = removal.ec2("deregister_image", DeleteAssociatedSnapshots=True, ImageId=image["ImageId"])
        yield _baked(AMI, image["ImageId"], gib, image, definition, now, delete)


def _snapshots(ec2: Any, definition: StackDefinition, now: datetime) -> Iterator[Left]:
    """The snapshots of data of the stack, and those that its bake keeps until their day."""
    filters = _of_stack_and(definition, DATA_ENDING)
    for snapshot in aws.pages(ec2, "describe_snapshots", "Snapshots", OwnerIds=["self"], Filters=filters):
        delete = removal.ec2("delete_snapshot", SnapshotId=snapshot["SnapshotId"])
        yield _baked(SNAPSHOT, snapshot["SnapshotId"], int(snapshot["VolumeSize"]), snapshot, definition, now, delete)


def _of_stack_and(definition: StackDefinition, ending: str) -> list[dict[str, Any]]:
    """The filter for the resources of the stack and of its builder whose name ends in this way."""
    return [{"Name": f"tag:{STACK_TAG}", "Values": [definition.name, f"{definition.name}{ending}"]}]


def _baked(
    kind: str,
    id: str,
    gib: int,
    described: dict[str, Any],
    definition: StackDefinition,
    now: datetime,
    delete: removal.Step,
) -> Left:
    """The resources that a bake keeps. Each is priced as a snapshot of a full disk, because AWS does not say how much a
    snapshot stores.
    """
    tags = aws.tags_of(described)
    until = epoch(tags.get(DELETE_AFTER, "")) or 0.0
    return Left(
        kind=kind,
        id=id,
        note=f"{gib} GiB, a schedule deletes it at {tags.get(DELETE_AFTER, 'no time')}",
        usd_per_month=_price("ebs_snapshot", definition.fleet.region) * gib * 2**30 / 10**9,
        asked_for=tags[STACK_TAG] != definition.name and until > now.timestamp(),
        owner=_other_owner(described, definition),
        steps=(delete,),
    )


def _nat_gateways(ec2: Any, definition: StackDefinition) -> Iterator[Left]:
    region = definition.fleet.region
    for nat in aws.pages(ec2, "describe_nat_gateways", "NatGateways"):
        ours = aws.tags_of(nat).get(STACK_TAG) == definition.name
        if ours and nat["State"] not in ("deleting", "deleted", "failed"):
            yield Left(
                kind="NAT gateway",
                id=nat["NatGatewayId"],
                usd_per_month=_price("nat_gateway", region) * MONTH_H,
                steps=(removal.ec2("delete_nat_gateway", NatGatewayId=nat["NatGatewayId"]),),
                owner=_other_owner(nat, definition),
            )


def _addresses(ec2: Any, definition: StackDefinition) -> Iterator[Left]:
    for address in ec2.describe_addresses(Filters=_tagged(definition))["Addresses"]:
        yield Left(
            kind="elastic address",
            id=address["AllocationId"],
            usd_per_month=_price("public_ipv4", definition.fleet.region) * MONTH_H,
            steps=(removal.ec2("release_address", AllocationId=address["AllocationId"]),),
            owner=_other_owner(address, definition),
        )


def _buckets(s3: Any, definition: StackDefinition) -> Iterator[Left]:
    keep, gb_price = definition.storage.keep, _price("s3_storage", definition.fleet.region)
    buckets = find_buckets(s3, definition.name)
    for name, refused in buckets.closed.items():
        yield Left(kind="bucket", id=name, note=str(refused), unseen=True)
    for name in buckets.untagged:  # the provider makes a bucket first and tags it afterwards
        yield Left(kind="bucket", id=name, note="named like ours", ours=False, steps=(removal.Bucket(name=name),))
    for bucket in buckets.ours:
        name, owner = bucket["Name"], _other_owner(bucket, definition)
        sizes = [int(item["Size"]) for item in aws.pages(s3, "list_objects_v2", "Contents", Bucket=name)]
        gb = Decimal(sum(sizes)) / 10**9
        for upload in aws.pages(s3, "list_multipart_uploads", "Uploads", Bucket=name):
            key, upload_id = upload["Key"], upload["UploadId"]
            parts = aws.pages(s3, "list_parts", "Parts", Bucket=name, Key=key, UploadId=upload_id)
            uploaded = Decimal(sum(int(part["Size"]) for part in parts)) / 10**9
            yield Left(
                kind="unfinished upload",
                id=f"s3://{name}/{key}",
                note=f"{uploaded:.3f} GB, of {upload['Initiated']:%Y-%m-%d %H:%M}",
                usd_per_month=uploaded * gb_price,
                steps=(removal.UnfinishedUpload(bucket=name, key=key, id=upload_id),),
                owner=owner,
            )
        yield Left(
            kind="bucket",
            id=name,
            note=f"{counted(len(sizes), 'object')}, {gb:.3f} GB" + (f", expiring {keep.expiry}" if keep.bucket else ""),
            # a bill shows amounts of at least one cent, and an empty bucket costs nothing
            usd_per_month=gb * gb_price,
            asked_for=keep.bucket,
            steps=(removal.Bucket(name=name),),
            owner=owner,
        )


def _log_groups(logs: Any, definition: StackDefinition) -> Iterator[Left]:
    for group in find_log_groups(logs, definition.name):
        stored = int(group.get("storedBytes") or 0)
        yield Left(
            kind="log group",
            id=group["logGroupName"],
            note=f"{stored / 1e6:.1f} MB",
            usd_per_month=Decimal(stored) / 10**9 * _price("logs_storage", definition.fleet.region),
            steps=(removal.Call("logs", "delete_log_group", {"logGroupName": group["logGroupName"]}),),
            owner=_other_owner(group, definition),
        )


def _schedules(scheduler: Any, definition: StackDefinition) -> Iterator[Left]:
    """The schedule groups, and the schedules in them; a schedule itself has no tags."""
    prefix = name_prefix(definition.name)
    for group in aws.pages(scheduler, "list_schedule_groups", "ScheduleGroups", NamePrefix=prefix):
        tagged = scheduler.list_tags_for_resource(ResourceArn=group["Arn"])
        if aws.tags_of(tagged).get(STACK_TAG) != definition.name:
            continue
        name, going = group["Name"], group["State"] == "DELETING"
        end = removal.Call("scheduler", "delete_schedule_group", {"Name": name})
        owner = _other_owner(tagged, definition)
        yield Left(kind="schedule group", id=name, steps=() if going else (end,), owner=owner)


def _machines(states: Any, definition: StackDefinition) -> Iterator[Left]:
    for machine in aws.pages(states, "list_state_machines", "stateMachines"):
        if not machine["name"].startswith(name_prefix(definition.name)):
            continue
        arn = machine["stateMachineArn"]
        tags = states.list_tags_for_resource(resourceArn=arn)["tags"]
        tagged = {"Tags": [{"Key": tag["key"], "Value": tag["value"]} for tag in tags]}
        if aws.tags_of(tagged).get(STACK_TAG) == definition.name:
            end = removal.Call("stepfunctions", "delete_state_machine", {"stateMachineArn": arn})
            yield Left(kind="state machine", id=machine["name"], steps=(end,), owner=_other_owner(tagged, definition))


class _Part(NamedTuple):
    """One kind of network resource."""

    kind: str
    name: str  # the name in describe_NAMEs and delete_NAME
    key: str  # the key of the list in AWS's answer
    id: str
    by_vpc: str = ""  # the filter by VPC; empty for kinds that are in no VPC

    @property
    def describe(self) -> str:
        return f"describe_{self.name}s"

    def step(self, identifier: str) -> removal.Step:
        if self.name == "vpc_endpoint":  # the API has no delete_vpc_endpoint
            return removal.ec2("delete_vpc_endpoints", VpcEndpointIds=[identifier])
        return removal.ec2(f"delete_{self.name}", **{self.id: identifier})


_PARTS = (  # kinds in the order in which AWS lets them be deleted
    _Part("launch template", "launch_template", "LaunchTemplates", "LaunchTemplateId"),
    _Part("VPC endpoint", "vpc_endpoint", "VpcEndpoints", "VpcEndpointId", "vpc-id"),
    _Part("network interface", "network_interface", "NetworkInterfaces", "NetworkInterfaceId", "vpc-id"),
    _Part("internet gateway", "internet_gateway", "InternetGateways", "InternetGatewayId", "attachment.vpc-id"),
    _Part("subnet", "subnet", "Subnets", "SubnetId", "vpc-id"),
    _Part("route table", "route_table", "RouteTables", "RouteTableId", "vpc-id"),
    _Part("security group", "security_group", "SecurityGroups", "GroupId", "vpc-id"),
    _Part("VPC", "vpc", "Vpcs", "VpcId"),
)


def _network(ec2: Any, definition: StackDefinition, vpcs: list[dict[str, Any]], nodes: set[str]) -> Iterator[Left]:
    """Network resources with the stack's tag, and everything else in the stack's VPCs."""
    owners = {vpc["VpcId"]: _other_owner(vpc, definition) for vpc in vpcs}
    for part in _PARTS:
        tagged = list(aws.pages(ec2, part.describe, part.key, Filters=_tagged(definition)))
        inside = _resources_in(ec2, part.describe, part.key, part.by_vpc, vpcs) if part.by_vpc else []
        every = {item[part.id]: item for item in (*tagged, *inside)}
        ours = {item[part.id] for item in tagged}
        for identifier, item in every.items():
            if item.get("State", "").lower() in ("deleting", "deleted") or _goes_with_its_vpc(item):
                continue  # AWS still lists deleted endpoints for a while
            attached = [attachment["VpcId"] for attachment in item.get("Attachments", [])]  # of a gateway
            # a network interface has no tag, so the instance to which it belongs is looked up
            node = (item.get("Attachment") or {}).get("InstanceId", "")
            vpc = item.get("VpcId") or next(iter(attached), "")
            owner = owners[vpc] if vpc in owners else _other_owner(item, definition)
            mine = identifier in ours or node in nodes
            names = (node, item.get("GroupName"), item.get("ServiceName"), "" if mine else item.get("Description"))
            note = ", ".join(filter(None, names))
            steps = (
                *(removal.ec2("detach_internet_gateway", **{part.id: identifier}, VpcId=vpc_id) for vpc_id in attached),
                # AWS deletes an interface of a node, or of one of its services, together with that
                *(() if node or item.get("RequesterManaged") else (part.step(identifier),)),
            )
            yield Left(kind=part.kind, id=identifier, note=note, foreign=not mine, owner=owner, steps=steps)


def _resources_in(
    ec2: Any, operation: str, key: str, by_vpc: str, vpcs: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Every resource of one kind in the VPCs."""
    if vpcs:
        within = [{"Name": by_vpc, "Values": [vpc["VpcId"] for vpc in vpcs]}]
        yield from aws.pages(ec2, operation, key, Filters=within)


def _goes_with_its_vpc(item: dict[str, Any]) -> bool:
    """Whether AWS makes and deletes the resource with its VPC: the main route table and the default security group."""
    return item.get("GroupName") == "default" or any(
        association.get("Main") for association in item.get("Associations", [])
    )


def _roles(iam: Any, definition: StackDefinition) -> Iterator[Left]:
    for role in aws.pages(iam, "list_roles", "Roles"):
        name = role["RoleName"]
        tagged = iam.list_role_tags(RoleName=name) if name.startswith(name_prefix(definition.name)) else {}
        if aws.tags_of(tagged).get(STACK_TAG) == definition.name:
            inline = aws.pages(iam, "list_role_policies", "PolicyNames", RoleName=name)
            attached = aws.pages(iam, "list_attached_role_policies", "AttachedPolicies", RoleName=name)
            steps = (
                *(removal.iam("delete_role_policy", RoleName=name, PolicyName=policy) for policy in inline),
                *(
                    removal.iam("detach_role_policy", RoleName=name, PolicyArn=policy["PolicyArn"])
                    for policy in attached
                ),
                removal.iam("delete_role", RoleName=name),
            )
            yield Left(kind="role", id=name, steps=steps, owner=_other_owner(tagged, definition))


def _profiles(iam: Any, definition: StackDefinition) -> Iterator[Left]:
    for profile in aws.pages(iam, "list_instance_profiles", "InstanceProfiles"):
        name = profile["InstanceProfileName"]
        if not name.startswith(name_prefix(definition.name)):
            continue
        # ListInstanceProfiles returns no tags
        described = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
        if aws.tags_of(described).get(STACK_TAG) == definition.name:
            of = {"InstanceProfileName": name}
            roles = [role["RoleName"] for role in described["Roles"]]
            steps = (
                *(removal.iam("remove_role_from_instance_profile", **of, RoleName=role) for role in roles),
                removal.iam("delete_instance_profile", **of),
            )
            yield Left(kind="instance profile", id=name, steps=steps, owner=_other_owner(described, definition))


def _tagged(definition: StackDefinition) -> list[dict[str, Any]]:
    """The EC2 filters for resources with the stack's tag."""
    return [{"Name": f"tag:{STACK_TAG}", "Values": [definition.name]}]


def _other_owner(resource: dict[str, Any], definition: StackDefinition) -> str:
    """The owner in the tag; empty if it is the owner in the file. (Two people may run the same file.)"""
    owner = aws.owner_of(resource)
    return "" if owner == definition.run.owner else owner


def _hourly(instance_type: str, region: str) -> Decimal:
    """USD per hour on demand; if the region has no such price, the highest known price of the type."""
    catalog = load_catalog()
    try:
        return catalog.on_demand(instance_type, region).amount
    except PriceMissing:
        elsewhere = [price.amount for (kind, _), price in catalog.on_demand_prices.items() if kind == instance_type]
        spot = [
            zone.price.amount
            for (kind, _), zones in catalog.spot_prices.items()
            if kind == instance_type
            for zone in zones
        ]
        return max([*elsewhere, *spot], default=Decimal(1))  # a type whose price is not known must not look free


def _price(item: str, region: str) -> Decimal:
    return load_catalog().price(item, region).amount
