"""Why a fleet has no node, in words: what its history says, and what to do about it. Pure.

Event names: EC2 API, EventInformation (botocore 1.44.5). Error names inside descriptions: EC2 API, error codes, read
2026-11-25; that descriptions hold them, and in these words: public reports. Unknown events are shown as they are: a
wrong guess costs more than none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from infra.definition.model import StackDefinition


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One cause. `final`: waiting changes nothing."""

    cause: str
    remedy: str
    final: bool = False


# How a node ends that was running (EC2 API, StateReason, read 2026-11-25); any other code tells why it did not start.
ENDS_OF_RUNNING = (
    "Server.ScheduledStop", "Server.SpotInstanceShutdown", "Server.SpotInstanceTermination",
    "Client.InstanceInitiatedShutdown", "Client.InstanceTerminated",
    "Client.UserInitiatedHibernate", "Client.UserInitiatedShutdown",
)  # fmt: skip
# By a pattern on "subtype: description"; the first that is found counts.
_RULES = {
    r"PendingVerification": Reason(
        cause="AWS is still verifying this account",
        remedy="Wait: it takes minutes, at times hours, and AWS writes to the account's address. If it lasts longer, "
        "ask AWS Support.",
    ),
    r"\(Blocked\)|\bBlocked:|OptInRequired": Reason(
        cause="AWS lets this account launch nothing: it is blocked, or not subscribed to what the AMI needs",
        remedy="Ask AWS Support (the account's console says what is open), then `gpufleet wait {stack}` again.",
        final=True,
    ),
    r"InvalidBlockDeviceMapping|smaller than (its )?snapshot": Reason(
        cause="EC2 does not accept the disks: one is smaller than the snapshot that it is made from, say",
        remedy="Put storage.root or storage.data right (`gpufleet doctor {stack}` compares them with AMI and "
        "snapshot), give run.id a new value, then `pulumi up`.",
        final=True,
    ),
    r"VolumeLimitExceeded|MaxIOPSLimitExceeded|Volume limit": Reason(
        cause="the account's quota of disks does not allow this node's",
        remedy="Ask for more (Service Quotas, Amazon EBS, storage or IOPS of gp3 volumes), or write smaller disks "
        "under storage with a new run.id, then `pulumi up`.",
        final=True,
    ),
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
    r"UnauthorizedOperation|not authorized to perform": Reason(
        cause="a policy of the account or its organization forbids this launch",
        remedy="Ask who keeps the account's policies; AWS's words above name the action.",
        final=True,
    ),
    r"spotFleetRequestConfigurationInvalid|allLaunchSpecsTemporarilyBlacklisted": Reason(
        cause="EC2 does not accept what the fleet asks for",
        remedy="In AWS's words: {said}. `gpufleet doctor {stack}` checks most causes.",
    ),
}


def explain(sub_type: str, description: str, definition: StackDefinition) -> Reason | None:
    """The reason behind one history event; None when the event is no obstacle or is not known."""
    text = f"{sub_type}: {description}"
    for pattern, reason in _RULES.items():
        if re.search(pattern, text):
            cause, remedy = _fill(reason.cause, definition, text), _fill(reason.remedy, definition, text)
            return replace(reason, cause=cause, remedy=remedy)
    return None


def describe(record: dict[str, Any]) -> tuple[str, str, str]:
    """(kind, sub-type, description) of one record of DescribeFleetHistory."""
    information = record.get("EventInformation") or {}
    return (
        str(record.get("EventType", "")),
        str(information.get("EventSubType", "")),
        str(information.get("EventDescription") or ""),
    )


def _fill(text: str, definition: StackDefinition, said: str) -> str:
    fleet = definition.fleet
    return text.format(
        stack=definition.argument,
        region=fleet.region,
        types=" or ".join(fleet.instance_types),
        zones=", ".join(fleet.zones),
        said=said.removesuffix("."),
    )
