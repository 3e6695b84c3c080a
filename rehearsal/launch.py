"""Launches a fleet's instances in moto: pools, the checks that AWS makes at a launch, disks, tags, user-data."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.ec2.utils import convert_tag_spec, parse_user_data
from moto.iam.models import iam_backends

from gpufleet.infra.market.reservation import BLOCK_ENDING
from gpufleet.rehearsal.account import QUOTAS, quota_code, spot_price

FLEET_ROLE = "AWSServiceRoleForEC2Fleet"
# resources that a template may tag but the fleet's role may not (AWSEC2FleetServiceRolePolicy, version 3)
NOT_TAGGABLE = "network-interface"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One pool of capacity: an instance type in a subnet, together with the values of the launch template."""

    type: str
    zone: str
    subnet: str
    template: Any  # moto's LaunchTemplateVersion
    spec: Mapping[str, Any]  # the template's data, in which values of the override have replaced those of the template
    price: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A Capacity Block: bought nodes of one type in one zone for a time."""

    id: str
    type: str
    zone: str
    count: int
    start: datetime
    end: datetime

    def state(self, now: datetime) -> str:
        """The block's state in AWS's words."""
        return "scheduled" if now < self.start else "active" if now < self.end else "expired"

    def ends_nodes(self, now: datetime) -> bool:
        """Whether AWS now ends the instances in the block."""
        return now >= self.end - BLOCK_ENDING


@dataclass(kw_only=True, slots=True)
class CloudInstance:
    """One node as the fleet sees it. Times are by the Cloud's clock."""

    id: str
    fleet_id: str
    region: str
    type: str
    zone: str
    image: str
    spot: bool
    block: str  # the id of the block in which the instance runs; empty if it is in no block
    spot_request: str | None
    user_data: str  # the decoded user-data
    profile: str | None  # instance profile name
    shutdown_behavior: str  # stop or terminate
    # disks other than the root disk: the snapshot by device name
    volumes: dict[str, str | None] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    tags_in_metadata: bool = False
    # The number of network hops that an answer of the metadata service can go. A container on a bridge is one hop
    # further away.
    hops: int = 1
    launched_at: datetime
    notice_at: datetime | None = None
    terminate_at: datetime | None = None
    rebalance_at: datetime | None = None
    ended_at: datetime | None = None


class LaunchFailedError(Exception):
    """A launch failed.

    The error has (event type, sub-type, description) for the fleet's history, in the order in which pools were tried.
    """

    def __init__(self, sub_type: str, description: str, tried: Sequence[str] = ()) -> None:
        super().__init__(description)
        skipped = (("information", "launchSpecTemporarilyBlacklisted", pool) for pool in tried)
        self.events = (*skipped, ("error", sub_type, description))


