"""What AWS says of the run's nodes: who took one away, AWS or the run's owner; when it ended; which are there.

The notice is the same for both, the charge is not: AWS charges no first hour that it interrupts itself (EC2 User Guide,
billing for interrupted Spot Instances, read 2026-11-23). What an owner does, setting the fleet to 0, deleting it,
letting it expire, is an event of the fleet's history. That AWS takes a node back is none; that it has ended is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from gpufleet.job.contract.aws import ENDED, FLEET_TAG, LAUNCHED, THERE
from gpufleet.job.supervisor import store

# EC2 API reference, EventInformation, read 2026-11-23. An event's type is spelled in two ways, its sub-type in one.
CHANGES = ("modify_in_progress", "expired", "deleted", "deleted_running", "deleted_terminating")


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Times are epoch seconds. `there`: nodes that have not ended; None: not known."""

    changes: tuple[float, ...] = ()  # when its owner changed the fleet
    launched: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    there: frozenset[str] | None = None


Ask = Callable[[float], History | None]  # since (epoch seconds) -> what AWS says; None: it does not


def history(ec2: Any, fleet: str, since: float) -> History:
    """The fleet's own. Raises botocore's errors."""
    asked: dict[str, Any] = {"FleetId": fleet, "StartTime": datetime.fromtimestamp(since, UTC)}
    changes, nodes = list[float](), {LAUNCHED: dict[str, float](), ENDED: dict[str, float]()}
    while True:
        answer = ec2.describe_fleet_history(**asked)
        for each in answer["HistoryRecords"]:
            told, at = each["EventInformation"], each["Timestamp"].timestamp()
            if told.get("EventSubType") in CHANGES:
                changes.append(at)
            elif told.get("EventSubType") in nodes and "InstanceId" in told:
                nodes[told["EventSubType"]][told["InstanceId"]] = at
        if not answer.get("NextToken"):
            return History(changes=tuple(changes), launched=nodes[LAUNCHED], ended=nodes[ENDED])
        asked["NextToken"] = answer["NextToken"]


def of_node(
    instance: str, client: Any = None, *, others: Callable[[], Iterable[str]] = lambda: (), on_demand: bool = False
) -> Ask:
    """The history of the fleet that the node belongs to, and which of its nodes are there. None whenever AWS does not
    answer as it should. `others`: the run's other fleets; `on_demand`: the node's own takes over from them, so that who
    changed it tells nothing of a notice.
    """

    def ask(since: float) -> History | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            ec2 = client or store.ec2()
            (node,) = ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"]
            fleet = {tag["Key"]: tag["Value"] for tag in node["Tags"]}[FLEET_TAG]
            more = sorted(set(others()) - {fleet})
            filters = [
                {"Name": f"tag:{FLEET_TAG}", "Values": [fleet, *more]},
                {"Name": "instance-state-name", "Values": list(THERE)},
            ]
            found = ec2.describe_instances(Filters=filters)["Reservations"]
            told = history(ec2, fleet, since)
            for each in more:
                other = history(ec2, each, since)
                told = History(
                    changes=other.changes if on_demand else told.changes,
                    launched={**other.launched, **told.launched},
                    ended={**other.ended, **told.ended},
                )
            there = frozenset(str(each["InstanceId"]) for group in found for each in group["Instances"])
            return replace(told, there=there)
        except (BotoCoreError, ClientError, OSError, LookupError, ValueError):
            return None

    return ask
