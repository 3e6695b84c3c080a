"""The definition file as a JSON Schema, so that editors complete its keys and mark what is wrong as one types.

Made from the dataclasses and rules by which the loader reads the file, and as strict as JSON Schema can be: what holds
between keys, or depends on the day, on prices or on AWS, the loader alone says. Stricter in one thing: a number stands
without quotes. Draft 7, which every editor knows.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import typing
from dataclasses import is_dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.definition.checks import INPUT_NAME, TAG_KEY
from gpufleet.infra.definition.layers import MODELINE, MOST_SCENARIOS, OVERLAID, SCENARIO_NAME
from gpufleet.infra.definition.loader import SCHEMA
from gpufleet.infra.definition.model import Account, Fleet, Interruptions, Job, Storage, Variant
from gpufleet.infra.definition.rules import REQUIRED
from gpufleet.infra.definition.schema import READY_MADE, SECTIONS, rule_of_key
from gpufleet.job.kind import COMMAND, EXPERIMENTS
from gpufleet.job.kind.command import SECRET, VARIABLE, CommandConfig
from gpufleet.job.kind.convert import Rule, describe, key_of, unwrap
from gpufleet.job.kind.convert import hints as hints_of

FILE = (
    Path(__file__).resolve().with_name("definition.schema.json")
)  # what `gpufleet schema` prints, for editors to find
# As the loader takes it: a time with its zone, or `in 10 h`.
_TIME = r"[0-9]{4}-?[0-9]{2}-?[0-9]{2}[T ][0-9:]+(Z|[+-][0-9:]+)"
MOMENT = rf"^(in (?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)? h|{_TIME})$"
Schema = dict[str, Any]


def schema() -> Schema:
    """The schema, as JSON values."""
    kinds = {name: (_job(name), f"parameters of {name}") for name in EXPERIMENTS}
    kinds[COMMAND] = (_section([Job, CommandConfig], but=("experiment", "parameters")), COMMAND)
    kinds[COMMAND][0]["required"].append("command")
    sections = {name: _section([cls]) for name, cls in SECTIONS.items() if name != "job"}
    definitions = {f"parameters of {name}": _section([config]) for name, config in EXPERIMENTS.items()}
    definitions[COMMAND] = _section([CommandConfig], partial=True)
    definitions |= {f"{name} laid over": _section([SECTIONS[name]], partial=True) for name in OVERLAID if name != "job"}
    laid_over = {name: {"$ref": f"#/definitions/{name} laid over"} for name in OVERLAID if name != "job"}
    every_job: Schema = {
        "type": "object",
        "properties": {
            "experiment": {"enum": [*EXPERIMENTS], "description": REQUIRED[Job, "experiment"]},
            "image": _field(Job, "image"),
            "command": {**_text(Rule()), "description": "text for sh -ec: starts your own training"},
        },
        "oneOf": [{"required": ["experiment"]}, {"required": ["command"]}],
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "gpufleet: the definition of one run",
        "type": "object",
        "properties": {
            **sections,
            "job": every_job,
            "rehearsal": {"description": "the same job, small enough for a laptop: laid over the sections above"},
            "scenarios": {"description": "variants laid over the file, for `gpufleet compare`"},
        },
        "required": [name for name, cls in SECTIONS.items() if _required(cls)],
        "additionalProperties": False,
        "allOf": [_kind(name, job, over, laid_over) for name, (job, over) in kinds.items()],
        "definitions": definitions,
    }


def text() -> str:
    """The schema as the shipped file holds it."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def modeline(folder: Path, project: Path) -> str:
    """The line that leads an editor from a file in `folder` to the `project`'s copy of the schema; empty where it has
    none, since the way to the installed one would be this machine's.
    """
    for file in (project.resolve() / SCHEMA, project.resolve() / "infra" / "definition" / FILE.name):
        if file.is_file():
            return MODELINE + os.path.relpath(file, folder.resolve())
    return ""


