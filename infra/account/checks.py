"""The checks of `gpufleet doctor` on credentials, roles, offers, AMI, disk key and inputs. The checks change
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import ClientError

from gpufleet.infra.account import iam_policy, refusals
from gpufleet.infra.account.aws import pages
from gpufleet.infra.account.fleet import nodes_of
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.boot.user_data import ROOT_DEVICE
from gpufleet.job.contract.inputs import DATASET, WEIGHTS, is_file
from gpufleet.job.kind.job import secrets_needed
from gpufleet.job.text import counted, stamp

DLAMI_OWNER = "898082745236"  # the account that publishes the Deep Learning AMIs
GRANT_OPERATIONS = (
    "Decrypt Encrypt GenerateDataKey GenerateDataKeyWithoutPlaintext ReEncryptFrom ReEncryptTo CreateGrant DescribeKey"
)
# When a role launches a node, EBS makes these requests to the disk's key in the role's name (EBS User Guide,
# requirements for encryption, read 2026-11-25). EBS does not make the last three requests for every disk.
LAUNCH_OPERATIONS = ("CreateGrant", "Decrypt", "GenerateDataKeyWithoutPlaintext")
SOME_OPERATIONS = ("DescribeKey", "ReEncryptFrom", "ReEncryptTo")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, and the command or change that solves a problem."""

    name: str
    found: str
    state: Literal["ok", "warning", "problem"] = "ok"
    fix: str = ""


def identity(sts: Any) -> Check:
    """Whether the credentials work, and whose they are. If they do not work, no other check can run."""
    try:
        who = sts.get_caller_identity()
    except Exception as error:
        refused = refusals.refusal(error)
        if refused is None:
            raise
        return Check("credentials", str(refused), "problem")
    return Check("credentials", f"account {who['Account']} as {who['Arn'].rpartition(':')[2]}")


def service_roles(definition: StackDefinition, iam: Any) -> Iterator[Check]:
    """Whether the service-linked roles of fleets exist. The API does not create them when it makes a fleet."""
    for role, service in definition.fleet.market.roles.items():
        if _role(role, iam) is None:
            fix = f"aws iam create-service-linked-role --aws-service-name {service}"
            yield Check("role", f"{role} does not exist: the fleet may not launch", "problem", fix)
        else:
            yield Check("role", f"{role} exists")


def _role(name: str, iam: Any) -> dict[str, Any] | None:
    answer = refusals.absent(lambda: iam.get_role(RoleName=name), "NoSuchEntity")
    return answer["Role"] if answer else None


def offerings(definition: StackDefinition, ec2: Any) -> Iterator[Check]:
    """Whether each listed zone offers each listed type."""
    fleet = definition.fleet
    key, location = ("ZoneId", "availability-zone-id") if fleet.zone_ids else ("ZoneName", "availability-zone")
    zones = {zone[key] for zone in ec2.describe_availability_zones()["AvailabilityZones"]}
    for zone in fleet.zones:
        if zone not in zones:
            fix = f"Remove it from fleet.zones; your account has {', '.join(sorted(zones))}."
            yield Check("zone", f"your account has no zone {zone}", "problem", fix)
    filters = [
        {"Name": "instance-type", "Values": list(fleet.instance_types)},
        {"Name": "location", "Values": list(fleet.zones)},
    ]
    listed = pages(
        ec2, "describe_instance_type_offerings", "InstanceTypeOfferings", LocationType=location, Filters=filters
    )
    offered = {(item["InstanceType"], item["Location"]) for item in listed}
    if not offered:
        fix = "Change fleet.zones, fleet.region or fleet.instance_types."
        finding = f"no listed zone offers {' or '.join(fleet.instance_types)}"
        yield Check("offer", finding, "problem", fix)
        return
    for kind in fleet.instance_types:
        have = [zone for zone in fleet.zones if (kind, zone) in offered]
        missing = [zone for zone in fleet.zones if zone not in have]
        if missing:
            fix = f"Take {', '.join(missing)} out of fleet.zones, or {kind} out of fleet.instance_types."
            yield Check("offer", f"{kind} is not offered in {', '.join(missing)}", "warning", fix)
        else:
            yield Check("offer", f"{kind} in {', '.join(have)}")


