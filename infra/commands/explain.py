"""Why a fleet has no node, in words: what its history says, and what to do about it. Pure.

Event names: EC2 API, EventInformation (botocore 1.44.5). Error names inside descriptions: public reports and
general knowledge, not read at AWS. Unknown events are shown as they are: a wrong guess costs more than none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from infra.definition import StackDefinition


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One cause. `final`: waiting changes nothing."""

    cause: str
    remedy: str
    final: bool = False


# By a pattern on "subtype: description"; the first that is found counts.
_RULES = {
    r"spotInstanceCountLimitExceeded|MaxSpotInstanceCountExceeded|VcpuLimitExceeded|vCPU limit|limit.*vCPU": Reason(
        cause="the account's vCPU quota does not allow this node",
        remedy="`gpufleet doctor {stack}` shows the quota and the command that asks for more; AWS answers in hours to "
        "days. If another node is still running or has just ended, its vCPUs count for a few minutes more.",
    ),
    r"iamFleetRoleInvalid|ServiceLinkedRole": Reason(
        cause="the fleet may not launch: its service-linked role is missing or damaged",
        remedy="Run `aws iam create-service-linked-role --aws-service-name ec2fleet.amazonaws.com` and the same for "
        "spot.amazonaws.com, then `pulumi destroy` and `pulumi up`.",
        final=True,
    ),
    r"Invalid IAM Instance Profile": Reason(
        cause="EC2 does not know the node's instance profile: it was made a moment ago, or somebody deleted it",
        remedy="Wait: the fleet tries again by itself, some minutes later. If this is said then too, give run.id a new "
        "value, then `pulumi up`: a fleet keeps the profile that it was made with.",
    ),
    r"InvalidAMIID|image id|InvalidAMI|AMI .*not (exist|found|available)": Reason(
        cause="the AMI does not exist in {region}, or is no longer offered",
        remedy="Run `gpufleet doctor {stack} --pin`, give run.id a new value, then `pulumi up`.",
        final=True,
    ),
    r"InvalidSnapshot": Reason(
        cause="the data volume's snapshot does not exist in {region}, or is not shared with this account",
        remedy="Put storage.data.snapshot right, give run.id a new value, then `pulumi up`.",
        final=True,
    ),
    r"KMS|Client\.InternalError|InvalidKey": Reason(
        cause="the encryption key of the disks cannot be used by the fleet",
        remedy="`gpufleet doctor {stack}` shows the key and the grant that AWSServiceRoleForEC2Fleet needs.",
        final=True,
    ),
    r"launchSpecUnusable|fleetProgressHalted|SpotMaxPriceTooLow|price.*(low|below)": Reason(
        cause="every spot price is above the ceiling, which is the on-demand price because the fleet sets none",
        remedy="Wait, add zones or instance types under fleet, or set capacity: on-demand with a new run id.",
    ),
    r"not supported in your requested Availability Zone|Unsupported|InvalidAvailabilityZone|not support": Reason(
        cause="a listed zone does not offer a listed instance type",
        remedy="`gpufleet doctor {stack}` shows which zone offers what.",
    ),
    r"InsufficientInstanceCapacity|capacity|UnfulfillableCapacity": Reason(
        cause="AWS has no free {types} in {zones} right now",
        remedy="Wait: the fleet keeps trying until it expires and nothing is billed meanwhile. More zones and "
        "instance types under fleet (with a new run id) widen the choice.",
    ),
    r"InsufficientFreeAddresses|InvalidSubnet|InvalidGroup|InvalidLaunchTemplate": Reason(
        cause="part of the network or the launch template is gone",
        remedy="Somebody deleted what the stack declared. Give run.id a new value, then `pulumi up`, which makes it "
        "again; a fleet keeps the subnets and the template that it was made with.",
        final=True,
    ),
    r"spotFleetRequestConfigurationInvalid|allLaunchSpecsTemporarilyBlacklisted": Reason(
        cause="EC2 does not accept what the fleet asks for",
        remedy="The description names it. `gpufleet doctor {stack}` checks most causes.",
    ),
}


def explain(sub_type: str, description: str, definition: StackDefinition) -> Reason | None:
    """The reason behind one history event; None when the event is no obstacle or is not known."""
    text = f"{sub_type}: {description}"
    for pattern, reason in _RULES.items():
        if re.search(pattern, text):
            return replace(reason, cause=_fill(reason.cause, definition), remedy=_fill(reason.remedy, definition))
    return None


def describe(record: dict[str, Any]) -> tuple[str, str, str]:
    """(kind, sub-type, description) of one record of DescribeFleetHistory."""
    information = record.get("EventInformation") or {}
    return (
        str(record.get("EventType", "")),
        str(information.get("EventSubType", "")),
        str(information.get("EventDescription") or ""),
    )


def _fill(text: str, definition: StackDefinition) -> str:
    fleet = definition.fleet
    return text.format(
        stack=definition.argument,
        region=fleet.region,
        types=" or ".join(fleet.instance_types),
        zones=", ".join(fleet.zones),
    )
