"""AWS's answers about the run's nodes: whether AWS or the run's owner took a node away, when the node ended, and which
nodes exist. The notice is the same in both cases, but AWS does not charge a first hour that it interrupts itself (EC2
User Guide, billing for interrupted Spot Instances, read 2026-11-23). If the owner changes the fleet (sets it to 0,
deletes it, lets it expire), the fleet's history has an event. An interruption by AWS is not in the history; a node's
end is.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from gpufleet.job.contract.aws import ENDED, FLEET_TAG, LAUNCHED, THERE
from gpufleet.job.contract.spent import History
from gpufleet.job.supervisor import store

# EC2 API reference, EventInformation, read 2026-11-23. The type of an event is spelled in two ways, its sub-type in
# one.
CHANGES = ("modify_in_progress", "expired", "deleted", "deleted_running", "deleted_terminating")

# a function that returns AWS's history since a time in epoch seconds; None if AWS does not answer
Ask = Callable[[float], History | None]


def history(ec2: Any, fleet: str, since: float) -> History:
    """The fleet's own history. Raises botocore's errors."""
    start = datetime.fromtimestamp(since, UTC)
    answers = store.pages(ec2.describe_fleet_history, FleetId=fleet, StartTime=start)
    events = [event for answer in answers for event in answer["HistoryRecords"]]
    dated = [(event["EventInformation"], event["Timestamp"].timestamp()) for event in events]

    def moments(kind: str) -> dict[str, float]:
        return {of["InstanceId"]: at for of, at in dated if of.get("EventSubType") == kind and "InstanceId" in of}

    changes = tuple(at for of, at in dated if of.get("EventSubType") in CHANGES)
    return History(changes=changes, launched=moments(LAUNCHED), ended=moments(ENDED))


def merged(histories: Sequence[History], changes: Iterable[float], there: frozenset[str] | None = None) -> History:
    """The histories of several fleets of one run, as one history."""
    launched, ended = (
        dict(ChainMap(*maps)) for maps in zip(*((part.launched, part.ended) for part in histories), strict=True)
    )
    return History(changes=tuple(changes), launched=launched, ended=ended, there=there)


def of_node(
    instance: str, client: Any = None, *, others: Callable[[], Iterable[str]] = lambda: (), on_demand: bool = False
) -> Ask:
    """Returns a function that asks AWS for the history of the node's fleet, and for the existing nodes of the fleet.
    The returned function gives None if AWS gives no usable answer. `others`: the run's other fleets. `on_demand`:
    whether the node's fleet takes over from these; a change of these fleets is then not the reason of a notice.
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
            groups = ec2.describe_instances(Filters=filters)["Reservations"]
            histories = [history(ec2, fleet_id, since) for fleet_id in (fleet, *more)]
            there = frozenset(str(described["InstanceId"]) for group in groups for described in group["Instances"])
            return merged(histories, histories[-1 if on_demand else 0].changes, there)
        except (BotoCoreError, ClientError, OSError, LookupError, ValueError):
            return None

    return ask
