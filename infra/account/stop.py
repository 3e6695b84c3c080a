"""Asks a run to end as a limit would end it, so that it saves its progress first. The request is one object in S3."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from gpufleet.infra.account import aws
from gpufleet.infra.account.fleet import fleets_of, is_over, nodes_of, wants
from gpufleet.infra.account.run_folder import find_folder, no_run
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.job import atomic
from gpufleet.job.contract.bucket import ASKED
from gpufleet.job.contract.done import Asked
from gpufleet.job.text import stamp


def ask(definition: StackDefinition, ec2: Any, s3: Any, now: datetime, say: Callable[[str], None] = print) -> None:
    """Asks the run to end, unless it is over already, and prints what will happen. Raises AwsRefused if the file's
    owner has no node or fleet that could follow the request.
    """
    name, run, owner = definition.name, definition.run.id, definition.run.owner
    again = definition.run_argument
    folder = find_folder(s3, definition)
    done = folder.read_done() if folder and folder.is_of(owner) else None
    if done:
        say(f"run {run} of {name} is over already: {done.reason}, {done.at}")
        return
    alive = [fleet for fleet in fleets_of(ec2, definition) if not is_over(fleet, now)]
    region = definition.fleet.region
    if not alive and folder is None:
        raise AwsRefused(f"nothing to stop: {no_run(s3, definition)}")
    if not alive:
        raise AwsRefused(
            f"nothing to stop: there is no fleet of run {run} of {name} in {region} any more. "
            f"`gpufleet results {again}` downloads the run's files; `--run ID` names an earlier run."
        )
    if not any(aws.owner_of(fleet) == owner for fleet in alive):
        others = ", ".join(sorted({aws.owner_of(fleet) or "nobody" for fleet in alive}))
        raise AwsRefused(
            f"there is no fleet of owner {owner} for run {run} of {name} in {region}; there is one of {others}, who "
            f"must ask with their own file. `gpufleet status {again}` shows the state; `--run ID` names an earlier "
            "run."
        )
    if folder is None or not folder.is_of(owner):  # a run of another owner is never stopped
        raise AwsRefused(
            f"no bucket of owner {owner} holds run {run} of {name}, so none of its nodes can boot or be asked. "
            "`pulumi destroy` ends its fleet."
        )
    # the first request stays, because its time shows whether a node should have followed it by now
    if earlier := folder.asked():
        say(f"asked already, by {earlier.by} at {earlier.at}: s3://{folder.bucket}/{run}/{ASKED}")
    else:
        asked = Asked(owner, stamp(now)).to_json()
        s3.put_object(Bucket=folder.bucket, Key=f"{run}/{ASKED}", Body=atomic.json_bytes(asked))
        say(f"asked: s3://{folder.bucket}/{run}/{ASKED}")
    running = [node for node in nodes_of(ec2, definition) if node["State"]["Name"] == "running"]
    nodes = [node["InstanceId"] for node in running if aws.owner_of(node) == owner]
    config = definition.job.parameters
    looks = f"looks every {config.checkpoint.heartbeat_s:g} s"
    leaves, later = "leaves final/", "leaves what the last checkpoint has"
    if not config.sizes().final_if_cut[0]:
        leaves = later = f"leaves no result ({name} has none before its end)"
    ends = "then ends the run and the fleet, and writes the receipt"
    wanted = any(map(wants, alive))
    if nodes:
        say(f"{nodes[0]} {looks}, finishes its step, saves, {leaves}, {ends}.")
    elif not wanted:
        how = f"`gpufleet wait {definition.argument}` says how to start one"
        say(f"No node runs and the fleet is at 0, so no node will act on the request. {how}.")
    else:
        say(f"No node runs. The next one {looks}: it {later}, {ends}.")
        say("If you do not want to pay for a node, run `pulumi destroy`: the bucket stays if storage.keep says so.")
    after = "" if definition.is_earlier_run else ", `pulumi destroy`"
    say(f"Next: `gpufleet logs {again} --follow`, `gpufleet results {again}`{after}.")