def block(definition: StackDefinition, ec2: Any) -> Iterator[Check]:
    """Whether the Capacity Block belongs to the account, agrees with the file, and has room for the run's nodes."""
    fleet, declared = definition.fleet, definition.fleet.block
    if declared is None or declared.reservation is None:
        return
    name, place = declared.reservation, f"in {fleet.region}, for this account"
    ask = ec2.describe_capacity_reservations
    answer = refusals.absent(lambda: ask(CapacityReservationIds=[name]), "InvalidCapacityReservationId.")
    if answer is None:
        fix = "Correct fleet.block.reservation or fleet.region."
        yield Check("block", f"{name} does not exist {place}", "problem", fix)
        return
    reservation = answer["CapacityReservations"][0]
    state = str(reservation["State"])
    if reservation.get("ReservationType") != "capacity-block":
        fix = "Write fleet.capacity: on-demand: on-demand nodes use an open reservation automatically."
        yield Check("block", f"{name} is a reservation of another kind than a Capacity Block", "problem", fix)
        return
    if state not in ("active", "scheduled", "payment-pending"):
        fix = "Name another block, or write another fleet.capacity."
        yield Check("block", f"{name} is {state}", "problem", fix)
        return
    zone = str(reservation["AvailabilityZoneId" if fleet.zone_ids else "AvailabilityZone"])
    both = {
        "fleet.block.start": (stamp(declared.start), stamp(reservation["StartDate"])),
        "fleet.block.end": (stamp(declared.end), stamp(reservation["EndDate"])),
        "fleet.instance_types": (", ".join(fleet.instance_types), str(reservation["InstanceType"])),
        "fleet.zones": (", ".join(fleet.zones), zone),
    }
    wrong = {key: theirs for key, (ours, theirs) in both.items() if ours != theirs}
    for key, theirs in wrong.items():
        said_so = f"{key} says {both[key][0]}, {name} is of {theirs}"
        yield Check("block", said_so, "problem", f"Write {theirs}.")
    own = sum(
        node.get("InstanceLifecycle") == "capacity-block" and node["State"]["Name"] in ("pending", "running")
        for node in nodes_of(ec2, definition)
    )
    total, free = int(reservation["TotalInstanceCount"]), int(reservation["AvailableInstanceCount"]) + own
    if total < definition.nodes or (state == "active" and free < definition.nodes):
        room = (
            f"{name} has {counted(total, 'instance')}, {free} of them free or used by this run, which needs "
            f"{definition.nodes}"
        )
        fix = "End other instances in the block (they still count for some minutes), or lower fleet.nodes."
        yield Check("block", room, "problem", fix)
    elif not wrong:
        capacity = (
            f"{total} x {fleet.instance_types[0]} in {fleet.zones[0]}, {stamp(declared.start)} to {stamp(declared.end)}"
        )
        yield Check("block", f"{name}, {state}: {capacity}")


def ami(definition: StackDefinition, ec2: Any) -> Iterator[Check]:
    """Whether the AMI exists, has the right architecture and publisher, and fits on the root disk."""
    wanted, stack = definition.fleet.starts_from, definition.argument
    repin = f"gpufleet bake {stack} --delete" if definition.fleet.baked_ami else f"gpufleet doctor {stack} --pin"
    if wanted == "unpinned":
        yield Check("AMI", "fleet.ami is unpinned", "problem", repin)
        return
    answer = refusals.absent(lambda: ec2.describe_images(ImageIds=[wanted]), "InvalidAMIID.")
    images = answer["Images"] if answer else []
    if not images or images[0]["State"] != "available":
        finding = (
            f"{wanted} does not exist in {definition.fleet.region}, or was withdrawn: the fleet could not launch nodes"
        )
        yield Check("AMI", finding, "problem", repin)
        return
    image = images[0]
    root = next((m["Ebs"] for m in image.get("BlockDeviceMappings", []) if m.get("DeviceName") == ROOT_DEVICE), None)
    size = int((root or {}).get("VolumeSize") or 0)
    title = f"{wanted}, {image.get('Name', 'no name')}"
    if image.get("Architecture") != "x86_64":
        yield Check("AMI", f"{title} is for {image.get('Architecture')}", "problem", repin)
    elif image.get("RootDeviceName") != ROOT_DEVICE:
        finding = f"{title} has its root disk at {image.get('RootDeviceName')}, not at {ROOT_DEVICE} as gpufleet needs"
        yield Check("AMI", finding, "problem", "Use an Amazon Linux 2023 AMI.")
    elif size > definition.storage.root.size_gib:
        fix = f"Set storage.root.size_gib: {size}."
        yield Check("AMI", f"{title} needs a root disk of {size} GiB", "problem", fix)
    elif definition.fleet.baked_ami:
        yield Check("AMI", f"{title}, by `gpufleet bake`")
    elif image.get("OwnerId") != DLAMI_OWNER:
        owner = image.get("OwnerId")
        yield Check("AMI", f"{title} belongs to {owner}, not to AWS's Deep Learning AMIs", "warning")
    else:
        yield Check("AMI", f"{title}, by AWS")


