"""Reads a definition from a file, or from a mapping of its sections."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import STACK_NAME, find, load, project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.scenarios import scenario as one_scenario
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.folders import FOLDER
from gpufleet.job import atomic

Given = str | Path | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A checked definition: one run, or one of its scenarios."""

    name: str  # the file's name without .yaml
    path: Path  # the path of the file; for a mapping, of the file that was written for it
    project: Path  # the folder of its inputs and prices
    scenario: str  # empty if the definition is the file itself, without a scenario
    run: str  # run.id
    owner: str
    experiment: str  # the kind of job; `command` for a script of your own
    region: str
    zones: tuple[str, ...]
    instance_types: tuple[str, ...]
    capacity: str  # spot or on-demand
    max_usd: float  # USD
    max_hours: float  # billed node-hours
    _definition: StackDefinition = field(repr=False, compare=False)


def read(
    source: Given | Definition, *, scenario: str, name: str, project: Path | str | None, now: datetime
) -> Definition:
    """The definition. Raises DefinitionError with every problem of the file, and GpufleetError."""
    if isinstance(source, Definition):
        if not scenario or scenario == source.scenario:
            return source
        root, path = source.project, source.path
    else:
        root = folder_of(project)
        path = file_of(source, root, name)
    if scenario:
        stack = one_scenario(path, scenario, now=now, past_deadline=True, to_run=False)
    else:
        stack = load(path, now=now, past_deadline=True, catalog=load_catalog(root))
    return Definition(
        name=stack.name,
        path=path,
        project=root,
        scenario=stack.scenario,
        run=stack.run.id,
        owner=stack.run.owner,
        experiment=stack.job.experiment,
        region=stack.fleet.region,
        zones=stack.fleet.zones,
        instance_types=stack.fleet.instance_types,
        capacity=stack.fleet.capacity,
        max_usd=float(stack.limits.max_usd),
        max_hours=float(stack.limits.max_hours),
        _definition=stack,
    )


def folder_of(project: Path | str | None) -> Path:
    """The project's folder: as given, or the nearest one with `stacks/`, at or above the working folder."""
    return project_root(Path.cwd()) if project is None else Path(project)


def file_of(source: Given, root: Path, name: str) -> Path:
    """The file of a definition, by a stack's name or a path. A mapping is written to .gpufleet/definitions/NAME.yaml of
    the project, where the commands find it by that path. Raises GpufleetError.
    """
    if not isinstance(source, Mapping):
        return find(str(source), root)
    if not STACK_NAME.fullmatch(name):
        raise GpufleetError(
            f"name={name!r}: a definition given as a mapping needs a name of 2 to 40 of a-z, 0-9 and inner hyphens,"
            " starting with a letter; it names the bucket"
        )
    path = root / FOLDER / "definitions" / f"{name}.yaml"
    content = as_yaml(source, f"# {name}: given by a program.\n").encode()
    if not path.is_file() or path.read_bytes() != content:
        atomic.write_bytes(path, content)
    return path


def as_yaml(mapping: Mapping[str, Any], heading: str = "") -> str:
    """A mapping as a definition file: plain values, no aliases. Raises GpufleetError for other values."""
    try:
        plain = json.loads(json.dumps(mapping, default=_plain))
    except (TypeError, ValueError) as error:
        raise GpufleetError(
            f"a definition may hold only text, numbers, truth values, lists and sections: {error}"
        ) from None
    return heading + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    if isinstance(value, datetime):
        return value.isoformat()
    # A Decimal, or a number of NumPy.
    if isinstance(value, Path) or re.fullmatch(r"-?[0-9.]+([eE][-+]?[0-9]+)?", str(value)):
        return str(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")
