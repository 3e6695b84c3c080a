"""The node's settings, from the header of its user-data, and its identity, from the metadata service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpufleet.job.clock import uptime
from gpufleet.job.contract.reading import epoch


@dataclass(frozen=True)
class Settings:
    """The settings in the header of infra/program/boot/user_data.py, and the places of this machine's files."""

    stack: str
    run: str
    region: str
    image: str  # the supervisor's
    job_image: str  # a command's image, which has a container to itself; empty: the supervisor's
    bucket: str
    log_group: str
    run_config_sha256: str
    timer_s: int
    schedule: str  # GROUP/NAME of what ends the fleet; empty: there is none
    device: str  # cuda or cpu
    container_options: str  # words for docker run, of this kind of job
    data_volume: str  # blank, snapshot, or empty: none
    data_device: str
    root: Path  # / on EC2
    metadata: str  # where the metadata service is, when it is the embedded one
    fallback: str = ""  # 1: a second fleet stands by, on demand
    notify: str = ""  # JSON of whom the node tells; empty: nobody

    @property
    def folder(self) -> Path:
        """Where gpufleet's own files lie on the machine."""
        return self.root / "opt/gpufleet"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises KeyError, ValueError."""
        return cls(
            stack=environment["STACK"],
            run=environment["RUN_ID"],
            region=environment["REGION"],
            image=environment["IMAGE"],
            job_image=environment.get("JOB_IMAGE", ""),
            bucket=environment["BUCKET"],
            log_group=environment["LOG_GROUP"],
            run_config_sha256=environment["RUN_CONFIG_SHA256"],
            timer_s=int(environment["TIMER_SECONDS"]),
            schedule=environment.get("SCHEDULE", ""),
            fallback=environment.get("FALLBACK", ""),
            notify=environment.get("NOTIFY", ""),
            device=environment["DEVICE"],
            container_options=environment["CONTAINER_OPTIONS"],
            data_volume=environment["DATA_VOLUME"],
            data_device=environment["DATA_DEVICE"],
            root=Path(environment.get("GPUFLEET_ROOT") or "/"),
            metadata=environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", ""),
        )


@dataclass(frozen=True)
class InstanceIdentity:
    """This instance, as its identity document has it."""

    instance: str
    type: str
    zone: str
    launched_at: str  # UTC, whole seconds, Z
    uptime: float = 0.0  # the machine's, when this was read
    account: str = ""

    @property
    def launched(self) -> float:
        """Epoch seconds."""
        return epoch(self.launched_at) or 0.0

    @classmethod
    def from_document(cls, document: str) -> InstanceIdentity:
        """Raises KeyError, TypeError, ValueError."""
        told = json.loads(document)
        return cls(
            instance=told["instanceId"],
            type=told["instanceType"],
            zone=told["availabilityZone"],
            launched_at=told["pendingTime"],
            uptime=uptime(),
            account=str(told.get("accountId", "")),
        )
