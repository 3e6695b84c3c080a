"""Makes a real interruption with notice, by AWS Fault Injection Service, if the account may: role, template,
experiment.

FIS User Guide, actions reference, aws:ec2:send-spot-instance-interruptions (read 2026-11-29): the notice comes two
minutes before the instance is interrupted, whatever duration is set; the least duration is two minutes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from gpufleet.infra.account import refusals
from gpufleet.infra.account.aws import pages
from gpufleet.infra.canary.stacks import RUN
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.tags import STACK_TAG, own_tags

ROLE = "gpufleet-canary-fis"  # named and tagged like the stack's resources, so that a sweep finds it
ACTION, TARGET = "aws:ec2:send-spot-instance-interruptions", "aws:ec2:spot-instance"
POLICY = "interrupt"
_TRUST = {"Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"}
ROLE_S = 60.0  # how long AWS may take until FIS accepts a new role


def refused(fis: Any) -> str:
    """A sentence about why the account may not use the service; empty if a listing succeeds."""
    try:
        fis.list_experiment_templates(maxResults=1)
    except (ClientError, BotoCoreError) as error:
        return str(refusals.refusal(error) or error)
    return ""


def interrupt(
    stack: StackDefinition, instance: str, client: Callable[[str], Any], sleep: Callable[[float], None]
) -> str:
    """Lets AWS interrupt the instance with a notice; returns the experiment's id. Raises ClientError if AWS refuses."""
    region, tags = stack.fleet.region, own_tags(stack)
    account = client("sts").get_caller_identity()["Account"]
    arn = f"arn:aws:ec2:{region}:{account}:instance/{instance}"
    template = {
        "description": "gpufleet canary: one interruption with notice",
        "stopConditions": [{"source": "none"}],
        "targets": {"node": {"resourceType": TARGET, "resourceArns": [arn], "selectionMode": "ALL"}},
        "actions": {
            "interrupt": {
                "actionId": ACTION,
                "parameters": {"durationBeforeInterruption": "PT2M"},
                "targets": {"SpotInstances": "node"},
            }
        },
        "roleArn": _role(stack, client("iam")),
        "tags": tags,
    }
    give_up = time.monotonic() + ROLE_S
    while True:
        try:
            made = client("fis").create_experiment_template(**template)["experimentTemplate"]
            break
        except ClientError as error:
            if refusals.code(error) != "ValidationException" or time.monotonic() > give_up:
                raise
            sleep(5)  # other services see a new IAM role only after a while
    return str(client("fis").start_experiment(experimentTemplateId=made["id"], tags=tags)["experiment"]["id"])


def _role(stack: StackDefinition, iam: Any) -> str:
    """Makes the role with which FIS can interrupt nodes of this stack, and do nothing else."""
    answer = refusals.absent(lambda: iam.get_role(RoleName=ROLE), "NoSuchEntity")
    if answer is None:
        tags = [{"Key": key, "Value": value} for key, value in own_tags(stack).items()]
        trust = json.dumps({"Version": "2012-10-17", "Statement": [_TRUST]})
        answer = iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=trust, Tags=tags)
    may = [
        {
            "Effect": "Allow",
            "Action": "ec2:SendSpotInstanceInterruptions",
            "Resource": "arn:aws:ec2:*:*:instance/*",
            "Condition": {"StringEquals": {f"aws:ResourceTag/{STACK_TAG}": RUN}},
        },
        {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"},
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": may})
    iam.put_role_policy(RoleName=ROLE, PolicyName=POLICY, PolicyDocument=policy)
    return str(answer["Role"]["Arn"])


def forget(client: Callable[[str], Any]) -> None:
    """Removes the templates and the role, including those that a killed canary left."""
    fis, iam = client("fis"), client("iam")
    for template in pages(fis, "list_experiment_templates", "experimentTemplates"):
        if template.get("tags", {}).get(STACK_TAG) == RUN:
            fis.delete_experiment_template(id=template["id"])
    refusals.absent(lambda: iam.delete_role_policy(RoleName=ROLE, PolicyName=POLICY), "NoSuchEntity")
    refusals.absent(lambda: iam.delete_role(RoleName=ROLE), "NoSuchEntity")