class Launcher:
    """Launches and ends instances in moto for one account."""

    def __init__(self, account: str) -> None:
        self.account = account
        self.quotas = dict.fromkeys(QUOTAS, 384.0)  # vCPUs by quota code
        self.no_spot = False  # whether there is no capacity of any type anywhere
        # pairs of instance type and zone without capacity; `*` stands for all
        self.no_capacity: set[tuple[str, str]] = set()
        self.blocks: dict[str, Reservation] = {}  # Capacity Blocks by id

    def pools(self, region: str, configs: list[dict[str, Any]]) -> list[Pool]:
        """Every pool that the configs name. Raises EC2ClientError for a missing template or subnet."""
        backend = ec2_backends[self.account][region]
        pools = []
        for config in configs:
            asked = config.get("LaunchTemplateSpecification") or {}
            if asked.get("LaunchTemplateId"):
                template = backend.get_launch_template(template_id=asked["LaunchTemplateId"])
            else:
                template = backend.get_launch_template_by_name(name=str(asked.get("LaunchTemplateName")))
            version = template.get_version(asked.get("Version") or "$Default")
            for override in config.get("Overrides") or [{}]:
                spec = {**version.data, **override}
                # moto parses the user-data only for a template's first version
                if isinstance(spec.get("UserData"), str):
                    spec["UserData"] = parse_user_data(spec["UserData"])
                interfaces = spec.get("NetworkInterfaces") or [{}]
                subnets = str(spec.get("SubnetId") or interfaces[0].get("SubnetId") or "")
                for subnet_id in filter(None, subnets.replace(" ", "").split(",")):
                    subnet = backend.get_subnet(subnet_id)
                    kind, zone = str(spec.get("InstanceType") or ""), subnet.availability_zone
                    price = spot_price(kind, zone)
                    pool = Pool(type=kind, zone=zone, subnet=subnet_id, template=version, spec=spec, price=price)
                    pools.append(pool)
        return pools

    def launch(self, region: str, fleet_id: str, spot: bool, pools: list[Pool], now: datetime) -> CloudInstance:
        """Launches one instance in the first pool with capacity. Raises LaunchFailedError with the events."""
        # The fleet's role launches the instance; into a block, the caller launches it.
        launches = not any(_block(pool.spec) for pool in pools)
        if launches and FLEET_ROLE not in {role.name for role in iam_backends[self.account]["aws"].roles.values()}:
            raise LaunchFailedError("iamFleetRoleInvalid", f"The service-linked role {FLEET_ROLE} does not exist")
        if not pools:
            raise LaunchFailedError("spotFleetRequestConfigurationInvalid", "The request names no subnet to launch in")
        tried = []
        for pool in pools:
            if any(entry["ResourceType"] == NOT_TAGGABLE for entry in pool.spec.get("TagSpecifications") or []):
                refused = f"{FLEET_ROLE} is not authorized to perform: ec2:CreateTags on resource: {NOT_TAGGABLE}/*"
                raise LaunchFailedError("iamFleetRoleInvalid", refused)
            why = self._obstacle(region, pool, spot, now)
            if why is None:
                return self._run(region, fleet_id, spot, pool, now)
            label = f"{pool.type}, {pool.spec.get('ImageId')}, Linux/UNIX, {pool.zone}"
            tried.append(f"{label}: {why}. It will not be retried for at least 13 minutes")
        failed = f"Several attempts to launch instances have failed. {tried[-1]}"
        raise LaunchFailedError("allLaunchSpecsTemporarilyBlacklisted", failed, tried)

    def terminate(self, instance_id: str) -> None:
        """Terminates the instance in moto together with its disks and interfaces."""
        instance = self._find(instance_id)
        if instance is not None and instance.state != "terminated":
            instance.terminate()

    def stop(self, instance_id: str) -> None:
        """Stops the instance in moto, as an OS shutdown does unless the template says terminate."""
        instance = self._find(instance_id)
        if instance is not None and instance.state == "running":
            instance.stop()

    def running(self, instance_id: str) -> bool:
        """Whether the instance is pending or running in moto."""
        instance = self._find(instance_id)
        return instance is not None and instance.state in ("pending", "running")

    def in_block(self, block: str) -> int:
        """The number of instances that run in a block."""
        every = (i for backend in ec2_backends[self.account].values() for i in backend.all_instances())
        return sum(i.state in ("pending", "running") and getattr(i, "capacity_block", "") == block for i in every)

    def _block_obstacle(self, pool: Pool, now: datetime) -> str | None:
        """Why the pool's block accepts no instance; None if it accepts one."""
        block = self.blocks.get(_block(pool.spec))
        if block is None:
            return (
                f"The capacity reservation '{_block(pool.spec)}' does not exist (InvalidCapacityReservationId.NotFound)"
            )
        market = (pool.spec.get("InstanceMarketOptions") or {}).get("MarketType")
        if market != "capacity-block":
            return f"The market type {market} is not valid for a capacity block (InvalidParameterValue)"
        fits = block.state(now) == "active" and not block.ends_nodes(now) and self.in_block(block.id) < block.count
        if not fits or (pool.type, pool.zone) != (block.type, block.zone):
            return "There is not enough capacity in the reservation (InsufficientInstanceCapacity)"
        return None

    def _vcpus_in_use(self, region: str, code: str) -> int:
        """The vCPUs of the running instances that use the quota."""
        live = [i for i in ec2_backends[self.account][region].all_instances() if i.state in ("pending", "running")]
        paid = [i for i in live if not getattr(i, "capacity_block", "")]
        kinds = [i.instance_type for i in paid if quota_code(i.instance_type, spot=i.lifecycle == "spot") == code]
        return sum(map(vcpus, kinds))

    def _find(self, instance_id: str) -> Any | None:
        for backend in ec2_backends[self.account].values():
            for instance in backend.all_instances():
                if instance.id == instance_id:
                    return instance
        return None

    def _obstacle(self, region: str, pool: Pool, spot: bool, now: datetime) -> str | None:
        """Why this pool accepts no instance; None if it accepts one. Raises LaunchFailedError for an obstacle in every
        pool.
        """
        backend = ec2_backends[self.account][region]
        if pool.spec.get("ImageId") not in backend.amis:
            return f"The image id '[{pool.spec.get('ImageId')}]' does not exist (InvalidAMIID.NotFound)"
        offered = backend.describe_instance_type_offerings(
            "availability-zone", {"location": [pool.zone], "instance-type": [pool.type]}
        )
        if not offered:
            return f"{pool.type} is not offered in {pool.zone} (Unsupported)"
        if _block(pool.spec):
            return self._block_obstacle(pool, now) or self._no_profile(pool)
        code = quota_code(pool.type, spot=spot)
        if self._vcpus_in_use(region, code) + vcpus(pool.type) > self.quotas[code]:
            if spot:
                raise LaunchFailedError("spotInstanceCountLimitExceeded", "Max spot instance count exceeded")
            return "You have requested more vCPU capacity than your current vCPU limit allows (VcpuLimitExceeded)"
        places = {(pool.type, pool.zone), (pool.type, "*"), ("*", pool.zone), ("*", "*")}
        if (spot and self.no_spot) or self.no_capacity & places:
            return "There is no Spot capacity available that matches your request (InsufficientInstanceCapacity)"
        return self._no_profile(pool)

    def _no_profile(self, pool: Pool) -> str | None:
        profile = _profile_name(pool.spec)
        if profile is not None and profile not in {
            p.name for p in iam_backends[self.account]["aws"].instance_profiles.values()
        }:
            return (
                f"Value ({profile}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
            )
        return None

    def _run(self, region: str, fleet_id: str, spot: bool, pool: Pool, now: datetime) -> CloudInstance:
        backend, spec = ec2_backends[self.account][region], pool.spec
        tags = convert_tag_spec(spec.get("TagSpecifications") or [])
        interface = (spec.get("NetworkInterfaces") or [{}])[0]
        behavior = str(spec.get("InstanceInitiatedShutdownBehavior") or "stop")
        reservation = backend.run_instances(
            image_id=spec["ImageId"],
            count=1,
            user_data=spec.get("UserData"),
            security_group_names=[],
            security_group_ids=list(spec.get("SecurityGroupIds") or interface.get("Groups") or []),
            instance_type=pool.type,
            is_instance_type_default=False,
            region_name=region,
            subnet_id=pool.subnet,
            associate_public_ip=interface.get("AssociatePublicIpAddress"),
            iam_instance_profile=spec.get("IamInstanceProfile"),
            metadata_options=spec.get("MetadataOptions"),
            instance_initiated_shutdown_behavior=behavior,
            lifecycle="spot" if spot else "capacity-block" if _block(spec) else None,
            block_device_mappings=[],
            tags={"instance": {**tags.get("instance", {}), **_aws_tags(fleet_id, pool)}},
        )
        made: Any = reservation.instances[0]
        made.launch_time, made.capacity_block = now, _block(spec)
        made.spot_instance_request_id = f"sir-{uuid.uuid4().hex[:8]}" if spot else None
        volumes = _attach_disks(backend, made, spec, {} if spot else tags.get("volume", {}))
        for nic in made.nics.values():
            nic.delete_on_termination = True
        metadata = spec.get("MetadataOptions") or {}
        user_data = spec.get("UserData")
        return CloudInstance(
            id=made.id,
            fleet_id=fleet_id,
            region=region,
            type=pool.type,
            zone=pool.zone,
            image=str(spec["ImageId"]),
            spot=spot,
            block=_block(spec),
            spot_request=made.spot_instance_request_id,
            user_data=user_data.decode() if user_data is not None else "",
            profile=_profile_name(spec),
            shutdown_behavior=behavior,
            volumes=volumes,
            tags={tag["key"]: tag["value"] for tag in made.get_tags()},
            tags_in_metadata=metadata.get("InstanceMetadataTags") == "enabled",
            hops=int(metadata.get("HttpPutResponseHopLimit") or 1),
            launched_at=now,
        )


