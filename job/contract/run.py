"""run.json: everything that the job knows about its run. Its content is fixed before the first resource is made, and
has the same bytes on every machine.

`document` writes it, once per run; `load` reads it for the supervisor, `Task` for the trainer. The file does not have
the bucket's name: the node passes the bucket's address to its container.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract import inputs as listing
from gpufleet.job.contract import reading, terms
from gpufleet.job.contract.estimate import BillEstimate
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.contract.terms import Terms
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.kind import JobConfig, from_json

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class InputData:
    """A dataset, base weights, a command's code or one of its inputs. If `uri` is None, the files are below
    inputs/<sha256>/ beside the run's folder. If there are no `files`, the data are an s3:// prefix, whose dataset.json
    (or weights.json) lists the files. For a command's input, all files of the prefix are taken, and `sha256` is the
    hash of their listing. If `stage` is set, the data are the outputs of the stage with this folder.
    """

    uri: str | None
    sha256: str | None
    files: tuple[InputFile, ...]
    stage: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile(Terms):
    """run.json as the supervisor reads it."""

    run: str
    stack: str
    owner: str
    experiment: str
    parameters: dict[str, Any]
    config: JobConfig  # the job's parameters
    image: str | None  # a command's image
    config_sha256: str
    dataset: InputData | None  # None for a command
    weights: InputData | None  # base weights; None for a job that starts without weights
    code: InputData | None  # the archive of a command's code; None if the command's image has all code
    folders: dict[str, InputData]  # a command's inputs, by name
    code_sha256: str | None  # hash of the job's archive, which every node unpacks; None if run.json does not have it
    estimate: BillEstimate
    goal: dict[str, Decimal]  # the goals by name
    whole_usd: tuple[Decimal, Decimal] | None  # p10 and p90 of the whole run; None if this run is not a stage

    def gpus(self, instance_type: str) -> int:
        """The GPUs of a node of this type, from the bill; 0 if unknown."""
        listed = self.prices.get(instance_type)
        return listed.gpus if listed else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """run.json as the trainer reads it."""

    name: str
    config: JobConfig
    digest: str
    tree: dict[str, Any]

    @classmethod
    def read(cls, workdir: Path) -> Task:
        """Reads run.json; raises ValueError."""
        tree = atomic.read_object(workdir / RUN)
        if tree is None:
            raise ValueError(f"{workdir / RUN}: missing or not JSON")
        try:
            name, parameters = tree["job"]["experiment"], tree["job"]["parameters"]
        except (KeyError, TypeError):
            raise ValueError(f"{workdir / RUN}: job.experiment and job.parameters are missing") from None
        return cls(name=name, config=from_json(name, parameters), digest=config_digest(name, parameters), tree=tree)

    @property
    def predicted(self) -> list[dict[str, Any]]:
        """The bill's estimate of each phase; empty during a calibration, which has no bill."""
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
    fallback: Mapping[str, Any] | None = None,
    rates: Mapping[str, Any],
    extras: Mapping[str, Any],
    estimate: Mapping[str, Any],
    predicted: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Any],
    image: str | None = None,
    nodes: int = 1,
    gather_s: float | None = None,
    goal: Mapping[str, str] = MappingProxyType({}),
    before: Sequence[str] = (),
    own: Mapping[str, str] | None = None,
    least_usd: str | None = None,
    following: Mapping[str, str] | None = None,
    whole_usd: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The object of run.json; money and hours become decimal strings, times are UTC, ISO.

    `rates`: per type {"on_demand", "spot": {zone: USD}, "gpus"}, of several nodes with "gbps" and "efa"; `extras`:
    {"hourly_usd": {line: USD}, "fixed_usd"}. `inputs`: {"archive": {"sha256", "bytes"}, "dataset": {"uri", "sha256",
    "files"}}, and `base_weights` like `dataset` where the run has them; a `uri` of None means that the files lie under
    inputs/<sha256>/ of the run's own bucket. A command has "code" like `dataset` (and "commit", "changed") and
    "folders": {name: like `dataset`} in place of dataset and base weights. `expires` is the time at which AWS ends the
    fleet. `image` is set if a command's speed is that of its own image. `nodes`, `fallback`, `gather_s`, `before`,
    `own`, `least_usd` and `following` are what contract/terms.py reads; these, `goal` and `whole_usd` are left out
    if they have the defaults of that file.
    """
    optional: dict[str, tuple[Any, Any]] = {
        "nodes": (nodes, 1),
        "gather_s": (gather_s, None),
        "fallback": (fallback, None),
        "goal": (dict(goal), {}),
        "before": (list(before), []),
        "own": (own, None),
        "least_usd": (least_usd, None),
        "following": (following, None),
        "whole_usd": (whole_usd, None),
    }
    return {
        "schema": SCHEMA,
        "run": {"id": run, "stack": stack, "experiment": experiment, "owner": owner},
        "region": region,
        "job": {"experiment": experiment, "parameters": dict(parameters), **({"image": image} if image else {})},
        "limits": {
            "max_usd": str(max_usd),
            "max_hours": str(max_hours),
            "deadline": deadline,
            "expires": expires,
        },
        "capacity": capacity,
        **{key: value for key, (value, default) in optional.items() if value != default},
        "rates": dict(rates),
        "extras": dict(extras),
        "estimate": dict(estimate),
        "predicted": list(predicted),
        "inputs": dict(inputs),
    }


def probe_document(experiment: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The part of run.json that a trainer needs during a calibration, where there is no run."""
    return {"schema": SCHEMA, "job": {"experiment": experiment, "parameters": dict(parameters)}, "predicted": []}


