"""Lists the runs of all stacks in the account, as AWS shows them, and the runs of the project's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from gpufleet.infra.account.aws import owner_of, pages, tags_of
from gpufleet.infra.account.fleet import GONE, find_instances, is_over, wants
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.tags import RUN_TAG, STACK_TAG
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.text import counted


class ListedRun(NamedTuple):
    """One run. `since`: when its fleet was made, or when the run ended, in UTC; empty if the run has not begun."""

    stack: str
    run: str
    region: str
    owner: str
    state: str
    since: str


def all_runs(
    definitions: Iterable[StackDefinition],
    receipts: Sequence[Receipt],
    regions: Iterable[str],
    client: Callable[[str, str], Any],
    now: datetime,
) -> list[ListedRun]:
    """First the runs with a fleet or a node in `regions`, then ended runs, then files that were never launched."""
    runs = [run for region in regions for run in _in_region(client("ec2", region), region, now)]
    known = {(run.stack, run.run) for run in runs}
    for receipt in sorted(receipts, key=lambda receipt: receipt.at, reverse=True):
        if (receipt.stack, receipt.run) not in known:
            known.add((receipt.stack, receipt.run))
            state = f"ended: {receipt.reason}, {receipt.actual:.2f} USD"
            runs.append(ListedRun(receipt.stack, receipt.run, "", "", state, receipt.at[:16].replace("T", " ")))
    for stack in definitions:
        if (stack.name, stack.run.id) not in known:
            runs.append(ListedRun(stack.name, stack.run.id, stack.fleet.region, stack.run.owner, "not launched", ""))
    return runs


def _in_region(ec2: Any, region: str, now: datetime) -> Iterable[ListedRun]:
    """The runs of one region, found by the tags of fleets and instances; newest first."""
    runs: dict[tuple[str, str, str], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    nodes = [node for node in find_instances(ec2, [("tag-key", [STACK_TAG])]) if node["State"]["Name"] not in GONE]
    for at, resources in enumerate((pages(ec2, "describe_fleets", "Fleets"), nodes)):
        for resource in resources:
            tags = tags_of(resource)
            if STACK_TAG in tags:
                key = tags[STACK_TAG], tags.get(RUN_TAG, ""), owner_of(resource)
                runs.setdefault(key, ([], []))[at].append(resource)
    listed = []
    for (stack, run, owner), (fleets, own) in runs.items():
        open_ = [fleet for fleet in fleets if not is_over(fleet, now)]
        state = "looks for a node" if any(map(wants, open_)) else "rests at 0 nodes" if open_ else "over"
        state = f"{counted(len(own), 'node')}, {own[0]['InstanceType']}" if own else state
        since = min([fleet["CreateTime"] for fleet in fleets] or [node["LaunchTime"] for node in own])
        listed.append(ListedRun(stack, run, region, owner, state, f"{since:%Y-%m-%d %H:%M}"))
    return sorted(listed, key=lambda run: run.since, reverse=True)
