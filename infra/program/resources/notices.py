"""Declares the messages about a run: a topic with an e-mail subscription, a rule that passes on AWS's events about the
fleet, and a schedule that fires if no node has trained for long, because a training node postpones it
(job/node/notices.py).

A subscription is active only once the person has confirmed it by the link in AWS's first message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.stop import FleetStop, one_time
from gpufleet.infra.program.resources.tags import tags
from gpufleet.job.contract.aws import SILENCE

# the ARN of a universal target (Scheduler User Guide, read 2026-11-26)
PUBLISH = "arn:aws:scheduler:::aws-sdk:sns:publish"
# Kinds of events about nodes that are lost without a notice, and about reasons why a fleet launches no nodes (EC2 Fleet
# event types, read 2026-11-26).
TOLD_OF_FLEET = (
    "terminated",
    "iamFleetRoleInvalid",
    "allLaunchSpecsTemporarilyBlacklisted",
    "spotInstanceCountLimitExceeded",
    "spotFleetRequestConfigurationInvalid",
)


class NoticesComponent(pulumi.ComponentResource):
    """The topic, its subscription and policy, and the schedule if the run is not over; all must exist before a node
    boots (`ready`). `declare_for` adds the resources that need the fleet.
    """

    topic: aws.sns.Topic
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        stop: FleetStop,
        silent_from: datetime | None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`stop`: the component that has the schedule's group and role. `silent_from`: the time at which the message
        about silence is sent if no node has trained until then; None if the run is over. The schedule is made before
        the uploads, because AWS refuses an hour that has passed.
        """
        super().__init__("gpufleet:infra:Notices", name, None, opts)
        self._name, self._definition, self._stop = name, definition, stop
        self._child = pulumi.ResourceOptions(parent=self)
        self.topic = aws.sns.Topic(f"gpufleet-{definition.name}", tags=tags(definition), opts=self._child)
        subscription = aws.sns.TopicSubscription(
            f"{name}-email",
            topic=self.topic.arn,
            protocol="email",
            endpoint=definition.notify.email,
            opts=self._child,
        )
        self._rights = aws.iam.RolePolicy(
            f"{name}-rights",
            role=stop.role.name,
            policy=self.topic.arn.apply(lambda arn: json.dumps(_may_publish(arn))),
            opts=self._child,
        )
        policy = aws.sns.TopicPolicy(
            f"{name}-policy",
            arn=self.topic.arn,
            policy=self.topic.arn.apply(lambda arn: json.dumps(_events_may_publish(arn))),
            opts=self._child,
        )
        self.ready = [subscription, policy]
        if silent_from is not None:
            self.ready.append(self._tell_silence(silent_from))
        self.register_outputs({})

    def told_node(self) -> pulumi.Output[str]:
        """The settings that a node needs to send messages, as JSON."""
        notify = self._definition.notify
        settings = {"silent_s": int(notify.silent_hours * 3600), "webhook": notify.webhook or ""}
        return pulumi.Output.json_dumps({"topic": self.topic.arn, **settings})

    def declare_for(self, fleets: Sequence[aws.ec2.Fleet]) -> list[pulumi.Resource]:
        """Declares the rule for the fleets' events, and its target."""
        definition = self._definition
        rule = aws.cloudwatch.EventRule(
            f"gpufleet-{definition.name}",
            description="what AWS says of a gpufleet run's fleet",
            event_pattern=pulumi.Output.all(*(fleet.arn for fleet in fleets)).apply(
                lambda arns: json.dumps(
                    {"source": ["aws.ec2fleet"], "resources": arns, "detail": {"sub-type": list(TOLD_OF_FLEET)}}
                )
            ),
            tags=tags(definition),
            opts=self._child,
        )
        target = aws.cloudwatch.EventTarget(
            f"{self._name}-target",
            rule=rule.name,
            arn=self.topic.arn,
            input_transformer=aws.cloudwatch.EventTargetInputTransformerArgs(
                input_paths={"what": "$.detail.sub-type", "at": "$.time"},
                input_template=f'"AWS on the fleet of {definition.name}, run {definition.run.id}, at <at>: <what>. '
                f'What the run does now: gpufleet status {definition.name}"',
            ),
            opts=self._child,
        )
        return [rule, target]

    def _tell_silence(self, since: datetime) -> aws.scheduler.Schedule:
        definition, silent = self._definition, self._definition.notify.silent_hours
        words = (
            f"Nothing has trained for {silent:g} hours in run {definition.run.id} of {definition.name}: AWS has no "
            f"capacity, a node hangs, or the run cannot begin. What it does now: gpufleet status {definition.name}"
        )
        # SNS accepts at most 100 ASCII characters
        subject = f"gpufleet {definition.name}, run {definition.run.id}: nothing trains"
        return one_time(
            f"{self._name}-silence",
            name=SILENCE,
            stop=self._stop,
            description="tells that nothing has trained for long; a node that trains moves the hour",
            at=since + timedelta(hours=float(silent)),
            target=PUBLISH,
            input=self.topic.arn.apply(
                lambda arn: json.dumps({"TopicArn": arn, "Subject": subject[:100], "Message": words})
            ),
            depends_on=[self._rights],
            trigger=definition.run.id,
            parent=self,
        )


def _may_publish(topic_arn: str) -> dict[str, Any]:
    """The right of the schedule's role to publish to this topic."""
    allow = {"Sid": "TellOfSilence", "Effect": "Allow", "Action": "sns:Publish", "Resource": topic_arn}
    return {"Version": "2012-10-17", "Statement": [allow]}


def _events_may_publish(topic_arn: str) -> dict[str, Any]:
    """The right of EventBridge to publish, only for this account's rules. The account's roles need no topic policy."""
    account = topic_arn.split(":")[4]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "FleetEvents",
                "Effect": "Allow",
                "Principal": {"Service": "events.amazonaws.com"},
                "Action": "sns:Publish",
                "Resource": topic_arn,
                "Condition": {"StringEquals": {"aws:SourceAccount": account}},
            }
        ],
    }
