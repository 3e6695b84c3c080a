"""The fleets that moto lacks: a state machine on an injected clock.

This module follows the AWS column of the table in docs/rehearsal.md. A maintain fleet replaces nodes that end.
ModifyFleet and expiry terminate nodes with a notice. A failed launch is an event, not an error of CreateFleet. An
instant fleet launches at once, answers with its errors, and stays in `deleted_terminating`. Requests and answers are
dicts in the EC2 API's own spelling; moto handles the protocols.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends

from gpufleet.rehearsal.clock import Clock
from gpufleet.rehearsal.fleet import CloudFleet, Event
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.launch import CloudInstance, Launcher, LaunchFailedError, Pool

HISTORY_PAGE = 1000  # the most records in an answer (EC2 API reference, DescribeFleetHistory, 2026-11-23)
LINGER = timedelta(hours=48)  # a deleted fleet stays in the API two days (EC2 User Guide, fleet states, 2026-11-21)


class FleetController:
    """All fleets of one Cloud. Every public method is safe to call from any thread."""

    def __init__(
        self,
        launcher: Launcher,
        clock: Clock,
        *,
        on_launch: Callable[[CloudInstance], None],
        on_end: Callable[[CloudInstance], None],
        on_image: Callable[[str, CloudInstance], None],
        habits: Habits,
    ) -> None:
        """`on_image` is called with the id of an AMI that was made from an instance's disk, and with the instance."""
        self.launcher = launcher
        self.clock = clock
        self.on_launch = on_launch
        self.on_end = on_end
        self.on_image = on_image
        self.habits = habits
        # may also be "active", because it is not verified which state AWS gives to an expired fleet
        self.expired_state = "deleted"
        self.fleets: dict[str, CloudFleet] = {}
        self.instances: dict[str, CloudInstance] = {}
        self.lock = threading.RLock()

    def create(self, region: str, request: dict[str, Any]) -> dict[str, Any]:
        """CreateFleet. Raises the errors with which the call fails; other errors appear in the fleet's history."""
        with self.lock:
            tags = refuse_at_create(self.launcher, region, request)
            now = self.clock.now()
            capacity = request.get("TargetCapacitySpecification") or {}
            fleet = CloudFleet(
                id=f"fleet-{uuid.uuid4()}",
                region=region,
                request=request,
                tags=tags,
                created=now,
                target=int(capacity.get("TotalTargetCapacity") or 0),
                excess=str(request.get("ExcessCapacityTerminationPolicy") or "termination"),
            )
            fleet.next_launch = now + timedelta(seconds=self.habits.launch_s)
            self.fleets[fleet.id] = fleet
            self._event(fleet, "fleetRequestChange", "submitted")
            if fleet.type != "instant":
                return {"FleetId": fleet.id}
            fleet.state = "active"
            self._launch_at_once(fleet, now)
            launched = fleet.told_instances(self.living(fleet.id))
            return {"FleetId": fleet.id, "Errors": fleet.errors, "Instances": launched}

    def modify(self, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """ModifyFleet: total capacity (0 too), template configs and excess policy of an active maintain fleet."""
        with self.lock:
            fleet = self._get(region, str(request.get("FleetId")))
            if fleet.type != "maintain":
                raise EC2ClientError(
                    "UnsupportedOperation", f"{fleet.id} is of type {fleet.type}; only maintain can be modified"
                )
            if fleet.state not in ("submitted", "active") or fleet.expired:
                raise EC2ClientError(
                    "FleetNotInModifiableState", f"The fleet {fleet.id} is {fleet.state} and cannot be modified"
                )
            self._event(fleet, "fleetRequestChange", "modify_in_progress")
            capacity = request.get("TargetCapacitySpecification") or {}
            if capacity.get("TotalTargetCapacity") is not None:
                fleet.target = int(capacity["TotalTargetCapacity"])
            if request.get("LaunchTemplateConfigs"):
                fleet.request["LaunchTemplateConfigs"] = request["LaunchTemplateConfigs"]
            if request.get("ExcessCapacityTerminationPolicy"):
                fleet.excess = str(request["ExcessCapacityTerminationPolicy"])
            self._event(fleet, "fleetRequestChange", "modify_succeeded")
            self.tick()
            return {"Return": True}

    def delete(self, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """DeleteFleets. The result has one answer for each fleet, even if the fleet's node ended long ago."""
        terminate = bool(request.get("TerminateInstances"))
        done: list[dict[str, Any]] = []
        failed: list[dict[str, Any]] = []
        with self.lock:
            for fleet_id in request.get("FleetIds") or []:
                fleet = self.fleets.get(fleet_id)
                if fleet is None or fleet.region != region:
                    failed.append(_undeleted(fleet_id, "fleetIdDoesNotExist", "The fleet ID does not exist"))
                    continue
                if fleet.state in ("deleted", "deleted_terminating"):
                    failed.append(_undeleted(fleet_id, "fleetNotInDeletableState", f"The fleet is {fleet.state}"))
                    continue
                if fleet.type == "instant" and not terminate:
                    failed.append(_undeleted(fleet_id, "unexpectedError", "An instant fleet is deleted with its nodes"))
                    continue
                previous, fleet.state = fleet.state, "deleted_terminating" if terminate else "deleted_running"
                self._event(fleet, "fleetRequestChange", fleet.state)
                done.append({"FleetId": fleet_id, "CurrentFleetState": fleet.state, "PreviousFleetState": previous})
                if terminate:
                    for node in self.living(fleet_id):
                        self.launcher.terminate(node.id)
            return {"SuccessfulFleetDeletions": done, "UnsuccessfulFleetDeletions": failed}

    def describe(self, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """DescribeFleets. The answer includes deleted fleets for as long as AWS shows them; instant fleets are
        described only by id (API reference, 2026-11-27). States are always current, tags are not.
        """
        with self.lock:
            self.tick()
            named = [self._get(region, fleet_id) for fleet_id in request.get("FleetIds") or []]
            wanted = named or [fleet for fleet in self._listed(region) if fleet.type != "instant"]
            return {"Fleets": [fleet.data(self.living(fleet.id)) for fleet in wanted]}

    def _listed(self, region: str) -> list[CloudFleet]:
        """The region's fleets, except those that are too new for AWS's lists."""
        shown = self.clock.now() - timedelta(seconds=self.habits.shown_s)
        return [fleet for fleet in self.fleets.values() if fleet.region == region and fleet.created <= shown]

    def described_tags(self, region: str) -> list[dict[str, str]]:
        """The tags of fleets as DescribeTags gives them."""
        with self.lock:
            return [
                {"Key": key, "Value": value, "ResourceId": fleet.id, "ResourceType": "fleet"}
                for fleet in self._listed(region)
                for key, value in fleet.tags.items()
            ]

    def describe_instances(self, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """DescribeFleetInstances: only the running instances."""
        with self.lock:
            self.tick()
            fleet = self._get(region, str(request.get("FleetId")))
            if fleet.type == "instant":
                raise EC2ClientError("Unsupported", "DescribeFleetInstances does not support fleets of type instant")
            active = [
                {
                    "InstanceId": i.id,
                    "InstanceType": i.type,
                    "InstanceHealth": "healthy",
                    "SpotInstanceRequestId": i.spot_request,
                }
                for i in self.living(fleet.id)
            ]
            return {"FleetId": fleet.id, "ActiveInstances": active}

    def describe_history(self, region: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """DescribeFleetHistory from StartTime on, optionally only of one EventType."""
        kinds = {
            "instance-change": ("instanceChange",),
            "fleet-change": ("fleetRequestChange",),
            "service-error": ("error",),
        }
        with self.lock:
            self.tick()
            fleet = self._get(region, str(request.get("FleetId")))
            start = request.get("StartTime")
            if start is None:
                raise EC2ClientError("MissingParameter", "The request must contain the parameter StartTime")
            allowed = kinds.get(str(request.get("EventType") or ""))
            records = [
                {
                    "EventType": event.type,
                    "Timestamp": event.at,
                    "EventInformation": {
                        "EventSubType": event.sub_type,
                        "EventDescription": event.description or None,
                        "InstanceId": event.instance_id,
                    },
                }
                for event in fleet.history
                if event.at >= start.replace(tzinfo=event.at.tzinfo, microsecond=0)
                and (not allowed or event.type in allowed)
            ]
            begin = int(request.get("NextToken") or 0)
            end = begin + int(request.get("MaxResults") or HISTORY_PAGE)
            last = {"NextToken": str(end)} if end < len(records) else {"LastEvaluatedTime": self.clock.now()}
            return {"FleetId": fleet.id, "HistoryRecords": records[begin:end], "StartTime": start, **last}

    def tick(self) -> None:
        """Carries out all events of all fleets that are due by the clock."""
        with self.lock:
            now = self.clock.now()
            for fleet in list(self.fleets.values()):
                self._reap(fleet, now)
                self._expire(fleet, now)
                if fleet.state == "submitted":
                    fleet.state = "active"
                    self._event(fleet, "fleetRequestChange", "active")
                self._shrink(fleet, now)
                self._fill(fleet, now)
                self._settle(fleet, now)

    def notice(self, instance_id: str) -> None:
        """Gives the instance an interruption notice; it ends after `notice_s`."""
        with self.lock:
            self._notify(self.instances[instance_id], self.clock.now())

    def rebalance(self, instance_id: str) -> None:
        with self.lock:
            self.instances[instance_id].rebalance_at = self.clock.now()

    def living(self, fleet_id: str) -> list[CloudInstance]:
        return [i for i in self.instances.values() if i.fleet_id == fleet_id and not i.ended_at]

    def _reap(self, fleet: CloudFleet, now: datetime) -> None:
        for node in self.living(fleet.id):
            block = self.launcher.blocks.get(node.block)
            if (node.terminate_at and node.terminate_at <= now) or (block and block.ends_nodes(now)):
                self.launcher.terminate(node.id)
            if not self.launcher.running(node.id):
                node.ended_at = now
                self._event(fleet, "instanceChange", "terminated", instance_id=node.id)
                fleet.next_launch = now + timedelta(seconds=self.habits.relaunch_s)
                self.on_end(node)

    def _expire(self, fleet: CloudFleet, now: datetime) -> None:
        until = fleet.request.get("ValidUntil")
        if (
            until is None
            or fleet.expired
            or fleet.state not in ("submitted", "active")
            or until.replace(tzinfo=now.tzinfo) > now
        ):
            return
        fleet.expired = True
        self._event(fleet, "fleetRequestChange", "expired")
        if fleet.request.get("TerminateInstancesWithExpiration"):
            for node in self.living(fleet.id):
                self._release(node, now)

    def _shrink(self, fleet: CloudFleet, now: datetime) -> None:
        if fleet.state != "active" or fleet.expired or fleet.excess != "termination":
            return
        staying = [node for node in self.living(fleet.id) if node.terminate_at is None]
        for node in staying[fleet.target :]:
            self._release(node, now)

    def _fill(self, fleet: CloudFleet, now: datetime) -> None:
        if fleet.type == "instant" or fleet.state != "active" or fleet.expired:
            return
        if fleet.next_launch and now < fleet.next_launch:
            return
        if fleet.excess == "no-termination" and fleet.launched >= fleet.target:
            return  # AWS does not replace interrupted or hand-terminated instances (API reference, ModifyFleet)
        if fleet.type != "maintain" and fleet.launched >= fleet.target:
            return
        while len(self.living(fleet.id)) < fleet.target:
            try:
                node = self._launch(fleet, now)
            except LaunchFailedError as failure:
                for kind, sub_type, description in failure.events:
                    self._event_once(fleet, kind, sub_type, description)
                fleet.next_launch = now + timedelta(seconds=self.habits.retry_s)
                return
            self._launched(fleet, node)

    def _launch_at_once(self, fleet: CloudFleet, now: datetime) -> None:
        """Launches as many nodes of an instant fleet as possible; the answer has the errors of the other launches."""
        while len(self.living(fleet.id)) < fleet.target:
            try:
                self._launched(fleet, self._launch(fleet, now))
            except LaunchFailedError as failure:
                match = re.search(r"\((\w[\w.]*)\)", str(failure))
                code = match[1] if match else failure.events[-1][1]
                fleet.errors.append({"ErrorCode": code, "ErrorMessage": str(failure), "Lifecycle": "capacity-block"})
                return

    def _launched(self, fleet: CloudFleet, node: CloudInstance) -> None:
        fleet.launched += 1
        self.instances[node.id] = node
        described = json.dumps({"instanceType": node.type, "image": node.image, "availabilityZone": node.zone})
        self._event(fleet, "instanceChange", "launched", described, node.id)
        self.on_launch(node)

    def _launch(self, fleet: CloudFleet, now: datetime) -> CloudInstance:
        """Launches a node. Raises LaunchFailedError, also if the template or the subnet no longer exists."""
        try:
            pools = self._pools(fleet)
        except EC2ClientError as gone:
            raise LaunchFailedError("spotFleetRequestConfigurationInvalid", str(gone.message)) from gone
        return self.launcher.launch(fleet.region, fleet.id, fleet.spot, pools, now)

    def _settle(self, fleet: CloudFleet, now: datetime) -> None:
        if self.living(fleet.id) or now - fleet.history[-1].at < timedelta(seconds=self.habits.deleted_s):
            return
        over = fleet.expired and fleet.state == "active" and self.expired_state == "deleted"
        if fleet.type == "instant" and fleet.state == "deleted_terminating":
            fleet.deleted_at = fleet.deleted_at or now
        elif over or fleet.state in ("deleted_terminating", "deleted_running"):
            fleet.state, fleet.deleted_at = "deleted", now
            self._event(fleet, "fleetRequestChange", "deleted")
        if fleet.deleted_at and now - fleet.deleted_at > LINGER:
            del self.fleets[fleet.id]

    def _pools(self, fleet: CloudFleet) -> list[Pool]:
        """The fleet's pools, the cheapest first. Pools with recent interruptions come last, because AWS prefers pools
        with capacity.
        """
        pools = self.launcher.pools(fleet.region, fleet.configs)
        ended = [(i.type, i.zone) for i in self.instances.values() if i.fleet_id == fleet.id and i.notice_at]
        return sorted(pools, key=lambda pool: (ended.count((pool.type, pool.zone)), pool.price))

    def _release(self, node: CloudInstance, now: datetime) -> None:
        """Ends a node that the fleet no longer wants. Only spot nodes get a notice (EC2 User Guide, June 2023)."""
        if node.spot:
            self._notify(node, now)
        else:
            self.launcher.terminate(node.id)

    def _notify(self, node: CloudInstance, now: datetime) -> None:
        if node.ended_at or node.terminate_at:
            return
        node.notice_at, node.terminate_at = now, now + timedelta(seconds=self.habits.notice_s)
        self._event(self.fleets[node.fleet_id], "instanceChange", "termination_notified", instance_id=node.id)

    def _get(self, region: str, fleet_id: str) -> CloudFleet:
        fleet = self.fleets.get(fleet_id)
        if fleet is None or fleet.region != region:
            raise EC2ClientError("InvalidFleetId.NotFound", f"The fleet ID '{fleet_id}' does not exist")
        return fleet

    def _event(
        self, fleet: CloudFleet, kind: str, sub_type: str, text: str = "", instance_id: str | None = None
    ) -> None:
        fleet.history.append(Event(self.clock.now(), kind, sub_type, text, instance_id))

    def _event_once(self, fleet: CloudFleet, kind: str, sub_type: str, text: str) -> None:
        if not any((e.type, e.sub_type, e.description) == (kind, sub_type, text) for e in fleet.history):
            self._event(fleet, kind, sub_type, text)


def _undeleted(fleet_id: str, code: str, message: str) -> dict[str, Any]:
    return {"FleetId": fleet_id, "Error": {"Code": code, "Message": message}}


USER_DATA_LIMIT = 16 * 1024  # bytes before base64 (EC2 User Guide, run commands at launch, 2026-11-21)


def refuse_at_create(launcher: Launcher, region: str, request: dict[str, Any]) -> dict[str, str]:
    """Makes every check at which CreateFleet itself fails. Returns the fleet's own tags."""
    kind, capacity = str(request.get("Type") or "maintain"), request.get("TargetCapacitySpecification") or {}
    if kind != "instant" and capacity.get("DefaultTargetCapacityType") == "capacity-block":
        raise EC2ClientError("InvalidParameterValue", f"capacity-block is not supported by fleets of type {kind}")
    if kind == "instant" and not capacity.get("TotalTargetCapacity"):
        raise EC2ClientError("InvalidTargetCapacitySpecification", "An instant fleet wants a capacity above 0")
    tags: dict[str, str] = {}
    for entry in request.get("TagSpecifications") or []:
        if entry.get("ResourceType") != "fleet" and kind != "instant":
            raise EC2ClientError(
                "InvalidParameterValue",
                f"'{entry.get('ResourceType')}' is not a valid taggable resource type for a fleet of type {kind}",
            )
        tags.update({tag["Key"]: tag.get("Value", "") for tag in entry.get("Tags") or []})
    backend = ec2_backends[launcher.account][region]
    pools = launcher.pools(region, list(request.get("LaunchTemplateConfigs") or []))
    for pool in pools:
        image = str(pool.spec.get("ImageId") or "")
        if image.startswith("resolve:ssm:") and kind != "instant":
            raise EC2ClientError(
                "InvalidAMIID.Malformed",
                f'Invalid id: "{image}": only a fleet of type instant may name a Systems Manager parameter',
            )
        if image not in backend.amis:
            raise EC2ClientError("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
        user_data = pool.spec.get("UserData")
        if user_data is not None and len(user_data.decode().encode()) > USER_DATA_LIMIT:
            raise EC2ClientError("InvalidUserData.Malformed", "User data is limited to 16384 bytes")
    for config in request.get("LaunchTemplateConfigs") or []:
        zones: dict[tuple[str, str], str] = {}
        for pool in launcher.pools(region, [config]):
            if zones.setdefault((pool.type, pool.zone), pool.subnet) != pool.subnet:
                raise EC2ClientError(
                    "InvalidFleetConfiguration", f"A fleet cannot use two subnets in one zone ({pool.zone})"
                )
    return tags
