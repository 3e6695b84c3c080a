"""Makes the resources that an AWS account has before a program declares anything, and lists everything that the account
contains later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Any
from unittest import mock

from moto.core.base_backend import BackendDict
from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.events.models import events_backends
from moto.iam.models import iam_backends
from moto.kms.models import kms_backends
from moto.logs.models import logs_backends
from moto.s3.models import s3_backends
from moto.scheduler.models import scheduler_backends
from moto.sns.models import sns_backends
from moto.ssm.models import Parameter, ssm_backends
from moto.stepfunctions.models import stepfunctions_backends

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Account, Vpc
from gpufleet.infra.errors import GpufleetError

# Names of the Deep Learning AMI's public parameters: AWS DLAMI release notes, 2026-11-21.
AMI_PARAMETERS = {
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id": (
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) 20261105",
        "/dev/xvda",
    )
}
QUOTAS = {  # Service Quotas codes and names, AWS documentation, 2026-11-21
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-417A185B": "Running On-Demand P instances",
    "L-34B43A08": "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
}
AMAZON = "898082745236"  # owner of the Deep Learning AMIs
SERVICE_ROLES = {
    "ec2fleet.amazonaws.com": "AWSServiceRoleForEC2Fleet",
    "spot.amazonaws.com": "AWSServiceRoleForEC2Spot",
}


def seed(account: str) -> None:
    """Makes the service-linked roles that an account gets with its first fleet and its first Spot request."""
    iam = iam_backends[account]["aws"]
    for service, name in SERVICE_ROLES.items():
        iam.create_service_linked_role(service, "", "").name = name


def seed_region(account: str, region: str) -> None:
    """Makes the Deep Learning AMIs of a region and the public parameters that name them."""
    ec2, ssm = ec2_backends[account][region], ssm_backends[account][region]
    made = datetime(2026, 11, 5, tzinfo=UTC)
    for parameter, (name, device) in AMI_PARAMETERS.items():
        image = ami_id(region, parameter)
        ec2.amis[image] = Ami(
            ec2,
            image,
            name=name,
            description=name,
            owner_id=AMAZON,
            owner_alias="amazon",
            public=True,
            virtualization_type="hvm",
            architecture="x86_64",
            root_device_type="ebs",
            root_device_name=device,
            creation_date=made,
            region_name=f"{region}a",
        )
        stored = Parameter(account, parameter, image, "String", None, None, None, made, 1, "aws:ec2:image")  # type: ignore[abstract]
        ssm._parameters[parameter].append(stored)


def seed_named(account: str, region: str, named: Account) -> None:
    """Makes the resources that a definition's `account` names, with the definition's ids instead of moto's random ones:
    a VPC with a public subnet in each zone, and a policy and a key that allow everything.
    """
    if named.vpc:
        _seed_network(account, region, named.vpc)
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    if arn := named.permissions_boundary:
        policy = {"Version": "2012-10-17", "Statement": [everything]}
        iam = iam_backends[account]["aws"]
        iam.managed_policies[arn] = iam.create_policy("", "/", json.dumps(policy), arn.rpartition("/")[2], [])
    if named.kms_key:
        policy = {"Version": "2012-10-17", "Statement": [{**everything, "Principal": "*"}]}
        kms = kms_backends[account][region]
        key = kms.create_key(json.dumps(policy), "ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT", "", None)
        key.arn, key.id = named.kms_key, named.kms_key.rpartition("/")[2]
        kms.keys[key.id] = key


def _seed_network(account: str, region: str, vpc: Vpc) -> None:
    ec2 = ec2_backends[account][region]
    with mock.patch("moto.ec2.models.vpcs.random_vpc_id", return_value=vpc.id):
        ec2.create_vpc("10.0.0.0/16")
    gateway = ec2.create_internet_gateway()
    ec2.attach_internet_gateway(gateway.id, vpc.id)
    (table,) = ec2.describe_route_tables(filters={"vpc-id": [vpc.id]})
    ec2.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)
    for number, (zone, name) in enumerate(vpc.subnets.items()):
        with mock.patch("moto.ec2.models.subnets.random_subnet_id", return_value=name):
            made = ec2.create_subnet(vpc.id, f"10.0.{number}.0/24", availability_zone=zone_name(zone, region))
        made.map_public_ip_on_launch = True


def key_of(account: str, bucket: str) -> str | None:
    """The customer's key that encrypts a bucket's objects."""
    stored = s3_backends[account]["aws"].buckets.get(bucket)
    rule = ((stored.encryption if stored else None) or {}).get("Rule") or {}
    key: str | None = rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID")
    return key


def ami_id(region: str, parameter: str) -> str:
    """The image id of a region and parameter, the same every time."""
    return "ami-0" + hashlib.sha256(f"{region} {parameter}".encode()).hexdigest()[:16]


def deregister_image(ec2: Any, image: str, *, with_snapshots: bool) -> None:
    """Deregisters an AMI in moto, and deletes its snapshot. Raises EC2ClientError for an unknown AMI."""
    ami = ec2.amis.get(image)
    ec2.deregister_image(image)
    if with_snapshots:
        ec2.delete_snapshot(ami.ebs_snapshot.id)


def quota_code(instance_type: str, *, spot: bool) -> str:
    """The quota that limits this type's vCPUs."""
    if instance_type[:1] in "gv":
        return "L-3819A6DF" if spot else "L-DB2E81BA"
    if instance_type[:1] == "p":
        return ("L-C4BD4855" if instance_type.startswith("p5") else "L-7212CCBC") if spot else "L-417A185B"
    return "L-34B43A08" if spot else "L-1216C47A"


