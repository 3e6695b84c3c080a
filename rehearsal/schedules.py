"""Fires one-time schedules at their time by the Cloud's clock, with the rights of their role, because moto only stores
them.

EventBridge Scheduler acts with a role's rights if the role trusts it for the schedule's group. A request with a time in
the past is refused. If a schedule or a node starts a state machine, the machine goes through its steps with the rights
of its own role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.scheduler.models import scheduler_backends
from moto.sns.models import sns_backends
from moto.stepfunctions.models import stepfunctions_backends

from gpufleet.infra.account import iam_policy
from gpufleet.infra.account.iam_policy import AccessRequest
from gpufleet.rehearsal import account
from gpufleet.rehearsal.controller import FleetController

SERVICE = "scheduler.amazonaws.com"
_AT = re.compile(r"at\((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\)")
_TARGET, _STEP = "arn:aws:scheduler:::aws-sdk:", "arn:aws:states:::aws-sdk:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A schedule that has fired, and the reason why its target failed; the reason is empty if it did not fail."""

    name: str  # GROUP/NAME
    at: datetime
    refused: str


def moment(expression: str) -> datetime | None:
    """The time at which a one-time schedule fires; None for any other expression."""
    match = _AT.fullmatch(expression)
    return datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None


class Schedules:
    def __init__(self, account_id: str, fleets: FleetController, tags: Callable[[str], Mapping[str, str]]) -> None:
        """`tags` returns the tags of a fleet or instance by its id."""
        self._account, self._fleets, self._tags = account_id, fleets, tags
        self._done: set[tuple[str, str]] = set()  # ARN and expression of schedules that have fired
        self.fired: list[Fired] = []
        # State machines that wait: the time until which they wait, the region, the next state, and its input.
        self._waiting: list[tuple[datetime, str, Any, str, Mapping[str, Any]]] = []
        self._begun: set[str] = set()  # executions that a node has started

    def bring_forward(self, name: str) -> None:
        """Makes the schedules of this name due now, because a rehearsal does not wait for their hour."""
        for backend in list(scheduler_backends[self._account].values()):
            for group in backend.schedule_groups.values():
                for schedule in group.schedules.values():
                    if schedule.name == name and schedule.state != "DISABLED":
                        schedule.schedule_expression = f"at({self._fleets.clock.now():%Y-%m-%dT%H:%M:%S})"
        self.tick()

    def tick(self) -> None:
        """Fires the schedules that are due."""
        now = self._fleets.clock.now()
        for region, backend in list(scheduler_backends[self._account].items()):
            for group in list(backend.schedule_groups.values()):
                for schedule in list(group.schedules.values()):
                    at, key = moment(schedule.schedule_expression), (schedule.arn, schedule.schedule_expression)
                    # If an update omits the state, moto stores none, but AWS stores the default.
                    if at is not None and at <= now and schedule.state != "DISABLED" and key not in self._done:
                        self._done.add(key)
                        refused = self._do(region, group.arn, schedule.target)
                        self.fired.append(Fired(name=f"{group.name}/{schedule.name}", at=now, refused=refused))
        for region, states in list(stepfunctions_backends[self._account].items()):
            for machine in list(states.state_machines):
                for execution in machine.executions:
                    if execution.execution_arn not in self._begun:
                        self._begun.add(execution.execution_arn)
                        self._execute(region, machine.arn, json.loads(execution.execution_input))
        for waiting in [entry for entry in self._waiting if entry[0] <= now]:
            self._waiting.remove(waiting)
            self._go_on(*waiting[1:])

    def _do(self, region: str, group_arn: str, target: dict[str, Any]) -> str:
        asked, role_arn, of = json.loads(target["Input"]), target["RoleArn"], {"aws:SourceArn": group_arn}
        if target["Arn"].startswith("arn:aws:states:"):
            wish = AccessRequest("states:StartExecution", target["Arn"])
            return self._refused(role_arn, of, [wish]) or self._execute(region, target["Arn"], {})
        if target["Arn"] == f"{_TARGET}ec2:modifyFleet":
            return self._modify(region, asked, role_arn, of, SERVICE)
        if target["Arn"] == f"{_TARGET}ec2:deregisterImage":
            return self._deregister(region, asked, role_arn, of)
        if target["Arn"] == f"{_TARGET}ec2:deleteSnapshot":
            return self._delete_snapshot(region, asked["SnapshotId"], role_arn, of)
        if target["Arn"] == f"{_TARGET}sns:publish":
            return self._publish(region, of, role_arn, asked)
        if target["Arn"] != f"{_TARGET}ec2:deleteFleets":
            return f"the embedded AWS has no target {target['Arn']}"
        place = f"arn:aws:ec2:{region}:{self._account}"
        ending = [node.id for fleet in asked["FleetIds"] for node in self._fleets.living(fleet)]
        named = [("DeleteFleets", f"{place}:fleet/{fleet}", fleet) for fleet in asked["FleetIds"]]
        named += [("TerminateInstances", f"{place}:instance/{node_id}", node_id) for node_id in ending]
        wishes = [
            AccessRequest(
                action=f"ec2:{action}",
                resource=arn,
                # The service authorization reference lists the keys of each request; the resource's type stands for all
                # of them.
                context={
                    **({"ec2:InstanceType": "any"} if action == "TerminateInstances" else {}),
                    **{f"aws:ResourceTag/{key}": value for key, value in self._tags(name).items()},
                },
            )
            for action, arn, name in named
        ]
        if asked.get("TerminateInstances", True):  # also required if no node is named, which is stricter
            wishes.append(AccessRequest("ec2:TerminateInstances"))
        if refused := self._refused(role_arn, of, wishes):
            return refused
        answer = self._fleets.delete(region, asked)
        return "; ".join(failure["Error"]["Message"] for failure in answer["UnsuccessfulFleetDeletions"])

    def _execute(self, region: str, machine_arn: str, inputs: Mapping[str, Any]) -> str:
        """Runs the steps of a state machine up to the first wait; returns why they failed; empty if they did not."""
        machines = stepfunctions_backends[self._account][region].state_machines
        machine = next((candidate for candidate in machines if candidate.arn == machine_arn), None)
        if machine is None:
            return f"there is no state machine {machine_arn}"
        return self._go_on(region, machine, json.loads(machine.definition)["StartAt"], inputs)

    def _go_on(self, region: str, machine: Any, state: str | None, inputs: Mapping[str, Any]) -> str:
        """Runs the steps from `state` on, with the rights of the state machine's role.

        Waits and Retry follow the clock; Catch handles failures.
        """
        steps, now = json.loads(machine.definition)["States"], self._fleets.clock.now()
        while state is not None:
            step = steps[state]
            if step["Type"] == "Wait":
                seconds = step.get("Seconds") or inputs[step["SecondsPath"].removeprefix("$.")]
                self._waiting.append((now + timedelta(seconds=seconds), region, machine, step["Next"], inputs))
                return ""
            refused = self._step(region, step, machine.roleArn)
            if refused and "Catch" in step:
                tried = (
                    retry["IntervalSeconds"] * (retry["BackoffRate"] ** retry["MaxAttempts"] - 1)
                    for retry in step.get("Retry", ())
                )
                at = now + timedelta(seconds=sum(tried))
                self._waiting.append((at, region, machine, step["Catch"][0]["Next"], inputs))
            if refused:
                return refused
            state = step.get("Next")
        return ""

    def _step(self, region: str, step: Mapping[str, Any], role_arn: str) -> str:
        of, service = {"aws:SourceAccount": self._account}, "states.amazonaws.com"
        if step["Resource"] == f"{_STEP}ec2:modifyFleet":
            return self._modify(region, step["Parameters"], role_arn, of, service)
        if step["Resource"] == f"{_STEP}sns:publish":
            return self._publish(region, of, role_arn, step["Parameters"], service)
        return f"the embedded AWS has no step {step}"

    def _modify(self, region: str, asked: dict[str, Any], role_arn: str, of: Mapping[str, str], service: str) -> str:
        fleet = asked["FleetId"]
        tags = {f"aws:ResourceTag/{key}": value for key, value in self._tags(fleet).items()}
        arn = f"arn:aws:ec2:{region}:{self._account}:fleet/{fleet}"
        wish = AccessRequest("ec2:ModifyFleet", arn, context=tags)
        if refused := self._refused(role_arn, of, [wish], service):
            return refused
        try:
            self._fleets.modify(region, asked)
        except EC2ClientError as error:
            return str(error.message)
        return ""

    def _deregister(self, region: str, asked: dict[str, Any], role_arn: str, of: Mapping[str, str]) -> str:
        ec2, image = ec2_backends[self._account][region], asked["ImageId"]
        with_snapshots = bool(asked.get("DeleteAssociatedSnapshots"))
        wishes = [AccessRequest("ec2:DeregisterImage", f"arn:aws:ec2:{region}::image/{image}")]
        if with_snapshots and image in ec2.amis:
            snapshot = ec2.amis[image].ebs_snapshot.id
            wishes.append(AccessRequest("ec2:DeleteSnapshot", f"arn:aws:ec2:{region}::snapshot/{snapshot}"))
        if refused := self._refused(role_arn, of, wishes):
            return refused
        try:
            account.deregister_image(ec2, image, with_snapshots=with_snapshots)
        except EC2ClientError as error:
            return str(error.message)
        return ""

    def _delete_snapshot(self, region: str, snapshot: str, role_arn: str, of: Mapping[str, str]) -> str:
        wish = AccessRequest("ec2:DeleteSnapshot", f"arn:aws:ec2:{region}::snapshot/{snapshot}")
        if refused := self._refused(role_arn, of, [wish]):
            return refused
        try:
            ec2_backends[self._account][region].delete_snapshot(snapshot)
        except EC2ClientError as error:
            return str(error.message)
        return ""

    def _publish(
        self, region: str, of: Mapping[str, str], role_arn: str, asked: dict[str, str], service: str = SERVICE
    ) -> str:
        wish = AccessRequest("sns:Publish", asked["TopicArn"])
        if refused := self._refused(role_arn, of, [wish], service):
            return refused
        sns_backends[self._account][region].publish(
            asked["Message"], arn=asked["TopicArn"], subject=asked.get("Subject")
        )
        return ""

    def _refused(
        self, role_arn: str, of: Mapping[str, str], wishes: list[AccessRequest], service: str = SERVICE
    ) -> str:
        """Why the role may not make the request; empty if it may. `of`: statements of the service about the resource
        for which it acts.
        """
        roles = iam_backends[self._account]["aws"].roles.values()
        role = next((candidate for candidate in roles if candidate.arn == role_arn), None)
        if role is None:
            return f"there is no role {role_arn}"
        if not trusts(json.loads(role.assume_role_policy_document), of, service):
            return f"{role_arn} does not trust {service} for {', '.join(of.values())}"
        statements = account.role_statements(role)
        return next((f"not allowed: {wish.action}" for wish in wishes if not iam_policy.allowed(statements, wish)), "")


def trusts(policy: dict[str, Any], of: Mapping[str, str], service: str = SERVICE) -> bool:
    """Whether a role's trust policy allows the service to use the role for the source that the service states."""
    for_service = [
        {key: value for key, value in statement.items() if key != "Principal"}
        for statement in policy["Statement"]
        if statement.get("Principal") == {"Service": service}
    ]
    wish = AccessRequest("sts:AssumeRole", context=dict(of))
    return bool(iam_policy.allowed([{"Resource": "*", **statement} for statement in for_service], wish))
