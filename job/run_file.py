"""run.json as the supervisor reads it, and who this attempt is: everything given from outside, parsed once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from job.config import JobConfig, from_json
from job.supervisor.metadata import epoch

ASKED = "stop.json"  # beside run.json in the bucket: `gpufleet stop` asks the run to end


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`deadline`, and `expires`, when AWS ends the fleet, in epoch seconds."""

    max_usd: Decimal
    max_hours: Decimal
    deadline: float | None
    expires: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """USD per node-hour of one type in one zone. `spot` is the bill's price, which may be old."""

    capacity: str
    on_demand: Decimal
    spot: Decimal | None
    disk: Decimal
    ipv4: Decimal

    @property
    def ceiling(self) -> Decimal:
        """Compute at the most: a fleet that sets no maximum pays no spot price above the on-demand price."""
        return max(self.on_demand, self.spot or self.on_demand) if self.capacity == "spot" else self.on_demand

    @property
    def extras(self) -> Decimal:
        """What a node-hour costs besides compute."""
        return self.disk + self.ipv4


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file of the dataset, relative to its place."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A dataset, or base weights. `uri` None: under inputs/<sha256>/ beside the run. No files: an s3:// prefix whose
    dataset.json (weights.json) names them.
    """

    uri: str | None
    sha256: str | None
    files: tuple[InputFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """The parts of run.json that decide something here; `tree` is all of it."""

    run: str
    config: JobConfig
    config_sha256: str
    limits: Limits
    fixed_usd: Decimal
    dataset: Dataset
    weights: Dataset | None  # base weights; None for a job that starts from nothing
    estimate: dict[str, Any]
    tree: dict[str, Any]

    @property
    def code_sha256(self) -> str | None:
        """Of the job's archive, which every node of the run unpacks; None: none was named."""
        archive = self.tree["inputs"].get("archive") or {}
        found: str | None = archive.get("sha256")
        return found

    def gpus(self, instance_type: str) -> int:
        """Of a node of this type, as the bill knows it; 0: unknown."""
        return int(self.tree["rates"].get(instance_type, {}).get("gpus", 0))

    def rates(self, instance_type: str, zone: str) -> Rates:
        """Rates of a type. One that run.json does not name is metered at the dearest on-demand price listed."""
        table, extras = self.tree["rates"], self.tree["extras"]
        listed = table.get(instance_type)
        spot = None
        if listed is None:
            on_demand = max(Decimal(row["on_demand"]) for row in table.values())
        else:
            on_demand = Decimal(listed["on_demand"])
            prices = {name: Decimal(price) for name, price in listed.get("spot", {}).items()}
            spot = prices.get(zone, max(prices.values(), default=None))
        return Rates(
            capacity=self.tree["capacity"],
            on_demand=on_demand,
            spot=spot,
            disk=Decimal(extras["disk_usd_per_hour"]),
            ipv4=Decimal(extras["ipv4_usd_per_hour"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The machine of this attempt, as the node script names it."""

    instance: str
    type: str
    zone: str
    launched_at: float

    @classmethod
    def of(cls, environment: Mapping[str, str], now: float) -> Node:
        """From the container's environment; outside one, a node called `local` that starts now."""
        launched = epoch(environment.get("GPUFLEET_LAUNCHED_AT", ""))
        return cls(
            instance=environment.get("GPUFLEET_INSTANCE_ID", "local"),
            type=environment.get("GPUFLEET_INSTANCE_TYPE", "local"),
            zone=environment.get("GPUFLEET_ZONE", ""),
            launched_at=now if launched is None else launched,
        )


def load(path: Path) -> RunFile:
    """Raises ValueError with what is wrong."""
    tree = _document(path)
    try:
        limits, job, dataset = tree["limits"], tree["job"], tree["inputs"]["dataset"]
        weights = tree["inputs"].get("base_weights")
        run = RunFile(
            run=tree["run"]["id"],
            config=from_json(job["experiment"], job["parameters"]),
            config_sha256=config_digest(job["experiment"], job["parameters"]),
            limits=Limits(
                max_usd=Decimal(limits["max_usd"]),
                max_hours=Decimal(limits["max_hours"]),
                deadline=epoch(limits.get("deadline")),
                expires=epoch(limits.get("expires")),
            ),
            fixed_usd=Decimal(tree["extras"]["fixed_usd"]),
            dataset=_inputs(dataset),
            weights=_inputs(weights) if weights else None,
            estimate=tree["estimate"],
            tree=tree,
        )
        run.rates("", "")
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return run


def _document(path: Path) -> dict[str, Any]:
    wanted = "name the run.json of a run, as `gpufleet results` brings it"
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); it is cut or damaged: bring it again, or {wanted}") from error
    if not isinstance(tree, dict) or "schema" not in tree:
        raise ValueError(f"{path}: JSON, but no run config: it has no `schema`; {wanted}")
    if tree["schema"] != 1:
        raise ValueError(
            f"{path}: a run config of schema {tree['schema']!r}, and this code reads 1; use its own version"
        )
    return tree


def _inputs(entry: Mapping[str, Any]) -> Dataset:
    files = tuple(InputFile(**file) for file in entry["files"])
    return Dataset(uri=entry["uri"], sha256=entry["sha256"], files=files)


def config_digest(experiment: str, parameters: Mapping[str, Any]) -> str:
    """One name for what is trained: checkpoints of another config are never resumed."""
    text = json.dumps({"experiment": experiment, "parameters": parameters}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