def vcpus(instance_type: str) -> int:
    """The vCPUs of a type by moto's table."""
    return int(INSTANCE_TYPES[instance_type]["VCpuInfo"]["DefaultVCpus"])


def _block(spec: Mapping[str, Any]) -> str:
    """The capacity reservation that a template targets; empty if none."""
    target = (spec.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}
    return str(target.get("CapacityReservationId") or "")


def _profile_name(spec: Mapping[str, Any]) -> str | None:
    profile = spec.get("IamInstanceProfile") or {}
    name = profile.get("Name") or str(profile.get("Arn") or "").rpartition("/")[2]
    return name or None


def _aws_tags(fleet_id: str, pool: Pool) -> dict[str, str]:
    return {
        "aws:ec2:fleet-id": fleet_id,
        "aws:ec2launchtemplate:id": pool.template.template.id,
        "aws:ec2launchtemplate:version": str(pool.template.number),
    }


def _attach_disks(backend: Any, instance: Any, spec: Mapping[str, Any], tags: dict[str, str]) -> dict[str, str | None]:
    """Attaches root and template disks. Those of spot nodes get no template tags (User Guide, June 2023)."""
    root = backend.amis[instance.image_id].root_device_name
    disks: dict[str, dict[str, Any]] = {root: {"VolumeSize": 40, "VolumeType": "gp3", "DeleteOnTermination": True}}
    for mapping in spec.get("BlockDeviceMappings") or []:
        disk = {key: value for key, value in (mapping.get("Ebs") or {}).items() if value is not None}
        disks[mapping["DeviceName"]] = {**disks.get(mapping["DeviceName"], {}), **disk}
    for device, disk in disks.items():
        volume = backend.create_volume(
            size=disk.get("VolumeSize"),
            zone_name=instance.availability_zone,
            snapshot_id=disk.get("SnapshotId"),
            encrypted=bool(disk.get("Encrypted")),
            kms_key_id=disk.get("KmsKeyId"),
            volume_type=disk.get("VolumeType"),
            iops=disk.get("Iops"),
            throughput=disk.get("Throughput"),
        )
        volume.add_tags(tags)
        backend.attach_volume(volume.id, instance.id, device, bool(disk.get("DeleteOnTermination")))
    return {device: disk.get("SnapshotId") for device, disk in disks.items() if device != root}
