"""Declares everything of a plan, in the order in which a node needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.program.plan import Plan
from infra.program.resources.fleet import FleetComponent
from infra.program.resources.identity import Identity
from infra.program.resources.network import Network
from infra.program.resources.storage import StorageComponent, Upload
from job.contract.bucket import ARCHIVE, CODE, input_key
from job.contract.workdir import RUN


def declare(plan: Plan, root: Path) -> dict[str, Any]:
    """The resources, and the stack outputs that name them. `root`: the project's folder."""
    definition, verdict = plan.definition, plan.verdict
    # The region comes from the definition alone: neither the stack's config nor the shell can put a run elsewhere.
    provider = aws.Provider("aws", region=definition.fleet.region)
    options = pulumi.ResourceOptions(providers=[provider])
    network = Network("network", definition, opts=options)
    storage = StorageComponent(
        "storage", definition, uploads=uploads(plan, root), runs=verdict.runs, frozen=verdict.continues, opts=options
    )
    identity = Identity("identity", definition, bucket_arn=storage.bucket.arn, opts=options)
    fleet = FleetComponent(
        "fleet",
        definition,
        subnets=network.subnets,
        security_group_id=network.security_group.id,
        profile_arn=identity.profile.arn,
        user_data_base64=pulumi.Output.all(storage.bucket.bucket, identity.log_group.name).apply(
            lambda names: plan.user_data(*names)
        ),
        valid_until=verdict.run.valid_until,
        frozen=verdict.continues,
        over=verdict.over,
        depends_on=[*network.ready, *storage.ready, *identity.ready],
        opts=options,
    )
    return {
        "bucket": storage.bucket.bucket,
        "log_group": identity.log_group.name,
        "fleet_id": fleet.fleet.id if fleet.fleet else "none: the run is over",
    }


def uploads(plan: Plan, root: Path) -> list[Upload]:
    """Job archive, run config, dataset files and base weights, or a command's code and local inputs."""
    run = plan.definition.run.id
    files = [
        Upload(
            name="job-archive",
            key=input_key(plan.archive.sha256, ARCHIVE),
            file=plan.archive.file(root),
        ),
        Upload(name="run-config", key=f"{run}/{RUN}", text=plan.run_config, belongs_to_run=True),
    ]
    for what, manifest, folder in (
        ("dataset", plan.dataset, plan.dataset_folder),
        ("weights", plan.weights, plan.weights_folder),
    ):
        if manifest and folder:
            files += [
                Upload(name=f"{what}-{file.name}", key=input_key(manifest.sha256, file.name), file=folder / file.name)
                for file in manifest.files
            ]
    if plan.code:
        files.append(Upload(name="code", key=input_key(plan.code.sha256, CODE), file=plan.code.file))
    for name, given in plan.inputs.items():
        for file in given.files:
            key, place = input_key(given.sha256, file.name), given.folder and given.folder / file.name
            files.append(Upload(name=f"input-{name}-{file.name}", key=key, file=place))
    return files
