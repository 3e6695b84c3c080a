"""Where a run stands, from its fleet and from what it has written to the bucket: the lines of `gpufleet status`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from gpufleet.infra.account import aws
from gpufleet.infra.account.fleet import (
    ENDED,
    end_command,
    fleets_of,
    has_expired,
    is_over,
    may_launch,
    nodes_of,
    wants,
    why_needless,
)
from gpufleet.infra.account.run_folder import RunFolder, StoredObject, find_folder, no_run
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract import attempt, bucket, reading
from gpufleet.job.contract.commit import BEST, Best
from gpufleet.job.contract.gang import GangGeneration, Presence
from gpufleet.job.contract.reading import DoubtError, epoch
from gpufleet.job.contract.receipt import start_up
from gpufleet.job.supervisor.gang import LOST_S
from gpufleet.job.text import counted

STALE_HEARTBEATS = 5  # this many intervals without one is worth a word
GONE = ("shutting-down", "terminated")  # states of an instance


def report(definition: StackDefinition, ec2: Any, s3: Any, now: datetime) -> Iterator[str]:
    """The lines. Raises AwsRefused when neither a fleet nor a folder of the run exists."""
    name, run_id = definition.name, definition.run.id
    fleets = fleets_of(ec2, definition)
    folder = find_folder(s3, definition)
    if not fleets and folder is None:
        raise no_run(s3, definition)
    yield f"{name}, run {run_id}, {definition.fleet.region}"
    yield from _fleet(fleets, definition.run.owner, now)
    for other in fleets[1:]:
        if other["FleetState"] not in ENDED:
            theirs = f"{other['FleetId']}, {other['FleetState']}, owner {aws.owner_of(other) or 'unknown'}"
            shown = f"shown is the one of run.owner, {definition.run.owner}"
            if aws.owner_of(other) == definition.run.owner and may_launch(other, now):
                shown = f"a run has one: gpufleet wait {definition.argument} says how to end the other"
            yield f"            also {theirs}; {shown}"
    nodes = [node for node in nodes_of(ec2, definition) if node["State"]["Name"] not in GONE]
    yield from _nodes(nodes, definition.run.owner)
    if folder is None:
        yield "bucket      nothing written yet"
        return
    whose = "" if folder.is_of(definition.run.owner) else f", owner {folder.owner}, whose run all below is of"
    yield f"bucket      s3://{folder.bucket}/{run_id}/{whose}"
    if folder.others:
        yield f"            also {folder.others}, {definition.run.owner}"
    yield from _attempts(folder, {node["InstanceId"] for node in nodes})
    ended = not fleets or is_over(fleets[0], now)
    if definition.nodes > 1 and not ended:
        yield from _gang(folder, definition, now)
    yield from _progress(folder, definition, now, ended)
    yield from _checkpoints(folder)
    done, asked = folder.read_done(), folder.asked()
    if asked and not done:
        yield f"asked       to end, by {asked.by} at {asked.at}"
    resting = not ended and not wants(fleets[0])
    if resting and not done:
        yield f"next        the fleet is at 0: gpufleet wait {definition.argument} says how the run goes on"
    if ended and not done and not any(aws.owner_of(node) in ("", folder.owner) for node in nodes):
        yield f"next        nothing goes on with it: gpufleet results {definition.run_argument} brings what it left"
    if done:
        yield f"done        {done.reason}, {done.at}. {done.detail}".rstrip()
        after = "" if definition.is_earlier_run else f"; pulumi destroy; gpufleet sweep {definition.argument}"
        own = bool(fleets) and aws.owner_of(fleets[0]) == definition.run.owner and not whose
        if own and (more := why_needless(fleets[0], done, now)):
            yield f"needless    {more}\n            {end_command(fleets[0], definition.fleet.region)}"
        yield f"next        gpufleet results {definition.run_argument}{after}"


def _fleet(fleets: list[dict[str, Any]], owner: str, now: datetime) -> Iterator[str]:
    if not fleets:
        yield "fleet       none: destroyed, or deleted more than two days ago"
        return
    fleet = fleets[0]
    whose = "" if aws.owner_of(fleet) in ("", owner) else f", owner {aws.owner_of(fleet)}"
    until = fleet.get("ValidUntil")
    expiry = f", ends at the latest {until:%Y-%m-%d %H:%M} UTC" if until else ""
    if is_over(fleet, now):
        why = f", expired {until:%Y-%m-%d %H:%M} UTC" if has_expired(fleet, now) else ""
        yield f"fleet       {fleet['FleetId']}, {fleet['FleetState']}{whose}{why}: it launches nothing more"
        return
    yield f"fleet       {fleet['FleetId']}, {fleet['FleetState']}{whose}, wants {counted(wants(fleet), 'node')}{expiry}"


def _nodes(nodes: list[dict[str, Any]], owner: str) -> Iterator[str]:
    for node in nodes:
        kind = f"{node['InstanceType']} {node.get('InstanceLifecycle', 'on-demand')}"
        where = f"{node['InstanceId']}, {kind} in {node['Placement']['AvailabilityZone']}"
        whose = "" if aws.owner_of(node) in ("", owner) else f", owner {aws.owner_of(node)}"
        yield f"node        {where}, {node['State']['Name']} since {node['LaunchTime']:%Y-%m-%d %H:%M:%S} UTC{whose}"
    if not nodes:
        yield "node        none"


def _attempts(folder: RunFolder, alive: set[str]) -> Iterator[str]:
    odd: list[str] = []
    found = {}
    for each in folder.objects(bucket.ATTEMPTS):
        name = bucket.node_of(each.name) or each.name
        found[name] = attempt.record(folder.read(each.name), _set_aside(each, odd))
    for name, record in sorted(found.items(), key=lambda pair: pair[1].booted_at):
        how = "running" if name in alive else "gone without notice"
        if record.exit:
            how = f"ended: {record.exit.reason} at {record.exit.at}"
        took = start_up(record.started_s, record.pulled_s)
        how += f", {took}" if took else ""
        yield f"attempt     {name}, {record.type} in {record.zone}, booted {record.booted_at}, {how}"
    yield from odd


def _set_aside(each: StoredObject, odd: list[str]) -> attempt.Aside:
    """Keeps what is said of an object that does not say what it should."""
    return lambda why: odd.append(f"            {each.name}: set aside: {why}")


def _gang(folder: RunFolder, definition: StackDefinition, now: datetime) -> Iterator[str]:
    """Who of several nodes trains, or who is there and waits, billed, for the others."""
    odd: list[str] = []
    there, newest = dict[str, Presence](), None
    for each in folder.objects(bucket.GANG):
        try:
            tree = reading.parse(folder.read(each.name) or b"")
            if bucket.PRESENCE_KEY.fullmatch(each.name):
                presence = Presence.from_json(tree)
                if presence.state != "gone" and (now - each.written).total_seconds() <= LOST_S:
                    there[presence.instance] = presence
            elif bucket.GENERATION_KEY.fullmatch(each.name):
                found = GangGeneration.from_json(tree)
                newest = found if newest is None or found.number > newest.number else newest
        except DoubtError as why:
            odd.append(f"            {each.name}: set aside: {why}")
    yield from odd
    busy = [each for each in there.values() if each.state == "busy"]
    if newest is not None and busy:
        yield f"together    {', '.join(newest.members)}, generation {newest.number}, led by {newest.leader}"
        return
    said = f"together    none: {len(there)} of {definition.nodes} nodes are there"
    if there:
        since = datetime.fromtimestamp(min(each.launched_at for each in there.values()), UTC)
        price = load_catalog().on_demand_prices.get((definition.fleet.instance_types[0], definition.fleet.region))
        cost = f", at most {price.amount * len(there):.2f} USD an hour" if price else ""
        said += f", since {since:%Y-%m-%d %H:%M:%S} UTC, and wait, billed{cost}"
    yield said


def _progress(folder: RunFolder, definition: StackDefinition, now: datetime, ended: bool) -> Iterator[str]:
    odd: list[str] = []
    beating = folder.objects(bucket.HEARTBEATS)  # files that grow
    ends = [(each, folder.read(each.name, last_bytes=4096)) for each in beating]
    found = [attempt.last_beat(end, _set_aside(each, odd)) for each, end in ends]
    yield from odd
    beats = [beat for beat in found if beat is not None]
    if not beats:
        yield f"heartbeat   none{'' if ended else ' yet: the node boots, pulls the image and stages its data first'}"
        return
    beat = max(beats, key=lambda beat: beat.ts)
    written = epoch(beat.ts)
    age = None if written is None else now.timestamp() - written
    yield f"heartbeat   {beat.ts}{f', {age:.0f} s ago' if age is not None else ''}"
    over = folder.read_done() is not None
    interval = definition.job.parameters.checkpoint.heartbeat_s
    if age is not None and age > STALE_HEARTBEATS * interval and not over:
        late = f"that is more than {STALE_HEARTBEATS} intervals of {interval:g} s"
        yield f"            {late}: see `gpufleet logs {definition.run_argument}`"
    if beat.phase is None:
        on = f"; it goes on from step {beat.step}" if beat.step else ""
        yield f"progress    nothing logged by this node yet{on}"
    else:
        figures = (("loss {:.4f}", beat.loss), ("{:,.0f} tokens/s", beat.tok_s))
        known = [form.format(value) for form, value in figures if value is not None]  # no speed at first
        yield f"progress    {', '.join([f'phase {beat.phase}, step {beat.step}', *known])}"
    if beat.gpu_util is not None or beat.xids:
        gpus = (("{:.0f} % used", beat.gpu_util), ("{:.1f} GB", beat.gpu_mem_gb), ("{:.0f} °C", beat.gpu_temp_c))
        said = [form.format(value) for form, value in gpus if value is not None]
        said += [f"Xid {', '.join(map(str, beat.xids))} told by the driver"] if beat.xids else []
        yield f"gpu         {', '.join(said)}"
    yield f"spent       ${beat.spent_usd or 0:.4f} of ${definition.limits.max_usd}"
    if beat.ceiling_s:
        yield f"            {beat.ceiling_s / 3600:.2f} h of it at the on-demand price: AWS tells no spot price"


def _checkpoints(folder: RunFolder) -> Iterator[str]:
    steps = sorted(
        int(found[1])
        for each in folder.objects(bucket.CHECKPOINTS)
        if (found := bucket.MANIFEST_KEY.fullmatch(each.name))
    )
    if not steps:
        yield "checkpoint  none published yet"
        return
    best = Best.from_bytes(folder.read(BEST))
    note = "" if best is None else f", best {best.step}"
    yield f"checkpoint  steps {', '.join(map(str, steps))}{note}"