@cache
def spot_price(instance_type: str, zone: str) -> Decimal:
    """USD per hour in the zone of this name: the catalog's price, if it has one."""
    prices = load_catalog().spot_prices.get((instance_type, zone[:-1]), ())
    by_zone = {price.zone: price.price.amount for price in prices}
    id = zone_ids(zone[:-1])[zone].rpartition("-")[2]
    return by_zone.get(id, max(by_zone.values(), default=Decimal("0.5000")))


def zone_ids(region: str) -> dict[str, str]:
    """The ids of a region's zones, by name, in this account."""
    return {zone.name: zone.zone_id for zone in RegionsAndZonesBackend.zones[region]}


def zone_name(zone: str, region: str) -> str:
    """The name in this account of a zone that is given by name or id. Raises GpufleetError for an unknown zone."""
    local_name = next((name for name, id in zone_ids(region).items() if zone in (name, id)), None)
    if local_name is None:
        raise GpufleetError(f"fleet.zones: {zone}; the embedded account has {', '.join(zone_ids(region).values())}")
    return local_name


Resource = tuple[str, str]  # kind, id


def inventory(
    account: str, fleets: Callable[[str], list[tuple[str, dict[str, str]]]]
) -> dict[Resource, dict[str, str]]:
    """Everything that exists in the account, with its tags: what would be billed or left behind."""
    existing: dict[Resource, dict[str, str]] = {}
    for region, ec2 in list(ec2_backends[account].items()):
        tables: dict[str, list[Any]] = {
            "instance": [i for i in ec2.all_instances() if i.state != "terminated"],
            "volume": list(ec2.volumes.values()),
            "image": [image for image in ec2.amis.values() if image.owner_id == account],
            "snapshot": [snapshot for snapshot in ec2.snapshots.values() if snapshot.owner_id == account],
            "network-interface": list(ec2.enis.values()),
            "elastic-ip": list(ec2.addresses),
            "launch-template": list(ec2.launch_templates.values()),
            "vpc": list(ec2.vpcs.values()),
            "subnet": [s for zone in ec2.subnets.values() for s in zone.values()],
            "security-group": [g for groups in ec2.groups.values() for g in groups.values()],
            "route-table": list(ec2.route_tables.values()),
            "internet-gateway": list(ec2.internet_gateways.values()),
            "nat-gateway": [n for n in ec2.nat_gateways.values() if n.state != "deleted"],
            "vpc-endpoint": [e for e in ec2.vpc_end_points.values() if e.state != "deleted"],
        }
        for kind, resources in tables.items():
            for resource in resources:
                tags = {tag["key"]: tag["value"] for tag in ec2.describe_tags({"resource-id": [_id(resource)]})}
                existing[(kind, _id(resource))] = tags
        existing.update({("fleet", fleet): tags for fleet, tags in fleets(region)})
    for bucket in s3_backends[account]["aws"].buckets.values():
        existing[("bucket", bucket.name)] = dict(
            s3_backends[account]["aws"].tagger.get_tag_dict_for_resource(bucket.arn)
        )
    iam = iam_backends[account]["aws"]
    for role in iam.roles.values():
        existing[("role", role.name)] = dict(_tags(role))
    for profile in iam.instance_profiles.values():
        existing[("instance-profile", profile.name)] = dict(_tags(profile))
    for logs in list(logs_backends[account].values()):
        for group in logs.groups.values():
            existing[("log-group", group.name)] = dict(logs.list_tags_log_group(group.name) or {})
    for scheduler in list(scheduler_backends[account].values()):
        for schedules in scheduler.schedule_groups.values():
            if schedules.name != "default":  # every region has this resource
                tags = {tag["Key"]: tag["Value"] for tag in scheduler.list_tags_for_resource(schedules.arn)["Tags"]}
                existing[("schedule-group", schedules.name)] = tags
    for states in list(stepfunctions_backends[account].values()):
        for machine in states.state_machines:
            existing[("state-machine", machine.name)] = states.tagger.get_tag_dict_for_resource(machine.arn)
    for sns in list(sns_backends[account].values()):
        for topic in sns.topics.values():
            existing[("topic", topic.name)] = {key: str(value) for key, value in topic._tags.items()}
    for events in list(events_backends[account].values()):
        for rule in events._get_event_bus("default").rules.values():
            existing[("event-rule", rule.name)] = dict(events.tagger.get_tag_dict_for_resource(rule.arn))
    return existing


