"""Decides, from the run's id, whether this update begins a run, continues it, or comes after its end. The module
imports no pulumi and reads no clock.

A fleet takes its settings only when it is created. So two kinds of change must not go unnoticed:

- the definition file says something else under the same run id: this is an error, before the first resource;
- job code or prices have changed since the run began: the run keeps what it began with, and a warning says so.

A digest shows whether the file has changed. The digest depends on the version that computed it (DIGESTS).

The stack's output `run` is the record of the last successful `up`. A run is over, and its fleet is no longer declared,
if `valid_until` has passed or the stack no longer has its fleet (the run ended it, somebody deleted it, or AWS expired
it), because a fleet is made only once per run id. There is one exception: a fleet in a Capacity Block does not replace
nodes, so it is made again while the block lasts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import Any

from gpufleet.infra.definition.model import Account, Goal, Notify, StackDefinition, days_to_keep
from gpufleet.infra.errors import DefinitionError, Problem
from gpufleet.job.contract.bucket import input_key
from gpufleet.job.text import stamp

# Versions with their own digests. A digest covers every key that its version knew, and each later key that does not
# have its default. The empty version stands for checkouts before 0.1.0: its digest omits the most keys, and new runs
# use it.
DIGESTS = ("", "0.1.0")

# The timer that a node sets at boot is longer than the limit by this time, because the node does not know yet how much
# was spent (job/node/allowance.py).
TIMER_MARGIN = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The stack output `run`: the state with which the run began."""

    id: str
    digest: str  # the digest over everything in the definition that a fleet takes only at creation
    # The sha256 of the prepared dataset; empty if it is an s3:// prefix. For a command, the hashes of all its inputs,
    # one after the other.
    dataset: str
    code: str  # sha256 of the job archive, followed by that of a command's code
    weights: str  # sha256 of the list of base weights; empty if there are none, or for an s3:// prefix
    began: str  # in UTC, in the form of valid_until
    # in UTC, with whole seconds and Z; the provider compares the text, so that another spelling would replace the fleet
    valid_until: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Previous:
    """The state of the stack after its last update."""

    outputs: Mapping[str, Any]  # empty before the first update
    # the ids of runs in the fleets' tags; an empty text for a fleet without such a tag
    fleets: frozenset[str] = frozenset()
    fleet_ids: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()  # keys of objects in the bucket, except those that are about to be deleted
    region: str = ""  # the region of its resources
    other: str = ""  # for a component: another component of the stack that ran this definition


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDecision:
    """What this update may do."""

    run: RunRecord
    # Every run id of this stack so far. Their objects are in the same bucket, but expire separately.
    runs: tuple[str, ...]
    # whether this is the run of the last `up`; then its template, job archive and run config stay as they are
    continues: bool
    over: bool  # whether the run is over; then no fleet is declared
    warnings: tuple[str, ...] = ()


def judge(
    definition: StackDefinition,
    *,
    dataset_sha256: str | None,
    weights_sha256: str | None = None,
    code_sha256: str,
    previous: Previous,
    now: datetime,
) -> RunDecision:
    """Compares the definition with the stack. Raises DefinitionError:

    - if the stack has another file or region;
    - if the run continues, but its digest has changed, its storage is kept for fewer days than its fleet may exist, or
      the stack's fleet belongs to another run;
    - if the run id is that of an earlier run, or of a run that an aborted `up` has begun or was about to replace;
    - if a new run's deadline has passed.
    """
    _stays(definition, previous)
    run_id, recorded = definition.run.id, _record(previous.outputs.get("run"))
    asked = RunRecord(
        id=run_id,
        digest=creation_digest(definition),
        dataset=dataset_sha256 or "",
        code=code_sha256,
        weights=weights_sha256 or "",
        began=stamp(now),
        valid_until=stamp(definition.expiry(now)),
    )
    earlier = [*map(str, previous.outputs.get("runs") or []), *sorted(previous.fleets - {""})]
    runs = tuple(dict.fromkeys([*earlier, run_id]))
    if recorded is not None and recorded.id == run_id:
        return _continued(definition, recorded, asked, runs, previous, now)
    if run_id in previous.fleets and previous.other:
        raise _used(
            definition,
            f"The component {previous.other} of this stack runs it. If this is the same component under a new name, "
            f'say so in its options: aliases=[pulumi.Alias(name="{previous.other}")].',
        )
    if run_id in earlier:
        raise _used(
            definition,
            f"An `up` that did not finish has made the fleet of run {run_id}, which may be training. Give run.id a new "
            "value: the new run's fleet replaces that one. Or end everything with `pulumi destroy` and begin again."
            if run_id in previous.fleets
            else f"Run {run_id} is an earlier run of this stack, and its results are in the bucket under its id. "
            "Give run.id a new value to start a new run.",
        )
    deadline = definition.limits.due(now)
    if deadline is not None and deadline <= now:
        raise _refused(
            definition,
            "limits.deadline",
            stamp(deadline),
            f"a time after now, {stamp(now)}",
            f"Run {run_id} has not begun, and its deadline has passed.",
        )
    ended = _ended(definition, recorded, previous.fleets, now)
    return RunDecision(run=asked, runs=runs, continues=False, over=False, warnings=ended)


