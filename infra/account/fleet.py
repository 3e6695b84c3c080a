"""Finds a run's fleets and nodes, and decides what a fleet may still launch."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from gpufleet.infra.account import refusals, removal
from gpufleet.infra.account.aws import owner_of, pages, tags_of
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.tags import RUN_TAG, STACK_TAG
from gpufleet.job.contract.done import Done
from gpufleet.job.contract.reading import epoch

ENDED = ("deleted", "deleted_running", "deleted_terminating")  # states in which a fleet launches nothing more
GONE = ("shutting-down", "terminated")  # states of an instance
NO_FLEET = ("InvalidFleetId.NotFound", "InvalidFleetIdNotFound")  # error codes in AWS's answers
ENDING_S = 300.0  # how long after done.json a node may take to end its fleet


def fleets_of(ec2: Any, definition: StackDefinition, *, every_run: bool = False) -> list[dict[str, Any]]:
    """The fleets of a run, or of every run of the stack. Fleets of the file's owner come first, among these the fleets
    that may still launch, then the newest. The ids come from the tags, because DescribeFleets has no filter by tag and
    shows an instant fleet (one into a Capacity Block) only if its id is given.
    """
    wanted = {STACK_TAG: definition.name, **({} if every_run else {RUN_TAG: definition.fleet_run})}
    there = {fleet["FleetId"]: fleet for fleet in pages(ec2, "describe_fleets", "Fleets")}
    ours = [("resource-type", ["fleet"]), (f"tag:{STACK_TAG}", [definition.name])]
    filters = [{"Name": name, "Values": values} for name, values in ours]
    tagged = {tag["ResourceId"] for tag in pages(ec2, "describe_tags", "Tags", Filters=filters)}
    for fleet_id in sorted(tagged - there.keys()):
        there.update((fleet["FleetId"], fleet) for fleet in _described(ec2, fleet_id))
    mine = [fleet for fleet in there.values() if wanted.items() <= tags_of(fleet).items()]

    def order(fleet: dict[str, Any]) -> tuple[bool, bool, bool, datetime]:
        ours, ended = owner_of(fleet) == definition.run.owner, fleet["FleetState"] in ENDED
        return ours, _wants_nodes(fleet), not ended, fleet["CreateTime"]

    return sorted(mine, key=order, reverse=True)


def _described(ec2: Any, fleet_id: str) -> list[dict[str, Any]]:
    """The fleet's description; empty if only its tags still exist."""
    answer = refusals.absent(lambda: ec2.describe_fleets(FleetIds=[fleet_id]), *NO_FLEET)
    return answer["Fleets"] if answer else []


def may_launch(fleet: dict[str, Any], now: datetime) -> bool:
    """Whether the fleet may still launch a node."""
    return _wants_nodes(fleet) and not has_expired(fleet, now)


def _wants_nodes(fleet: dict[str, Any]) -> bool:
    return replaces(fleet) and fleet["FleetState"] in ("submitted", "active", "modifying") and wants(fleet) > 0


def replaces(fleet: dict[str, Any]) -> bool:
    """Whether the fleet replaces a lost node; a fleet into a block does not."""
    return fleet.get("Type") != "instant"


def market(fleet: dict[str, Any]) -> str:
    """The fleet's market: spot, on-demand or capacity-block."""
    return str(fleet["TargetCapacitySpecification"]["DefaultTargetCapacityType"])


def too_many(fleets: list[dict[str, Any]], definition: StackDefinition) -> list[dict[str, Any]]:
    """The fleets that may still launch nodes, if there are more of them than the run needs. A run needs one fleet; with
    a fallback, one in each market.
    """
    stands_by = definition.fleet.market.stands_by
    kinds = [market(fleet) if market(fleet) in stands_by else "" for fleet in fleets]
    return [fleet for fleet, kind in zip(fleets, kinds, strict=True) if kinds.count(kind) > 1]


def wants(fleet: dict[str, Any]) -> int:
    """The number of nodes that the fleet should have."""
    return int(fleet["TargetCapacitySpecification"]["TotalTargetCapacity"])


def is_over(fleet: dict[str, Any], now: datetime) -> bool:
    """Whether the fleet can never launch again. A fleet whose target is 0 can launch again, because its target may be
    raised.
    """
    return fleet["FleetState"] in ENDED or has_expired(fleet, now)


def why_needless(fleet: dict[str, Any], done: Done, now: datetime) -> str:
    """A sentence about a fleet that launches nodes for a run that is over; empty while the run's node may still end the
    fleet.
    """
    at = epoch(done.at)
    if (at is not None and now.timestamp() - at <= ENDING_S) or not may_launch(fleet, now):
        return ""
    return (
        f"fleet {fleet['FleetId']} still launches nodes. Each is billed until it sees that the run is over, and none "
        "may delete the fleet. End it:"
    )


def end_command(fleet: dict[str, Any], region: str) -> str:
    """The command that ends a fleet and its nodes."""
    return f"{removal.end_fleet(fleet['FleetId']).command} --region {region}"


def has_expired(fleet: dict[str, Any], now: datetime) -> bool:
    """Whether the fleet has expired. This follows from its end date, because AWS does not document the state of an
    expired fleet.
    """
    until: datetime | None = fleet.get("ValidUntil")
    return until is not None and until <= now


def find_instances(ec2: Any, filters: Iterable[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Instances by filter, oldest first."""
    named = [{"Name": name, "Values": values} for name, values in filters]
    instances = [i for r in pages(ec2, "describe_instances", "Reservations", Filters=named) for i in r["Instances"]]
    return sorted(instances, key=lambda instance: instance["LaunchTime"])


def nodes_of(ec2: Any, definition: StackDefinition) -> list[dict[str, Any]]:
    """The run's instances that still exist or ended within the hour."""
    tags = [(f"tag:{STACK_TAG}", [definition.name]), (f"tag:{RUN_TAG}", [definition.fleet_run])]
    return find_instances(ec2, tags)
