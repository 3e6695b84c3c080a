"""The security group and its one rule. Rules are resources of their own, so the group starts with none."""

from __future__ import annotations

from typing import Any

from rehearsal.handlers.network import retag, tag_specification
from rehearsal.handlers.table import Aws, Handler, Properties, absent, fields, tagged


def _create_group(aws: Aws, inputs: Properties) -> str:
    group = aws.ec2.create_security_group(
        GroupName=inputs["name"],
        Description=inputs["description"],
        VpcId=inputs["vpcId"],
        TagSpecifications=tag_specification("security-group", inputs),
    )["GroupId"]
    # The provider removes the rule that AWS adds to every new group: everything out.
    rules = aws.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissionsEgress"]
    if rules:
        aws.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=rules)
    return str(group)


def _read_group(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(lambda: aws.ec2.describe_security_groups(GroupIds=[resource_id]), "InvalidGroup.NotFound")
    if answer is None:
        return None
    group = answer["SecurityGroups"][0]
    return {
        "name": group["GroupName"],
        "description": group["Description"],
        "vpcId": group["VpcId"],
        "ingress": [_permission(rule) for rule in group["IpPermissions"]],
        "arn": aws.arn("ec2", f"security-group/{resource_id}"),
        **tagged(group.get("Tags")),
    }


def _permission(rule: dict[str, Any]) -> Properties:
    return {
        "protocol": rule["IpProtocol"],
        "fromPort": rule.get("FromPort", 0),
        "toPort": rule.get("ToPort", 0),
        "cidrBlocks": [block["CidrIp"] for block in rule.get("IpRanges", [])],
    }


def _rule(inputs: Properties) -> dict[str, Any]:
    return {
        "IpProtocol": inputs["ipProtocol"],
        "FromPort": inputs["fromPort"],
        "ToPort": inputs["toPort"],
        "IpRanges": [{"CidrIp": inputs["cidrIpv4"], "Description": inputs.get("description", "")}],
    }


def _create_egress(aws: Aws, inputs: Properties) -> str:
    answer = aws.ec2.authorize_security_group_egress(
        GroupId=inputs["securityGroupId"],
        IpPermissions=[_rule(inputs)],
        TagSpecifications=tag_specification("security-group-rule", inputs),
    )
    return str(answer["SecurityGroupRules"][0]["SecurityGroupRuleId"])


def _update_egress(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    keys = ("ipProtocol", "fromPort", "toPort", "cidrIpv4", "description")
    if any(old.get(key) != new.get(key) for key in keys):
        rule = {key[0].upper() + key[1:]: new[key] for key in keys if key in new}
        change = {"SecurityGroupRuleId": resource_id, "SecurityGroupRule": rule}
        aws.ec2.modify_security_group_rules(GroupId=new["securityGroupId"], SecurityGroupRules=[change])
    retag(aws, resource_id, old, new)


def _read_egress(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    answer = absent(
        lambda: aws.ec2.describe_security_group_rules(SecurityGroupRuleIds=[resource_id]),
        "InvalidSecurityGroupRuleId.NotFound",
        "InvalidGroup.NotFound",
    )
    rules = [rule for rule in answer["SecurityGroupRules"] if rule["IsEgress"]] if answer else []
    if not rules:
        return None
    rule = rules[0]
    return {
        "securityGroupId": rule["GroupId"],
        "ipProtocol": rule["IpProtocol"],
        "fromPort": rule["FromPort"],
        "toPort": rule["ToPort"],
        "cidrIpv4": rule.get("CidrIpv4"),
        "description": rule.get("Description"),
        "securityGroupRuleId": resource_id,
        "arn": aws.arn("ec2", f"security-group-rule/{resource_id}"),
        **tagged(rule.get("Tags")),
    }


HANDLERS = {
    "aws:ec2/securityGroup:SecurityGroup": Handler(
        source="ec2/vpc_security_group; rules are resources of their own",
        required=fields("vpcId description"),
        optional=fields("name tags"),
        replaces=fields("vpcId description name"),
        computed=fields("arn ingress tagsAll"),
        name="name",
        create=_create_group,
        read=_read_group,
        update=retag,
        delete=lambda aws, resource_id, state: aws.ec2.delete_security_group(GroupId=resource_id),
    ),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": Handler(
        source="ec2/vpc_security_group_egress_rule",
        required=fields("securityGroupId ipProtocol fromPort toPort cidrIpv4"),
        optional=fields("description tags"),
        replaces=fields("securityGroupId"),
        computed=fields("arn securityGroupRuleId tagsAll"),
        create=_create_egress,
        read=_read_egress,
        update=_update_egress,
        delete=lambda aws, resource_id, state: aws.ec2.revoke_security_group_egress(
            GroupId=state["securityGroupId"], SecurityGroupRuleIds=[resource_id]
        ),
    ),
}
