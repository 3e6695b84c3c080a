"""The definition with which `gpufleet bake STACK` runs a builder: a node that pulls the stack's images and then waits.

It is a plain definition of a command, in the folder of campaigns' trials, so that limits, stop, status and sweep work
for the builder as for any run.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from gpufleet.infra.definition.loader import STACK_NAME, TRIALS
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic

ENDING = "-bake"  # the end of the builder's name
# The cheapest type in the catalog, since a pull needs no GPU. It has no instance store, so that docker keeps its images
# on the root disk.
TYPE = "c7i.xlarge"
WAITS_S = 3600  # longer than the builder's limit of hours
# The images are on the disk before the first step, and the AMI is made after that step.
COMMAND = f"sync; echo step 1; exec sleep {WAITS_S}"


def builder_name(stack: str) -> str:
    """The name of the builder's stack, which also keeps the AMI. Raises GpufleetError if the name is too long."""
    name = f"{stack}{ENDING}"
    if not STACK_NAME.fullmatch(name):
        raise GpufleetError(f"{stack}: {name} is too long for a stack; allowed are names of 2 to {40 - len(ENDING)}")
    return name


def is_builder(definition: StackDefinition) -> bool:
    return getattr(definition.job.parameters, "command", "") == COMMAND


def write_builder(definition: StackDefinition, root: Path) -> Path:
    path = root / TRIALS / f"{builder_name(definition.name)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, text(definition).encode())
    return path


def text(definition: StackDefinition) -> str:
    fleet, storage, job = definition.fleet, definition.storage, definition.job
    images = dict.fromkeys(job.images)
    began = hashlib.sha256(" ".join([*images, fleet.ami]).encode()).hexdigest()
    registry = getattr(job.parameters, "registry", None)
    sections: dict[str, Any] = {
        "run": {"id": f"b{began[:12]}", "owner": definition.run.owner},
        "job": {
            "image": job.image,
            "supervisor_image": job.supervisor_image or job.image,
            **({"registry": registry} if registry else {}),
            "command": COMMAND,
            "device": "cpu",
            "checkpoint": "none",
            "progress": {"stdout": "^step (?P<step>[0-9]+)"},
            "work": {"hours": {"low": 0.05, "likely": 0.1, "high": 0.2}},
        },
        "fleet": {
            "region": fleet.region,
            "zones": list(fleet.zones),
            "instance_types": [TYPE],
            "capacity": "on-demand",
            "ami": fleet.ami,
        },
        "storage": {"root": _given(storage.root), "keep": {"bucket": False}},
        "account": _given(definition.account),
        "limits": {"max_usd": 1, "max_hours": 1},
        "estimate": {"setup_minutes": 20},
    }
    head = f"# The builder of `gpufleet bake {definition.name}`, which wrote this.\n"
    return head + yaml.safe_dump(sections, sort_keys=False)


def _given(section: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(section).items() if value is not None}