def encode(tree: Mapping[str, Any]) -> bytes:
    """The bytes of run.json, whose sha256 the node compares."""
    return (json.dumps(tree, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def load(path: Path) -> RunFile:
    """Reads run.json; raises ValueError with the problem."""
    tree = _document(path)
    try:
        return _typed(Fields(with_kinds(tree)))
    except DoubtError as error:
        raise ValueError(f"{path}: {error}; it is damaged: download it again, or {WANTED}") from error


def with_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """run.json in today's form, in which each line of the bill has a kind. Before 2026-11-26, disks and address had
    keys of their own.
    """
    extras, estimate = tree.get("extras"), tree.get("estimate")
    if not isinstance(extras, dict) or not isinstance(estimate, dict) or "disk_usd_per_hour" not in extras:
        return tree
    if not isinstance(lines := estimate.get("lines"), list):
        return tree
    hourly = {"root disk": extras["disk_usd_per_hour"], "public IPv4": extras.get("ipv4_usd_per_hour")}
    kinds = {"compute": "compute", "interruptions": "interruptions", **dict.fromkeys(hourly, "hourly")}
    priced = [
        {"kind": kinds.get(str(line.get("name")), "fixed"), **line} if isinstance(line, dict) else line
        for line in lines
    ]
    return {**tree, "extras": {**extras, "hourly_usd": hourly}, "estimate": {**estimate, "lines": priced}}


def _typed(fields: Fields) -> RunFile:
    inputs, job, run = (fields.section(key) for key in ("inputs", "job", "run"))
    experiment, parameters = job.need("experiment", reading.text), job.section("parameters").tree
    money = terms.read(fields)
    archive, config = inputs.tree.get("archive"), from_json(experiment, parameters)
    return RunFile(
        **{field.name: getattr(money, field.name) for field in dataclasses.fields(Terms)},
        run=run.need("id", reading.name),
        stack=run.need("stack", reading.text),
        owner=run.take("owner", reading.text, ""),
        experiment=experiment,
        parameters=parameters,
        config=config,
        image=job.take("image", reading.text, None),
        config_sha256=config_digest(experiment, parameters),
        dataset=_inputs(inputs.section("dataset")) if config.dataset_kind else None,
        weights=_inputs(inputs.section("base_weights")) if inputs.tree.get("base_weights") else None,
        code=_inputs(inputs.section("code")) if inputs.tree.get("code") else None,
        folders={name: _inputs(folder) for name, folder in inputs.table("folders").items()}
        if "folders" in inputs.tree
        else {},
        code_sha256=None if archive is None else inputs.section("archive").take("sha256", reading.text, None),
        estimate=BillEstimate.from_json(fields.section("estimate"), money.hourly),
        goal=fields.take("goal", reading.mapping(reading.amount), {}),
        whole_usd=_span(fields.take("whole_usd", reading.mapping(reading.unsigned), None)),
    )


def _span(usd: Mapping[str, Decimal] | None) -> tuple[Decimal, Decimal] | None:
    return None if usd is None else (usd["p10"], usd["p90"])


WANTED = "name the run.json of a run, as `gpufleet results` downloads it"


def _document(path: Path) -> dict[str, Any]:
    try:
        tree = reading.parse(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {WANTED}") from error
    except DoubtError as error:
        raise ValueError(f"{path}: {error}; it is cut or damaged: download it again, or {WANTED}") from error
    if "schema" not in tree:
        raise ValueError(f"{path}: JSON, but not a run config, because it has no `schema`; {WANTED}")
    if tree["schema"] != SCHEMA:
        raise ValueError(
            f"{path}: a run config of schema {reading.show(tree['schema'])}, but this code reads {SCHEMA};"
            " use the version of gpufleet that wrote it"
        )
    return tree


def _inputs(entry: Fields) -> InputData:
    return InputData(
        uri=entry.take("uri", reading.text, None),
        sha256=entry.take("sha256", reading.text, None),
        files=listing.files(entry),
        stage=entry.take("stage", reading.name, ""),
    )


def config_digest(experiment: str, parameters: Mapping[str, Any]) -> str:
    """One hash of the experiment and its parameters. A run resumes only from a checkpoint with the same hash."""
    text = json.dumps({"experiment": experiment, "parameters": parameters}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
