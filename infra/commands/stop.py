"""`gpufleet stop`: asks a run to end as a limit would end it, with what it has trained. Writes one object."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

from infra.commands import aws, stack
from infra.definition import StackDefinition
from infra.errors import AwsRefused
from job import atomic
from job.contract.bucket import ASKED, DONE
from job.text import stamp


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)


def run(args: argparse.Namespace) -> int:
    definition = stack.definition_of(args)
    region = definition.fleet.region
    return ask(definition, aws.client("ec2", region), aws.client("s3", region), datetime.now(UTC))


def ask(definition: StackDefinition, ec2: Any, s3: Any, now: datetime) -> int:
    """0 when the run is asked, or over already. Raises AwsRefused where nothing of the file's owner could hear it."""
    name, run, owner = definition.name, definition.run.id, definition.run.owner
    again = stack.again(definition)
    folder = aws.run_folder(s3, definition)
    done = folder.document(DONE) if folder and folder.is_of(owner) else None
    if done:
        print(f"run {run} of {name} is over already: {done.get('reason')}, {done.get('at')}")
        return 0
    alive = [fleet for fleet in aws.fleets(ec2, definition) if not aws.over(fleet, now)]
    region = definition.fleet.region
    if not alive and folder is None:
        raise AwsRefused(f"nothing to stop: {aws.no_run(s3, definition)}")
    if not alive:
        raise AwsRefused(
            f"nothing to stop: there is no fleet of run {run} of {name} in {region} any more. "
            f"`gpufleet results {again}` brings what the run left; `--run ID` names an earlier run."
        )
    if not any(aws.owner(fleet) == owner for fleet in alive):
        others = ", ".join(sorted({aws.owner(fleet) or "nobody" for fleet in alive}))
        raise AwsRefused(
            f"there is no fleet of owner {owner} for run {run} of {name} in {region}; there is one of {others}, whose "
            f"file has to ask. `gpufleet status {again}` says what there is; `--run ID` names an earlier run."
        )
    if folder is None or not folder.is_of(owner):  # another's would end his run
        raise AwsRefused(
            f"no bucket of owner {owner} holds run {run} of {name}: no node of it can boot or be asked. "
            "`pulumi destroy` ends its fleet."
        )
    if earlier := folder.document(ASKED):  # kept: when it was asked first tells whether a node should have heeded it
        print(f"asked already, by {earlier.get('by')} at {earlier.get('at')}: s3://{folder.bucket}/{run}/{ASKED}")
    else:
        asked = {"by": owner, "at": stamp(now)}
        s3.put_object(Bucket=folder.bucket, Key=f"{run}/{ASKED}", Body=atomic.json_bytes(asked))
        print(f"asked: s3://{folder.bucket}/{run}/{ASKED}")
    running = [node for node in aws.nodes(ec2, definition) if node["State"]["Name"] == "running"]
    nodes = [node["InstanceId"] for node in running if aws.owner(node) == owner]
    config = definition.job.parameters
    looks = f"looks every {config.checkpoint.heartbeat_s:g} s"
    left, later = "leaves final/", "leaves what the last checkpoint has"
    if not config.sizes().final_if_cut[0]:
        left = later = f"leaves no result ({name} has none before its end)"
    ends = "then ends the run and the fleet, and writes the receipt"
    wanted = any(map(aws.wants, alive))
    if nodes:
        print(f"{nodes[0]} {looks}, finishes its step, saves, {left}, {ends}.")
    elif not wanted:
        how = f"`gpufleet wait {definition.argument}` says how one does"
        print(f"No node runs and the fleet is at 0: none comes to heed it. {how}.")
    else:
        print(f"No node runs. The next one {looks}: it {later}, {ends}.")
        print("Where that is not worth a node, `pulumi destroy` keeps what is in the bucket, if the file says so.")
    after = "" if stack.is_earlier(definition) else ", `pulumi destroy`"
    print(f"Next: `gpufleet logs {again} --follow`, `gpufleet results {again}`{after}.")
    return 0