def disk_key(definition: StackDefinition, ec2: Any, kms: Any, iam: Any) -> Iterator[Check]:
    """Whether the fleet can use the key that encrypts the disks: the key in the file, or the account's default key if
    the file has none; for a disk from a snapshot, the key of the snapshot. A customer key must allow the fleet's role.
    The key in the file must also allow the nodes, because it encrypts their bucket.
    """
    own = definition.account.kms_key
    yield from _key("new disks are", own or str(ec2.get_ebs_default_kms_key_id()["KmsKeyId"]), definition, kms, iam)
    if own:
        yield _bucket_key(own, definition, kms)
    snapshot = definition.storage.data.snapshot if definition.storage.data else None
    key = (_snapshot(snapshot, ec2) or {}).get("KmsKeyId") if snapshot else None
    if key:
        yield from _key(f"the disk of {snapshot} is", str(key), definition, kms, iam)


def _key(disk: str, key: str, definition: StackDefinition, kms: Any, iam: Any) -> Iterator[Check]:
    region, alias = definition.fleet.region, key.endswith("alias/aws/ebs")
    metadata = {} if alias else kms.describe_key(KeyId=key)["KeyMetadata"]
    if alias or metadata["KeyManager"] == "AWS":
        yield Check("disk key", f"{disk} encrypted with AWS's own key")
        return
    if not metadata.get("Enabled", True):
        yield Check("disk key", f"{key} is disabled", "problem", f"aws kms enable-key --region {region} --key-id {key}")
        return
    if not definition.fleet.market.roles:
        needs = f"the user who runs `up` launches, and needs {', '.join(LAUNCH_OPERATIONS)}"
        yield Check("disk key", f"{disk} encrypted with your key {key}: {needs}", "warning")
        return
    key = str(metadata["Arn"])  # the account's default key may be an alias, which is refused below
    grants = [_as_statement(grant) for grant in pages(kms, "list_grants", "Grants", KeyId=key)]
    policy = json.loads(kms.get_key_policy(KeyId=key, PolicyName="default")["Policy"]).get("Statement", [])
    for role in definition.fleet.market.roles:
        if (described := _role(role, iam)) is None:  # service_roles already reports a missing role
            continue
        arn = str(described["Arn"])
        wishes = {
            operation: _launching(operation, arn, key, region) for operation in LAUNCH_OPERATIONS + SOME_OPERATIONS
        }
        may = {operation: iam_policy.allowed([*policy, *grants], wish) for operation, wish in wishes.items()}
        denied = any(
            statement["Effect"] == "Deny" and iam_policy.speaks_of(statement, wish) is not False
            for statement in policy
            for wish in wishes.values()
        )
        fix = (
            f"aws kms create-grant --region {region} --key-id {key} --grantee-principal {arn} "
            f"--operations {GRANT_OPERATIONS}"
        )
        if denied:
            fix = (
                "Correct its policy, because no grant outweighs a denial in it: "
                f"aws kms get-key-policy --region {region} --key-id {key} --policy-name default"
            )
        missing = ", ".join(operation for operation in LAUNCH_OPERATIONS if may[operation] is False)
        if missing:
            finding = (
                f"{disk} encrypted with your key {key}, which {role} may not use ({missing}): nodes would end at launch"
            )
            yield Check("disk key", finding, "problem", fix)
        elif all(may.values()):
            yield Check("disk key", f"{key} is a customer key, and {role} may use it")
        else:
            unsure = ", ".join(operation for operation, answer in may.items() if not answer)
            finding = f"{disk} encrypted with your key {key}; cannot tell whether {role} may use it ({unsure})"
            yield Check("disk key", finding, "warning", fix)


