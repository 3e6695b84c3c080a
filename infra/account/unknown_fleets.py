"""Fleets of a stack that its state does not know of: an `up` that was killed has made them, and the engine forgot.

Asked before anything is declared, with the shell's credentials: by the whole program, not by a component, whose
provider may have others. A second fleet of the run is refused: both would train it, and each is billed. One of another
run is a warning: it may be that of another Pulumi stack with the same file.
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
    """What is to be warned of. `known`: the ids in the stack's state. Raises GpufleetError where `up` would make a
    second fleet of the run.
    """
    try:
        fleets = fleets_of(client("ec2", definition.fleet.region), definition, every_run=True)
    except NoCredentialsError:  # the provider makes nothing either, and says so
        return []
    except (ClientError, BotoCoreError) as error:
        return [f"Whether there are fleets that this stack's state does not know of was not seen: {refusal(error)}"]
    found = [
        fleet
        for fleet in fleets
        if fleet["FleetId"] not in known and owner_of(fleet) == definition.run.owner and not is_over(fleet, now)
    ]
    said = [
        f"{fleet['FleetId']} of run {_run(fleet)} is in {definition.fleet.region}, and this stack's state does not "
        f"know of it: an `up` that was killed has made it, or another Pulumi stack. End it and its nodes: "
        f"`{end_command(fleet, definition.fleet.region)}`; or all that a killed command has left: "
        f"`gpufleet sweep {definition.argument} --delete`."
        for fleet in found
    ]
    if not preview and any(_run(fleet) == definition.run.id for fleet in found):
        raise GpufleetError("\n".join(said))
    return said


def _run(fleet: dict[str, Any]) -> str:
    return tags_of(fleet).get(RUN_TAG, "")
