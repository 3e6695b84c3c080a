"""Questions to AWS that cost nothing: what the account has and may do, how AWS refuses, how a bucket behaves, and two
fleets without nodes, one of which expires while a schedule deletes the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, quotas, rights
from gpufleet.infra.account.doctor import AMI_PARAMETER
from gpufleet.infra.account.fleet import ENDED
from gpufleet.infra.account.refusals import code
from gpufleet.infra.account.run_folder import find_log_groups, name_prefix
from gpufleet.infra.canary import role_rights
from gpufleet.infra.canary.assumptions import known
from gpufleet.infra.canary.observations import LATE, FlightFacts
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import PriceMissing
from gpufleet.infra.program.resources.stop import END_FLEET
from gpufleet.infra.program.resources.stop import SCHEDULE as STOP
from gpufleet.infra.program.resources.tags import STACK_TAG, own_tags
from gpufleet.job import atomic

Asked = Callable[[str], Any]  # makes boto3's client of a service
SCHEDULE = "canary"
BYTES = 8_000_000


def account(facts: FlightFacts, stack: StackDefinition, asked: Asked) -> None:
    """Adds what the account has before anything is made: quotas, zones, offers, types, prices, AMI, roles, rights."""
    ec2, region, catalog, add = asked("ec2"), stack.fleet.region, load_catalog(), facts.add
    asked("sts").get_caller_identity()
    zones = {zone["ZoneName"]: zone["ZoneId"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]}
    add("zones.known", set(catalog.zones(region)) <= zones.keys())
    add("zones.prefix", all(zone_id.startswith(catalog.zone_id_prefix(region)) for zone_id in zones.values()))
    filters = [{"Name": "instance-type", "Values": list(stack.fleet.instance_types)}]
    by = {
        kind: {(offer["InstanceType"], offer["Location"]) for offer in aws.pages(
            ec2, "describe_instance_type_offerings", "InstanceTypeOfferings", LocationType=kind, Filters=filters)}
        for kind in ("availability-zone", "availability-zone-id")
    }  # fmt: skip
    named = {(kind, zones[zone]) for kind, zone in by["availability-zone"] if zone in zones}
    add("offers.by_id", named == {(kind, id) for kind, id in by["availability-zone-id"] if id in zones.values()})
    for described in ec2.describe_instance_types(InstanceTypes=list(stack.fleet.instance_types))["InstanceTypes"]:
        own = catalog.instances[described["InstanceType"]]
        add("type.vcpus", int(described["VCpuInfo"]["DefaultVCpus"]) == own.vcpu)
        add("type.memory", round(int(described["MemoryInfo"]["SizeInMiB"]) / 1024) == round(own.memory_gib))
        add(
            "type.gpus", sum(int(gpu["Count"]) for gpu in described.get("GpuInfo", {}).get("Gpus", [])) == own.gpu_count
        )
    gpus = any(catalog.instances[type_].gpu_count for type_ in stack.fleet.instance_types)
    for need in quotas.needs(stack.fleet, "spot")[0]:
        quota = asked("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=need.code)["Quota"]
        add("quota.name" if gpus else "quota.standard_name", quota["QuotaName"])
        add("quota.value", float(quota["Value"]))
    _prices(facts, stack, ec2)
    ami = asked("ssm").get_parameter(Name=AMI_PARAMETER)["Parameter"]["Value"]
    (image,) = ec2.describe_images(ImageIds=[ami])["Images"]
    for key in ("RootDeviceName", "OwnerId", "Architecture", "State"):
        add(f"ami.{key}", image[key])
    add("ami.name", image.get("Name", ""))
    add("disk.key", str(ec2.get_ebs_default_kms_key_id()["KmsKeyId"]).rpartition(":")[2])
    for role in stack.fleet.market.roles:
        add("roles.there", bool(asked("iam").get_role(RoleName=role)["Role"]["Arn"]))
    for check in rights.check(stack, asked("sts"), asked("iam")):
        add("rights.simulated", check.state != "problem")


def _prices(facts: FlightFacts, stack: StackDefinition, ec2: Any) -> None:
    """Adds the ratio of today's spot prices to the known spot prices, and to the on-demand price."""
    catalog, region = load_catalog(), stack.fleet.region
    prefix = catalog.zone_id_prefix(region)
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]}
    now = datetime.now(UTC)
    for kind in stack.fleet.instance_types:
        history = ec2.describe_spot_price_history(
            InstanceTypes=[kind], ProductDescriptions=["Linux/UNIX"], StartTime=now, EndTime=now
        )["SpotPriceHistory"]
        facts.add("price.told", bool(history))
        held = {prefix + zone.zone: zone.price.amount for zone in catalog.spot_zones(kind, region)}
        for row in history:
            facts.add("price.spot_usd", float(row["SpotPrice"]))
            try:
                dearest = float(catalog.on_demand(kind, region).amount)
                facts.add("price.of_on_demand", float(row["SpotPrice"]) / dearest)
            except PriceMissing:
                pass
            if known_usd := held.get(ids.get(row["AvailabilityZone"], "")):
                facts.add("price.of_known", float(row["SpotPrice"]) / float(known_usd))


