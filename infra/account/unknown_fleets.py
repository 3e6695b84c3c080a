"""Finds fleets of a stack that are not in its Pulumi state: a killed `up` made them, and the Pulumi engine did not
record them.

The program looks for them with the shell's credentials before it declares anything. The program does not look for them
inside a component resource, whose provider may have other credentials. A second fleet of the same run is an error: both
would train it, and both would be billed. A fleet of another run is only a warning, since it may belong to another
Pulumi stack with the same file.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from gpufleet.infra.account.aws import owner_of, tags_of
from gpufleet.infra.account.fleet import end_command, fleets_of, is_over
from gpufleet.infra.account.refusals import refusal
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.resources.tags import RUN_TAG


def look(
    definition: StackDefinition,
    known: frozenset[str],
    client: Callable[[str, str], Any],
    now: datetime,
    *,
    preview: bool,
) -> list[str]:
    """Returns warnings about such fleets. `known`: the ids in the stack's state. Raises GpufleetError if `up` would
    make a second fleet of the run.
    """
    try:
        fleets = fleets_of(client("ec2", definition.fleet.region), definition, every_run=True)
    except NoCredentialsError:  # without credentials the provider makes nothing either, and says why
        return []
    except (ClientError, BotoCoreError) as error:
        return [f"gpufleet could not check for fleets that this stack's state does not know: {refusal(error)}"]
    unknown = [
        fleet
        for fleet in fleets
        if fleet["FleetId"] not in known and owner_of(fleet) == definition.run.owner and not is_over(fleet, now)
    ]
    warnings = [
        f"{fleet['FleetId']} of run {_run(fleet)} is in {definition.fleet.region}, and this stack's state does not "
        f"know of it: an `up` that was killed has made it, or another Pulumi stack. End it and its nodes: "
        f"`{end_command(fleet, definition.fleet.region)}`; or all that a killed command has left: "
        f"`gpufleet sweep {definition.argument} --delete`."
        for fleet in unknown
    ]
    if not preview and any(_run(fleet) == definition.run.id for fleet in unknown):
        raise GpufleetError("\n".join(warnings))
    return warnings


def _run(fleet: dict[str, Any]) -> str:
    return tags_of(fleet).get(RUN_TAG, "").partition("/")[0]  # RUN/STAGE for a stage
