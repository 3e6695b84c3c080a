"""The role of a node: its rights on its run's objects, log group and fleet. A node can launch nothing, and can pass
only one role, which has fewer rights than the node (resources/stop.py).

A node can end its fleet but not change it, because ModifyFleet has no condition on the number of nodes. A node can
delete only checkpoints. So it cannot delete the records of what earlier attempts spent, which the meter reads for the
caps. The runs of a stack share only compiled graphs, and every node may replace them. Since later nodes run this code,
a node trusts the nodes of earlier runs.

The condition on ListBucket also affects HEAD and GET: for a key that does not exist, S3 answers 403, not 404.
"""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program import ecr
from gpufleet.infra.program.resources.gather import machine_arn
from gpufleet.infra.program.resources.stop import SERVICE, with_its_nodes
from gpufleet.infra.program.resources.tags import owned, tags
from gpufleet.job.contract import bucket
from gpufleet.job.contract.aws import SILENCE, SWITCH, asks_again, begins
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.kind.job import secrets_needed

EC2_MAY_ASSUME = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"},
        ],
    }
)
# CloudWatch Logs accepts only these numbers of days (PutRetentionPolicy, API reference, read 2026-11-21).
LOG_RETENTION_DAYS = (
    1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653,
)  # fmt: skip


class Identity(pulumi.ComponentResource):
    """Log group, role, inline policy and instance profile. `ready`: resources that must exist before a node boots."""

    log_group: aws.cloudwatch.LogGroup
    profile: aws.iam.InstanceProfile
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        bucket_arn: pulumi.Input[str],
        schedule_arn: pulumi.Input[str],
        stop_role_arn: pulumi.Input[str],
        topic_arn: pulumi.Input[str] = "",
        permissions_boundary: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("gpufleet:infra:Identity", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        labels = tags(definition)
        self.log_group = aws.cloudwatch.LogGroup(
            f"gpufleet-{definition.name}",
            # by default the provider keeps logs for ever
            retention_in_days=log_retention(definition.storage.keep.days),
            tags=labels,
            opts=child,
        )
        role = aws.iam.Role(
            f"gpufleet-{definition.name}",
            assume_role_policy=EC2_MAY_ASSUME,
            description="gpufleet node",
            permissions_boundary=permissions_boundary or definition.account.permissions_boundary,
            tags=labels,
            opts=child,
        )
        policy = aws.iam.RolePolicy(
            f"{name}-rights",
            role=role.name,
            policy=pulumi.Output.all(bucket_arn, self.log_group.arn, schedule_arn, stop_role_arn, topic_arn).apply(
                lambda arns: json.dumps({"Version": "2012-10-17", "Statement": node_statements(definition, *arns)})
            ),
            # Each run has a policy of its own, and the policy of the old run is removed after the old fleet. If the
            # policy were changed in place, a node of the old run would lose its rights while `up` uploads the new run's
            # files, and for good if `up` fails. It would even lose the right to end its fleet.
            opts=pulumi.ResourceOptions(parent=self, replacement_trigger=definition.run.id),
        )
        self.profile = aws.iam.InstanceProfile(f"gpufleet-{definition.name}", role=role.name, tags=labels, opts=child)
        self.ready = [self.log_group, policy, self.profile]
        self.register_outputs({"log_group": self.log_group.name})


def node_statements(
    definition: StackDefinition,
    bucket_arn: str,
    log_group_arn: str,
    schedule_arn: str,
    stop_role_arn: str,
    topic_arn: str = "",
) -> list[dict[str, Any]]:
    """The statements of everything that a node may do. `schedule_arn`, `stop_role_arn`: the schedule that ends its
    fleet, and the role of that schedule. `topic_arn`: the topic of its messages; empty if there is none.
    """
    run, group = definition.run.id, schedule_arn.rpartition("/")[0]
    others = [*([SILENCE] if topic_arn else []), *(SWITCH for _ in definition.fleet.market.stands_by)]
    return [
        {
            "Sid": "OwnObjects",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"],
            "Resource": f"{bucket_arn}/{run}/*",
        },
        *_taken_over(definition, bucket_arn),
        {
            "Sid": "OldCheckpoints",
            "Effect": "Allow",
            "Action": "s3:DeleteObject",
            "Resource": one_or_all([f"{bucket_arn}/{folder}/{bucket.CHECKPOINTS}*" for folder in _folders(definition)]),
        },
        {
            "Sid": "LimitsStay",
            "Effect": "Deny",
            "Action": "s3:PutObject",
            "Resource": [
                f"{bucket_arn}/{part.run.id}/{name}" for part in definition.parts for name in (RUN, f"{bucket.FLEETS}*")
            ],
        },
        {
            "Sid": "OwnListing",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": bucket_arn,
            "Condition": {"StringLike": {"s3:prefix": [f"{run}/*", f"{bucket.GRAPHS}/*"]}},
        },
        {
            "Sid": "CompiledGraphs",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"],
            "Resource": f"{bucket_arn}/{bucket.GRAPHS}/*",
        },
        {
            "Sid": "Inputs",
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": f"{bucket_arn}/{bucket.INPUTS}/*",
        },
        *_private_images(definition),
        *(statement for sid, uri in definition.storage.prefixes.items() for statement in _foreign_prefix(sid, uri)),
        *_own_key(definition),
        *_secrets(definition),
        {
            "Sid": "OwnLogs",
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
            "Resource": f"{log_group_arn}:*",
        },
        {
            # This right is for the fleet's history, which shows whether AWS or the owner ended a node. AWS bills these
            # cases differently.
            "Sid": "OwnFleet",
            "Effect": "Allow",
            "Action": ["ec2:DeleteFleets", "ec2:DescribeFleetHistory", "ec2:TerminateInstances"],
            "Resource": [f"arn:aws:ec2:{definition.fleet.region}:*:{kind}/*" for kind in ("fleet", "instance")],
            "Condition": {"StringEquals": owned(definition)},
        },
        # an instant fleet can only be deleted together with its nodes
        *([] if definition.fleet.market.replaces else [with_its_nodes()]),
        {
            "Sid": "MoveTheHour",
            "Effect": "Allow",
            "Action": ["scheduler:GetSchedule", "scheduler:UpdateSchedule"],
            "Resource": [schedule_arn, *(f"{group}/{other}" for other in others)] if others else schedule_arn,
        },
        *_ask_again(definition, schedule_arn),
        *_begin_stages(definition, schedule_arn),
        *([{"Sid": "Tell", "Effect": "Allow", "Action": "sns:Publish", "Resource": topic_arn}] if topic_arn else []),
        {
            "Sid": "WithItsRole",
            "Effect": "Allow",
            "Action": "iam:PassRole",
            "Resource": stop_role_arn,
            "Condition": {"StringEquals": {"iam:PassedToService": SERVICE}},
        },
        {
            "Sid": "FindItselfAndItsPrice",  # neither action can be narrowed to a resource
            "Effect": "Allow",
            "Action": ["ec2:DescribeInstances", "ec2:DescribeSpotPriceHistory"],
            "Resource": "*",
        },
        {
            # The rights that a shell needs. They are those of AmazonSSMManagedInstanceCore, without the right to read
            # every parameter.
            "Sid": "SessionManager",
            "Effect": "Allow",
            "Action": [
                "ssm:UpdateInstanceInformation",
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            ],
            "Resource": "*",
        },
    ]


def _folders(definition: StackDefinition) -> list[str]:
    """The run's folders in the bucket, one per stage. Stages on one node share one, as IAM limits policies."""
    return [f"{definition.run.id}/*"] if definition.parts[0].shared else [part.run.id for part in definition.parts]


def _ask_again(definition: StackDefinition, schedule_arn: str) -> list[dict[str, Any]]:
    """The right to start the state machines that empty a fleet and later ask for its nodes again."""
    several = [part.run.id for part in definition.with_fleets if part.fleet.lets_go]
    arns = [f"{machine_arn(schedule_arn)}{asks_again(run)}" for run in several]
    start = {"Sid": "AskAgain", "Effect": "Allow", "Action": "states:StartExecution"}
    return [{**start, "Resource": one_or_all(arns)}] if arns else []


def _taken_over(definition: StackDefinition, bucket_arn: str) -> list[dict[str, Any]]:
    """The right to read the outputs of another run's stages."""
    folders = dict.fromkeys(folder for stage in definition.stages for folder in stage.taken)
    arns = [f"{bucket_arn}/{folder}/{bucket.FINAL}*" for folder in folders]
    read = {"Sid": "TakenOver", "Effect": "Allow", "Action": "s3:GetObject"}
    return [{**read, "Resource": one_or_all(arns)}] if arns else []


def _begin_stages(definition: StackDefinition, schedule_arn: str) -> list[dict[str, Any]]:
    """The right to start the state machines that begin later stages."""
    arns = [f"{machine_arn(schedule_arn)}{begins(stage.stage)}" for stage in definition.with_fleets[1:]]
    start = {"Sid": "BeginStages", "Effect": "Allow", "Action": "states:StartExecution"}
    return [{**start, "Resource": one_or_all(arns)}] if arns else []


def log_retention(days: int) -> int:
    """The shortest retention of at least `days` that CloudWatch Logs accepts."""
    return next((allowed for allowed in LOG_RETENTION_DAYS if allowed >= days), LOG_RETENTION_DAYS[-1])


def one_or_all(values: list[str]) -> str | list[str]:
    """The list; if it has only one value, this value alone. AWS's policy language allows both."""
    return values[0] if len(values) == 1 else values


def _private_images(definition: StackDefinition) -> list[dict[str, Any]]:
    """The right to log in to ECR and pull from these repositories; another account must also allow it in its policy."""
    images = dict.fromkeys(image for part in definition.parts for image in part.job.images)
    arns = [private.arn for image in images if (private := ecr.repository(image))]
    if not arns:
        return []
    log_in, pull = "ecr:GetAuthorizationToken", ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    return [
        # the action cannot be narrowed to a resource
        {"Sid": "LogInToEcr", "Effect": "Allow", "Action": log_in, "Resource": "*"},
        {"Sid": "PrivateImage", "Effect": "Allow", "Action": pull, "Resource": one_or_all(arns)},
    ]


def _secrets(definition: StackDefinition) -> list[dict[str, Any]]:
    """The right to read the job's secrets, and no others. A secret that is encrypted with a customer key also needs a
    right on this key; with AWS's own key it needs none.
    """
    region, key = definition.fleet.region, definition.account.kms_key
    secret = dict.fromkeys(name for part in definition.parts for name in secrets_needed(part.job.parameters).values())
    named = [*secret, *filter(None, [definition.notify.webhook])]
    parameters = [reference.removeprefix("ssm:") for reference in named if reference.startswith("ssm:")]
    secrets = [
        reference.removeprefix("secretsmanager:") for reference in named if reference.startswith("secretsmanager:")
    ]
    statements: list[dict[str, Any]] = []
    if parameters:
        arns = [f"arn:aws:ssm:{region}:*:parameter{name}" for name in parameters]
        statements.append({"Sid": "Parameters", "Effect": "Allow", "Action": "ssm:GetParameter", "Resource": arns})
    if secrets:
        arns = [
            f"arn:aws:secretsmanager:{region}:*:secret:{name}-??????" for name in secrets
        ]  # AWS appends six characters to the ARN of a secret
        statements.append(
            {"Sid": "Secrets", "Effect": "Allow", "Action": "secretsmanager:GetSecretValue", "Resource": arns}
        )
    if named and key is not None:
        services = [f"{service}.{region}.amazonaws.com" for service in ("ssm", "secretsmanager")]
        through = {"StringEquals": {"kms:ViaService": services}}
        may = {"Effect": "Allow", "Action": "kms:Decrypt", "Resource": key, "Condition": through}
        statements.append({"Sid": "KeyOfSecrets", **may})
    return statements


def _own_key(definition: StackDefinition) -> list[dict[str, Any]]:
    """The right to use the key in the definition file, but only through S3."""
    if definition.account.kms_key is None:
        return []
    return [
        {
            "Sid": "OwnKey",
            "Effect": "Allow",
            "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
            "Resource": definition.account.kms_key,
            "Condition": {"StringEquals": {"kms:ViaService": f"s3.{definition.fleet.region}.amazonaws.com"}},
        }
    ]


def _foreign_prefix(sid: str, uri: str) -> list[dict[str, Any]]:
    """The right to read one prefix of somebody's bucket. A node takes file names from a manifest, and does not list the
    bucket. The node has the right to list only because S3's answers then distinguish two cases: a file is missing,
    which ends the run, or a file may not be read, and then every node tries again.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    path, arn = f"{prefix.strip('/')}/*" if prefix.strip("/") else "*", f"arn:aws:s3:::{bucket}"
    return [
        {"Sid": sid, "Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{arn}/{path}"},
        {
            "Sid": f"{sid}Listing",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": arn,
            "Condition": {"StringLike": {"s3:prefix": path}},
        },
    ]
