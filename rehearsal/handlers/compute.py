"""Handlers for launch template and EC2 Fleet, with those habits of the provider that matter in a rehearsal.

An update of a fleet resends its template and its capacity. Deleting waits until the fleet is `deleted`. A deleted fleet
is treated as missing when it is read. (terraform-provider-aws internal/service/ec2/ec2_fleet.go, read 2026-11-21.)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gpufleet.infra.account.fleet import NO_FLEET
from gpufleet.infra.account.refusals import absent
from gpufleet.job.text import stamp
from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.calls import OwnCalls
from gpufleet.rehearsal.handlers.table import Aws, Properties, UnsupportedError, tagged

_POLL_S = 0.05
# Seconds for which the provider waits for `deleted`. An instant fleet does not reach this state in this time
# (docs/decisions, capacity block).
_DELETE_S = {"maintain": 1800.0, "instant": 600.0}
_GONE_STATES = ("deleted", "deleted_running", "deleted_terminating")
# Inputs of the resource that AWS keeps in the data of the launch template.
_DATA = table.fields(
    "imageId userData iamInstanceProfile vpcSecurityGroupIds networkInterfaces instanceInitiatedShutdownBehavior "
    "metadataOptions blockDeviceMappings tagSpecifications instanceMarketOptions capacityReservationSpecification"
)


def _template_data(inputs: Properties) -> dict[str, Any]:
    return dict(table.to_api({key: value for key, value in inputs.items() if key in _DATA}))


def _create_template(aws: Aws, inputs: Properties) -> str:
    answer = aws.ec2.create_launch_template(
        LaunchTemplateName=inputs["name"],
        LaunchTemplateData=_template_data(inputs),
        TagSpecifications=table.tag_specification("launch-template", inputs),
    )
    return str(answer["LaunchTemplate"]["LaunchTemplateId"])


def _update_template(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if any(old.get(key) != new.get(key) for key in _DATA):
        version = aws.ec2.create_launch_template_version(
            LaunchTemplateId=resource_id, LaunchTemplateData=_template_data(new)
        )["LaunchTemplateVersion"]["VersionNumber"]
        if new.get("updateDefaultVersion"):
            aws.ec2.modify_launch_template(LaunchTemplateId=resource_id, DefaultVersion=str(version))


def _read_template(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(
        lambda: aws.ec2.describe_launch_templates(LaunchTemplateIds=[resource_id]),
        "InvalidLaunchTemplateId.NotFound",
        "InvalidLaunchTemplateId.NotFoundException",
    )
    if not answer or not answer["LaunchTemplates"]:
        return None
    template = answer["LaunchTemplates"][0]
    newest = aws.ec2.describe_launch_template_versions(LaunchTemplateId=resource_id, Versions=["$Latest"])
    data = newest["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    return {
        **table.from_api(data),
        "name": template["LaunchTemplateName"],
        "latestVersion": template["LatestVersionNumber"],
        "defaultVersion": template["DefaultVersionNumber"],
        "arn": aws.arn("ec2", f"launch-template/{resource_id}"),
        **tagged(template.get("Tags")),
    }


def _fleet_configs(inputs: Properties) -> list[dict[str, Any]]:
    return [
        {
            "LaunchTemplateSpecification": table.to_api(config["launchTemplateSpecification"]),
            "Overrides": table.to_api(config.get("overrides", [])),
        }
        for config in inputs["launchTemplateConfigs"]
    ]


def _create_fleet(aws: Aws, inputs: Properties) -> str:
    request: dict[str, Any] = {
        "Type": inputs.get("type", "maintain"),
        "LaunchTemplateConfigs": _fleet_configs(inputs),
        "TargetCapacitySpecification": table.to_api(inputs["targetCapacitySpecification"]),
        "ExcessCapacityTerminationPolicy": inputs.get("excessCapacityTerminationPolicy", "termination"),
        "TerminateInstancesWithExpiration": inputs.get("terminateInstancesWithExpiration", False),
        "ReplaceUnhealthyInstances": inputs.get("replaceUnhealthyInstances", False),
        "TagSpecifications": table.tag_specification("fleet", inputs),
    }
    if "spotOptions" in inputs:
        request["SpotOptions"] = table.to_api(inputs["spotOptions"])
    if "validUntil" in inputs:
        request["ValidUntil"] = datetime.fromisoformat(inputs["validUntil"])
    fleet = str(aws.ec2.create_fleet(**request)["FleetId"])
    _wait(aws, fleet, {"active"}, timeout_s=600)
    return fleet


def _fleet(aws: Aws, resource_id: str) -> dict[str, Any] | None:
    answer = absent(lambda: aws.ec2.describe_fleets(FleetIds=[resource_id]), *NO_FLEET)
    return answer["Fleets"][0] if answer and answer["Fleets"] else None


def _read_fleet(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    fleet = _fleet(aws, resource_id)
    if fleet is None or fleet["FleetState"] in _GONE_STATES:
        return None
    times = {key: stamp(fleet[table.api(key)]) for key in ("validFrom", "validUntil") if fleet.get(table.api(key))}
    arn = aws.arn("ec2", f"fleet/{resource_id}")
    return {**table.from_api(fleet), **times, "arn": arn, **tagged(fleet.get("Tags"))}


def _update_fleet(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if any(old.get(key) != new.get(key) for key in new if key not in ("tags", "terminateInstances")):
        aws.ec2.modify_fleet(
            FleetId=resource_id,
            ExcessCapacityTerminationPolicy=new.get("excessCapacityTerminationPolicy", "termination"),
            LaunchTemplateConfigs=_fleet_configs(new),
            TargetCapacitySpecification={
                "TotalTargetCapacity": new["targetCapacitySpecification"]["totalTargetCapacity"]
            },
        )
        _wait(aws, resource_id, {"active"}, timeout_s=600)


def _delete_fleet(aws: Aws, resource_id: str, state: Properties) -> None:
    terminate = bool(state.get("terminateInstances"))
    answer = aws.ec2.delete_fleets(FleetIds=[resource_id], TerminateInstances=terminate)
    for failure in answer.get("UnsuccessfulFleetDeletions", []):
        if failure["Error"]["Code"] == "fleetIdDoesNotExist":
            return
        raise UnsupportedError(f"fleet {resource_id} cannot be deleted: {failure['Error']['Message']}")
    gone = {"deleted"} if terminate else {"deleted", "deleted_running"}
    _wait(aws, resource_id, gone, timeout_s=_DELETE_S[str(state.get("type", "maintain"))])


def _wait(aws: Aws, fleet: str, states: set[str], *, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while (described := _fleet(aws, fleet)) and described["FleetState"] not in states:
        if described["FleetState"] in ("deleted", "failed") or time.monotonic() > until:
            raise UnsupportedError(f"fleet {fleet} is {described['FleetState']}, not {' or '.join(sorted(states))}")
        time.sleep(_POLL_S)


def _delete_image(aws: Aws, resource_id: str, state: Properties) -> None:
    aws.ec2.deregister_image(ImageId=resource_id)
    aws.ec2.delete_snapshot(SnapshotId=state["rootSnapshotId"])


def _root_snapshot(aws: Aws, like: Properties, live: Properties, image: Mapping[str, Any]) -> Properties:
    return {"rootSnapshotId": image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]}


OWN = {
    "aws:ec2/amiFromInstance:AmiFromInstance": OwnCalls(delete=_delete_image, seen=_root_snapshot),
    "aws:ec2/launchTemplate:LaunchTemplate": OwnCalls(_create_template, _read_template, change=_update_template),
    "aws:ec2/fleet:Fleet": OwnCalls(_create_fleet, _read_fleet, _delete_fleet, change=_update_fleet),
}
