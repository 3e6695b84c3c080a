"""Declares the stop that works outside of the run's own processes: a schedule of EventBridge Scheduler that ends the
fleet and its nodes.

At first its time is the fleet's expiry. A node changes it to the time at which the run's limits will be reached
(job/node/allowance.py). To change the time, a node must pass the role of the schedule, because UpdateSchedule replaces
everything. So this role can end the run's fleet and nodes, and nothing else, and a compromised node cannot use it for
more. A run's other schedules are in the same group. Each has a role that is just as harmless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.tags import owned, tags

SCHEDULE = "stop"  # the schedule's name within its group
SERVICE = "scheduler.amazonaws.com"
# the ARN of a universal target (Scheduler User Guide, 2026-11-27)
END_FLEET = "arn:aws:scheduler:::aws-sdk:ec2:deleteFleets"


class FleetStop(pulumi.ComponentResource):
    """Group and role of a schedule. Both must exist before a node boots (`ready`). `declare_for` adds the schedule."""

    group: aws.scheduler.ScheduleGroup
    role: aws.iam.Role
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        statements: pulumi.Input[list[dict[str, Any]]] | None = None,
        permissions_boundary: pulumi.Input[str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`statements`: the policy statements of the role; None if the role may end the run's fleets and nodes."""
        super().__init__("gpufleet:infra:Stop", name, None, opts)
        self._name, self._definition = name, definition
        child, labels = pulumi.ResourceOptions(parent=self), tags(definition)
        self.group = aws.scheduler.ScheduleGroup(f"gpufleet-{definition.name}", tags=labels, opts=child)
        self.role = aws.iam.Role(
            f"gpufleet-{definition.name}-stop",
            assume_role_policy=self.group.arn.apply(lambda arn: json.dumps(trust(arn))),
            description="ends a gpufleet run",
            permissions_boundary=permissions_boundary or definition.account.permissions_boundary,
            tags=labels,
            opts=child,
        )
        allowed = stop_statements(definition) if statements is None else statements
        rights = aws.iam.RolePolicy(
            f"{name}-rights",
            role=self.role.name,
            policy=pulumi.Output.json_dumps({"Version": "2012-10-17", "Statement": allowed}),
            opts=pulumi.ResourceOptions(parent=self, replacement_trigger=definition.run.id),
        )
        self.ready = [rights]
        self.schedule_arn = self.group.arn.apply(schedule_arn)
        self.schedule_name = self.group.name.apply(lambda group: f"{group}/{SCHEDULE}")
        self.register_outputs({})

    def declare_for(self, fleets: Sequence[aws.ec2.Fleet], valid_until: str) -> aws.scheduler.Schedule:
        """Declares the schedule that ends these fleets. Nodes change its time, so a later `up` does not reset it."""
        ids = pulumi.Output.all(*(fleet.id for fleet in fleets))
        return one_time(
            f"{self._name}-schedule",
            name=SCHEDULE,
            stop=self,
            description="ends the fleet when the run's means are used up; its node moves the hour",
            at=datetime.fromisoformat(valid_until),
            target=END_FLEET,
            input=ids.apply(lambda fleet_ids: json.dumps({"FleetIds": fleet_ids, "TerminateInstances": True})),
            depends_on=self.ready,
            # The schedule is replaced together with the fleets. If the fleets are those of another run, or are made
            # again, the time of the old schedule may have passed.
            trigger=ids.apply(lambda fleet_ids: " ".join([self._definition.run.id, *fleet_ids])),
            parent=self,
        )


def one_time(
    resource: str,
    *,
    name: str,
    stop: FleetStop,
    description: str,
    at: datetime,
    target: pulumi.Input[str],
    input: pulumi.Input[str],
    depends_on: Sequence[pulumi.Resource],
    trigger: pulumi.Input[str],
    parent: pulumi.Resource,
    enabled: bool = True,
) -> aws.scheduler.Schedule:
    """A one-time schedule with the group and role of `stop`. Nodes change its time; `up` resets it only if `trigger`
    changes.
    """
    return aws.scheduler.Schedule(
        resource,
        name=name,
        group_name=stop.group.name,
        description=description,
        schedule_expression=f"at({at:%Y-%m-%dT%H:%M:%S})",
        schedule_expression_timezone="UTC",
        flexible_time_window=aws.scheduler.ScheduleFlexibleTimeWindowArgs(mode="OFF"),
        state="ENABLED" if enabled else "DISABLED",
        action_after_completion="NONE",
        target=aws.scheduler.ScheduleTargetArgs(
            arn=target,
            role_arn=stop.role.arn,
            input=input,
            retry_policy=aws.scheduler.ScheduleTargetRetryPolicyArgs(
                maximum_event_age_in_seconds=86400, maximum_retry_attempts=185
            ),
        ),
        opts=pulumi.ResourceOptions(
            parent=parent,
            depends_on=list(depends_on),
            replacement_trigger=trigger,
            delete_before_replace=True,  # the new schedule has the same name
            ignore_changes=["scheduleExpression", "state"],
        ),
    )


def trust(group_arn: str) -> dict[str, Any]:
    """The trust policy of the role: only the service, for this group (Scheduler User Guide, confused deputy
    prevention).
    """
    principal, of_group = {"Service": SERVICE}, {"ArnEquals": {"aws:SourceArn": group_arn}}
    allow = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole", "Condition": of_group}
    return {"Version": "2012-10-17", "Statement": [allow]}


def schedule_arn(group_arn: str) -> str:
    return f"{group_arn.replace(':schedule-group/', ':schedule/')}/{SCHEDULE}"


def stop_statements(definition: StackDefinition) -> list[dict[str, Any]]:
    """The statements of everything that the schedule may do. AWS's pages do not say whether DeleteFleets needs the
    right to terminate each node by its id, or the right to terminate without an id. The first statement covers requests
    that name an instance.
    """
    region = definition.fleet.region
    return [
        {
            "Sid": "EndOwnFleet",
            "Effect": "Allow",
            "Action": ["ec2:DeleteFleets", "ec2:TerminateInstances"],
            "Resource": [f"arn:aws:ec2:{region}:*:{kind}/*" for kind in ("fleet", "instance")],
            "Condition": {"StringEquals": owned(definition)},
        },
        with_its_nodes(),
    ]


def with_its_nodes() -> dict[str, Any]:
    """The right to terminate without naming an instance."""
    return {
        "Sid": "WithItsNodes",
        "Effect": "Allow",
        "Action": "ec2:TerminateInstances",
        "Resource": "*",
        "Condition": {"Null": {"ec2:InstanceType": "true"}},
    }
