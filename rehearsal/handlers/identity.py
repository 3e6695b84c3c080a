"""Role, inline policy, instance profile and log group."""

from __future__ import annotations

import json

from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.table import Aws, Calls, Properties, absent, deleted, tagged


def _create_role(aws: Aws, inputs: Properties) -> str:
    aws.iam.create_role(
        RoleName=inputs["name"],
        AssumeRolePolicyDocument=inputs["assumeRolePolicy"],
        Description=inputs.get("description", ""),
        Tags=table.tag_list(inputs.get("tags") or {}),
        **({"PermissionsBoundary": inputs["permissionsBoundary"]} if "permissionsBoundary" in inputs else {}),
    )
    return str(inputs["name"])


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
    table.retag_by(aws.iam.tag_role, aws.iam.untag_role, {"RoleName": resource_id}, old, new)


def _read_role(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(lambda: aws.iam.get_role(RoleName=resource_id), "NoSuchEntity")
    if answer is None:
        return None
    role = answer["Role"]
    return {
        "name": resource_id,
        "description": role.get("Description"),
        "assumeRolePolicy": json.dumps(role["AssumeRolePolicyDocument"]),
        "arn": role["Arn"],
        "uniqueId": role["RoleId"],
        "permissionsBoundary": role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn"),
        **tagged(role.get("Tags")),
    }


def _put_policy(aws: Aws, inputs: Properties) -> str:
    aws.iam.put_role_policy(RoleName=inputs["role"], PolicyName=inputs["name"], PolicyDocument=inputs["policy"])
    return f"{inputs['role']}:{inputs['name']}"


def _read_policy(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    role, _, name = resource_id.partition(":")
    answer = absent(lambda: aws.iam.get_role_policy(RoleName=role, PolicyName=name), "NoSuchEntity")
    if answer is None:
        return None
    return {"role": role, "name": name, "policy": json.dumps(answer["PolicyDocument"])}


def _delete_policy(aws: Aws, resource_id: str, state: Properties) -> None:
    role, _, name = resource_id.partition(":")
    absent(lambda: aws.iam.delete_role_policy(RoleName=role, PolicyName=name), "NoSuchEntity")


def _create_profile(aws: Aws, inputs: Properties) -> str:
    name = inputs["name"]
    aws.iam.create_instance_profile(InstanceProfileName=name, Tags=table.tag_list(inputs.get("tags") or {}))
    aws.iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=inputs["role"])
    return str(name)


def _update_profile(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if new["role"] != old.get("role"):
        if old.get("role"):
            aws.iam.remove_role_from_instance_profile(InstanceProfileName=resource_id, RoleName=old["role"])
        aws.iam.add_role_to_instance_profile(InstanceProfileName=resource_id, RoleName=new["role"])
    target = {"InstanceProfileName": resource_id}
    table.retag_by(aws.iam.tag_instance_profile, aws.iam.untag_instance_profile, target, old, new)


def _read_profile(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(lambda: aws.iam.get_instance_profile(InstanceProfileName=resource_id), "NoSuchEntity")
    if answer is None:
        return None
    profile = answer["InstanceProfile"]
    return {
        "name": resource_id,
        "role": profile["Roles"][0]["RoleName"] if profile["Roles"] else None,
        "arn": profile["Arn"],
        **tagged(profile.get("Tags")),
    }


def _delete_profile(aws: Aws, resource_id: str, state: Properties) -> None:
    if state.get("role"):
        aws.iam.remove_role_from_instance_profile(InstanceProfileName=resource_id, RoleName=state["role"])
    aws.iam.delete_instance_profile(InstanceProfileName=resource_id)


def _create_group(aws: Aws, inputs: Properties) -> str:
    aws.client("logs").create_log_group(logGroupName=inputs["name"], tags=inputs.get("tags") or {})
    _put_retention(aws, inputs["name"], {}, inputs)
    return str(inputs["name"])


def _put_retention(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    days = new.get("retentionInDays", 0)
    if days == old.get("retentionInDays", 0):
        return
    if days:
        aws.client("logs").put_retention_policy(logGroupName=resource_id, retentionInDays=days)
    else:
        aws.client("logs").delete_retention_policy(logGroupName=resource_id)


def _update_group(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    _put_retention(aws, resource_id, old, new)
    arn = aws.arn("logs", f"log-group:{resource_id}")
    gone, changed = table.tag_diff(old, new)
    if gone:
        aws.client("logs").untag_resource(resourceArn=arn, tagKeys=gone)
    if changed:
        aws.client("logs").tag_resource(resourceArn=arn, tags=changed)


def _read_group(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    groups = aws.client("logs").describe_log_groups(logGroupNamePrefix=resource_id)["logGroups"]
    found = [group for group in groups if group["logGroupName"] == resource_id]
    if not found:
        return None
    arn = aws.arn("logs", f"log-group:{resource_id}")
    tags = aws.client("logs").list_tags_for_resource(resourceArn=arn)["tags"]
    return {
        "name": resource_id,
        "retentionInDays": found[0].get("retentionInDays", 0),
        "tags": tags,
        "tagsAll": tags,
        "arn": arn,
    }


CALLS = {
    "aws:iam/role:Role": Calls(_create_role, _read_role, deleted("iam", "delete_role", "RoleName"), _update_role),
    "aws:iam/rolePolicy:RolePolicy": Calls(
        _put_policy, _read_policy, _delete_policy, lambda aws, resource_id, old, new: _put_policy(aws, new)
    ),
    "aws:iam/instanceProfile:InstanceProfile": Calls(_create_profile, _read_profile, _delete_profile, _update_profile),
    "aws:cloudwatch/logGroup:LogGroup": Calls(
        _create_group, _read_group, deleted("logs", "delete_log_group", "logGroupName"), _update_group
    ),
}