def _bucket_key(key: str, definition: StackDefinition, kms: Any) -> Check:
    """Whether nodes can use the bucket's key. The nodes' role does not exist before `up`, so IAM cannot be asked about
    it. The answer is certain only if the key's policy leaves the decision to the account's IAM policies.
    """
    policy = json.loads(kms.get_key_policy(KeyId=key, PolicyName="default")["Policy"])["Statement"]
    root = f"arn:aws:iam::{key.split(':')[4]}:root"
    context = {"kms:ViaService": f"s3.{definition.fleet.region}.amazonaws.com", "kms:CallerAccount": key.split(":")[4]}
    delegated = [
        iam_policy.allowed(
            policy,
            iam_policy.AccessRequest(action=action, resource=key, principal=root, context=context, complete=False),
        )
        for action in ("kms:Decrypt", "kms:GenerateDataKey")
    ]
    if all(delegated):
        return Check("bucket key", f"{key} is a customer key whose policy lets IAM policies decide who may use it")
    return Check(
        "bucket key",
        f"cannot tell whether nodes may use {key} for the bucket: its policy does not let IAM policies decide",
        "warning",
        f"Let its policy allow {root} kms:Decrypt and kms:GenerateDataKey; the nodes' role narrows it.",
    )


def _launching(operation: str, role: str, key: str, region: str) -> iam_policy.AccessRequest:
    """The access request that the role makes to the KMS key when a node is launched. The request comes through EC2,
    which asks for grants on behalf of AWS resources.
    """
    account = role.split(":")[4]
    context = {
        "kms:ViaService": f"ec2.{region}.amazonaws.com",
        "kms:CallerAccount": account,
        "kms:GrantIsForAWSResource": "true" if operation == "CreateGrant" else None,
        "aws:PrincipalAccount": account,
        "aws:PrincipalArn": role,
    }
    return iam_policy.AccessRequest(
        action=f"kms:{operation}", resource=key, principal=role, context=context, complete=False
    )


def _as_statement(grant: dict[str, Any]) -> iam_policy.Statement:
    """A grant as a policy statement. A grant with constraints decides nothing here, because they concern the encryption
    context, which only EC2 knows.
    """
    constraints = grant.get("Constraints")
    return {
        "Effect": "Allow",
        "Principal": {"AWS": grant.get("GranteePrincipal", "")},
        "Action": [f"kms:{operation}" for operation in grant["Operations"]],
        "Resource": "*",
        "Condition": {"GrantConstraints": constraints} if constraints else {},
    }


def inputs(definition: StackDefinition, s3: Any, ec2: Any, kms: Any) -> Iterator[Check]:
    """Whether nodes can read the definition's files below s3:// prefixes, and whether its snapshot exists."""
    places = {
        "dataset": (definition.storage.dataset, DATASET),
        "base_weights": (definition.storage.base_weights, WEIGHTS),
    }
    for key, (place, listing) in places.items():
        if place and place.startswith("s3://"):
            yield _prefix(key, place.rstrip("/"), listing, definition.account.kms_key, s3, kms)
    for name, place in (definition.storage.inputs or {}).items():
        if place.startswith("s3://"):
            yield _prefix(f"inputs.{name}", place.rstrip("/"), _first(place, s3), definition.account.kms_key, s3, kms)
    disk = definition.storage.data
    if disk is None or disk.snapshot is None:
        return
    snapshot = _snapshot(disk.snapshot, ec2)
    if snapshot is None:
        finding = f"{disk.snapshot} does not exist in {definition.fleet.region}"
        yield Check("snapshot", finding, "problem", "Correct storage.data.snapshot.")
        return
    if snapshot["VolumeSize"] > disk.size_gib:
        fix = f"Set storage.data.size_gib: {snapshot['VolumeSize']}."
        yield Check("snapshot", f"{disk.snapshot} is larger than its disk", "problem", fix)
    else:
        yield Check("snapshot", f"{disk.snapshot}, {snapshot['VolumeSize']} GiB")


