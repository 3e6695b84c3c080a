"""One EC2 Fleet: the request that made it, its state, and how DescribeFleets shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpufleet.rehearsal.launch import CloudInstance


@dataclass(frozen=True, slots=True)
class Event:
    """One record of DescribeFleetHistory. Types and sub-types: EC2 API reference, EventInformation, 2026-11-21."""

    at: datetime
    type: str  # one of fleetRequestChange, instanceChange, error and information
    sub_type: str
    description: str = ""
    instance_id: str | None = None


@dataclass(slots=True)
class CloudFleet:
    id: str
    region: str
    request: dict[str, Any]
    tags: dict[str, str]
    created: datetime
    target: int
    state: str = "submitted"
    excess: str = "termination"
    history: list[Event] = field(default_factory=list)
    launched: int = 0
    next_launch: datetime | None = None
    # for an instant fleet: errors of failed launches
    errors: list[dict[str, Any]] = field(default_factory=list)
    expired: bool = False
    deleted_at: datetime | None = None

    @property
    def type(self) -> str:
        return str(self.request.get("Type") or "maintain")

    @property
    def is_gone(self) -> bool:
        """Whether the fleet has ended. An instant fleet stays in `deleted_terminating` after its nodes have ended."""
        return self.state == "deleted" or (self.type, self.state) == ("instant", "deleted_terminating")

    @property
    def spot(self) -> bool:
        capacity = self.request.get("TargetCapacitySpecification") or {}
        return bool(capacity.get("DefaultTargetCapacityType") == "spot" or capacity.get("SpotTargetCapacity"))

    @property
    def configs(self) -> list[dict[str, Any]]:
        return list(self.request.get("LaunchTemplateConfigs") or [])

    def data(self, living: Sequence[CloudInstance]) -> dict[str, Any]:
        """FleetData of DescribeFleets. The argument has the fleet's instances that have not ended."""
        request = self.request
        pending = [n for n in living if n.terminate_at]
        if any(e.type == "error" for e in self.history) and not living:
            activity = "error"
        elif pending and len(living) > self.target:
            activity = "pending_termination"
        else:
            activity = "fulfilled" if len(living) >= self.target else "pending_fulfillment"
        fulfilled = float(len(living))
        asked = request.get("TargetCapacitySpecification") or {}
        on_demand = int(asked.get("OnDemandTargetCapacity") or 0) if self.spot else self.target
        data = {
            "FleetId": self.id,
            "FleetState": self.state,
            "ActivityStatus": activity,
            "CreateTime": self.created,
            "Type": self.type,
            "ExcessCapacityTerminationPolicy": self.excess,
            "FulfilledCapacity": fulfilled,
            "FulfilledOnDemandCapacity": 0.0 if self.spot else fulfilled,
            # AWS fills in these options and the on-demand options (EC2 User Guide, describe your EC2 Fleet,
            # 2026-11-25).
            "TargetCapacitySpecification": {
                **asked,
                "OnDemandTargetCapacity": min(on_demand, self.target),
                "SpotTargetCapacity": self.target - min(on_demand, self.target),
                "TotalTargetCapacity": self.target,
            },
            "LaunchTemplateConfigs": self.configs,
            "TerminateInstancesWithExpiration": bool(request.get("TerminateInstancesWithExpiration")),
            "ReplaceUnhealthyInstances": bool(request.get("ReplaceUnhealthyInstances")),
            "ValidFrom": request.get("ValidFrom") or self.created,
            "ValidUntil": request.get("ValidUntil"),
            "SpotOptions": request.get("SpotOptions"),
            "OnDemandOptions": {"AllocationStrategy": "lowestPrice", **(request.get("OnDemandOptions") or {})},
            "Context": request.get("Context"),
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
        }
        if self.type == "instant":
            data |= {"ActivityStatus": "fulfilled", "Errors": self.errors, "Instances": self.told_instances(living)}
        return {key: value for key, value in data.items() if value is not None}

    def told_instances(self, instances: Sequence[CloudInstance]) -> list[dict[str, Any]]:
        """The instances of an instant fleet in the form of CreateFleet and DescribeFleets."""
        kinds = dict.fromkeys(
            (instance.type, "capacity-block" if instance.block else "on-demand") for instance in instances
        )
        return [
            {"InstanceIds": [i.id for i in instances if i.type == kind], "InstanceType": kind, "Lifecycle": lifecycle}
            for kind, lifecycle in kinds
        ]
