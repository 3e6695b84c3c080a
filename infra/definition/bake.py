"""The definition with which `gpufleet bake STACK` runs a builder. A builder is a node that pulls the stack's images,
or, for a snapshot of data, copies the data to its data volume, and then waits. Its definition is that of a command, and
is in the folder of campaigns' trials. So limits, stop, status and sweep work for the builder as for any run.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gpufleet.infra.definition.loader import STACK_NAME, TRIALS
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic

# Endings of the builder's name. The stack with this name also keeps the AMI or the snapshot.
ENDING = "-bake"  # for an AMI
DATA_ENDING = "-data"  # for a snapshot of data
DATA = "/data"  # the folder in which the data volume is mounted
# The cheapest type in the catalog, because a pull needs no GPU. The type has no instance store, so that docker's images
# are on its root disk.
TYPE = "c7i.xlarge"
WAITS_S = 3600  # seconds; longer than the builder's own limit of hours
# The images are on the disk before the first step, and the AMI is made after that step.
COMMAND = f"sync; echo step 1; exec sleep {WAITS_S}"


class Content(NamedTuple):
    """The content of a snapshot of data: a folder or an s3:// prefix, as it is now."""

    place: str
    sha256: str  # hash of the listing of its files
    size_gib: int  # size of the volume


def builder_name(stack: str, ending: str = ENDING) -> str:
    """The name of the builder's stack. Raises GpufleetError for a name that is too long."""
    name = f"{stack}{ending}"
    if not STACK_NAME.fullmatch(name):
        raise GpufleetError(f"{stack}: {name} is too long for a stack; allowed are names of 2 to {40 - len(ending)}")
    return name


def is_builder(definition: StackDefinition) -> bool:
    """Whether this is the definition of a builder."""
    return getattr(definition.job.parameters, "command", "").endswith(COMMAND)


def write_builder(definition: StackDefinition, root: Path, content: Content | None = None) -> Path:
    """Writes the builder's definition; returns its path. `content`: the content of a snapshot of data; None for
    an AMI.
    """
    path = root / TRIALS / f"{builder_name(definition.name, DATA_ENDING if content else ENDING)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, text(definition, content).encode())
    return path


def text(definition: StackDefinition, content: Content | None = None) -> str:
    """The builder's definition as text."""
    fleet, storage, job = definition.fleet, definition.storage, definition.job
    images = dict.fromkeys(job.images)
    began = hashlib.sha256(" ".join([*images, fleet.ami, *map(str, content or ())]).encode()).hexdigest()
    root, filled = _given(storage.root), dict[str, Any]()
    if content:  # the inputs are on the root disk before they are copied
        root["size_gib"] += content.size_gib
        filled = {"inputs": {"data": content.place}, "data": {"size_gib": content.size_gib}}
    registry = getattr(job.parameters, "registry", None)
    sections: dict[str, Any] = {
        "run": {"id": f"b{began[:12]}", "owner": definition.run.owner},
        "job": {
            "image": job.image,
            "supervisor_image": job.supervisor_image or job.image,
            **({"registry": registry} if registry else {}),
            "command": f"cp -R {{inputs.data}}/. {DATA}/; {COMMAND}" if content else COMMAND,
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
        "storage": {"root": root, **filled, "keep": {"bucket": False}},
        "account": _given(definition.account),
        "limits": {"max_usd": 1, "max_hours": 1},
        "estimate": {"setup_minutes": 20},
    }
    head = f"# The builder of `gpufleet bake {definition.name}`, which wrote this.\n"
    return head + yaml.safe_dump(sections, sort_keys=False)


def _given(section: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(section).items() if value is not None}
