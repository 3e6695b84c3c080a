"""User-data of a node: a header of shell variables, then `node.sh` as it stands.

Pure, so that a preview can check the size before AWS has named the bucket. No secrets: every process on a node can read
its user-data. Nothing is interpolated into the body of the script; values appear in the header only, quoted.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from infra.errors import DefinitionError, Problem

LIMIT_BYTES = 16 * 1024  # before base64 (EC2 User Guide, user data, 2026-11-21)
DATA_DEVICE = "/dev/sdf"  # the launch template's name for the data volume; AL2023 links it to its /dev/nvme* name

# The longest names AWS allows for what a preview does not know yet.
_LONGEST_BUCKET = "b" * 63
_LONGEST_LOG_GROUP = "g" * 512
_SHA256 = "0" * 64


def render(
    *,
    stack: str,
    run_id: str,
    region: str,
    image: str,
    bucket: str,
    log_group: str,
    archive_sha256: str,
    run_config_sha256: str,
    timer_seconds: int,
    data_volume: str | None,
) -> str:
    """The script. `timer_seconds` after boot the node ends its run, whatever job and supervisor do.

    `data_volume`: None, "blank" (formatted when nothing is on it) or "snapshot" (never formatted).
    """
    if data_volume not in (None, "blank", "snapshot"):
        raise ValueError(f"data_volume: {data_volume!r} is not one of None, 'blank', 'snapshot'")
    values = {
        "STACK": stack,
        "RUN_ID": run_id,
        "REGION": region,
        "IMAGE": image,
        "BUCKET": bucket,
        "LOG_GROUP": log_group,
        "ARCHIVE_SHA256": archive_sha256,
        "RUN_CONFIG_SHA256": run_config_sha256,
        "TIMER_SECONDS": str(timer_seconds),
        "DATA_VOLUME": data_volume or "",
        "DATA_DEVICE": DATA_DEVICE,
    }
    if any("\0" in value for value in values.values()):
        raise ValueError("a value for the node script holds a NUL character, which no shell variable can")
    header = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    return f"#!/bin/bash\n{header}{_body()}"


def check_size(
    *,
    stack: str,
    run_id: str,
    region: str,
    image: str,
    timer_seconds: int,
    data_volume: str | None,
) -> int:
    """Bytes of the script under the longest names AWS can give. Raises DefinitionError above EC2's limit."""
    size = len(
        render(
            stack=stack,
            run_id=run_id,
            region=region,
            image=image,
            bucket=_LONGEST_BUCKET,
            log_group=_LONGEST_LOG_GROUP,
            archive_sha256=_SHA256,
            run_config_sha256=_SHA256,
            timer_seconds=timer_seconds,
            data_volume=data_volume,
        ).encode()
    )
    if size > LIMIT_BYTES:
        path, value = max((("job.image", image), ("run.id", run_id)), key=lambda field: len(field[1]))
        problem = Problem(
            path=path,
            value=value,
            allowed=f"what fits user-data of {LIMIT_BYTES} bytes",
            hint=f"It takes {size} bytes: shorten this by {size - LIMIT_BYTES}.",
        )
        raise DefinitionError(f"stacks/{stack}.yaml", [problem])
    return size


def _body() -> str:
    return (Path(__file__).parent / "node.sh").read_text(encoding="utf-8")
