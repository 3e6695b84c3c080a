"""The rights that `up`, `refresh` and `destroy` themselves need of whoever runs them, and whether they are there.

By the types of what the program declares: the calls that the provider makes for each, to create, read, change and
delete it (terraform-provider-aws internal/service/, 2026-11-27). AWS's policy simulator tells whether the caller may
make them. It knows the organisation's policies and the caller's boundary, but neither policies of a session nor what is
allowed on certain EC2 resources alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from gpufleet.infra.account.aws import pages
from gpufleet.infra.account.checks import Check
from gpufleet.infra.definition.model import StackDefinition

AT_ONCE = 50  # actions in a request
_TAGS = "ec2:CreateTags ec2:DeleteTags"
_SCHEDULES = "scheduler:ListTagsForResource scheduler:TagResource"
_BUCKET = "Acl CORS Location Logging ObjectLockConfiguration Policy RequestPayment Tagging Versioning Website"


def _always(definition: StackDefinition) -> bool:
    return True


def _own_network(definition: StackDefinition) -> bool:
    return definition.account.vpc is None


def _behind_nat(definition: StackDefinition) -> bool:
    return definition.fleet.cards == "all" and _own_network(definition)


def _several(definition: StackDefinition) -> bool:
    return definition.nodes > 1


def _falls_back(definition: StackDefinition) -> bool:
    return definition.fleet.falls_back


def _notifies(definition: StackDefinition) -> bool:
    return definition.notify.email is not None


def _own_lifecycle(definition: StackDefinition) -> bool:
    return definition.storage.keep.lifecycle == "own"


# By type: when it is declared, and the actions.
NEEDS: dict[str, tuple[Callable[[StackDefinition], bool], str]] = {
    "aws:ec2/vpc:Vpc": (
        _own_network,
        f"{_TAGS} ec2:CreateVpc ec2:DeleteVpc ec2:DescribeNetworkAcls ec2:DescribeVpcAttribute ec2:DescribeVpcs "
        "ec2:ModifyVpcAttribute",
    ),
    "aws:ec2/subnet:Subnet": (
        _own_network,
        f"{_TAGS} ec2:CreateSubnet ec2:DeleteSubnet ec2:DescribeNetworkInterfaces ec2:DescribeSubnets "
        "ec2:ModifySubnetAttribute",
    ),
    "aws:ec2/internetGateway:InternetGateway": (
        _own_network,
        f"{_TAGS} ec2:AttachInternetGateway ec2:CreateInternetGateway ec2:DeleteInternetGateway "
        "ec2:DescribeInternetGateways ec2:DetachInternetGateway",
    ),
    "aws:ec2/routeTable:RouteTable": (
        _own_network,
        f"{_TAGS} ec2:CreateRouteTable ec2:DeleteRouteTable ec2:DescribeRouteTables",
    ),
    "aws:ec2/route:Route": (_own_network, "ec2:CreateRoute ec2:DeleteRoute ec2:DescribeRouteTables"),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": (
        _own_network,
        "ec2:AssociateRouteTable ec2:DescribeRouteTables ec2:DisassociateRouteTable",
    ),
    "aws:ec2/vpcEndpoint:VpcEndpoint": (
        _own_network,
        f"{_TAGS} ec2:CreateVpcEndpoint ec2:DeleteVpcEndpoints ec2:DescribePrefixLists ec2:DescribeVpcEndpoints "
        "ec2:ModifyVpcEndpoint",
    ),
    "aws:ec2/eip:Eip": (
        _behind_nat,
        f"{_TAGS} ec2:AllocateAddress ec2:DescribeAddresses ec2:DescribeAddressesAttribute ec2:ReleaseAddress",
    ),
    "aws:ec2/natGateway:NatGateway": (
        _behind_nat,
        f"{_TAGS} ec2:CreateNatGateway ec2:DeleteNatGateway ec2:DescribeNatGateways",
    ),
    "aws:ec2/securityGroup:SecurityGroup": (
        _always,
        f"{_TAGS} ec2:CreateSecurityGroup ec2:DeleteSecurityGroup ec2:DescribeSecurityGroups "
        "ec2:RevokeSecurityGroupEgress",
    ),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": (
        _always,
        f"{_TAGS} ec2:AuthorizeSecurityGroupEgress ec2:DescribeSecurityGroupRules ec2:ModifySecurityGroupRules "
        "ec2:RevokeSecurityGroupEgress",
    ),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": (
        _several,
        f"{_TAGS} ec2:AuthorizeSecurityGroupIngress ec2:DescribeSecurityGroupRules ec2:ModifySecurityGroupRules "
        "ec2:RevokeSecurityGroupIngress",
    ),
    "aws:s3/bucket:Bucket": (
        _always,
        "s3:CreateBucket s3:DeleteBucket s3:DeleteObject s3:DeleteObjectVersion s3:GetAccelerateConfiguration "
        "s3:GetEncryptionConfiguration s3:GetLifecycleConfiguration s3:GetReplicationConfiguration s3:ListBucket "
        "s3:ListBucketVersions s3:PutBucketTagging s3:TagResource s3:ListTagsForResource "
        + " ".join(f"s3:GetBucket{each}" for each in _BUCKET.split()),
    ),
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": (
        _always,
        "s3:GetBucketPublicAccessBlock s3:PutBucketPublicAccessBlock",
    ),
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": (
        _always,
        "s3:GetEncryptionConfiguration s3:PutEncryptionConfiguration",
    ),
    "aws:s3/bucketPolicy:BucketPolicy": (_always, "s3:DeleteBucketPolicy s3:GetBucketPolicy s3:PutBucketPolicy"),
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": (
        _own_lifecycle,
        "s3:GetLifecycleConfiguration s3:PutLifecycleConfiguration",
    ),
    "aws:s3/bucketObjectv2:BucketObjectv2": (
        _always,
        "s3:DeleteObject s3:GetObject s3:GetObjectTagging s3:PutObject s3:PutObjectTagging",
    ),
    "aws:iam/role:Role": (
        _always,
        "iam:CreateRole iam:DeleteRole iam:GetRole iam:ListAttachedRolePolicies iam:ListInstanceProfilesForRole "
        "iam:ListRolePolicies iam:TagRole iam:UntagRole iam:UpdateAssumeRolePolicy",
    ),
    "aws:iam/rolePolicy:RolePolicy": (_always, "iam:DeleteRolePolicy iam:GetRolePolicy iam:PutRolePolicy"),
    "aws:iam/instanceProfile:InstanceProfile": (
        _always,
        "iam:AddRoleToInstanceProfile iam:CreateInstanceProfile iam:DeleteInstanceProfile iam:GetInstanceProfile "
        "iam:PassRole iam:RemoveRoleFromInstanceProfile iam:TagInstanceProfile iam:UntagInstanceProfile",
    ),
    "aws:cloudwatch/logGroup:LogGroup": (
        _always,
        "logs:CreateLogGroup logs:DeleteLogGroup logs:DescribeLogGroups logs:ListTagsForResource "
        "logs:PutRetentionPolicy logs:TagResource logs:UntagResource",
    ),
    "aws:scheduler/scheduleGroup:ScheduleGroup": (
        _always,
        f"{_SCHEDULES} scheduler:CreateScheduleGroup scheduler:DeleteScheduleGroup scheduler:GetScheduleGroup",
    ),
    "aws:scheduler/schedule:Schedule": (
        _always,
        "iam:PassRole scheduler:CreateSchedule scheduler:DeleteSchedule scheduler:GetSchedule scheduler:UpdateSchedule",
    ),
    "aws:sfn/stateMachine:StateMachine": (
        _falls_back,
        "iam:PassRole states:CreateStateMachine states:DeleteStateMachine states:DescribeStateMachine "
        "states:ListStateMachineVersions states:ListTagsForResource states:TagResource states:UntagResource "
        "states:UpdateStateMachine states:ValidateStateMachineDefinition",
    ),
    "aws:sns/topic:Topic": (
        _notifies,
        "sns:CreateTopic sns:DeleteTopic sns:GetTopicAttributes sns:ListTagsForResource sns:SetTopicAttributes "
        "sns:TagResource sns:UntagResource",
    ),
    "aws:sns/topicSubscription:TopicSubscription": (
        _notifies,
        "sns:GetSubscriptionAttributes sns:Subscribe sns:Unsubscribe",
    ),
    "aws:sns/topicPolicy:TopicPolicy": (_notifies, "sns:GetTopicAttributes sns:SetTopicAttributes"),
    "aws:cloudwatch/eventRule:EventRule": (
        _notifies,
        "events:DeleteRule events:DescribeRule events:ListTagsForResource events:PutRule events:TagResource "
        "events:UntagResource",
    ),
    "aws:cloudwatch/eventTarget:EventTarget": (
        _notifies,
        "events:ListTargetsByRule events:PutTargets events:RemoveTargets",
    ),
    "aws:ec2/launchTemplate:LaunchTemplate": (
        _always,
        f"{_TAGS} ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion ec2:DeleteLaunchTemplate "
        "ec2:DescribeLaunchTemplateVersions ec2:DescribeLaunchTemplates ec2:ModifyLaunchTemplate",
    ),
    "aws:ec2/fleet:Fleet": (
        _always,
        "ec2:CreateFleet ec2:CreateTags ec2:DeleteFleets ec2:DescribeFleets ec2:DescribeTags ec2:RunInstances "
        "ec2:TerminateInstances iam:PassRole",
    ),
}


# What gpufleet's commands ask beside it, whatever the file declares.
COMMANDS = (
    "ec2:Describe* ec2:GetEbsDefaultKmsKeyId ecr:DescribeImages iam:GetInstanceProfile iam:GetPolicy "
    "iam:GetPolicyVersion iam:GetRole iam:ListAttachedRolePolicies iam:ListInstanceProfiles iam:ListRolePolicies "
    "iam:ListRoleTags iam:ListRoles iam:SimulatePrincipalPolicy kms:DescribeKey kms:GetKeyPolicy kms:ListGrants "
    "logs:DescribeLogGroups logs:FilterLogEvents logs:ListTagsForResource s3:GetBucketTagging s3:GetObject "
    "s3:ListAllMyBuckets s3:ListBucket s3:ListBucketMultipartUploads s3:ListMultipartUploadParts s3:PutObject "
    "scheduler:GetSchedule scheduler:ListScheduleGroups scheduler:ListTagsForResource "
    "secretsmanager:DescribeSecret servicequotas:GetAWSDefaultServiceQuota servicequotas:GetServiceQuota "
    "ssm:DescribeParameters ssm:GetParameter states:ListStateMachines "
    "states:ListTagsForResource"
)


def needed(definition: StackDefinition) -> list[str]:
    """Every action, sorted."""
    declared = [actions for when, actions in NEEDS.values() if when(definition)]
    if definition.account.kms_key:
        declared.append("kms:Decrypt kms:GenerateDataKey")  # of the bucket's objects
    if definition.account.permissions_boundary:
        declared.append("iam:PutRolePermissionsBoundary")
    return sorted({action for actions in declared for action in actions.split()})


def policy(definition: StackDefinition) -> str:
    """They and those of the commands as an IAM policy, for whoever grants them."""
    statements = [
        {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": "*"}
        for sid, actions in (("PulumiUp", needed(definition)), ("GpufleetCommands", COMMANDS.split()))
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)


def check(definition: StackDefinition, sts: Any, iam: Any) -> Iterator[Check]:
    """Whether the caller has them. Raises botocore's errors where the caller may not ask."""
    who = str(sts.get_caller_identity()["Arn"])
    account, name = who.split(":")[4], who.rpartition(":")[2]
    if name == "root":
        return
    if name.startswith("assumed-role/"):
        who = str(iam.get_role(RoleName=name.split("/")[1])["Role"]["Arn"])
    elif not name.startswith("user/"):
        found = f"cannot tell whether {name} may do all that `up` does: AWS simulates users and roles alone"
        yield Check(name="rights", state="warning", found=found)
        return
    context = {"aws:RequestedRegion": definition.fleet.region, "iam:PassedToService": "ec2.amazonaws.com"}
    if boundary := definition.account.permissions_boundary:
        context["iam:PermissionsBoundary"] = boundary
    missing, unsure = set[str](), set[str]()
    by_resource = sorted(needed(definition), key=lambda action: _resource(definition, action, account))
    for resource, group in groupby(by_resource, lambda action: _resource(definition, action, account)):
        actions = list(group)
        for start in range(0, len(actions), AT_ONCE):
            answers = pages(
                iam,
                "simulate_principal_policy",
                "EvaluationResults",
                PolicySourceArn=who,
                ActionNames=actions[start : start + AT_ONCE],
                ResourceArns=[resource],
                ContextEntries=[
                    {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                    for key, value in context.items()
                ],
            )
            for answer in answers:
                if answer["EvalDecision"] != "allowed":
                    open_ = answer["EvalDecision"] == "implicitDeny" and (
                        resource == "*" or answer.get("MissingContextValues")
                    )
                    (unsure if open_ else missing).add(str(answer["EvalActionName"]))
    fix = f"gpufleet doctor {definition.argument} --rights prints them all as a policy, for whoever grants them."
    if missing:
        found = f"`up` needs rights that {name} lacks: {', '.join(sorted(missing))}"
        yield Check(name="rights", state="problem", found=found, fix=fix)
    if unsure:
        found = f"{name} lacks these, or has them on some resources or conditions alone: {', '.join(sorted(unsure))}"
        yield Check(name="rights", state="warning", found=found, fix=fix)
    if not missing | unsure:
        yield Check(name="rights", found=f"{name} may do all that `up` and `destroy` do")


def _resource(definition: StackDefinition, action: str, account: str) -> str:
    """What the action is asked for: something called as the stack's own. EC2's resources have ids alone."""
    service, _, verb = action.partition(":")
    made, place = f"gpufleet-{definition.name}-0000000", f"{definition.fleet.region}:{account}"
    of_profile = "InstanceProfile" in verb and verb != "ListInstanceProfilesForRole"
    named = {
        "s3": f"arn:aws:s3:::{made}" + ("/object" if "Object" in verb and "Bucket" not in verb else ""),
        "iam": f"arn:aws:iam::{account}:{'instance-profile' if of_profile else 'role'}/{made}",
        "logs": f"arn:aws:logs:{place}:log-group:{made}",
        "scheduler": f"arn:aws:scheduler:{place}:"
        + (f"schedule/{made}/stop" if verb.endswith("Schedule") else f"schedule-group/{made}"),
        "states": f"arn:aws:states:{place}:stateMachine:{made}",
        "sns": f"arn:aws:sns:{place}:{made}",
        "events": f"arn:aws:events:{place}:rule/{made}",
        "kms": str(definition.account.kms_key),
    }
    return named.get(service, "*")
