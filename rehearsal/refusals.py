"""What makes CreateFleet itself fail; everything else that goes wrong with a fleet is an event in its history."""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends

from rehearsal.launch import Launcher

USER_DATA_LIMIT = 16 * 1024  # bytes before base64 (EC2 User Guide, run commands at launch, 2026-11-21)


def refuse_at_create(launcher: Launcher, region: str, request: dict[str, Any]) -> dict[str, str]:
    """The fleet's own tags, after every check that makes CreateFleet itself fail."""
    kind = str(request.get("Type") or "maintain")
    tags: dict[str, str] = {}
    for entry in request.get("TagSpecifications") or []:
        if entry.get("ResourceType") != "fleet" and kind != "instant":
            raise EC2ClientError(
                "InvalidParameterValue",
                f"'{entry.get('ResourceType')}' is not a valid taggable resource type for a fleet of type {kind}",
            )
        tags.update({tag["Key"]: tag.get("Value", "") for tag in entry.get("Tags") or []})
    backend = ec2_backends[launcher.account][region]
    pools = launcher.pools(region, list(request.get("LaunchTemplateConfigs") or []))
    for pool in pools:
        image = str(pool.spec.get("ImageId") or "")
        if image.startswith("resolve:ssm:") and kind != "instant":
            raise EC2ClientError(
                "InvalidAMIID.Malformed",
                f'Invalid id: "{image}": only a fleet of type instant may name a Systems Manager parameter',
            )
        if image not in backend.amis:
            raise EC2ClientError("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
        user_data = pool.spec.get("UserData")
        if user_data is not None and len(user_data.decode().encode()) > USER_DATA_LIMIT:
            raise EC2ClientError("InvalidUserData.Malformed", "User data is limited to 16384 bytes")
    for config in request.get("LaunchTemplateConfigs") or []:
        zones: dict[tuple[str, str], str] = {}
        for pool in launcher.pools(region, [config]):
            if zones.setdefault((pool.type, pool.zone), pool.subnet) != pool.subnet:
                raise EC2ClientError(
                    "InvalidFleetConfiguration", f"A fleet cannot use two subnets in one zone ({pool.zone})"
                )
    return tags