def _kind(name: str, job: Schema, overlay: str, laid_over: Schema) -> Schema:
    """What holds for a file whose job is of this kind."""
    own = {"$ref": f"#/definitions/{overlay}"}
    of_job = own if name == COMMAND else _object({"parameters": own})
    sections = {"job": of_job, **laid_over}
    variant = _section([Variant])["properties"]
    asks: Schema = {"required": ["command"]}
    storage: Schema = {"properties": {"dataset": False, "base_weights": False}}
    if name != COMMAND:
        asks = {"properties": {"experiment": {"const": name}}, "required": ["experiment"]}
        storage = {"properties": {"inputs": False}, "required": ["dataset"]}
    return {
        "if": {"properties": {"job": asks}, "required": ["job"]},
        "then": {
            "properties": {
                "job": job,
                "storage": storage,
                "rehearsal": _object({**sections, "interruptions": _section([Interruptions])}),
                "scenarios": {
                    "type": ["object", "null"],
                    "maxProperties": MOST_SCENARIOS,
                    **_names(SCENARIO_NAME, "a name of at most 40 of a-z 0-9 . -, not beginning with . or -"),
                    "additionalProperties": _object({**variant, **sections}),
                },
            },
            "required": ["storage"] if "required" in storage else [],
        },
    }


def _job(experiment: str) -> Schema:
    """The section `job` of a ready-made job."""
    parameters = {"$ref": f"#/definitions/parameters of {experiment}"}
    keys = {key: _field(Job, key) for key in READY_MADE if key != "parameters"}
    return {**_object({**keys, "parameters": parameters}), "type": "object", "required": ["experiment", "image"]}


def _section(classes: list[type[Any]], *, partial: bool = False, but: tuple[str, ...] = (), default: Any = None) -> Any:
    """The keys of dataclasses as one section. `partial`: laid over another, so that none is required; nor is any where
    the section around it has a `default` for it.
    """
    properties, required = {}, []
    for cls in classes:
        for spec in dataclasses.fields(cls):
            if spec.name in but:
                continue
            properties[key_of(spec.name)] = _field(cls, spec.name, partial=partial, default=default)
            if not partial and default is None and spec.name in _required(cls):
                required.append(spec.name)
    found = _object(properties)
    if required:
        found |= {"type": "object", "required": required}
    return {"description": inspect.cleandoc(classes[-1].__doc__ or "").partition("\n\n")[0].replace("\n", " ")} | found


def _object(properties: Schema) -> Schema:
    """A section that may also stand there empty."""
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _required(cls: type[Any]) -> list[str]:
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing is f.default_factory]


def _field(cls: type[Any], name: str, *, partial: bool = False, default: Any = None) -> Schema:
    """One key. `default`: of the section around it, where that has one of its own."""
    (spec,) = (each for each in dataclasses.fields(cls) if each.name == name)
    hint, rule = hints_of(cls)[name], rule_of_key(cls, spec)  # type: ignore[arg-type]  # mypy: type[Any] unhashable
    kept = spec.default if default is None else getattr(default, name)
    inner, optional = unwrap(hint)
    if is_dataclass(inner) and isinstance(inner, type):
        own = kept if isinstance(kept, inner) else None
        found: Schema = _section([inner], partial=partial, default=own)
        if optional and found["type"] == "object":
            found["type"] = ["object", "null"]
        if words := getattr(inner, "WORDS", {}):
            found |= {"type": [*found["type"], "string"], "if": {"type": "string"}, "then": {"enum": [*words]}}
        return found
    found = _value(inner, rule) | _KNOWN.get((cls, name), {})
    if (cls, name) == (Fleet, "instance_types") and not partial:  # a scenario may list one that is gone, to be shown
        found["items"] = {"enum": sorted(name for name, kind in _TYPES.items() if not kind.unusable)}
    if optional or (inner is str and spec.default == ""):
        empty = {"type": "null"} if optional else {"enum": [None, ""]}
        found = {"anyOf": [found, empty]}
    found["description"] = REQUIRED.get((cls, name)) or describe(hint, rule)
    if kept is not dataclasses.MISSING and kept is not None and not partial:
        found["default"] = list(kept) if isinstance(kept, tuple) else float(kept) if type(kept) is Decimal else kept
    return found


