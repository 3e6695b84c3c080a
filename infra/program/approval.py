"""Computes the hash by which a person approves a bill, before anything exists that costs money.

`gpufleet run` asks for the hash and passes it to `pulumi up`. The Pulumi program computes it again from the plan that
it is about to declare, and refuses if a file, a price or data has changed in between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from gpufleet.infra.definition.campaign import CampaignFile
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.plan import Plan

VARIABLE = "GPUFLEET_APPROVED"  # the variable in the environment of `pulumi up` that holds the hash
DIGITS = 16
_OF_THE_CLOCK = ("began", "valid_until")


def approval(plan: Plan) -> str:
    """The hash, in hexadecimal digits, of everything that the run begins with and of its bill in cents."""
    bills = [plan.usd, *(fallback.usd for fallback in plan.fallbacks)]
    cents = [[f"{usd:.2f}" for usd in asdict(quantiles).values()] for quantiles in bills]
    return _digits([_begins_with(plan), cents, plan.kept_after_destroy()])


def of_campaign(plans: Iterable[Plan], described: CampaignFile) -> str:
    """The hash for a campaign. The hash covers everything that each run begins with, in any order of the runs, and what
    the campaign's file allows. The hash does not cover the bills of the runs, because these change with each receipt of
    the campaign; the cap does not change.
    """
    return _digits([sorted(begins_with(plan) for plan in plans), described.allowed])


def begins_with(plan: Plan) -> str:
    """The hash, in hexadecimal digits, of what the run begins with."""
    return _digits([plan.definition.name, _begins_with(plan)])


def _begins_with(plan: Plan) -> dict[str, str]:
    return {key: value for key, value in asdict(plan.verdict.run).items() if key not in _OF_THE_CLOCK}


def _digits(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:DIGITS]


def require(plan: Plan, approved: str | None) -> None:
    """Raises GpufleetError if the plan would begin another run than the approved one. `approved`: the hash; None for a
    plain `pulumi up`, where the Pulumi CLI itself asks the user.
    """
    if approved is None or plan.verdict.continues or (now := approval(plan)) == approved:
        return
    raise GpufleetError(
        f"{plan.definition.source}: {approved} was approved, but the hash is now {now}: the bill, or a file that "
        f"the run reads, has changed. `gpufleet run {plan.definition.argument}` shows the bill again."
    )
