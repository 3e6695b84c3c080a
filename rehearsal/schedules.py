"""The schedules that moto keeps and never fires: one-time ones, at their hour by the Cloud's clock, as their role may.

EventBridge Scheduler acts with a role's rights, if that trusts it for the schedule's group; an hour that has passed is
refused where it is set. A state machine that it starts goes through its one step, with the rights of its own role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from moto.ec2.exceptions import EC2ClientError
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
    """A schedule that has fired, and what kept its target from being done: nothing, if that is empty."""

    name: str  # GROUP/NAME
    at: datetime
    refused: str


def moment(expression: str) -> datetime | None:
    """When a one-time schedule fires; None: it is none."""
    found = _AT.fullmatch(expression)
    return datetime.fromisoformat(found[1]).replace(tzinfo=UTC) if found else None


class Schedules:
    """Those of one Cloud."""

    def __init__(self, account_id: str, fleets: FleetController, tags: Callable[[str], Mapping[str, str]]) -> None:
        """`tags`: those of a fleet or an instance, by its id."""
        self._account, self._fleets, self._tags = account_id, fleets, tags
        self._done: set[tuple[str, str]] = set()  # ARN and expression
        self.fired: list[Fired] = []

    def bring_forward(self, name: str) -> None:
        """The hour of the schedules of this name is now: nobody waits for it in a rehearsal."""
        for backend in list(scheduler_backends[self._account].values()):
            for group in backend.schedule_groups.values():
                for each in group.schedules.values():
                    if each.name == name and each.state != "DISABLED":
                        each.schedule_expression = f"at({self._fleets.clock.now():%Y-%m-%dT%H:%M:%S})"
        self.tick()

    def tick(self) -> None:
        """Fires what is due."""
        now = self._fleets.clock.now()
        for region, backend in list(scheduler_backends[self._account].items()):
            for group in list(backend.schedule_groups.values()):
                for each in list(group.schedules.values()):
                    at, key = moment(each.schedule_expression), (each.arn, each.schedule_expression)
                    # moto keeps a state that was left out of an update as none, AWS as the default.
                    if at is not None and at <= now and each.state != "DISABLED" and key not in self._done:
                        self._done.add(key)
                        refused = self._do(region, group.arn, each.target)
                        self.fired.append(Fired(name=f"{group.name}/{each.name}", at=now, refused=refused))

    def _do(self, region: str, group_arn: str, target: dict[str, Any]) -> str:
        asked, role_arn, of = json.loads(target["Input"]), target["RoleArn"], {"aws:SourceArn": group_arn}
        if target["Arn"].startswith("arn:aws:states:"):
            wish = AccessRequest(action="states:StartExecution", resource=target["Arn"])
            return self._refused(role_arn, of, [wish]) or self._execute(region, target["Arn"])
        if target["Arn"] == f"{_TARGET}ec2:modifyFleet":
            return self._modify(region, asked, role_arn, of, SERVICE)
        if target["Arn"] == f"{_TARGET}sns:publish":
            return self._publish(region, of, role_arn, asked)
        if target["Arn"] != f"{_TARGET}ec2:deleteFleets":
            return f"the embedded AWS has no target {target['Arn']}"
        place = f"arn:aws:ec2:{region}:{self._account}"
        ending = [node.id for fleet in asked["FleetIds"] for node in self._fleets.living(fleet)]
        named = [("DeleteFleets", f"{place}:fleet/{each}", each) for each in asked["FleetIds"]]
        named += [("TerminateInstances", f"{place}:instance/{each}", each) for each in ending]
        wishes = [
            AccessRequest(
                action=f"ec2:{action}",
                resource=arn,
                # Which keys a request has is in the service authorization reference; the type stands for all of them.
                context={
                    **({"ec2:InstanceType": "any"} if action == "TerminateInstances" else {}),
                    **{f"aws:ResourceTag/{key}": value for key, value in self._tags(name).items()},
                },
            )
            for action, arn, name in named
        ]
        if asked.get("TerminateInstances", True):  # and, to be strict, without a node named
            wishes.append(AccessRequest(action="ec2:TerminateInstances"))
        if refused := self._refused(role_arn, of, wishes):
            return refused
        answer = self._fleets.delete(region, asked)
        return "; ".join(each["Error"]["Message"] for each in answer["UnsuccessfulFleetDeletions"])

    def _execute(self, region: str, machine_arn: str) -> str:
        """The one step that such a machine may have here, as its role may do it."""
        machines = stepfunctions_backends[self._account][region].state_machines
        machine = next((each for each in machines if each.arn == machine_arn), None)
        if machine is None:
            return f"there is no state machine {machine_arn}"
        told = json.loads(machine.definition)
        step = told["States"][told["StartAt"]]
        if step["Resource"] != f"{_STEP}ec2:modifyFleet" or not step.get("End"):
            return f"the embedded AWS has no step {step}"
        of = {"aws:SourceAccount": self._account}
        return self._modify(region, step["Parameters"], machine.roleArn, of, "states.amazonaws.com")

    def _modify(self, region: str, asked: dict[str, Any], role_arn: str, of: Mapping[str, str], service: str) -> str:
        fleet = asked["FleetId"]
        tags = {f"aws:ResourceTag/{key}": value for key, value in self._tags(fleet).items()}
        arn = f"arn:aws:ec2:{region}:{self._account}:fleet/{fleet}"
        wish = AccessRequest(action="ec2:ModifyFleet", resource=arn, context=tags)
        if refused := self._refused(role_arn, of, [wish], service):
            return refused
        try:
            self._fleets.modify(region, asked)
        except EC2ClientError as error:
            return str(error.message)
        return ""

    def _publish(self, region: str, of: Mapping[str, str], role_arn: str, asked: dict[str, str]) -> str:
        wish = AccessRequest(action="sns:Publish", resource=asked["TopicArn"])
        if refused := self._refused(role_arn, of, [wish]):
            return refused
        sns_backends[self._account][region].publish(
            asked["Message"], arn=asked["TopicArn"], subject=asked.get("Subject")
        )
        return ""

    def _refused(
        self, role_arn: str, of: Mapping[str, str], wishes: list[AccessRequest], service: str = SERVICE
    ) -> str:
        """Why the role may not; empty: it may. `of`: what the service says of whom it acts for."""
        roles = iam_backends[self._account]["aws"].roles.values()
        role = next((each for each in roles if each.arn == role_arn), None)
        if role is None:
            return f"there is no role {role_arn}"
        if not trusts(json.loads(role.assume_role_policy_document), of, service):
            return f"{role_arn} does not trust {service} for {', '.join(of.values())}"
        statements = account.role_statements(role)
        return next((f"not allowed: {each.action}" for each in wishes if not iam_policy.allowed(statements, each)), "")


def trusts(policy: dict[str, Any], of: Mapping[str, str], service: str = SERVICE) -> bool:
    """Whether a role's trust policy lets the service act with it, for whom it says."""
    for_service = [
        {key: value for key, value in each.items() if key != "Principal"}
        for each in policy["Statement"]
        if each.get("Principal") == {"Service": service}
    ]
    wish = AccessRequest(action="sts:AssumeRole", context=dict(of))
    return bool(iam_policy.allowed([{"Resource": "*", **each} for each in for_service], wish))
