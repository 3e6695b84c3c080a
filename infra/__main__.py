"""The Pulumi program: definition -> bill -> resources -> outputs. Decisions are in infra.program: plan, run_guard."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pulumi

from infra.bill.table import render
from infra.definition.selected import refuse_unread
from infra.errors import GpufleetError
from infra.evidence.receipts import score
from infra.program.plan import make
from infra.program.previous import previous
from job.text import printable

# Before 3.208 the engine ignores a replacement trigger, and a new run id would start nothing; before 3.226 one may fire
# by itself, which ends a run (Pulumi's change log).
ENGINE = ">=3.226.0"
SHOWN = 32  # tells the engine that the message is out, so that it adds none of its own


def main() -> None:
    pulumi.require_pulumi_version(ENGINE)
    stack = f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"
    before = previous(stack, lambda token, arguments: pulumi.runtime.invoke(token, arguments).value)
    root, now = Path(pulumi.runtime.get_root_directory()), datetime.now(UTC)
    try:
        refuse_unread(pulumi.runtime.get_config_env(), pulumi.get_project())
        plan = make(
            root,
            pulumi.Config().get("definition") or pulumi.get_stack(),
            now=now,
            previous=before,
            preview=pulumi.runtime.is_dry_run(),
            scenario=pulumi.Config().get("scenario") or "",
        )
    except GpufleetError as error:
        pulumi.log.error(printable(f"{error}\nNothing was declared."))
        sys.exit(SHOWN)
    cheaper = plan.cheaper.lines() if plan.cheaper else None
    pulumi.log.info(printable(render(plan.bill, today=now.date(), accuracy=score(root), cheaper=cheaper)))
    for warning in plan.warnings:
        pulumi.log.warn(printable(warning))

    # Imported here: the provider's SDK takes a second to import, and errors need not wait for it.
    from infra.program.resources.declare import declare

    for name, value in {**plan.outputs(), **declare(plan, root)}.items():
        pulumi.export(name, value)


main()
