"""The bakes of a project: which AMI holds which images, until when, at what price. `gpufleet bake` writes
bakes/<ami>.json, to be committed.
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
    base_ami: str  # the AMI that its builder started from
    images: tuple[str, ...]  # with their digests
    made: str
    until: str  # when a schedule deletes it
    usd_per_month: Decimal  # of its snapshot
    builder_usd: Decimal  # of making it, by the builder's bill
    pulled_s: Decimal  # how long its builder took to pull the images


def path_of(ami: str, root: Path) -> Path:
    """The file of an AMI."""
    return root / FOLDER / f"{ami}.json"


def write(bake: Bake, root: Path) -> Path:
    """Writes the file; returns its path."""
    path = path_of(bake.ami, root)
    path.parent.mkdir(exist_ok=True)
    tree = {name: str(value) if isinstance(value, Decimal) else value for name, value in asdict(bake).items()}
    atomic.write_json(path, {"schema": SCHEMA, **tree})
    return path


def read(definition: StackDefinition, root: Path) -> Bake | None:
    """The bake that the definition's nodes start from; None without one. Raises GpufleetError for a file that no bake
    wrote.
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
    """Why nodes may not start from the definition's baked AMI."""
    fleet, bake = definition.fleet, read(definition, root)
    if fleet.baked_ami is None:
        return
    if bake is None:
        why = f"has no {FOLDER}/{fleet.baked_ami}.json, so what it holds is not known"
    elif missing := [image for image in definition.job.images if image not in bake.images]:
        why = f"holds {', '.join(bake.images)}, and the job needs {', '.join(missing)}"
    elif bake.base_ami != fleet.ami:
        why = f"was made from {bake.base_ami}, and fleet.ami is {fleet.ami}"
    elif bake.region != fleet.region:
        why = f"is in {bake.region}, and fleet.region is {fleet.region}"
    else:
        return
    yield f"fleet.baked_ami, {fleet.baked_ami}, {why}: {_advice(definition)}."


def gone_before_the_end(definition: StackDefinition, root: Path, now: datetime) -> Iterator[str]:
    """Why the baked AMI may be gone while the fleet of a run that begins now still replaces nodes."""
    bake, end = read(definition, root), definition.expiry(now)
    if bake is not None and datetime.fromisoformat(bake.until) <= end:
        yield (
            f"fleet.baked_ami, {bake.ami}, is deleted at {bake.until}, and the fleet may launch nodes until"
            f" {stamp(end)}: {_advice(definition)}."
        )


def _advice(definition: StackDefinition) -> str:
    stack = definition.argument
    return f"`gpufleet bake {stack} --delete`, then `gpufleet bake {stack}`, or take fleet.baked_ami out"
