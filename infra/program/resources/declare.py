"""Declares all resources of a plan, in the order in which a node needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import pulumi
import pulumi_aws as aws

from gpufleet.infra.bill.fallback import switch_at
from gpufleet.infra.program.plan import Plan
from gpufleet.infra.program.resources import gather, stages
from gpufleet.infra.program.resources.fallback import FallbackSwitch
from gpufleet.infra.program.resources.fleet import FleetComponent
from gpufleet.infra.program.resources.identity import Identity
from gpufleet.infra.program.resources.machine import FleetMachine
from gpufleet.infra.program.resources.network import GivenVpc, Network
from gpufleet.infra.program.resources.notices import NoticesComponent
from gpufleet.infra.program.resources.stop import FleetStop
from gpufleet.infra.program.resources.storage import StorageComponent, Upload
from gpufleet.job.contract.aws import asks_again, begins
from gpufleet.job.contract.bucket import ARCHIVE, CODE, input_key
from gpufleet.job.contract.workdir import RUN


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Settings from the program that contains the run. The defaults are those of a run with a program of its own."""

    prefix: str = ""  # the prefix of the resources' names, for a program with several runs
    earlier: tuple[str, ...] = ()  # earlier prefixes of the names, if the component was renamed
    opts: pulumi.ResourceOptions | None = None  # options for all resources: parent, provider
    vpc: GivenVpc | None = None
    permissions_boundary: pulumi.Input[str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredRun:
    """The declared resources whose ids become outputs."""

    bucket: pulumi.Output[str]
    log_group: pulumi.Output[str]
    fleet_id: pulumi.Output[str] | None  # None if the run is over


def declare(plan: Plan, root: Path, around: Surroundings = Surroundings()) -> DeclaredRun:
    """Declares the resources of the plan; `root` is the project's folder."""
    definition, verdict, prefix = plan.definition, plan.verdict, around.prefix
    options = with_provider(around, definition.fleet.region)
    network = Network(f"{prefix}network", definition, vpc=around.vpc, opts=options)
    storage = StorageComponent(
        f"{prefix}storage",
        definition,
        uploads=[
            replace(
                upload, name=f"{prefix}{upload.name}", earlier=tuple(f"{old}{upload.name}" for old in around.earlier)
            )
            for upload in uploads(plan, root)
        ],
        runs=verdict.runs,
        frozen=verdict.continues,
        opts=options,
    )
    stop = FleetStop(
        f"{prefix}stop",
        definition,
        permissions_boundary=around.permissions_boundary,
        opts=options,
    )
    notices = None
    if definition.notify.email:
        begin = None if verdict.over else plan.now
        notices = NoticesComponent(f"{prefix}notices", definition, stop=stop, silent_from=begin, opts=options)
    identity = Identity(
        f"{prefix}identity",
        definition,
        bucket_arn=storage.bucket.arn,
        schedule_arn=stop.schedule_arn,
        stop_role_arn=stop.role.arn,
        topic_arn=notices.topic.arn if notices else "",
        permissions_boundary=around.permissions_boundary,
        opts=options,
    )
    fleets = [
        FleetComponent(
            f"{prefix}fleet{_part(part)}",
            part.definition,
            subnets=network.subnets,
            pools=part.pools,
            security_group_id=network.security_group.id,
            bucket=storage.bucket.bucket,
            profile_arn=identity.profile.arn,
            user_data_base64=pulumi.Output.all(
                storage.bucket.bucket,
                identity.log_group.name,
                stop.schedule_name,
                notices.told_node() if notices else "",
            ).apply(partial(_user_data, part)),
            valid_until=verdict.run.valid_until,
            frozen=verdict.continues,
            over=verdict.over,
            depends_on=[
                *network.ready,
                *storage.ready,
                *identity.ready,
                *stop.ready,
                *(notices.ready if notices else []),
            ],
            opts=options,
        )
        for part in plan.with_fleets
    ]
    fleet, *later = fleets
    launched = None
    if not verdict.over:
        switch: list[pulumi.Resource] = []
        for standing_by in fleet.standing_by:
            due = datetime.fromisoformat(verdict.run.valid_until)
            # None if the file has no fallback, or if a price is no longer known
            priced = next(iter(plan.fallbacks), None)
            switch = FallbackSwitch(
                f"{prefix}fallback",
                definition,
                fleet=standing_by,
                stop=stop,
                at=switch_at(priced, due, plan.now) if priced else due,
                enabled=priced is None or priced.paid_from_start,
                topic_arn=notices.topic.arn if notices else "",
                permissions_boundary=around.permissions_boundary,
                opts=options,
            ).ready
        waiting = [component.declare_fleet([]) for component in later]
        starts: list[pulumi.Resource] = [
            FleetMachine(
                "StageStart",
                f"{prefix}begin{_part(part)}",
                part.definition,
                role=part.definition.stage,
                part=begins(part.definition.stage),
                does="begins a stage of a gpufleet run",
                steps=stages.steps,
                fleet=theirs,
                stop=stop,
                permissions_boundary=around.permissions_boundary,
                opts=options,
            ).machine
            for part, theirs in zip(plan.with_fleets[1:], waiting, strict=True)
        ]
        launched = fleet.declare_fleet([*switch, *starts])
        both = [launched, *fleet.standing_by, *waiting]
        ends = stop.declare_for(both, verdict.run.valid_until)
        known: list[pulumi.Resource] = [ends, *(notices.declare_for(both) if notices else [])]
        launching = [launched, *waiting]
        known += [
            FleetMachine(
                "GatherMachine",
                f"{prefix}gather{_part(part)}",
                part.definition,
                role=f"gather{_part(part)}",
                part=asks_again(part.definition.run.id),
                does="asks for all nodes of a gpufleet run again",
                steps=gather.steps,
                fleet=theirs,
                stop=stop,
                permissions_boundary=around.permissions_boundary,
                opts=options,
            ).machine
            for part, theirs in zip(plan.with_fleets, launching, strict=True)
            if part.definition.fleet.lets_go
        ]
        for component, theirs in zip(fleets, launching, strict=True):
            component.declare_known(theirs, known)
    return DeclaredRun(
        bucket=storage.bucket.bucket,
        log_group=identity.log_group.name,
        fleet_id=launched.id if launched else None,
    )


def with_provider(around: Surroundings, region: str) -> pulumi.ResourceOptions:
    """The options with a provider of the region, unless they already have a provider. The region comes only from the
    definition, so that neither the stack's config nor the shell can put a run elsewhere.
    """
    options = around.opts or pulumi.ResourceOptions()
    if options.providers:
        return options
    own = aws.Provider(f"{around.prefix}aws", region=region, opts=around.opts)
    return pulumi.ResourceOptions.merge(options, pulumi.ResourceOptions(providers=[own]))


def uploads(plan: Plan, root: Path) -> list[Upload]:
    """The objects that `up` uploads: job archive, run config and inputs. Inputs are dataset files and base weights, or
    a command's code and its local inputs.
    """
    files = [
        Upload(
            name="job-archive",
            key=input_key(plan.archive.sha256, ARCHIVE),
            file=plan.archive.file(root),
        ),
        *(
            Upload(
                name=f"run-config{_part(part)}",
                key=f"{part.definition.run.id}/{RUN}",
                text=part.run_config,
                belongs_to_run=True,
            )
            for part in plan.parts
        ),
    ]
    for part in plan.parts:
        files += [upload for upload in _inputs(part) if upload.key not in {known.key for known in files}]
    return files


def _user_data(plan: Plan, names: Sequence[str]) -> str:
    return plan.user_data(*names)


def _part(plan: Plan) -> str:
    """The part of names in which the resources of different stages differ; empty if the run has no stages."""
    return f"-{plan.definition.stage}" if plan.definition.stage else ""


def _inputs(plan: Plan) -> list[Upload]:
    part, files = _part(plan), list[Upload]()
    for kind, manifest, folder in (
        ("dataset", plan.dataset, plan.dataset_folder),
        ("weights", plan.weights, plan.weights_folder),
    ):
        if manifest and folder:
            files += [
                Upload(
                    name=f"{kind}{part}-{file.name}", key=input_key(manifest.sha256, file.name), file=folder / file.name
                )
                for file in manifest.files
            ]
    if plan.code:
        files.append(Upload(name=f"code{part}", key=input_key(plan.code.sha256, CODE), file=plan.code.file))
    for name, listed in plan.inputs.items():
        for file in listed.files:
            key, place = input_key(listed.sha256, file.name), listed.folder and listed.folder / file.name
            files.append(Upload(name=f"input{part}-{name}-{file.name}", key=key, file=place))
    return files
