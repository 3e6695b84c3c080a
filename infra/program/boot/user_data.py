"""User-data of a node: a header of variables for job/node, then `node.sh`, which starts it, without most comments.

Pure. No secrets: every process on a node can read its user-data. Nothing is interpolated into the body of the script;
values appear in the header only, quoted. As long as a definition and AWS allow, they fit EC2's limit (a test counts).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.run_guard import timer_seconds

ROOT_DEVICE = "/dev/xvda"  # of Amazon Linux 2023 AMIs, the Deep Learning Base AMI among them
_OPTIONAL = ("JOB_IMAGE", "NOTIFY", "FALLBACK")  # not set where they say nothing
DATA_DEVICE = "/dev/sdf"  # the launch template's name for the data volume; AL2023 links it to its /dev/nvme* name


def known(definition: StackDefinition) -> dict[str, Any]:
    """What of the header the definition says, as `render` takes it."""
    disk = definition.storage.data
    return {
        "stack": definition.name,
        "run_id": definition.run.id,
        "region": definition.fleet.region,
        "image": definition.job.supervisor_image or definition.job.image,
        "job_image": definition.job.image if definition.job.supervisor_image else "",
        "fallback": bool(definition.fleet.market.stands_by),
        "timer_seconds": timer_seconds(definition),
        "device": definition.job.parameters.device,
        "container_options": definition.job.parameters.demands.container_options,
        "data_volume": None if disk is None else "snapshot" if disk.snapshot else "blank",
    }


def render(
    *,
    stack: str,
    run_id: str,
    region: str,
    image: str,
    job_image: str = "",
    bucket: str,
    log_group: str,
    schedule: str,
    notify: str = "",
    fallback: bool = False,
    archive_sha256: str,
    run_config_sha256: str,
    timer_seconds: int,
    device: str,
    container_options: str,
    data_volume: str | None,
) -> str:
    """The script. `timer_seconds` after boot the node ends its run, whatever job and supervisor do, and sooner once it
    knows what the run has spent. `schedule`: GROUP/NAME of what ends the fleet by itself, which the node moves.
    `notify`: JSON of whom the node tells (resources/notices.py), empty: nobody. `fallback`: whether a second fleet
    stands by, on demand.

    `image`: the supervisor's; `job_image`: of a command of the user's own, which has a container to itself, else empty.
    `device`: "cuda" or "cpu". `container_options`: words for `docker run`. `data_volume`: None, "blank" (formatted when
    nothing is on it) or "snapshot" (never formatted).
    """
    if data_volume not in (None, "blank", "snapshot"):
        raise ValueError(f"data_volume: {data_volume!r} is not one of None, 'blank', 'snapshot'")
    values = {
        "STACK": stack,
        "RUN_ID": run_id,
        "REGION": region,
        "IMAGE": image,
        "JOB_IMAGE": job_image,
        "BUCKET": bucket,
        "LOG_GROUP": log_group,
        "SCHEDULE": schedule,
        "NOTIFY": notify,
        "FALLBACK": "1" * fallback,
        "ARCHIVE_SHA256": archive_sha256,
        "RUN_CONFIG_SHA256": run_config_sha256,
        "TIMER_SECONDS": str(timer_seconds),
        "DEVICE": device,
        "CONTAINER_OPTIONS": container_options,
        "DATA_VOLUME": data_volume or "",
        "DATA_DEVICE": DATA_DEVICE,
    }
    if any("\0" in value for value in values.values()):
        raise ValueError("a value for the node script holds a NUL character, which no shell variable can")
    said = {name: value for name, value in values.items() if value or name not in _OPTIONAL}
    header = "".join(f"{name}={shlex.quote(value)}\n" for name, value in said.items())
    return f"#!/bin/bash\nset -a\n{header}{_body()}"


def _body() -> str:
    """node.sh without the comments beside its commands: they are for its readers."""
    return re.sub(r"^ +# .*\n| +# .*$", "", (Path(__file__).parent / "node.sh").read_text("utf-8"), flags=re.MULTILINE)