def _continued(
    definition: StackDefinition,
    recorded: RunRecord,
    asked: RunRecord,
    runs: tuple[str, ...],
    previous: Previous,
    now: datetime,
) -> RunDecision:
    """The decision for a recorded run, which continues or is over. `asked`: the record that the file would have now
    under the same id.
    """
    run_id = recorded.id
    if previous.fleets and not previous.fleets & {run_id, ""}:
        others = " and ".join(sorted(previous.fleets))
        raise _used(
            definition,
            f"The stack's record names run {run_id}, but its fleet belongs to run {others}, and `up` would delete it. "
            "An `up` was interrupted, or `refresh --run-program` wrote the record. Leave the stack as it is until "
            f"{others} is done, or give run.id a new value: the new run's fleet replaces this one.",
        )
    # If a folder of inputs is missing, this does not mean that the run has changed. Another check asks for the folder.
    other_inputs = (asked.dataset and asked.dataset != recorded.dataset) or (
        asked.weights and asked.weights != recorded.weights
    )
    if recorded.digest not in {creation_digest(definition, version=version) for version in DIGESTS} or other_inputs:
        raise _used(
            definition,
            f"Run {run_id} already exists with other settings, and a fleet takes its settings only when it is created. "
            "Undo the change; or give run.id a new value to start a new run with the new settings, which ends this run "
            "if it still trains.",
        )
    end, gone = datetime.fromisoformat(recorded.valid_until), not previous.fleets & {run_id, ""}
    if end <= now or (gone and definition.fleet.market.replaces):
        why = f"since {recorded.valid_until}" if end <= now else "its fleet no longer exists"
        over = (
            f"Run {run_id} is over ({why}): no fleet is declared. Its results stay in the bucket; a new run.id starts "
            "a new run."
        )
        return RunDecision(run=recorded, runs=runs, continues=True, over=True, warnings=(over,))
    if _replaced(previous.objects, recorded):
        raise _used(
            definition,
            f"Run {run_id} goes on, but an `up` for another run has put its inputs into the stack, and was interrupted "
            f"before it made a fleet. Another `up` under this id would delete the inputs of {run_id}, so that its next "
            f"node could not boot. Leave the stack as it is until {run_id} is done, or give run.id a new value again, "
            f"which ends {run_id}.",
        )
    began = datetime.fromisoformat(recorded.began or recorded.valid_until)
    keep, least = definition.storage.keep.days, days_to_keep(began, end)
    if keep < least:
        raise _refused(
            definition,
            "storage.keep.days",
            str(keep),
            f"at least {least} (days) while run {run_id} may go on, so that its run.json outlives its fleet",
            f"Run {run_id} began at {recorded.began}, and its fleet may live until {recorded.valid_until}.",
        )
    changed = (
        f"The job code has changed since run {run_id} began. The run keeps the code with which it began; a new run.id "
        "starts a new run with the new code."
    )
    again = (
        f"Run {run_id}'s fleet no longer exists, but its block lasts until {recorded.valid_until}: `up` launches its "
        "nodes again. They go on from the last checkpoint, or end at once if the run is over."
    )
    warnings = [*([] if recorded.code == asked.code else [changed]), *([again] if gone else [])]
    return RunDecision(run=recorded, runs=runs, continues=True, over=False, warnings=tuple(warnings))


def _stays(definition: StackDefinition, previous: Previous) -> None:
    """Raises DefinitionError if a stack's file or region has changed. The names and regions of all resources depend on
    them. Under another name a node would lose its bucket and role, and the provider does not move resources to another
    region (pulumi-aws, pull request 5656: destroy, then up).
    """
    name, region = str(previous.outputs.get("definition") or ""), previous.region
    hint = (
        "Write the old one again, and run `pulumi destroy` and `gpufleet sweep`; then change it. Or make a separate "
        "stack for the new file or region: `pulumi stack init`."
    )
    if name and name != definition.name:
        raise _refused(definition, "the file's name", definition.name, f"{name}, which this stack runs", hint)
    if region and region != definition.fleet.region:
        raise _refused(definition, "fleet.region", definition.fleet.region, f"{region}, where this stack is", hint)


