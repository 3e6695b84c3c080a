"""Handlers for role, inline policy, instance profile and log group."""

from __future__ import annotations

import json

from gpufleet.rehearsal.handlers.calls import OwnCalls
from gpufleet.rehearsal.handlers.table import Aws, Properties


def _update_role(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if new["assumeRolePolicy"] != old.get("assumeRolePolicy"):
        aws.iam.update_assume_role_policy(RoleName=resource_id, PolicyDocument=new["assumeRolePolicy"])
    if new.get("description") != old.get("description"):
        aws.iam.update_role_description(RoleName=resource_id, Description=new.get("description", ""))
    if (boundary := new.get("permissionsBoundary")) != old.get("permissionsBoundary"):
        if boundary:
            aws.iam.put_role_permissions_boundary(RoleName=resource_id, PermissionsBoundary=boundary)
        else:
            aws.iam.delete_role_permissions_boundary(RoleName=resource_id)


def _put_role(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if new["role"] != old.get("role"):
        if old.get("role"):
            aws.iam.remove_role_from_instance_profile(InstanceProfileName=resource_id, RoleName=old["role"])
        aws.iam.add_role_to_instance_profile(InstanceProfileName=resource_id, RoleName=new["role"])


def _delete_profile(aws: Aws, resource_id: str, state: Properties) -> None:
    if state.get("role"):
        aws.iam.remove_role_from_instance_profile(InstanceProfileName=resource_id, RoleName=state["role"])
    aws.iam.delete_instance_profile(InstanceProfileName=resource_id)


def _put_retention(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    days = new.get("retentionInDays", 0)
    if days == old.get("retentionInDays", 0):
        return
    if days:
        aws.client("logs").put_retention_policy(logGroupName=resource_id, retentionInDays=days)
    else:
        aws.client("logs").delete_retention_policy(logGroupName=resource_id)


def _read_group(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    groups = aws.client("logs").describe_log_groups(logGroupNamePrefix=resource_id)["logGroups"]
    matching = [group for group in groups if group["logGroupName"] == resource_id]
    if not matching:
        return None
    arn = aws.arn("logs", f"log-group:{resource_id}")
    tags = aws.client("logs").list_tags_for_resource(resourceArn=arn)["tags"]
    days = matching[0].get("retentionInDays", 0)
    return {"name": resource_id, "retentionInDays": days, "tags": tags, "tagsAll": tags, "arn": arn}


OWN = {
    "aws:iam/role:Role": OwnCalls(
        change=_update_role,
        seen=lambda aws, like, live, raw: {"assumeRolePolicy": json.dumps(raw["AssumeRolePolicyDocument"])},
    ),
    "aws:iam/rolePolicy:RolePolicy": OwnCalls(
        seen=lambda aws, like, live, raw: {"policy": json.dumps(raw["PolicyDocument"])}
    ),
    "aws:iam/instanceProfile:InstanceProfile": OwnCalls(
        delete=_delete_profile,
        settle=_put_role,
        seen=lambda aws, like, live, raw: {"role": raw["Roles"][0]["RoleName"] if raw["Roles"] else None},
    ),
    "aws:cloudwatch/logGroup:LogGroup": OwnCalls(read=_read_group, settle=_put_retention),
}
