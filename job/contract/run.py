"""run.json: all that the job is told, known before the first resource and the same bytes on every machine.

`document` writes it, once per run; `load` reads it for the supervisor, `Task` for the trainer. It holds no bucket name:
the node gives the container its own address.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from job import atomic
from job.contract import inputs as listing
from job.contract import reading
from job.contract.inputs import InputFile
from job.contract.reading import DoubtError, Fields
from job.contract.workdir import RUN
from job.spec import JobConfig, from_json

SCHEMA = 1
LINE_KINDS = ("compute", "hourly", "fixed", "interruptions")  # how the meter counts a line of the bill


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
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
    hourly: Mapping[str, Decimal]  # beside compute, by line of the bill

    @property
    def ceiling(self) -> Decimal:
        """Compute at the most: a fleet that sets no maximum pays no spot price above the on-demand price."""
        return max(self.on_demand, self.spot or self.on_demand) if self.capacity == "spot" else self.on_demand

    @property
    def extras(self) -> Decimal:
        """What a node-hour costs besides compute."""
        return sum(self.hourly.values(), Decimal(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputData:
    """A dataset, base weights, a command's code or one of its inputs. `uri` None: under inputs/<sha256>/ beside the
    run. No files: an s3:// prefix whose dataset.json (weights.json) names them; of a command's input all that lies
    there, and `sha256` is the listing's.
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
    limits: RunLimits
    fixed_usd: Decimal
    dataset: InputData | None  # None for a command
    weights: InputData | None  # base weights; None for a job that starts from nothing
    code: InputData | None  # of a command: one archive; None: its image has all
    folders: dict[str, InputData]  # a command's inputs, by name
    estimate: dict[str, Any]
    tree: dict[str, Any]

    @property
    def code_sha256(self) -> str | None:
        """Of the job's archive, which every node of the run unpacks; None: none was named."""
        archive = self.tree["inputs"].get("archive") or {}
        found: str | None = archive.get("sha256")
        return found

    @property
    def hourly(self) -> dict[str, Decimal]:
        """USD per node-hour beside compute, by line of the bill."""
        return {name: Decimal(usd) for name, usd in self.tree["extras"]["hourly_usd"].items()}

    def gpus(self, instance_type: str) -> int:
        """Of a node of this type, as the bill knows it; 0: unknown."""
        return int(self.tree["rates"].get(instance_type, {}).get("gpus") or 0)

    def rates(self, instance_type: str, zone: str) -> Rates:
        """Rates of a type. One that run.json does not name is metered at the dearest on-demand price listed."""
        table = self.tree["rates"]
        listed = table.get(instance_type)
        spot = None
        if listed is None:
            on_demand = max(Decimal(row["on_demand"]) for row in table.values())
        else:
            on_demand = Decimal(listed["on_demand"])
            prices = {name: Decimal(price) for name, price in (listed.get("spot") or {}).items()}
            spot = prices.get(zone, max(prices.values(), default=None))
        return Rates(
            capacity=self.tree["capacity"],
            on_demand=on_demand,
            spot=spot,
            hourly=self.hourly,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """run.json as the trainer reads it."""

    name: str
    config: JobConfig
    digest: str
    tree: dict[str, Any]

    @classmethod
    def read(cls, workdir: Path) -> Task:
        """Raises ValueError."""
        tree = atomic.read_object(workdir / RUN)
        if tree is None:
            raise ValueError(f"{workdir / RUN}: missing or not JSON")
        try:
            name, parameters = tree["job"]["experiment"], tree["job"]["parameters"]
        except (KeyError, TypeError):
            raise ValueError(f"{workdir / RUN}: job.experiment and job.parameters are needed") from None
        return cls(name=name, config=from_json(name, parameters), digest=config_digest(name, parameters), tree=tree)

    @property
    def predicted(self) -> list[dict[str, Any]]:
        """What the bill says of each phase; nothing in a probe."""
        return self.tree.get("predicted") or []


def document(
    *,
    run: str,
    stack: str,
    owner: str,
    region: str,
    experiment: str,
    parameters: Mapping[str, Any],
    max_usd: Decimal,
    max_hours: Decimal,
    deadline: str | None,
    expires: str,
    capacity: str,
    rates: Mapping[str, Any],
    extras: Mapping[str, Any],
    estimate: Mapping[str, Any],
    predicted: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """The object of run.json; money and hours become decimal strings, times are UTC, ISO.

    `rates`: per type {"on_demand", "spot": {zone: USD}, "gpus"}; `extras`: {"hourly_usd": {line: USD}, "fixed_usd"}.
    `inputs`: {"archive": {"sha256", "bytes"}, "dataset": {"uri", "sha256", "files"}}, and `base_weights` like `dataset`
    where the run has them; a `uri` of None means that the files lie under inputs/<sha256>/ of the run's own bucket. A
    command has "code" like `dataset` (and "commit", "changed") and "folders": {name: like `dataset`} in their place.
    `expires`: when AWS ends the fleet.
    """
    return {
        "schema": SCHEMA,
        "run": {"id": run, "stack": stack, "experiment": experiment, "owner": owner},
        "region": region,
        "job": {"experiment": experiment, "parameters": dict(parameters)},
        "limits": {
            "max_usd": str(max_usd),
            "max_hours": str(max_hours),
            "deadline": deadline,
            "expires": expires,
        },
        "capacity": capacity,
        "rates": dict(rates),
        "extras": dict(extras),
        "estimate": dict(estimate),
        "predicted": list(predicted),
        "inputs": dict(inputs),
    }


def probe_document(experiment: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer needs of run.json where no run is behind it."""
    return {"schema": SCHEMA, "job": {"experiment": experiment, "parameters": dict(parameters)}, "predicted": []}


def encode(tree: Mapping[str, Any]) -> bytes:
    """The bytes of run.json: the node compares their sha256."""
    return (json.dumps(tree, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def load(path: Path) -> RunFile:
    """Raises ValueError with what is wrong."""
    tree = _document(path)
    try:
        return _typed(Fields(with_kinds(tree)))
    except DoubtError as error:
        raise ValueError(f"{path}: {error}; it is damaged: bring it again, or {WANTED}") from error


def with_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """run.json with a kind for each line of its bill; one written before 2026-11-26 named disks and address apart."""
    extras, estimate = tree.get("extras"), tree.get("estimate")
    if not isinstance(extras, dict) or not isinstance(estimate, dict) or "disk_usd_per_hour" not in extras:
        return tree
    if not isinstance(lines := estimate.get("lines"), list):
        return tree
    hourly = {"root disk": extras["disk_usd_per_hour"], "public IPv4": extras.get("ipv4_usd_per_hour")}
    kinds = {"compute": "compute", "interruptions": "interruptions", **dict.fromkeys(hourly, "hourly")}
    told = [
        {"kind": kinds.get(str(line.get("name")), "fixed"), **line} if isinstance(line, dict) else line
        for line in lines
    ]
    return {**tree, "extras": {**extras, "hourly_usd": hourly}, "estimate": {**estimate, "lines": told}}


def _typed(fields: Fields) -> RunFile:
    limits, extras, given = (fields.section(key) for key in ("limits", "extras", "inputs"))
    job = fields.section("job")
    experiment, parameters = job.need("experiment", reading.text), job.section("parameters").tree
    hourly = extras.need("hourly_usd", reading.mapping(reading.unsigned))
    if (archive := given.tree.get("archive")) is not None:
        Fields(archive, "inputs.archive").take("sha256", reading.text, None)
    _check_rates(fields)
    _check_estimate(fields.section("estimate"), hourly)
    config = from_json(experiment, parameters)
    fields.section("run").need("stack", reading.text)
    return RunFile(
        run=fields.section("run").need("id", reading.name),
        config=config,
        config_sha256=config_digest(experiment, parameters),
        limits=RunLimits(
            max_usd=limits.need("max_usd", reading.unsigned),
            max_hours=limits.need("max_hours", reading.unsigned),
            deadline=limits.take("deadline", reading.moment, None),
            expires=limits.take("expires", reading.moment, None),
        ),
        fixed_usd=extras.need("fixed_usd", reading.unsigned),
        dataset=_inputs(given.section("dataset")) if config.dataset_kind else None,
        weights=_inputs(given.section("base_weights")) if given.tree.get("base_weights") else None,
        code=_inputs(given.section("code")) if given.tree.get("code") else None,
        folders={name: _inputs(each) for name, each in given.table("folders").items()}
        if "folders" in given.tree
        else {},
        estimate=fields.section("estimate").tree,
        tree=fields.tree,
    )


def _check_rates(fields: Fields) -> None:
    fields.need("capacity", reading.choice("spot", "on-demand"))
    table = fields.table("rates")
    if not table:
        raise DoubtError("rates names no type")
    for row in table.values():
        row.need("on_demand", reading.unsigned)
        row.take("gpus", reading.whole_number, 0)
        row.take("spot", reading.mapping(reading.unsigned), {})


def _check_estimate(estimate: Fields, hourly: Mapping[str, Decimal]) -> None:
    """What forecast and receipt take from the bill."""
    for key in ("p10", "p50", "p90"):
        estimate.section("usd").need(key, reading.unsigned)
        estimate.section("hours").need(key, reading.unsigned)
    estimate.take("interruptions_expected", reading.number, None)
    lines = estimate.sections("lines")
    for line in lines:
        line.need("name", reading.text)
        line.need("amount", reading.amount)
        if line.need("kind", reading.choice(*LINE_KINDS)) == "hourly":
            line.need("name", reading.choice(*hourly))
    compute = [line for line in lines if line.tree["kind"] == "compute"]
    if len(compute) != 1:
        raise DoubtError(f"estimate.lines has {len(compute) or 'none'} for compute")
    for key in ("unit_price", "quantity"):
        compute[0].need(key, reading.unsigned)
    for phase in estimate.sections("phases") if "phases" in estimate.tree else ():
        phase.need("phase", reading.text)
        phase.need("step_ms", reading.number)
        phase.take("steps", reading.step, None)
    for notice in estimate.sections("notice") if "notice" in estimate.tree else ():
        notice.need("type", reading.text)
        notice.need("phase", reading.text)
        notice.take("seconds", reading.seconds, None)


WANTED = "name the run.json of a run, as `gpufleet results` brings it"


def _document(path: Path) -> dict[str, Any]:
    try:
        tree = reading.parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {WANTED}") from error
    except DoubtError as error:
        raise ValueError(f"{path}: {error}; it is cut or damaged: bring it again, or {WANTED}") from error
    if "schema" not in tree:
        raise ValueError(f"{path}: JSON, but no run config: it has no `schema`; {WANTED}")
    if tree["schema"] != SCHEMA:
        raise ValueError(
            f"{path}: a run config of schema {reading.show(tree['schema'])}, and this code reads {SCHEMA}; "
            "use its own version"
        )
    return tree


def _inputs(entry: Fields) -> InputData:
    return InputData(
        uri=entry.take("uri", reading.text, None),
        sha256=entry.take("sha256", reading.text, None),
        files=listing.files(entry),
    )


def config_digest(experiment: str, parameters: Mapping[str, Any]) -> str:
    """One name for what is trained: checkpoints of another config are never resumed."""
    text = json.dumps({"experiment": experiment, "parameters": parameters}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
