"""Makes a Capacity Block for a rehearsal: the account has bought the block in the file, and it has just begun."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import cast

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.yaml_tree import Mapping, merge, read
from gpufleet.job.text import stamp
from gpufleet.rehearsal.account import zone_name
from gpufleet.rehearsal.launch import Reservation
from gpufleet.rehearsal.pace import Change

NOT_BOUGHT = "cr-00000000000000000"  # stands for a block that the file only prices


def begun(definition: StackDefinition, changed: Change | None, now: datetime) -> Change | None:
    """A function that changes the definition: it applies `changed`, and then sets the block's start to a minute ago,
    with the same length. If there is no block, it only applies `changed`.
    """
    block = definition.fleet.block
    if not block:
        return changed
    start = now - timedelta(minutes=1)
    section = {
        "reservation": block.reservation or NOT_BOUGHT,
        "start": stamp(start),
        "end": stamp(start + (block.end - block.start)),
    }
    overlay = read(json.dumps({"fleet": {"block": section}}))
    return lambda tree: cast(Mapping, merge(changed(tree) if changed else tree, overlay))


def bought(definition: StackDefinition) -> Reservation | None:
    """The reservation that the account has for the run's nodes; None if there is no block."""
    fleet = definition.fleet
    block = fleet.block
    if not block:
        return None
    return Reservation(
        id=block.reservation or NOT_BOUGHT,
        type=fleet.instance_types[0],
        zone=zone_name(fleet.zones[0], fleet.region),
        count=definition.nodes,
        start=block.start,
        end=block.end,
    )
