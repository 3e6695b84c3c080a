"""The bakes of a project: which AMI contains which images, until when, and at what price. `gpufleet bake` writes
bakes/<ami>.json, which users commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path

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
    images: tuple[str, ...]  # with their digests
    made: str
    until: str  # the time at which a schedule deletes it
    usd_per_month: Decimal  # the price of its snapshot
    builder_usd: Decimal  # what making it cost, by the builder's bill
    pulled_s: Decimal  # how long its builder took to pull the images


def path_of(ami: str, root: Path) -> Path:
    return root / FOLDER / f"{ami}.json"


def write(bake: Bake, root: Path) -> Path:
    path = path_of(bake.ami, root)
    path.parent.mkdir(exist_ok=True)
    tree = {name: str(value) if isinstance(value, Decimal) else value for name, value in asdict(bake).items()}
    atomic.write_json(path, {"schema": SCHEMA, **tree})
    return path


def read(definition: StackDefinition, root: Path) -> Bake | None:
    """The bake from which the definition's nodes start; None if there is none. Raises GpufleetError if no bake wrote
    the file.
    """
    if definition.fleet.baked_ami is None:
        return None
    path = path_of(definition.fleet.baked_ami, root)
    try:
        fields = Fields(reading.parse(path.read_bytes()))
        fields.schema(SCHEMA)
        return reading.filled(Bake, fields)
    except FileNotFoundError:
        return None
    except (OSError, DoubtError) as error:
        raise GpufleetError(f"{path}: {error}; allowed are files of `gpufleet bake`, in {FOLDER}/") from None


def not_ready(definition: StackDefinition, root: Path) -> Iterator[str]:
    """Yields the reason why nodes may not start from the definition's baked AMI, if there is one."""
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


def gone_before_the_end(definition: StackDefinition, root: Path, now: datetime) -> Iterator[str]:
    """Yields a warning if the baked AMI may be deleted while the fleet of a run that begins now replaces nodes."""
    bake, end = read(definition, root), definition.expiry(now)
    if bake is not None and datetime.fromisoformat(bake.until) <= end:
        yield (
            f"fleet.baked_ami, {bake.ami}, is deleted at {bake.until}, but the fleet may launch nodes until"
            f" {stamp(end)}: {_advice(definition)}."
        )


def _advice(definition: StackDefinition) -> str:
    stack = definition.argument
    return f"run `gpufleet bake {stack} --delete`, then `gpufleet bake {stack}`, or remove fleet.baked_ami"