def messages(account: str) -> list[str]:
    """The subjects of the messages that were sent to subscribers of the topics."""
    topics = [topic for sns in list(sns_backends[account].values()) for topic in sns.topics.values()]
    return [str(sent[2]) for topic in topics for sent in topic.sent_notifications]


def statements(account: str, profile: str) -> list[dict[str, Any]]:
    """The current statements of the inline policies of the roles in an instance profile."""
    iam = iam_backends[account]["aws"]
    roles = [
        role
        for instance_profile in list(iam.instance_profiles.values())
        if instance_profile.name == profile
        for role in instance_profile.roles
    ]
    return [statement for role in roles for statement in role_statements(role)]


def statements_of(account: str, role_arn: str) -> list[dict[str, Any]] | None:
    """The current statements of a role's inline policies; None if there is no such role."""
    roles = list(iam_backends[account]["aws"].roles.values())
    return next((role_statements(role) for role in roles if role.arn == role_arn), None)


def role_statements(role: Any) -> list[dict[str, Any]]:
    """The statements of the role's inline policies."""
    policies = [json.loads(document) for document in list(role.policies.values())]
    return [statement for policy in policies for statement in policy["Statement"]]


def forget(account: str) -> None:
    """Deletes everything that moto keeps for the account."""
    every: list[Any] = list(BackendDict._instances)  # type: ignore[misc]
    for backends in every:
        if account in backends:
            backends[account].reset()
            del backends[account]


def _id(resource: Any) -> str:
    return str(getattr(resource, "id", None) or getattr(resource, "allocation_id", ""))


def _tags(resource: Any) -> dict[str, str]:
    tags = resource.tags
    if isinstance(tags, list):
        return {tag["Key"]: tag["Value"] for tag in tags}
    return {key: value["Value"] if isinstance(value, dict) else value for key, value in tags.items()}