def _replaced(objects: frozenset[str], recorded: RunRecord) -> bool:
    """Whether one of the objects that the run's nodes read at every boot has been replaced."""
    inputs = [
        input_key(sha256) for named in (recorded.code, recorded.dataset, recorded.weights) for sha256 in named.split()
    ]
    return any(not key.startswith((f"{recorded.id}/", *inputs)) for key in objects)


def creation_digest(definition: StackDefinition, *, version: str = DIGESTS[0]) -> str:
    """sha256, as hexadecimal digits, of the parts of the definition that a fleet, its template and its run config use,
    as `version` computed it. `keep`, `estimate`, and keys that are newer than the version and have their default, are
    not included.
    """
    kinds, zones = definition.fleet.instance_types, definition.fleet.zones
    job, fleet = _digested(definition.job, version), _digested(definition.fleet, version)
    taken = {
        "run": asdict(definition.run),
        "job": {key: value for key, value in job.items() if value is not None},
        "fleet": {**fleet, "instance_types": sorted(kinds), "zones": sorted(zones)},  # in any order
        "disks": [_digested(definition.storage.root, version), _digested(definition.storage.data, version)],
        "dataset": definition.storage.dataset,
        "base_weights": definition.storage.base_weights,
        **({"inputs": definition.storage.inputs} if definition.storage.inputs else {}),
        "limits": _digested(definition.limits, version),
        **(
            {"stages": [creation_digest(stage, version=version) for stage in definition.stages]}
            if definition.stages
            else {}
        ),
        **({"fleet_of": definition.fleet_of} if definition.fleet_of else {}),
        **({"taken": definition.taken} if definition.taken else {}),
        **({"goal": _digested(definition.goal, version)} if definition.goal != Goal() else {}),
        **({"account": _digested(definition.account, version)} if definition.account != Account() else {}),
        **({"notify": _digested(definition.notify, version)} if definition.notify != Notify() else {}),
    }
    text = json.dumps(taken, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _digested(value: Any, version: str) -> Any:
    """The value as a tree, as asdict makes it, without fields that are newer than `version` and have their default."""
    if is_dataclass(value):
        counted = {}
        for key in fields(value):
            own = getattr(value, key.name)
            if own == key.default:
                if key.metadata.get("added", "") > version:
                    continue
                own = key.default  # so that 6.0 is equal to 6
            counted[key.name] = _digested(own, version)
        return counted
    if isinstance(value, dict):
        return {key: _digested(child, version) for key, child in value.items()}
    return [_digested(child, version) for child in value] if isinstance(value, (list, tuple)) else value


def timer_seconds(definition: StackDefinition) -> int:
    """So many seconds after its boot a node ends itself, even if the job hangs."""
    hours = definition.fleet.market.timer_hours((definition.shared or definition.limits).max_hours)
    return int(hours * 3600) + int(TIMER_MARGIN.total_seconds())


def _ended(
    definition: StackDefinition, recorded: RunRecord | None, fleets: frozenset[str], now: datetime
) -> tuple[str, ...]:
    """A warning that a new run's fleet replaces another fleet, which may still have a node."""
    expired = recorded.id if recorded and datetime.fromisoformat(recorded.valid_until) <= now else ""
    return tuple(
        f"Run {definition.run.id}'s fleet replaces that of run {run}. If {run} still trains, `pulumi up` ends it: its "
        "published checkpoints stay in the bucket, but its work since the last one is lost. `gpufleet status "
        f"{definition.argument} --run {run}` shows whether it trains. To keep its work, first run `gpufleet stop "
        f"{definition.argument} --run {run}`."
        for run in sorted(fleets - {"", expired})
    )


def _record(output: Any) -> RunRecord | None:
    if not isinstance(output, Mapping):
        return None
    return RunRecord(**{field.name: str(output.get(field.name, "")) for field in fields(RunRecord)})


def _used(definition: StackDefinition, hint: str) -> DefinitionError:
    return _refused(definition, "run.id", definition.run.id, "a value that this stack has not used", hint)


def _refused(definition: StackDefinition, path: str, value: str, allowed: str, hint: str) -> DefinitionError:
    return DefinitionError(str(definition.source), [Problem(path=path, value=value, allowed=allowed, hint=hint)])
