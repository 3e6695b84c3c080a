"""A node's user-data: a header with variables for job/node, and then the script `node.sh`, which starts job/node; most
of its comments are removed. All functions are pure. The user-data has no secrets, because every process on a node can
read it. Values appear only in the header, quoted; nothing is interpolated into the script's body. The script fits into
EC2's limit even with the longest values that a definition and AWS allow (a test checks this).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.run_guard import timer_seconds

ROOT_DEVICE = "/dev/xvda"  # the root device of Amazon Linux 2023 AMIs, among them the Deep Learning Base AMI
_OPTIONAL = ("JOB_IMAGE", "NOTIFY", "FALLBACK", "NEXT_STAGE")  # variables that are omitted if they are empty
DATA_DEVICE = "/dev/sdf"  # the launch template's name for the data volume; AL2023 links it to the /dev/nvme* device


def known(definition: StackDefinition) -> dict[str, Any]:
    """The arguments of `render` that come from the definition."""
    disk = definition.storage.data
    return {
        "stack": definition.name,
        "run_id": definition.run.id,
        "region": definition.fleet.region,
        "image": definition.job.supervisor_image or definition.job.image,
        "job_image": definition.job.image if definition.job.supervisor_image else "",
        "fallback": bool(definition.fleet.market.stands_by),
        "next_stage": "" if definition.shared else definition.next_stage,
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
    next_stage: str = "",
    archive_sha256: str,
    run_config_sha256: str,
    timer_seconds: int,
    device: str,
    container_options: str,
    data_volume: str | None,
) -> str:
    """The script. `timer_seconds`: after this time since its boot the node ends its run, even if job and supervisor
    hang. The node makes this time shorter once it knows how much the run has spent. `schedule`: GROUP/NAME of the
    schedule that ends the fleet, whose time the node changes. `notify`: the receivers of the node's messages as JSON
    (resources/notices.py); empty if there are none. `fallback`: whether a second fleet, on demand, stands by.
    `next_stage`: the stage that the node begins once this one is done, or empty. `image`: the supervisor's image.
    `job_image`: the image of a user's command, which runs in a container of its own; empty for a ready-made job.
    `device`: "cuda" or "cpu". `container_options`: options for `docker run`. `data_volume`: None, "blank" (formatted if
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
        "NEXT_STAGE": next_stage,
        "ARCHIVE_SHA256": archive_sha256,
        "RUN_CONFIG_SHA256": run_config_sha256,
        "TIMER_SECONDS": str(timer_seconds),
        "DEVICE": device,
        "CONTAINER_OPTIONS": container_options,
        "DATA_VOLUME": data_volume or "",
        "DATA_DEVICE": DATA_DEVICE,
    }
    if any("\0" in value for value in values.values()):
        raise ValueError("a value for the node script has a NUL character, which a shell variable cannot hold")
    variables = {name: value for name, value in values.items() if value or name not in _OPTIONAL}
    header = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    return f"#!/bin/bash\nset -a\n{header}{_body()}"


def _body() -> str:
    """The text of node.sh without the comments between its commands, because a node does not need them."""
    return re.sub(r"^ +# .*\n| +# .*$", "", (Path(__file__).parent / "node.sh").read_text("utf-8"), flags=re.MULTILINE)
