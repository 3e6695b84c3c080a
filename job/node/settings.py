"""The node's settings, from the header of its user-data, and its identity, from the metadata service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpufleet.job.clock import uptime
from gpufleet.job.contract.reading import epoch


@dataclass(frozen=True)
class Settings:
    """The settings in the header of infra/program/boot/user_data.py, and the paths of this machine's files."""

    stack: str
    run: str
    region: str
    image: str  # the supervisor's image
    # the image of a user's command, which has its own container; empty if the supervisor's image is used
    job_image: str
    bucket: str
    log_group: str
    run_config_sha256: str
    timer_s: int
    schedule: str  # GROUP/NAME of the schedule that ends the fleet; empty if there is none
    device: str  # cuda or cpu
    container_options: str  # options of docker run for this kind of job
    data_volume: str  # `blank` or `snapshot`; an empty text means no volume
    data_device: str
    root: Path  # / on EC2
    metadata: str  # the address of an embedded metadata service; empty on EC2
    next_stage: str = ""  # for a run in stages: the stage that follows this one
    fallback: str = ""  # 1: a second fleet stands by, on demand
    # For a stage on the node of the stage before it: when that one ended (UTC, ISO), and the run id of the stage to
    # which the fleet belongs. The program of that stage gives these, not the header.
    since: str = ""
    fleet_run: str = ""
    scratch: str = ""  # the folder for the job's files, if it is ready
    notify: str = ""  # JSON with the receivers of the node's messages; empty if there are none

    @property
    def folder(self) -> Path:
        """The folder of gpufleet's own files on the machine."""
        return self.root / "opt/gpufleet"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """The settings in the environment. Raises KeyError, ValueError."""
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
            next_stage=environment.get("NEXT_STAGE", ""),
            since=environment.get("SINCE", ""),
            fleet_run=environment.get("FLEET_RUN", ""),
            scratch=environment.get("SCRATCH", ""),
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
    """This instance, as its identity document describes it."""

    instance: str
    type: str
    zone: str
    launched_at: str  # in UTC, with whole seconds and Z
    uptime: float = 0.0  # the machine's uptime when this was read
    account: str = ""
    older_s: float = 0.0  # how long the machine had run before `launched_at`

    def counted_since(self, since: str) -> InstanceIdentity:
        """The machine as a stage counts it that begins on a running machine: it was launched when the stage before
        ended. A machine that was launched later is unchanged.
        """
        older_s = (epoch(since) or 0.0) - self.launched
        return self if older_s <= 0 else replace(self, launched_at=since, older_s=older_s)

    @property
    def launched(self) -> float:
        """The launch in epoch seconds."""
        return epoch(self.launched_at) or 0.0

    @classmethod
    def from_document(cls, document: str) -> InstanceIdentity:
        """Reads the identity document. Raises KeyError, TypeError or ValueError for any other document."""
        identity = json.loads(document)
        return cls(
            instance=identity["instanceId"],
            type=identity["instanceType"],
            zone=identity["availabilityZone"],
            launched_at=identity["pendingTime"],
            uptime=uptime(),
            account=str(identity.get("accountId", "")),
        )
