"""What the stack's last update left, as the engine tells it to the program.

The engine writes the state of a file backend while the program starts, in place: a read that meets the write finds a
file cut short. It is asked again; any other refusal is passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from infra.resources.tags import RUN_TAG
from infra.review.declared import OBJECT, RUN_CONFIG
from infra.run_guard import Previous

TRIES = 20
PAUSE_S = 0.25
FLEET, PROVIDER = "aws:ec2/fleet:Fleet", "pulumi:providers:aws"
_CUT_SHORT = ("failed to load checkpoint", "unexpected end of JSON input")

Invoke = Callable[[str, dict[str, Any]], Mapping[str, Any]]


def previous(stack: str, invoke: Invoke, *, pause: Callable[[float], None] = time.sleep) -> Previous:
    """Outputs of `stack`, the runs of its fleets and of its inputs, and its region; empty before its first update.
    `invoke` calls a function of the engine.

    What a StackReference calls, asked about this very stack; it declares no resource.
    """
    outputs = _asked(invoke, "pulumi:pulumi:readStackOutputs", {"name": stack}, pause)
    there = _asked(invoke, "pulumi:pulumi:readStackResourceOutputs", {"stackName": stack}, pause)
    fleets, providers, objects = (
        {urn: each["outputs"] for urn, each in there["outputs"].items() if each["type"] == kind}
        for kind in (FLEET, PROVIDER, OBJECT)
    )
    keys = [str(outputs.get("key", "")) for urn, outputs in objects.items() if urn.endswith(f"::{RUN_CONFIG}")]
    return Previous(
        outputs=outputs["outputs"],
        fleets=frozenset(str((fleet.get("tags") or {}).get(RUN_TAG, "")) for fleet in fleets.values()),
        inputs=keys[0].partition("/")[0] if keys else "",
        region=next((str(provider["region"]) for provider in providers.values() if "region" in provider), ""),
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
