"""Makes the lines of `gpufleet status`: a run's state, from its fleet and from its files in the bucket."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, refusals
from gpufleet.infra.account.fleet import (
    ENDED,
    GONE,
    end_command,
    fleets_of,
    has_expired,
    is_over,
    market,
    may_launch,
    nodes_of,
    replaces,
    wants,
    why_needless,
)
from gpufleet.infra.account.run_folder import RunFolder, StoredObject, find_folder, name_prefix, no_run
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.tags import STACK_TAG
from gpufleet.job.contract import attempt, bucket, reading
from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.contract.commit import BEST, Best
from gpufleet.job.contract.gang import GangGeneration, Presence
from gpufleet.job.contract.goal import goal_text
from gpufleet.job.contract.reading import epoch, iso
from gpufleet.job.contract.receipt import network, parse, start_up
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.job.text import counted

AWAY_S = 120.0  # one of several nodes counts as away if its last sign of life is older than this many seconds
STALE_HEARTBEATS = 5  # the report warns after this many intervals without a heartbeat
# kinds of lines that the short form of a report leaves out
DETAILS = ("attempt", "bucket", "done", "gang", "gpu", "progress", "spent")


def report(definition: StackDefinition, ec2: Any, s3: Any, now: datetime, scheduler: Any = None) -> Iterator[str]:
    """The lines of the report. If `scheduler` is None, it does not say when the run switches to on demand. Raises
    AwsRefused if the run has neither a fleet nor a folder.
    """
    name, run_id = definition.name, definition.run.id
    fleets = fleets_of(ec2, definition)
    folder = find_folder(s3, definition)
    if not fleets and folder is None:
        raise no_run(s3, definition)
    yield f"{name}, run {run_id}, {definition.fleet.region}"
    yield from _fleet(fleets, definition.run.owner, now)
    for other in fleets[1:]:
        own = aws.owner_of(other) == definition.run.owner
        if own and sorted((market(fleets[0]), market(other))) == sorted(definition.fleet.market.fleets):
            if not is_over(other, now):
                does = "looks for a node too" if wants(other) else "stands by"
                yield f"            and {other['FleetId']}, {market(other)}, {does}"
        elif other["FleetState"] not in ENDED:
            theirs = f"{other['FleetId']}, {other['FleetState']}, owner {aws.owner_of(other) or 'unknown'}"
            shown = f"this is the one of run.owner, {definition.run.owner}"
            if own and may_launch(other, now):
                shown = f"a run has one: gpufleet wait {definition.argument} says how to end the other"
            yield f"            also {theirs}; {shown}"
    if definition.fleet.market.stands_by and scheduler is not None:
        yield from _switch(scheduler, definition, now)
    nodes = [node for node in nodes_of(ec2, definition) if node["State"]["Name"] not in GONE]
    yield from _nodes(nodes, definition.run.owner)
    if folder is None:
        yield "bucket      nothing written yet"
        return
    whose = "" if folder.is_of(definition.run.owner) else f", owner {folder.owner}, whose run all lines below describe"
    yield f"bucket      s3://{folder.bucket}/{run_id}/{whose}"
    if folder.others:
        yield f"            also {folder.others}, {definition.run.owner}"
    yield from _attempts(folder, {node["InstanceId"] for node in nodes})
    leader = yield from _gang(folder, definition, now)
    ended = not fleets or is_over(fleets[0], now)
    yield from _progress(folder, definition, now, ended, leader)
    yield from _checkpoints(folder)
    yield from _goals(folder, definition)
    done, asked = folder.read_done(), folder.asked()
    if asked and not done:
        yield f"asked       to end, by {asked.by} at {asked.at}"
    resting = not ended and not wants(fleets[0])
    lacking = not ended and not replaces(fleets[0]) and len(nodes) < wants(fleets[0])
    if (resting or lacking) and not done:
        why = "is at 0" if resting else f"has {len(nodes)} of {counted(wants(fleets[0]), 'node')} and replaces none"
        yield f"next        the fleet {why}: gpufleet wait {definition.argument} says how the run goes on"
    if ended and not done and not any(aws.owner_of(node) in ("", folder.owner) for node in nodes):
        yield f"next        the run does not continue: gpufleet results {definition.run_argument} downloads its files"
    if done:
        yield f"done        {done.reason}, {done.at}. {done.detail}".rstrip()
        after = "" if definition.is_earlier_run else f"; pulumi destroy; gpufleet sweep {definition.argument}"
        own = bool(fleets) and aws.owner_of(fleets[0]) == definition.run.owner and not whose
        if own and (more := why_needless(fleets[0], done, now)):
            yield f"needless    {more}\n            {end_command(fleets[0], definition.fleet.region)}"
        yield f"next        gpufleet results {definition.run_argument}{after}"


def headline(lines: Sequence[str]) -> str:
    """The headline of a report: how the run ended, or what it is doing; and the money spent."""
    texts = {line[:12].strip(): line[12:] for line in reversed(lines[1:])}  # by kind, the first line of that kind
    state = texts.get("done") or texts.get("progress") or "a node runs, but has not reported yet"
    if texts["node"] == "none" and "done" not in texts:
        state = f"no node; last {texts['progress']}" if "progress" in texts else "no node"
    spent = "" if "spent" not in texts else f", {texts['spent'].replace('$', '')} USD spent"
    return f"{lines[0]}: {state.removesuffix('.')}{spent}"


def short(lines: Sequence[str], command: str) -> Iterator[str]:
    """The lines of a report that matter now and are not in its headline; `command` is what shows all with --all."""
    matters, hidden = False, 0
    for line in lines:
        matters = line[:12].strip() not in DETAILS if line[:1] != " " else matters
        hidden += not matters
        if matters:
            yield line
    if hidden:
        yield f"all         {counted(hidden, 'more line')}: `{command} --all`"


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


def _switch(scheduler: Any, definition: StackDefinition, now: datetime) -> Iterator[str]:
    """The line that says when AWS will start the on-demand fleet, by the current schedule."""
    try:
        for group in aws.pages(
            scheduler, "list_schedule_groups", "ScheduleGroups", NamePrefix=name_prefix(definition.name)
        ):
            tagged = scheduler.list_tags_for_resource(ResourceArn=group["Arn"])
            if aws.tags_of(tagged).get(STACK_TAG) != definition.name or aws.owner_of(tagged) != definition.run.owner:
                continue
            schedule = scheduler.get_schedule(GroupName=group["Name"], Name=SWITCH)
            at = epoch(schedule["ScheduleExpression"][3:-1] + "Z") or 0.0
            hour = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
            if schedule["State"] == "DISABLED":
                yield "switch      to on demand: off, as the run is over or the cost does not fit within its limits"
            elif at <= now.timestamp():
                yield f"switch      to on demand: since {hour}, unless AWS has no capacity there"
            else:
                yield f"switch      to on demand: at {hour}, unless a node that trains changes the hour"
    except ClientError as error:
        yield f"switch      to on demand: the hour cannot be read, {refusals.refusal(error)}"


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
    records = {}
    for stored in folder.objects(bucket.ATTEMPTS):
        name = bucket.node_of(stored.name) or stored.name
        records[name] = attempt.record(folder.read(stored.name), _set_aside(stored, odd))
    for name, record in sorted(records.items(), key=lambda pair: pair[1].booted_at):
        how = "running" if name in alive else "gone without notice"
        if record.exit:
            how = f"ended: {record.exit.reason} at {record.exit.at}"
        how = ", ".join(filter(None, (how, start_up(record.started_s, record.pulled_s), network(record.preflight))))
        kind = f"{record.type} {record.capacity}".rstrip()
        yield f"attempt     {name}, {kind} in {record.zone}, booted {record.booted_at}, {how}"
        if record.alarm:
            yield f"warning     {record.alarm}"
    yield from odd


def _gang(folder: RunFolder, definition: StackDefinition, now: datetime) -> Generator[str, None, str]:
    """Yields lines that say which of several nodes train together, which nodes wait, and since when. Returns the
    leading instance; empty if there is none.
    """
    made, waiting = dict[int, GangGeneration](), list[Presence]()
    for stored in folder.objects(bucket.GANG):
        content = folder.read(stored.name) or b""
        with suppress(reading.DoubtError):
            if bucket.GENERATION_KEY.fullmatch(stored.name):
                generation = GangGeneration.from_json(reading.parse(content))
                made[generation.number] = generation
            elif (now - stored.written).total_seconds() <= AWAY_S:
                presence = Presence.from_json(reading.parse(content))
                waiting += [presence] if presence.state == "ready" else []
    newest = made[max(made)] if made else None
    if newest is not None:
        others = ", ".join(newest.members[1:])
        yield f"gang        generation {newest.number}: {newest.leader} leads, with {others}"
    for one in sorted(waiting, key=lambda one: one.since):
        yield f"            {one.instance} waits for the others since {iso(one.since)}, billed"
    if waiting:
        fleet = definition.fleet
        price = load_catalog().on_demand_prices.get((fleet.instance_types[0], fleet.region))
        cost = f", at most {price.amount * len(waiting):.2f} USD an hour" if price else ""
        yield f"            {len(waiting)} of {fleet.nodes} wait{cost}"
    return newest.leader if newest is not None else ""


def _set_aside(stored: StoredObject, odd: list[str]) -> attempt.Aside:
    """A function that adds a sentence about a damaged object to `odd`."""
    return lambda why: odd.append(f"            {stored.name}: set aside: {why}")


def _progress(folder: RunFolder, definition: StackDefinition, now: datetime, ended: bool, leader: str) -> Iterator[str]:
    odd: list[str] = []
    beating = folder.objects(bucket.HEARTBEATS)
    ends = [(stored, folder.read(stored.name, last_bytes=4096)) for stored in beating]
    last_beats = [attempt.last_beat(end, _set_aside(stored, odd)) for stored, end in ends]
    yield from odd
    leads = [bucket.node_of(stored.name) == leader for stored in beating]
    beats = [beat for beat in last_beats if beat is not None]
    if not beats:
        yield f"heartbeat   none{'' if ended else ' yet: the node boots, pulls the image and stages its data first'}"
        return
    beat = max(beats, key=lambda beat: beat.ts)
    own = next(
        (last for last, is_leader in zip(last_beats, leads, strict=True) if is_leader and last is not None), beat
    )
    # if there are several nodes, only a node with a recent heartbeat shows the state of the training
    if (epoch(beat.ts) or 0) - (epoch(own.ts) or 0) <= AWAY_S:
        beat = own
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
        known = [form.format(value) for form, value in figures if value is not None]  # the speed is not known at first
        yield f"progress    {', '.join([f'phase {beat.phase}, step {beat.step}', *known])}"
    if beat.gpu_util is not None or beat.xids:
        gpus = (("{:.0f} % used", beat.gpu_util), ("{:.1f} GB", beat.gpu_mem_gb), ("{:.0f} °C", beat.gpu_temp_c))
        parts = [form.format(value) for form, value in gpus if value is not None]
        parts += [f"Xid {', '.join(map(str, beat.xids))} reported by the driver"] if beat.xids else []
        yield f"gpu         {', '.join(parts)}"
    yield f"spent       ${beat.spent_usd or 0:.4f} of ${(definition.shared or definition.limits).max_usd}"
    if beat.ceiling_s:
        yield f"            {beat.ceiling_s / 3600:.2f} h of it at the on-demand price: AWS gives no spot price"


def _goals(folder: RunFolder, definition: StackDefinition) -> Iterator[str]:
    """The run's goals; if there is a receipt, with the metric values that the run reached."""
    texts = [goal_text(name, figure) for name, figure in definition.goal.wanted.items()]
    with suppress(reading.DoubtError):
        texts = [grade.text for grade in parse(folder.read(RECEIPT) or b"").goals]
    yield from (f"{'' if index else 'goal':<12}{text}" for index, text in enumerate(texts))


def _checkpoints(folder: RunFolder) -> Iterator[str]:
    places = bucket.published(stored.name for stored in folder.objects(bucket.CHECKPOINTS))
    steps = sorted({place.step for place in places})
    if not steps:
        yield "checkpoint  none published yet"
        return
    best = Best.from_bytes(folder.read(BEST))
    note = "" if best is None else f", best {best.step}"
    yield f"checkpoint  steps {', '.join(map(str, steps))}{note}"