def _value(hint: Any, rule: Rule) -> Schema:
    """What a key of this type may hold."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = _value(typing.get_args(hint)[0], rule)
        items: Schema = {"type": "array", "items": item}
        if rule.most is not None:
            items |= {"minItems": 1, "maxItems": rule.most}
        return {"anyOf": [item, items]} if rule.one else items
    if origin is dict:
        most = {} if rule.most is None else {"maxProperties": rule.most}
        return {"type": "object", "additionalProperties": _value(typing.get_args(hint)[1], rule), **most}
    if origin is Literal:
        choices = list(typing.get_args(hint))
        return {"enum": [*choices, *(word == "true" for word in choices if word in ("true", "false"))]}
    if hint is str:
        return _text(rule)
    if hint is bool:
        return {"type": "boolean"}
    if hint is datetime:
        return {"type": "string", **_pattern(f"^{_TIME}$" if rule.moment else MOMENT, describe(hint, rule))}
    bounds = {"minimum": rule.minimum, "maximum": rule.maximum}
    kept = {key: bound for key, bound in bounds.items() if bound is not None}
    return {"type": "integer" if hint is int else "number", **kept}


def _text(rule: Rule) -> Schema:
    """Text, which YAML takes for a number or a truth value where it looks like one."""
    looks = {"number": "1", "boolean": "true"}
    kinds = ["string", *(kind for kind, example in looks.items() if re.fullmatch(rule.pattern or ".*", example))]
    return {"type": kinds, **(_pattern(_anchored(rule.pattern), rule.allowed) if rule.pattern else _SOME_TEXT)}


def _pattern(pattern: str, allowed: str) -> Schema:
    """A pattern, with what editors say in its place where it does not match: VS Code's and the YAML language server."""
    return {"pattern": pattern, "patternErrorMessage": f"Allowed: {allowed}."}


def _anchored(pattern: str) -> str:
    """A schema's pattern, which may match anywhere, of one that the whole text must match."""
    return f"^(?:{pattern})$"


def _names(pattern: re.Pattern[str], allowed: str) -> Schema:
    return {"propertyNames": _pattern(_anchored(pattern.pattern), allowed)}


_SOME_TEXT = _pattern(r"\S", "text that is not empty")
_TYPES = load_catalog(FILE.parent).instances  # the shipped ones, whatever prices a project has read
_SECRET = {"type": "string", **_pattern(_anchored(SECRET.pattern), "ssm:/name or secretsmanager:name")}
_VARIABLE = "a variable of the environment: letters, digits and _, not beginning with a digit"
_ZONE_IDS = "|".join(f"{region.zone_id_prefix}az[1-8]" for region in known_regions().values())
# What a type and a rule do not say, and the checks between keys do.
_KNOWN: dict[tuple[type[Any], str], Schema] = {
    (Fleet, "region"): {"type": "string", "enum": [*known_regions()]},
    (Fleet, "zones"): {
        "items": {
            "anyOf": [
                {"enum": [zone for region in known_regions().values() for zone in region.zones]},
                {
                    "type": "string",
                    **_pattern(_anchored(_ZONE_IDS), "a zone's name or id, such as us-east-2a or use2-az1"),
                },
            ]
        },
        "uniqueItems": True,
    },
    (Fleet, "instance_types"): {"items": {"enum": sorted(_TYPES)}, "uniqueItems": True},
    (Job, "experiment"): {"enum": [*EXPERIMENTS]},
    (Storage, "inputs"): _names(INPUT_NAME, "a name of at most 40 of a-z 0-9 _, beginning with a letter"),
    (Account, "tags"): _names(TAG_KEY, "as run.owner, without aws: or gpufleet: in front, and not Name"),
    (CommandConfig, "env"): _names(VARIABLE, _VARIABLE),
    (CommandConfig, "secrets"): _names(VARIABLE, _VARIABLE) | {"additionalProperties": _SECRET},
    (CommandConfig, "registry"): _SECRET,
}
