"""Checks between the keys of a definition file, on the dataclasses that infra.definition.schema has built. The checks
are pure functions: the caller passes the time and the catalog. infra.definition.rules checks single values, infra.bill
checks prices and compares the cap with p50; `gpufleet doctor` checks facts that only AWS knows.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gpufleet.infra.definition.model import (
    Account,
    Disk,
    Fleet,
    Limits,
    Notify,
    StackDefinition,
    Storage,
    days_to_keep,
)
from gpufleet.infra.definition.schema import Findings, nearest
from gpufleet.infra.definition.type_checks import declared_steps, gpus_asked, instance_types, several_nodes
from gpufleet.infra.market import asked
from gpufleet.infra.market.market import DEADLINE, MAX_HOURS, Beside
from gpufleet.infra.market.reservation import END
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.job import problems_of
from gpufleet.job.text import counted, stamp

if TYPE_CHECKING:
    from gpufleet.infra.catalog import Catalog

ROOT_MINIMUM_GIB = 75  # size of the snapshot of the Deep Learning Base AMI (AL2023, build of 2026-09-25)
IOPS_PER_GIB = 500  # for gp3; the source is third-party notes of 2026, not a page of AWS
MIBPS_PER_IOPS = 0.25  # source: the same notes
BASE_IOPS = 3000  # included in the price of any size
TAG_KEY = re.compile(r"(?!aws:|gpufleet:|Name$)(?! )[A-Za-z0-9 _.:/=+@-]{1,128}(?<! )")
PLACE = "a folder inside the project, or s3://bucket/prefix"
ANYWHERE = "a folder, relative to the project, or s3://bucket/prefix"
INPUT_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")  # also the name of a folder and, in capitals, of a variable
# `*` is not allowed, because it is IAM's wildcard
BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.'()=-]+)*/?")


def check(
    s: StackDefinition,
    findings: Findings,
    *,
    now: datetime,
    catalog: Catalog,
    past_deadline: bool,
    launchable: bool = True,
) -> None:
    """Adds every contradiction in the file to `findings`. If not `launchable`, the types need only be known. A scenario
    may list a type that EC2 has retired or that is too small; `compare` then shows the scenario with the reason.
    """
    impossible = _model(s.job.parameters, findings)
    _placement(s.fleet, findings, catalog)
    # If the job's parameters are invalid, skip the checks that need them; still check the instance types.
    unknown = impossible or bool(findings.bad & {"job", "job.experiment", "job.parameters"})
    config = None if unknown else s.job.parameters
    market, *fallbacks = asked(s.fleet.capacity, s.fleet.fallback, s.nodes, s.fleet.block)
    beside = Beside(config, s.limits.deadline, now, past_deadline)
    market.check(findings, s.fleet, beside)
    instance_types(s.fleet, config, findings, catalog, launchable=launchable)
    if not unknown:
        declared_steps(s.job.parameters, findings, catalog)
    if launchable and not unknown:
        gpus_asked(s.fleet, s.job.parameters, findings, catalog)
        several_nodes(s.fleet, s.job.parameters, findings, catalog)
    _storage(s.storage, findings)
    if "job" not in findings.bad:
        _check_given(s, findings)
    check_account(s.account, s.fleet, findings)
    _notify(s.notify, findings)
    _limits(s.limits, findings, now, past_deadline)
    _check_keep(s, findings, now)
    if not unknown:
        _base_weights(s, findings)
        _saves(s, findings)
        _estimate(s, findings)
    for fallback in fallbacks:
        fallback.check(findings, s.fleet, beside)


def _model(config: JobConfig, findings: Findings) -> bool:
    """Reports a run config from which no model can be built. Returns whether it reported one."""
    model_problems = problems_of(config)
    for path, sentence in model_problems:
        findings.add(f"{config.path}.{path}", sentence, default=_standing(config, path))
    return bool(model_problems)


def _standing(config: JobConfig, path: str) -> str:
    """The value at a path of the run config, written as in the file; empty for a section or a missing value."""
    value: object = config
    for name in path.split("."):
        value = getattr(value, name, None)
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if isinstance(value, int | float | str) else ""


def _placement(fleet: Fleet, findings: Findings, catalog: Catalog) -> None:
    regions, priced = sorted(catalog.regions()), sorted(catalog.billed_regions())
    if fleet.region not in priced:
        hint = nearest(fleet.region, priced)
        if catalog.zones(fleet.region):
            lacks = ", ".join(catalog.missing(fleet.region))
            hint = f"No price there of {lacks}: `gpufleet prices refresh --region {fleet.region}` reads them from AWS."
        findings.add("fleet.region", "a region with prices in the catalog: " + ", ".join(priced), hint)
    zones, prefix = sorted(catalog.zones(fleet.region)), catalog.zone_id_prefix(fleet.region)
    if 0 < len(fleet.zone_ids) < len(fleet.zones):
        hint = "AWS maps names to ids differently in each account, so that a name and an id may be the same zone."
        findings.add("fleet.zones", "only names, or only ids", hint, value=", ".join(fleet.zones))
        return
    for index, zone in enumerate(fleet.zones):
        path = f"fleet.zones[{index}]"
        if zone in fleet.zones[:index]:
            findings.add(path, "each zone once (a fleet takes one subnet per zone)")
        elif fleet.zone_ids:
            if prefix and not re.fullmatch(f"{prefix}az[1-8]", zone):
                findings.add(path, f"ids of zones of {fleet.region}, as {prefix}az1")
        elif zones and zone not in zones:
            other = next((region for region in regions if zone in catalog.zones(region)), None)
            theirs = [listed for listed in fleet.zones if other and listed in catalog.zones(other)]
            if zone in theirs[1:]:
                continue  # one report is enough, because either the region is wrong or all zones are
            hint = f"In {other}: {', '.join(theirs)}." if other else nearest(zone, zones)
            findings.add(path, f"the zones of {fleet.region}: {', '.join(zones)}", hint)


def _storage(storage: Storage, findings: Findings) -> None:
    _disk("storage.root", storage.root, findings)
    if storage.root.snapshot is not None:
        findings.add(
            "storage.root.snapshot", "no snapshot: the root disk comes from the AMI", "Put it under storage.data."
        )
    if storage.root.size_gib < ROOT_MINIMUM_GIB:
        findings.add(
            "storage.root.size_gib", f"at least {ROOT_MINIMUM_GIB} (GiB): the AMI's own snapshot is that large"
        )
    if storage.data is not None:
        _disk("storage.data", storage.data, findings)
    for name, place in (("dataset", storage.dataset), ("base_weights", storage.base_weights)):
        if place and (problem := _place_problem(place)):
            findings.add(f"storage.{name}", PLACE, problem)
    for name, place in (storage.inputs or {}).items():
        if not INPUT_NAME.fullmatch(name):
            allowed = "a name of 1 to 40 of a-z, 0-9 and _, beginning with a letter"
            findings.add(f"storage.inputs.{name}", allowed, value=name)
        elif problem := _place_problem(place, anywhere=True):
            findings.add(f"storage.inputs.{name}", ANYWHERE, problem)


def _check_given(s: StackDefinition, findings: Findings) -> None:
    """Checks the inputs: a ready-made job takes a dataset and the inputs that its parameters name, a command any inputs
    by name.
    """
    storage, config = s.storage, s.job.parameters
    if config.dataset_kind:
        if not storage.dataset:
            findings.add("storage.dataset", PLACE)
        asked = dict(config.demands.inputs)
        if storage.inputs is not None and not asked:
            findings.add("storage.inputs", "nothing unless job.command is set", "Use storage.dataset for this job.")
        for name in storage.inputs or {}:
            if asked and name not in asked.values():
                findings.add(f"storage.inputs.{name}", f"only what {' and '.join(asked)} names", value=name)
        _check_named(s, findings)
        return
    for key, place in (("dataset", storage.dataset), ("base_weights", storage.base_weights)):
        if place:
            hint = "Name it under storage.inputs: in the command, {inputs.NAME} is its path."
            findings.add(f"storage.{key}", "nothing when job.command is set", hint)
    if (code := config.demands.code) is not None:
        remote = "Only a folder of this machine can be shipped." if "://" in code.folder else ""
        if problem := remote or _place_problem(code.folder, anywhere=True):
            findings.add(f"{config.path}.code.folder", "a folder, relative to the project", problem)
    _check_named(s, findings)


def _check_named(s: StackDefinition, findings: Findings) -> None:
    """Checks that each input which the parameters name is in the file."""
    storage, config = s.storage, s.job.parameters
    named = [*(storage.inputs or {}), *s.left]
    for path, name in config.demands.inputs:
        if name not in named:
            there = f"an input of storage.inputs or an earlier stage, which are {', '.join(named) or 'none'}"
            value = name if _standing(config, path) == name else f"{{inputs.{name}}}"
            findings.add(f"{config.path}.{path}", there, nearest(name, named), value=value)


def _saves(s: StackDefinition, findings: Findings) -> None:
    """Checks that a command saves often enough, because the work since its last checkpoint is repeated after a node is
    lost.
    """
    where = f"{s.job.parameters.path}.checkpoint.every"
    has_interval = not s.job.parameters.demands.interval or any(path.startswith(where) for path in findings.bad)
    if s.fleet.market.is_interrupted and not has_interval:
        findings.add(
            where,
            "how often the command saves by itself, {steps: N}, {epochs: N} or {minutes: N}",
            f"{s.fleet.market.place.capitalize()} a lost node's work after the last save is repeated, and the bill "
            "prices that by this key. If the command saves nothing, write checkpoint: none.",
        )


def check_account(account: Account, fleet: Fleet, findings: Findings) -> None:
    """Checks the section `account` against the fleet."""
    for key in account.tags or {}:
        if not TAG_KEY.fullmatch(key):
            allowed = (
                "1 to 128 of the characters A-Z a-z 0-9 space _ . : / = + - @, but not Name, aws:... or gpufleet:..."
            )
            findings.add(f"account.tags.{key}", allowed, "The excluded keys belong to the stack or to AWS.")
    if account.kms_key and account.kms_key.split(":")[3] != fleet.region:
        findings.add("account.kms_key", f"a key of {fleet.region}, where bucket and disks are")
    known = not any(path.startswith(("account.vpc.subnets", "fleet.zones")) for path in findings.bad)
    if account.vpc and known and set(account.vpc.subnets) != set(fleet.zones):
        allowed = f"one subnet for each of fleet.zones: {', '.join(fleet.zones)}"
        findings.add("account.vpc.subnets", allowed, value=", ".join(account.vpc.subnets))


def _notify(notify: Notify, findings: Findings) -> None:
    if notify != Notify() and notify.email is None:
        hint = "If no node can send a message (no capacity, or a node that hangs), AWS sends it, but only by e-mail."
        findings.add("notify.email", "an e-mail address, if any other key of notify is set", hint)


def _base_weights(s: StackDefinition, findings: Findings) -> None:
    named, config = s.storage.base_weights is not None, s.job.parameters
    if not config.dataset_kind:  # _check_given already reports such inputs
        return
    if not config.sizes().base_weights:
        if named:
            hint = f"{s.job.experiment} starts without base weights: remove the key."
            findings.add("storage.base_weights", "nothing in this experiment", hint)
    elif not named and config.dataset.is_own(""):  # otherwise only a node would report this, after a paid set-up
        hint = f"{s.job.experiment} starts from a model; with generated data alone it starts from random weights."
        findings.add("storage.base_weights", PLACE, hint)


def _disk(path: str, disk: Disk, findings: Findings) -> None:
    most = max(BASE_IOPS, IOPS_PER_GIB * disk.size_gib)
    if disk.iops > most:
        least = -(-disk.iops // IOPS_PER_GIB)
        findings.add(
            f"{path}.iops",
            f"at most {IOPS_PER_GIB} per GiB, {most:,} for {disk.size_gib} GiB",
            f"It takes size_gib: {least}.",
        )
    if disk.throughput_mibps > MIBPS_PER_IOPS * disk.iops:
        findings.add(
            f"{path}.throughput_mibps",
            f"at most {MIBPS_PER_IOPS:g} MiB/s per IOPS, {MIBPS_PER_IOPS * disk.iops:g} for {disk.iops:,} IOPS",
            f"It takes iops: {int(disk.throughput_mibps / MIBPS_PER_IOPS)}.",
        )


def _place_problem(place: str, *, anywhere: bool = False) -> str:
    """Why `place` is neither a folder of the project nor an s3:// prefix; empty if it is one of them. If `anywhere`,
    the folder may be anywhere on this machine.
    """
    if place.startswith("s3://"):
        return (
            ""
            if BUCKET.fullmatch(place) and ".." not in place
            else "After s3:// come a bucket name and plain folder names."
        )
    if ":" in place:
        return "Only s3:// addresses are read; a local folder has no colon."
    path = PurePosixPath(place)
    if anywhere and place.startswith("~"):
        return "No shell expands ~ here: write the path relative to the project, as in ../my-model, or in full."
    if not anywhere and (path.is_absolute() or ".." in path.parts or not path.parts or place.startswith("~")):
        return "Write it relative to the project, as in data/tinystories."
    # no operating system accepts NUL; other control characters make two names look alike, or break a line in two
    if not place.isprintable():
        return "It has a line break or another invisible character: write a plain name."
    return (
        "" if place == place.strip() and "\\" not in place else "Write it with forward slashes and no blanks around it."
    )


def _limits(limits: Limits, findings: Findings, now: datetime, past_deadline: bool) -> None:
    if (due := limits.due(now)) is None:
        return
    if due <= now and not past_deadline:
        findings.add("limits.deadline", f"a time after now, {stamp(now)}", "Move it, and give the run a new id.")
    elif due > now + timedelta(days=366):
        findings.add("limits.deadline", "a time within a year: it stops the fleet if everything else fails")


def _check_keep(s: StackDefinition, findings: Findings, now: datetime) -> None:
    """Checks storage.keep. A value that is too small is refused, not silently raised, because the bill prices the days
    for which objects are kept.
    """
    if findings.bad & {MAX_HOURS, DEADLINE, END}:
        return
    now = s.begins_at(now)
    end = s.expiry(now)
    least = days_to_keep(now, end)
    if s.storage.keep.days < least:
        findings.add(
            "storage.keep.days",
            f"at least {least} (days), so that run.json and the record of what was spent outlive the fleet",
            f"The fleet may live until {end:%Y-%m-%dT%H:%MZ}: {s.fleet.market.keep_ends}.",
            default=str(s.storage.keep.days),
        )


def _estimate(s: StackDefinition, findings: Findings) -> None:
    steps = s.estimate.step_ms
    phases = sum(1 for phase in s.job.parameters.phases() if phase.steps)
    if steps is not None and phases and len(steps) != phases:
        findings.add(
            "estimate.step_ms",
            f"{counted(phases, 'number')} (ms), one per phase with optimizer steps",
            value=f"{len(steps)} of them",
        )