def refusals(facts: FlightFacts, asked: Asked) -> None:
    """Makes the calls that AWS should refuse, and adds the code of each refusal."""
    for assumption in known():
        if assumption.ask:
            service, _, operation = assumption.ask.partition(".")
            facts.add(assumption.fact, _code(lambda: getattr(asked(service), operation)(**(assumption.given or {}))))  # noqa: B023


def bucket(facts: FlightFacts, s3: Any, name: str) -> None:
    """Adds how S3 behaves right after a write, and with conditional writes."""
    add, key, body = facts.add, "canary/probe", atomic.json_bytes({"probe": 1})
    began = time.monotonic()
    s3.put_object(Bucket=name, Key="canary/large", Body=b"\0" * BYTES)
    add("s3.put_s", time.monotonic() - began)
    put = s3.put_object(Bucket=name, Key=key, Body=body)
    add("s3.read_at_once", s3.get_object(Bucket=name, Key=key)["Body"].read() == body)
    add("s3.listed_at_once", s3.list_objects_v2(Bucket=name, Prefix=key).get("KeyCount") == 1)
    head = s3.head_object(Bucket=name, Key=key)
    add("s3.same_etag", head["ETag"] == put["ETag"])
    add("s3.clock_s", abs((datetime.now(UTC) - head["LastModified"]).total_seconds()))
    add("s3.encrypted", head.get("ServerSideEncryption", "not"))
    conditions = {
        "absent": {"IfNoneMatch": "*"},
        "other": {"IfMatch": f'"{"0" * 32}"'},
        "same": {"IfMatch": put["ETag"]},
    }
    for how, condition in conditions.items():
        own = f"canary/{how}"
        s3.put_object(Bucket=name, Key=own, Body=body)
        add(f"s3.over_{how}", _code(lambda: s3.put_object(Bucket=name, Key=own, Body=b"", **condition)))  # noqa: B023
    s3.delete_object(Bucket=name, Key=key)
    add("s3.gone_at_once", _code(lambda: s3.get_object(Bucket=name, Key=key)))
    add("s3.deleted_again", _code(lambda: s3.delete_object(Bucket=name, Key=key)))
    upload = s3.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
    s3.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=b"part")
    listed = s3.list_multipart_uploads(Bucket=name).get("Uploads", [])
    add("s3.upload_listed", [pending["Key"] for pending in listed] == [key])
    s3.abort_multipart_upload(Bucket=name, Key=key, UploadId=upload)
    add("s3.upload_aborted", not s3.list_multipart_uploads(Bucket=name).get("Uploads"))
    public = s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"]
    add("s3.closed", all(public.values()))
    add("s3.tagged", STACK_TAG in aws.tags_of(s3.get_bucket_tagging(Bucket=name)))


def _code(call: Callable[[], Any]) -> str:
    """The code with which AWS refuses the call; `accepted` if it does not."""
    try:
        call()
    except ClientError as error:
        return code(error)
    return "accepted"


