"""What the stack's last update left, as the engine tells it to the program.

The engine writes the state of a file backend while the program starts, in place: a read that meets the write finds a
file cut short. It is asked again; any other refusal is passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from infra.program.resources.tags import RUN_TAG
from infra.program.run_guard import Previous
from infra.review.policy import OBJECT

TRIES = 20
PAUSE_S = 0.25
FLEET, PROVIDER = "aws:ec2/fleet:Fleet", "pulumi:providers:aws"
_CUT_SHORT = ("failed to load checkpoint", "unexpected end of JSON input")

Invoke = Callable[[str, dict[str, Any]], Mapping[str, Any]]


def previous(stack: str, invoke: Invoke, *, pause: Callable[[float], None] = time.sleep) -> Previous:
    """Outputs of `stack`, the runs of its fleets, its objects and its region; empty before its first update. `invoke`
    calls a function of the engine.

    What a StackReference calls, asked about this very stack; it declares no resource.
    """
    outputs = _asked(invoke, "pulumi:pulumi:readStackOutputs", {"name": stack}, pause)
    there = _asked(invoke, "pulumi:pulumi:readStackResourceOutputs", {"stackName": stack}, pause)
    fleets, providers, objects = (
        [each["outputs"] for each in there["outputs"].values() if each["type"] == kind]
        for kind in (FLEET, PROVIDER, OBJECT)
    )
    return Previous(
        outputs=outputs["outputs"],
        fleets=frozenset(str((fleet.get("tags") or {}).get(RUN_TAG, "")) for fleet in fleets),
        objects=frozenset(str(each["key"]) for each in objects if "key" in each),
        region=next((str(provider["region"]) for provider in providers if "region" in provider), ""),
    )


def _asked(invoke: Invoke, token: str, arguments: dict[str, Any], pause: Callable[[float], None]) -> Mapping[str, Any]:
    for _ in range(TRIES - 1):
        try:
            return invoke(token, arguments)
        except Exception as error:
            if not any(words in str(error) for words in _CUT_SHORT):
                raise
            pause(PAUSE_S)
    return invoke(token, arguments)
