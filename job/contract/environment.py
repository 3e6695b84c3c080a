"""What the node gives the container's process besides run.json: names of environment variables."""

from __future__ import annotations

RUN_URI = "GPUFLEET_RUN_URI"  # s3://BUCKET/RUN, or a folder: what is kept lies there
INSTANCE_ID, INSTANCE_TYPE = "GPUFLEET_INSTANCE_ID", "GPUFLEET_INSTANCE_TYPE"
ZONE = "GPUFLEET_ZONE"
LAUNCHED_AT = "GPUFLEET_LAUNCHED_AT"  # UTC, ISO
