"""The whole program of a Pulumi project: definition -> bill -> resources -> outputs."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

import pulumi

from gpufleet.infra.definition.loader import find
from gpufleet.infra.definition.selected import BAKE, Selected, refuse_unread
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval, engine
from gpufleet.job.text import printable

SHOWN = 32  # an exit code: the engine adds no message of its own


def program() -> None:
    """Declares one run as the whole Pulumi program: of `stacks/NAME.yaml` for the Pulumi stack NAME, or of the
    `definition` and `scenario` set by `pulumi config set`. `gpufleet init` writes the program that calls it.

    Ends the program with the problems as sentences if the definition, the run id or an input is wrong; nothing is
    declared then. Exports bucket, log group, fleet and the bill; docs/real-aws.md has the outputs.
    """
    engine.require()
    was, root = engine.last_update(), engine.root_directory()
    try:
        refuse_unread(pulumi.runtime.get_config_env(), pulumi.get_project())
        config = pulumi.Config()
        name = config.get("definition") or pulumi.get_stack()
        if baked := config.get(BAKE):
            return _keep_bake(name, json.loads(baked))
        plan = engine.planned(root, name, was, scenario=config.get("scenario") or "")
        # Imported here, like the provider below. An SDK takes a second to import, and an error in the definition is
        # reported sooner.
        from gpufleet.infra.account import aws, month, unknown_fleets

        preview = bool(pulumi.runtime.is_dry_run())
        if not plan.verdict.continues:
            month.require_run(plan.definition, root, aws.client, plan.now)
        unknown = unknown_fleets.look(plan.definition, was.fleet_ids, aws.client, datetime.now(UTC), preview=preview)
        approval.require(plan, os.environ.get(approval.VARIABLE))
        engine.begin(plan.verdict, was)
    except GpufleetError as error:
        pulumi.log.error(printable(f"{error}\nNothing was declared."))
        sys.exit(SHOWN)
    engine.say(plan, also=unknown)

    from gpufleet.infra.program.resources.declare import declare

    resources = declare(plan, root)
    outputs = {
        "bucket": resources.bucket,
        "log_group": resources.log_group,
        "fleet_id": resources.fleet_id or engine.OVER,
    }
    for key, value in {**plan.outputs(), **outputs}.items():
        pulumi.export(key, value)


def _keep_bake(name: str, described: dict[str, Any]) -> None:
    """Declares the AMI or snapshot of a bake in place of its builder. Raises GpufleetError."""
    chosen = Selected(path=find(name, engine.root_directory()), asked=name)
    definition = chosen.load(now=datetime.now(UTC), past_deadline=True)

    from gpufleet.infra.program.resources.bake import declare_bake

    outputs = {"definition": definition.name, **declare_bake(definition, described), BAKE: described}
    for key, value in outputs.items():
        pulumi.export(key, value)