def role(facts: FlightFacts, stack: StackDefinition, asked: Asked, bucket: str) -> None:
    """Adds what the policy simulator says about the role of the stack's nodes."""
    ec2, iam = asked("ec2"), asked("iam")
    latest = {"LaunchTemplateId": _template(ec2, stack), "Versions": ["$Latest"]}
    (version,) = ec2.describe_launch_template_versions(**latest)["LaunchTemplateVersions"]
    (profile,) = version["LaunchTemplateData"]["IamInstanceProfile"].values()  # its name, or its ARN
    named = iam.get_instance_profile(InstanceProfileName=profile.rpartition("/")[2])["InstanceProfile"]
    arn, schedule = named["Roles"][0]["Arn"], _declared_stop(asked("scheduler"), stack)
    account, of_bucket = arn.split(":")[4], f"arn:aws:s3:::{bucket}"
    (group,) = find_log_groups(asked("logs"), stack.name)
    places = {
        "account": account,
        "place": f"{stack.fleet.region}:{account}",
        "bucket": of_bucket,
        "own": f"{of_bucket}/{stack.run.id}",
        "log_group": group["arn"].removesuffix(":*"),
        "schedule": schedule["Arn"],
        "stop_role": schedule["Target"]["RoleArn"],
    }
    role_rights.ask(facts, stack, iam, arn, places)


def _template(ec2: Any, stack: StackDefinition) -> str:
    """The id of the stack's launch template."""
    tagged = [{"Name": f"tag:{STACK_TAG}", "Values": [stack.name]}]
    (template,) = ec2.describe_launch_templates(Filters=tagged)["LaunchTemplates"]
    return str(template["LaunchTemplateId"])


def _declared_stop(scheduler: Any, stack: StackDefinition) -> dict[str, Any]:
    """The schedule that ends the stack's fleet, as AWS describes it."""
    groups = list(aws.pages(scheduler, "list_schedule_groups", "ScheduleGroups", NamePrefix=name_prefix(stack.name)))
    group = next(
        described["Name"] for described in groups if "-cap-" not in described["Name"] or stack.name.endswith("cap")
    )
    return dict(scheduler.get_schedule(Name=STOP, GroupName=group))


class Stops(NamedTuple):
    """The two fleets without nodes, and the time at which both must stop."""

    expiring: str
    deleted: str
    due: float  # in epoch seconds


def stops_begin(facts: FlightFacts, stack: StackDefinition, asked: Asked, stop_s: float) -> Stops:
    """Makes two fleets without nodes from the stack's template, and a schedule that deletes one of them with the
    stack's role. Compares the schedule group, the schedule and the log group with what the program has declared.
    """
    ec2, scheduler, add = asked("ec2"), asked("scheduler"), facts.add
    schedule = _declared_stop(scheduler, stack)
    add("schedule.declared", schedule["Target"]["Arn"] == END_FLEET and schedule["State"] == "ENABLED")
    add("log.group", len(list(find_log_groups(asked("logs"), stack.name))))
    subnets = ec2.describe_subnets(Filters=[{"Name": f"tag:{STACK_TAG}", "Values": [stack.name]}])["Subnets"]
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=stop_s)
    due, later = until, until + timedelta(hours=1)
    wanted = [_empty_fleet(stack, _template(ec2, stack), subnets[0]["SubnetId"], ends) for ends in (due, later)]
    add("dry.run", _code(lambda: ec2.create_fleet(**wanted[0], DryRun=True)))
    fleets = [str(ec2.create_fleet(**request)["FleetId"]) for request in wanted]
    add("dry.run", _code(lambda: ec2.delete_fleets(FleetIds=fleets, TerminateInstances=True, DryRun=True)))
    target = schedule["Target"]
    asked_for = {
        "Name": f"{SCHEDULE}-{fleets[1][-12:]}",
        "GroupName": schedule["GroupName"],
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ScheduleExpressionTimezone": "UTC",
        "Target": {
            "Arn": END_FLEET,
            "RoleArn": target["RoleArn"],
            "Input": json.dumps({"FleetIds": [fleets[1]], "TerminateInstances": True}),
        },
    }
    past = f"at({until - timedelta(days=1):%Y-%m-%dT%H:%M:%S})"
    add("schedule.past", _code(lambda: scheduler.create_schedule(**asked_for, ScheduleExpression=past)))
    scheduler.create_schedule(**asked_for, ScheduleExpression=f"at({until:%Y-%m-%dT%H:%M:%S})")
    state = _state(ec2, fleets[1])
    add("fleet.accepted_as", state)
    add("fleet.resized", _code(lambda: _resize(ec2, fleets[1])))
    return Stops(expiring=fleets[0], deleted=fleets[1], due=due.timestamp())


