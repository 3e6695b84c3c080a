"""Whose hand took a node away: AWS's, or that of the run's owner.

The notice is the same for both, the charge is not: AWS charges no first hour that it interrupts itself (EC2 User Guide,
billing for interrupted Spot Instances, read 2026-11-23). What an owner does, setting the fleet to 0, deleting it,
letting it expire, is an event of the fleet's history. That AWS takes a node back is none.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gpufleet.job.contract.aws import FLEET_TAG
from gpufleet.job.supervisor import store

KEPT_S = 48 * 3600  # AWS keeps a fleet's events so long (EC2 API reference, DescribeFleetHistory)
# EC2 API reference, EventInformation, read 2026-11-23. An event's type is spelled in two ways, its sub-type in one.
CHANGES = ("modify_in_progress", "expired", "deleted", "deleted_running", "deleted_terminating")

Changes = Callable[[float], list[float] | None]  # since (epoch seconds) -> when; None: not known


def changes(ec2: Any, fleet: str, since: float) -> list[float]:
    """When its owner changed the fleet. Raises botocore's errors."""
    asked: dict[str, Any] = {"FleetId": fleet, "StartTime": datetime.fromtimestamp(since, UTC)}
    found: list[float] = []
    while True:
        answer = ec2.describe_fleet_history(**asked)
        for each in answer["HistoryRecords"]:
            if each["EventInformation"].get("EventSubType") in CHANGES:
                found.append(each["Timestamp"].timestamp())
        if not answer.get("NextToken"):
            return found
        asked["NextToken"] = answer["NextToken"]


def of_node(instance: str, client: Any = None) -> Changes:
    """The history of the fleet that the node belongs to. None whenever AWS does not answer as it should."""

    def ask(since: float) -> list[float] | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            ec2 = client or store.ec2()
            (node,) = ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"]
            tags = {tag["Key"]: tag["Value"] for tag in node["Tags"]}
            return changes(ec2, tags[FLEET_TAG], since)
        except (BotoCoreError, ClientError, OSError, LookupError, ValueError):
            return None

    return ask
