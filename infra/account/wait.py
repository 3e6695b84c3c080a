"""Waits for a node: `pulumi up` ends when AWS has accepted the fleet, not when it has a node.

`wait` reads the fleet's history, prints each new event once with what to do, and gives up at once if waiting cannot
help. The last lines say why there is no node, in AWS's words if the cause is not known.

Sources: event names are those of the EC2 API's EventInformation (botocore 1.44.5). Error names inside descriptions are
the EC2 API's error codes, read 2026-11-25; public reports show that descriptions contain these codes, and in which
words. Unknown events are shown unchanged, because a wrong explanation costs more than none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from gpufleet.infra.account import aws
from gpufleet.infra.account.fleet import (
    ENDED,
    end_command,
    find_instances,
    fleets_of,
    has_expired,
    may_launch,
    replaces,
    too_many,
    wants,
    why_needless,
)
from gpufleet.infra.account.run_folder import find_folder
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.market import WAYS
from gpufleet.infra.program.resources.tags import RUN_TAG
from gpufleet.job.contract.done import FINISHED, Done
from gpufleet.job.supervisor.store import pages
from gpufleet.job.text import counted

POLL_S = 10.0


@dataclass(kw_only=True, slots=True)
class WaitLoop:
    """One wait. Clock and sleep are parameters, so that a test does not have to wait."""

    definition: StackDefinition
    ec2: Any
    s3: Any
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    say: Callable[[str], None] = print
    said: set[str] = field(default_factory=set)
    reasons: list[Reason] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)  # events without a known cause, in AWS's words
    ended: set[str] = field(default_factory=set)  # nodes that have ended

    def until_node(self, timeout_s: float) -> int:
        """Returns 0 if a node runs or the run is over. Prints the reasons and returns 1 if no node runs in time."""
        give_up = self.clock() + timeout_s
        while True:
            fleets = fleets_of(self.ec2, self.definition)
            if not fleets:
                if done := self._read_done(self.definition.run.owner):
                    return self._report_end(done)
                raise self._no_fleet()
            launching = [candidate for candidate in fleets if self._ours(candidate)]
            if twice := too_many(launching, self.definition):
                self._report_second_fleet(twice)
                return 1
            fleet = fleets[0]
            stopped = not wants(fleet)
            ended, expired = fleet["FleetState"] in ENDED, has_expired(fleet, self.now())
            if (stopped or ended or expired) and (
                done := self._read_done(aws.owner_of(fleet) or self.definition.run.owner)
            ):
                return self._report_end(done)
            if ended or fleet["FleetState"] == "failed":
                return self._no_more(fleet, fleet["FleetState"])
            if stopped and not expired and not self.definition.before:
                self._resting(fleet)
                return 1
            # otherwise the stage before may be about to start this stage's fleet
            if stopped and not expired and self._is_called_off():
                return 0
            looking = launching if fleet in launching else [fleet]
            if not replaces(fleet) and (missing := self._missing(fleet)):
                if done := self._read_done(aws.owner_of(fleet) or self.definition.run.owner):
                    return self._report_end(done)
                self._report_missing(fleet, missing)
                return 1
            if node_of := next((candidate for candidate in looking if self._node(candidate)), None):
                return self._for_nothing(node_of)
            if expired:
                return self._no_more(fleet, "expired")
            if len(looking) > 1:
                place = WAYS[self.definition.fleet.market.fleets[-1]].place
                self._say(f"The hour has come to go on {place} (fleet.fallback): both fleets look for a node.")
            for candidate in looking:
                self._history(candidate)
            final = next((reason for reason in self.reasons if reason.final), None)
            if final:
                self._keeps_away([])  # the reasons were printed a moment ago
                self.say(f"Waiting cannot help: {final.cause}. `pulumi destroy` ends the fleet, which keeps trying.")
                return 1
            if self.clock() >= give_up:
                return self._timed_out(timeout_s, both=len(looking) > 1)
            self._say(f"waiting for fleet {fleet['FleetId']} to find a node ...")
            self.sleep(min(POLL_S, max(give_up - self.clock(), 0.0)))

    def _report_end(self, done: Done) -> int:
        if self.definition.next_stage and done.reason == FINISHED:
            self.say(f"the stage {self.definition.stage} is done; {self.definition.next_stage} is next.")
            return 0
        self.say(f"the run is over: {done.reason}. {done.detail}".strip())
        self.say(f"Next: `gpufleet results {self.definition.argument}`, then `pulumi destroy`.")
        return 0

    def _no_fleet(self) -> AwsRefused:
        name, run_id = self.definition.name, self.definition.run.id
        others = sorted(
            {aws.tags_of(fleet).get(RUN_TAG, "?") for fleet in fleets_of(self.ec2, self.definition, every_run=True)}
        )
        hint = f" This stack has fleets of {', '.join(others)}." if others else ""
        where = f"{name} in {self.definition.fleet.region}"
        return AwsRefused(f"there is no fleet of run {run_id} of {where}: run `pulumi up` first.{hint}")

    def _ours(self, fleet: dict[str, Any]) -> bool:
        return may_launch(fleet, self.now()) and aws.owner_of(fleet) == self.definition.run.owner

    def _report_second_fleet(self, fleets: list[dict[str, Any]]) -> None:
        """Warns of a second fleet. If an `up` was killed, the engine forgets its fleet and makes another."""
        run = self.definition.run.id
        self.say(
            f"{len(fleets)} fleets of run {run} launch nodes, each billed. An `up` that was interrupted leaves a fleet "
            "that the stack does not know, and no destroy ends it: end all but the one that `pulumi stack output "
            f"fleet_id` names. Or a second stack has this file up as run {run}: it needs another run.id."
        )
        for fleet in fleets:
            made = f"{fleet['CreateTime']:%Y-%m-%d %H:%M:%S} UTC"
            self.say(f"  {end_command(fleet, self.definition.fleet.region)}   # made {made}")

    def _is_called_off(self) -> bool:
        folder = find_folder(self.s3, self.definition)
        if folder is None or not folder.is_called_off():
            return False
        self.say(f"the run was asked to end before its stage {self.definition.stage}, which does not begin.")
        return True

    def _read_done(self, owner: str) -> Done | None:
        folder = find_folder(self.s3, self.definition)
        return folder.read_done() if folder and folder.is_of(owner) else None

    def _nodes(self, fleet: dict[str, Any]) -> list[dict[str, Any]]:
        if replaces(fleet):
            active = self.ec2.describe_fleet_instances(FleetId=fleet["FleetId"])["ActiveInstances"]
            ids = [instance["InstanceId"] for instance in active]
        else:  # DescribeFleetInstances does not support instant fleets
            ids = [instance_id for launched in fleet.get("Instances", []) for instance_id in launched["InstanceIds"]]
        return find_instances(self.ec2, [("instance-id", ids)]) if ids else []

    def _node(self, fleet: dict[str, Any]) -> bool:
        for node in self._nodes(fleet):
            where = f"{node['InstanceId']}, {node['InstanceType']} in {node['Placement']['AvailabilityZone']}"
            if node["State"]["Name"] == "running":
                self._say(f"node {where} runs since {node['LaunchTime']:%Y-%m-%d %H:%M:%S} UTC. {self._status()}")
                return True
            self._say(f"node {where} is {node['State']['Name']}.")
        return False

    def _missing(self, fleet: dict[str, Any]) -> int:
        """The number of nodes that the fleet lacks."""
        there = [node for node in self._nodes(fleet) if node["State"]["Name"] in ("pending", "running")]
        return max(wants(fleet) - len(there), 0)

    def _report_missing(self, fleet: dict[str, Any], missing: int) -> None:
        """Prints what to do about missing nodes of a fleet that asks AWS for nodes only once."""
        for error in fleet.get("Errors", []):
            self.say(f"AWS says: {error['ErrorCode']}: {error['ErrorMessage']}")
        if fleet.get("Errors"):
            self.say(f"`gpufleet doctor {self.definition.argument}` compares the block with the file.")
        self.say(
            f"fleet {fleet['FleetId']} has {wants(fleet) - missing} of {counted(wants(fleet), 'node')}, and asks for no"
            " more. End it; then `pulumi up` launches all nodes again while the block lasts, and they go on from the"
            " last checkpoint:"
        )
        self.say(f"  {end_command(fleet, self.definition.fleet.region)}")

    def _for_nothing(self, fleet: dict[str, Any]) -> int:
        """Returns 1 if the node is useless because its run is over, and 0 otherwise. (Another owner's node trains that
        owner's run.)
        """
        done = self._read_done(self.definition.run.owner) if self._ours(fleet) else None
        needless = why_needless(fleet, done, self.now()) if done else ""
        if needless:
            self.say(f"The run is over, but {needless}\n  {end_command(fleet, self.definition.fleet.region)}")
        return 1 if needless else 0

    def _history(self, fleet: dict[str, Any]) -> None:
        """Prints every new event, and collects those that explain why there is no node."""
        asked = {"FleetId": fleet["FleetId"], "StartTime": fleet["CreateTime"]}
        for answer in pages(self.ec2.describe_fleet_history, **asked):
            for record in answer["HistoryRecords"]:
                self._event(record)

    def _event(self, record: dict[str, Any]) -> None:
        kind, sub_type, description = describe(record)
        # AWS's guide and its API model spell the kinds of events differently
        if "change" in kind.lower():
            self._ended(record, sub_type)
        else:
            self._say(f"{sub_type}: {description}" if description else sub_type)
            self._explain(sub_type, description)

    def _ended(self, record: dict[str, Any], sub_type: str) -> None:
        """Prints why an instance ended, from its own state reason."""
        node = str(record["EventInformation"].get("InstanceId", ""))
        if sub_type != "terminated" or not node or node in self.ended:
            return
        self.ended.add(node)
        instances = find_instances(self.ec2, [("instance-id", [node])])
        why = (instances[0].get("StateReason") or {}) if instances else {}
        code, message = str(why.get("Code", "")), str(why.get("Message", ""))
        self.say(f"node {node} has ended{': ' + message if message else ''}.")
        if code and code not in ENDS_OF_RUNNING:
            self._explain(code, message)

    def _explain(self, sub_type: str, description: str) -> None:
        reason = explain(sub_type, description, self.definition)
        words = f"{sub_type}: {description}" if description else sub_type
        if reason is None:
            self.unexplained += [words] if words not in self.unexplained else []
        elif reason not in self.reasons:
            self.reasons.append(reason)
            self.say(f"  That means {reason.cause}.\n  {reason.remedy}")

    def _no_more(self, fleet: dict[str, Any], why: str) -> int:
        self.say(f"fleet {fleet['FleetId']} is {why}: it launches nothing more.")
        self._history(fleet)
        self._keeps_away(self.reasons)
        self.say(f"A new run.id and `pulumi up` start a new one. {self._status()}")
        return 1

    def _resting(self, fleet: dict[str, Any]) -> None:
        let_go = "waiting nodes have ended, and within four hours AWS is asked for all nodes again; or "
        self.say(
            f"fleet {fleet['FleetId']} is at 0, and the run left no done marker: "
            f"{let_go if self.definition.fleet.lets_go else ''}somebody has set its size to 0, or a node could not "
            "reach the bucket. A new run.id begins anew; this command lets the run go on from its last checkpoint:"
        )
        self.say(
            f"  aws ec2 modify-fleet --region {self.definition.fleet.region} --fleet-id {fleet['FleetId']} "
            f"--target-capacity-specification TotalTargetCapacity={self.definition.nodes}"
        )

    def _timed_out(self, timeout_s: float, *, both: bool) -> int:
        neither = " Neither on spot nor on demand: limits.deadline may be missed." if both else ""
        self.say(f"No node after {timeout_s:g} s.{neither}")
        self._keeps_away(self.reasons)
        if not (self.reasons or self.unexplained or self.ended):
            self.say(
                "The fleet's history gives no reason yet; AWS is usually still looking. Nothing is billed meanwhile."
            )
        self.say(f"The fleet keeps trying: `gpufleet wait {self.definition.argument}` again, or `pulumi destroy`.")
        return 1

    def _keeps_away(self, reasons: list[Reason]) -> None:
        """Prints why there is no node: the `reasons`, events whose cause is not known, and nodes that started and
        ended.
        """
        for reason in reasons:
            self.say(f"  - {reason.cause}. {reason.remedy}")
        for words in self.unexplained:
            self.say(f"  - AWS says: {words}")
        if self.ended:
            nodes = counted(len(self.ended), "node")
            self.say(
                f"  - {nodes} started and ended: once a node runs, at least a minute is billed, and the fleet starts "
                f"more. `gpufleet status {self.definition.argument}` shows those that booted."
            )

    def _status(self) -> str:
        return f"Next: `gpufleet status {self.definition.argument}`."

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.say(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A cause, and what to do about it. If it is `final`, waiting does not help."""

    cause: str
    remedy: str
    final: bool = False


# Codes that say why a running node ended (EC2 API, StateReason, read 2026-11-25). Other codes say why no node started.
ENDS_OF_RUNNING = (
    "Server.ScheduledStop", "Server.SpotInstanceShutdown", "Server.SpotInstanceTermination",
    "Client.InstanceInitiatedShutdown", "Client.InstanceTerminated",
    "Client.UserInitiatedHibernate", "Client.UserInitiatedShutdown",
)  # fmt: skip
# Each pattern is searched for in "subtype: description"; the first that matches gives the reason.
_RULES = {
    r"PendingVerification": Reason(
        cause="AWS is still verifying this account",
        remedy="Wait: it takes minutes, sometimes hours, and AWS then writes to the account's address. If it lasts "
        "longer, ask AWS Support.",
    ),
    r"\(Blocked\)|\bBlocked:|OptInRequired": Reason(
        cause="AWS lets this account launch nothing: it is blocked, or lacks a subscription that the AMI needs",
        remedy="Ask AWS Support (the account's console says what is missing), then `gpufleet wait {stack}` again.",
        final=True,
    ),
    r"InvalidBlockDeviceMapping|smaller than (its )?snapshot": Reason(
        cause="EC2 does not accept the disks: for example, one is smaller than its snapshot",
        remedy="Correct storage.root or storage.data (`gpufleet doctor {stack}` compares them with AMI and "
        "snapshot), give run.id a new value, then `pulumi up`.",
        final=True,
    ),
    r"VolumeLimitExceeded|MaxIOPSLimitExceeded|Volume limit": Reason(
        cause="the account's quota for disks does not allow those of this node",
        remedy="Ask for more (Service Quotas, Amazon EBS, storage or IOPS of gp3 volumes), or write smaller disks "
        "under storage with a new run.id, then `pulumi up`.",
        final=True,
    ),
    r"spotInstanceCountLimitExceeded|MaxSpotInstanceCountExceeded|VcpuLimitExceeded|vCPU limit|limit.*vCPU": Reason(
        cause="the account's vCPU quota does not allow this node",
        remedy="`gpufleet doctor {stack}` shows the quota and the command that asks for more; AWS answers in hours to "
        "days. If another node is still running or has just ended, its vCPUs count for a few minutes more.",
    ),
    r"iamFleetRoleInvalid|ServiceLinkedRole": Reason(
        cause="the fleet may not launch: its service-linked role is missing or damaged",
        remedy="Run `aws iam create-service-linked-role --aws-service-name ec2fleet.amazonaws.com` and the same for "
        "spot.amazonaws.com, then `pulumi destroy` and `pulumi up`.",
        final=True,
    ),
    r"Invalid IAM Instance Profile": Reason(
        cause="EC2 does not know the node's instance profile: it was made a moment ago, or somebody deleted it",
        remedy="Wait: the fleet tries again by itself some minutes later. If it fails again for this reason, give "
        "run.id a new value, then `pulumi up`: a fleet keeps the profile with which it was made.",
    ),
    r"InvalidAMIID|image id|InvalidAMI|AMI .*not (exist|found|available)": Reason(
        cause="the AMI does not exist in {region}, or is no longer offered",
        remedy="Run `gpufleet doctor {stack} --pin`, give run.id a new value, then `pulumi up`.",
        final=True,
    ),
    r"InvalidSnapshot": Reason(
        cause="the data volume's snapshot does not exist in {region}, or is not shared with this account",
        remedy="Correct storage.data.snapshot, give run.id a new value, then `pulumi up`.",
        final=True,
    ),
    r"KMS|Client\.InternalError|InvalidKey": Reason(
        cause="the encryption key of the disks cannot be used by the fleet",
        remedy="`gpufleet doctor {stack}` shows the key and the grant that AWSServiceRoleForEC2Fleet needs.",
        final=True,
    ),
    r"launchSpecUnusable|fleetProgressHalted|SpotMaxPriceTooLow|price.*(low|below)": Reason(
        cause="every spot price is above the ceiling, which is the on-demand price because the fleet sets none",
        remedy="Wait, add zones or instance types under fleet, or set capacity: on-demand with a new run id.",
    ),
    r"not supported in your requested Availability Zone|Unsupported|InvalidAvailabilityZone|not support": Reason(
        cause="a listed zone does not offer a listed instance type",
        remedy="`gpufleet doctor {stack}` shows which zone offers what.",
    ),
    r"InsufficientInstanceCapacity|capacity|UnfulfillableCapacity": Reason(
        cause="AWS has no free {types} in {zones} right now",
        remedy="Wait: the fleet keeps trying until it expires and nothing is billed meanwhile. More zones and "
        "instance types under fleet (with a new run id) widen the choice.",
    ),
    r"InsufficientFreeAddresses|InvalidSubnet|InvalidGroup|InvalidLaunchTemplate": Reason(
        cause="part of the network or the launch template is gone",
        remedy="Somebody deleted what the stack had made. Give run.id a new value, then `pulumi up`, which makes it "
        "again; the old fleet cannot use it, because a fleet keeps its first subnets and template.",
        final=True,
    ),
    r"UnauthorizedOperation|not authorized to perform": Reason(
        cause="a policy of the account or its organization forbids this launch",
        remedy="Ask the person who manages the account's policies; AWS's message above names the action.",
        final=True,
    ),
    r"spotFleetRequestConfigurationInvalid|allLaunchSpecsTemporarilyBlacklisted": Reason(
        cause="EC2 does not accept what the fleet asks for",
        remedy="In AWS's words: {said}. `gpufleet doctor {stack}` checks most causes.",
    ),
}


def explain(sub_type: str, description: str, definition: StackDefinition) -> Reason | None:
    """The reason behind one event of the history; None if the event prevents no node, or is not known."""
    text = f"{sub_type}: {description}"
    for pattern, reason in _RULES.items():
        if re.search(pattern, text):
            cause, remedy = _fill(reason.cause, definition, text), _fill(reason.remedy, definition, text)
            return replace(reason, cause=cause, remedy=remedy)
    return None


def describe(record: dict[str, Any]) -> tuple[str, str, str]:
    """Kind, sub-type and description of a record of DescribeFleetHistory."""
    information = record.get("EventInformation") or {}
    return (
        str(record.get("EventType", "")),
        str(information.get("EventSubType", "")),
        str(information.get("EventDescription") or ""),
    )


def _fill(text: str, definition: StackDefinition, message: str) -> str:
    fleet = definition.fleet
    return text.format(
        stack=definition.argument,
        region=fleet.region,
        types=" or ".join(fleet.instance_types),
        zones=", ".join(fleet.zones),
        said=message.removesuffix("."),
    )
