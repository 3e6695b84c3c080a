"""Reads the state of this stack, or of one component in it, after the last update, as the engine reports it.

If the state is a file, the engine rewrites it while the program starts, so that a read may find a truncated file. The
program then reads again; any other error is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpufleet.infra.program.resources.tags import RUN_TAG, STACK_TAG
from gpufleet.infra.program.run_guard import Previous
from gpufleet.infra.review.policy import OBJECT

TRIES = 20
PAUSE_S = 0.25
FLEET, PROVIDER = "aws:ec2/fleet:Fleet", "pulumi:providers:aws"
_CUT_SHORT = ("failed to load checkpoint", "unexpected end of JSON input")

Invoke = Callable[[str, dict[str, Any]], Mapping[str, Any]]


def previous(stack: str, invoke: Invoke, *, pause: Callable[[float], None] = time.sleep) -> Previous:
    """Outputs of `stack`, the runs of its fleets, its objects and its region; empty before the first update. `invoke`
    calls a function of the engine. This is the function by which a StackReference reads a stack; here it reads the
    program's own stack, and no resource is declared.
    """
    outputs = _asked(invoke, "pulumi:pulumi:readStackOutputs", {"name": stack}, pause)
    there = _resources(stack, invoke, pause)
    region = next((str(provider["region"]) for provider in _of_kind(there, PROVIDER) if "region" in provider), "")
    return _previous(outputs["outputs"], there, region)


def previous_of_component(
    stack: str,
    type_: str,
    names: Sequence[str],
    definition: str,
    invoke: Invoke,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> Previous:
    """Like `previous`, but for a component in a user's stack; its state is in the component's outputs. `names`: the
    component's name, and the earlier names for which it has an alias; one of them is in the state. `definition`: the
    name of the definition that it ran last or runs now, which is in the tags of its fleet and objects.
    """
    there = _resources(stack, invoke, pause)
    components = [
        (urn.split("::")[-1], resource["outputs"]) for urn, resource in there.items() if resource["type"] == type_
    ]
    own = [outputs for name, outputs in components if name in names]
    outputs = next((state for state in own if state.get("definition") == definition), own[0] if own else {})
    tag = str(outputs.get("definition") or definition)
    mine = {
        urn: resource
        for urn, resource in there.items()
        if (resource["outputs"].get("tags") or {}).get(STACK_TAG) == tag
    }
    others = [name for name, outputs in components if name not in names and outputs.get("definition") == definition]
    return replace(_previous(outputs, mine, str(outputs.get("region") or "")), other="".join(others[:1]))


def _resources(stack: str, invoke: Invoke, pause: Callable[[float], None]) -> dict[str, Any]:
    """The stack's resources by URN, each with `type` and `outputs`; empty before the first update."""
    there = _asked(invoke, "pulumi:pulumi:readStackResourceOutputs", {"stackName": stack}, pause)
    return dict(there.get("outputs") or {})


def _of_kind(there: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [resource["outputs"] for resource in there.values() if resource["type"] == kind]


def _previous(outputs: Mapping[str, Any], there: Mapping[str, Any], region: str) -> Previous:
    return Previous(
        outputs=outputs,
        # The tag of a stage's fleet has the form RUN/STAGE.
        fleets=frozenset(
            str((fleet.get("tags") or {}).get(RUN_TAG, "")).partition("/")[0] for fleet in _of_kind(there, FLEET)
        ),
        fleet_ids=frozenset(str(f["arn"]).rpartition("/")[2] for f in _of_kind(there, FLEET) if "arn" in f),
        objects=frozenset(str(stored["key"]) for stored in _of_kind(there, OBJECT) if "key" in stored),
        region=region,
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
