"""Reads and writes the records of a project's bakes: the images in an AMI or the data in a snapshot, the time of its
deletion, and its price. `gpufleet bake` writes bakes/<id>.json, which users commit.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.text import stamp

SCHEMA = 1
FOLDER = "bakes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bake:
    """One AMI. Times are in UTC."""

    ami: str
    region: str
    base_ami: str  # the AMI from which its builder started
    images: tuple[str, ...]  # the images in the AMI, with their digests
    made: str
    until: str  # the time at which a schedule deletes it
    usd_per_month: Decimal  # the price of its snapshot
    builder_usd: Decimal  # the cost of making it, by the builder's bill
    pulled_s: Decimal  # seconds that the builder took to pull the images

    @property
    def id(self) -> str:
        return self.ami


@dataclass(frozen=True, kw_only=True, slots=True)
class BakedData:
    """One snapshot of data. Times are in UTC."""

    snapshot: str
    region: str
    place: str  # the folder or the s3:// prefix that was copied
    sha256: str  # hash of the listing of this place
    size_gib: int
    made: str
    until: str
    usd_per_month: Decimal
    builder_usd: Decimal

    @property
    def id(self) -> str:
        return self.snapshot


T = TypeVar("T", Bake, BakedData)


def path_of(id: str, root: Path) -> Path:
    """The path of the record of an AMI or a snapshot."""
    return root / FOLDER / f"{id}.json"


def write(bake: Bake | BakedData, root: Path) -> Path:
    """Writes the file; returns its path."""
    path = path_of(bake.id, root)
    path.parent.mkdir(exist_ok=True)
    tree = {name: str(value) if isinstance(value, Decimal) else value for name, value in asdict(bake).items()}
    atomic.write_json(path, {"schema": SCHEMA, **tree})
    return path


def read(definition: StackDefinition, root: Path) -> Bake | None:
    """The record of the AMI from which the definition's nodes start; None if they start from a plain AMI, or if its
    record is missing. Raises GpufleetError if no bake wrote the file.
    """
    return _read(Bake, definition.fleet.baked_ami, root)


def read_data(definition: StackDefinition, root: Path) -> BakedData | None:
    """The record of the snapshot from which the nodes' data volumes are made; None if there is no snapshot, or if no
    bake made it. Raises GpufleetError as `read` does.
    """
    disk = definition.storage.data
    return _read(BakedData, disk.snapshot if disk else None, root)


def _read(cls: type[T], id: str | None, root: Path) -> T | None:
    if id is None:
        return None
    path = path_of(id, root)
    try:
        fields = Fields(reading.parse(path.read_bytes()))
        fields.schema(SCHEMA)
        return reading.filled(cls, fields)
    except FileNotFoundError:
        return None
    except (OSError, DoubtError) as error:
        raise GpufleetError(f"{path}: {error}; allowed are files of `gpufleet bake`, in {FOLDER}/") from None


def not_ready(definition: StackDefinition, root: Path) -> Iterator[str]:
    """Reasons why nodes may not start from the definition's baked AMI, or read its baked data."""
    yield from _data_not_ready(definition, root)
    fleet, bake = definition.fleet, read(definition, root)
    if fleet.baked_ami is None:
        return
    if bake is None:
        why = f"has no {FOLDER}/{fleet.baked_ami}.json, so its images are unknown"
    elif missing := [image for image in definition.job.images if image not in bake.images]:
        why = f"contains {', '.join(bake.images)}, but the job needs {', '.join(missing)}"
    elif bake.base_ami != fleet.ami:
        why = f"was made from {bake.base_ami}, but fleet.ami is {fleet.ami}"
    elif bake.region != fleet.region:
        why = f"is in {bake.region}, but fleet.region is {fleet.region}"
    else:
        return
    yield f"fleet.baked_ami, {fleet.baked_ami}, {why}: {_advice(definition)}."


def _data_not_ready(definition: StackDefinition, root: Path) -> Iterator[str]:
    data = read_data(definition, root)
    if data is None:
        return
    from gpufleet.infra.inputs import folders  # imported here, because most definitions read no snapshot

    # None if the place is not on this machine; then only the snapshot has the data
    now = folders.content(data.place, root)
    if now is not None and now.sha256 != data.sha256:
        why = f"was made of {data.place} as it was at {data.made}, and its files have changed"
    elif data.region != definition.fleet.region:
        why = f"is in {data.region}, and fleet.region is {definition.fleet.region}"
    else:
        return
    yield f"storage.data.snapshot, {data.snapshot}, {why}: {_advice_data(definition, data)}."


def gone_before_the_end(definition: StackDefinition, root: Path, end: datetime) -> Iterator[str]:
    """A sentence if the baked AMI or snapshot may be deleted while a fleet that exists until `end` replaces nodes."""
    bake, data = read(definition, root), read_data(definition, root)
    for key, baked, advice in (
        ("fleet.baked_ami", bake, _advice(definition)),
        ("storage.data.snapshot", data, data and _advice_data(definition, data)),
    ):
        if baked is not None and datetime.fromisoformat(baked.until) <= end:
            yield (
                f"{key}, {baked.id}, is deleted at {baked.until}, but the fleet may launch nodes until"
                f" {stamp(end)}: {advice}."
            )


def _advice(definition: StackDefinition) -> str:
    stack = definition.argument
    return f"run `gpufleet bake {stack} --delete`, then `gpufleet bake {stack}`, or remove fleet.baked_ami"


def _advice_data(definition: StackDefinition, data: BakedData) -> str:
    again = f"gpufleet bake {definition.argument} --data {shlex.quote(data.place)}"
    return f"run `{again} --delete`, then `{again}`, or remove storage.data.snapshot"