def _snapshot(name: str, ec2: Any) -> dict[str, Any] | None:
    """EC2's description of the snapshot; None if it does not exist."""
    answer = refusals.absent(
        lambda: ec2.describe_snapshots(SnapshotIds=[name]), "InvalidSnapshot.", "InvalidSnapshotID."
    )
    return answer["Snapshots"][0] if answer else None


def _first(place: str, s3: Any) -> str:
    """The key of the first listed object below a prefix that has no manifest; a made-up key if there is no object."""
    bucket, _, path = place.removeprefix("s3://").partition("/")
    prefix = f"{path.strip('/')}/" if path.strip("/") else ""
    listed = refusals.absent(lambda: s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=10), "NoSuchBucket")
    names = [item["Key"].removeprefix(prefix) for item in (listed or {}).get("Contents", ())]
    return next(filter(is_file, names), "(any file)")


def secrets(definition: StackDefinition, client: Callable[[str, str], Any]) -> Iterator[Check]:
    """Whether the job's secrets exist where the file says. The secrets' values are not read."""
    region, own = definition.fleet.region, definition.account.kms_key or ""
    for reference in dict.fromkeys(secrets_needed(definition.job.parameters).values()):
        service, _, name = reference.partition(":")
        key = _parameter(name, client("ssm", region)) if service == "ssm" else _secret(name, client(service, region))
        if key is None:
            fix = f"Create it in {region}, or correct job.secrets."
            yield Check("secret", f"{reference} does not exist", "problem", fix)
        elif key and key != own and not own.endswith(f"/{key}"):
            finding = f"{reference} is encrypted with {key}, but nodes may only use account.kms_key to decrypt"
            yield Check(
                "secret", finding, "problem", f"Set account.kms_key to {key}, or encrypt the secret with AWS's key."
            )
        else:
            yield Check("secret", f"{reference} is there")


def _parameter(name: str, ssm: Any) -> str | None:
    """The customer key that encrypts a parameter; empty for AWS's own key, None if there is no such parameter."""
    wanted = {"Key": "Name", "Option": "Equals", "Values": [name]}
    parameter = next(iter(pages(ssm, "describe_parameters", "Parameters", ParameterFilters=[wanted])), None)
    if parameter is None:
        return None
    key = str(parameter.get("KeyId") or "")
    return "" if key == "alias/aws/ssm" else key


def _secret(name: str, manager: Any) -> str | None:
    """The customer key that encrypts a secret; empty for AWS's own key, None if the secret does not exist or is being
    deleted.
    """
    secret = refusals.absent(lambda: manager.describe_secret(SecretId=name), "ResourceNotFoundException")
    if secret is None or secret.get("DeletedDate"):
        return None
    key = str(secret.get("KmsKeyId") or "")
    return "" if key == "alias/aws/secretsmanager" else key


def _prefix(key: str, place: str, listing: str, own: str | None, s3: Any, kms: Any) -> Check:
    """Whether a prefix has its list of files. `prepare` writes this list, and a node reads it first."""
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    place_of_list = {"Bucket": bucket, "Key": f"{prefix}/{listing}".lstrip("/")}
    listed = refusals.absent(lambda: s3.head_object(**place_of_list), "NoSuchBucket", "NoSuchKey", "404")
    if listed is None:
        fix = f"Put storage.{key} right."
        if listing in (DATASET, WEIGHTS):
            fix = f"Correct storage.{key}; it needs {listing} and all files that `gpufleet prepare` lists in it."
        return Check(key, f"{place}/{listing} is not there", "problem", fix)
    used = listed.get("SSEKMSKeyId")
    manager = _manager(used, kms) if used and used != own else "AWS"
    if manager != "AWS":
        doubt = "" if manager else "cannot tell whose key that is, and "
        return Check(
            key,
            f"{place}/{listing} is encrypted with {used}: {doubt}a node may not decrypt with a key of yours",
            "problem" if manager else "warning",
            f"Set account.kms_key to it, or: aws s3 cp --recursive --sse AES256 {place} s3://...",
        )
    return Check(key, f"{place}/{listing} is there")


def _manager(key: str, kms: Any) -> str:
    """The manager of a key: AWS or CUSTOMER. Empty if KMS does not say."""
    try:
        return str(kms.describe_key(KeyId=key)["KeyMetadata"]["KeyManager"])
    except ClientError:
        return ""