def _empty_fleet(stack: StackDefinition, template: str, subnet: str, until: datetime) -> dict[str, Any]:
    """The arguments of CreateFleet for a fleet without nodes. The fleet has the run's tags, so that the role of the
    stop may end it, and a sweep finds it.
    """
    tags = [{"Key": key, "Value": value} for key, value in own_tags(stack).items()]
    return {
        "Type": "maintain",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "$Latest"},
                "Overrides": [{"InstanceType": stack.fleet.instance_types[0], "SubnetId": subnet}],
            }
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 0, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        "ValidUntil": until,
        "TerminateInstancesWithExpiration": True,
        "ExcessCapacityTerminationPolicy": "termination",
        "TagSpecifications": [{"ResourceType": "fleet", "Tags": tags}],
    }


def _resize(ec2: Any, fleet: str) -> None:
    ec2.modify_fleet(FleetId=fleet, TargetCapacitySpecification={"TotalTargetCapacity": 0})


def _state(ec2: Any, fleet: str) -> str:
    return str(ec2.describe_fleets(FleetIds=[fleet])["Fleets"][0]["FleetState"])


def stops_end(facts: FlightFacts, stops: Stops, asked: Asked, sleep: Callable[[float], None], most_s: float) -> None:
    """Adds what has become of the two fleets: how many seconds after its time each stop came, and its traces."""
    ec2, add = asked("ec2"), facts.add

    def seconds(moment: Callable[[], float | None]) -> float | str:
        """Waits until `moment` returns a time; returns how many seconds this is after the due time, or the text LATE if
        there is none in time.
        """
        while (at := moment()) is None:
            if time.time() > stops.due + most_s:
                return LATE.format(most_s)
            sleep(min(2.0, most_s / 50))
        return max(at - stops.due, 0.0)

    def deleted() -> float | None:
        if _state(ec2, stops.deleted) not in ENDED:
            return None
        return _event(ec2, stops.deleted, "deleted", stops.due) or time.time()

    add("schedule.late_s", seconds(deleted))
    add("expiry.late_s", late := seconds(lambda: _event(ec2, stops.expiring, "expired", stops.due)))
    if not isinstance(late, str):
        add("expiry.state", _state(ec2, stops.expiring))
        add("expiry.resized", _code(lambda: _resize(ec2, stops.expiring)))
    # deletes the fleet even if the schedule has not
    ec2.delete_fleets(FleetIds=[stops.deleted], TerminateInstances=True)
    again = ec2.delete_fleets(FleetIds=[stops.deleted], TerminateInstances=True)
    add("delete.again", _undeleted(again))
    unknown = ec2.delete_fleets(FleetIds=["fleet-00000000-0000-4000-8000-000000000000"], TerminateInstances=True)
    add("delete.unknown", _undeleted(unknown))
    ec2.delete_fleets(FleetIds=[stops.expiring], TerminateInstances=True)


def _undeleted(answer: dict[str, Any]) -> str:
    """The error code in an answer about a fleet that was not deleted."""
    return next((failure["Error"]["Code"] for failure in answer.get("UnsuccessfulFleetDeletions", [])), "deleted")


def _event(ec2: Any, fleet: str, kind: str, due: float) -> float | None:
    """The epoch seconds of an event in the fleet's history whose sub-type begins with `kind`; None if there is none."""
    since = datetime.fromtimestamp(due, UTC) - timedelta(hours=1)
    records = ec2.describe_fleet_history(FleetId=fleet, StartTime=since)["HistoryRecords"]
    matching = (event for event in records if event["EventInformation"].get("EventSubType", "").startswith(kind))
    return next((event["Timestamp"].timestamp() for event in matching), None)
