"""The definition file as a JSON Schema. Editors use the schema to complete keys, to explain each key, and to mark
mistakes while a user types.

The schema is made from the dataclasses and rules by which the loader reads the file, and from the tables of docs/,
whose words editors show. The schema is as strict as JSON Schema can be; only the loader can check rules that depend on
sums, the day, prices or AWS. In one respect the schema is stricter than the loader: a number must not be quoted. The
schema is in Draft 7, which every editor supports.

`make schema` writes the shipped file. `make schema` needs the pages, which only a clone has.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import re
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.definition import between
from gpufleet.infra.definition.between import Schema, pattern
from gpufleet.infra.definition.checks import ANYWHERE, INPUT_NAME, PLACE, TAG_KEY
from gpufleet.infra.definition.layers import MODELINE, MOST_SCENARIOS, OVERLAID, SCENARIO_NAME
from gpufleet.infra.definition.loader import SCHEMA
from gpufleet.infra.definition.model import Account, Estimate, Fleet, Interruptions, Job, Storage, Variant
from gpufleet.infra.definition.rules import REQUIRED
from gpufleet.infra.definition.schema import READY_MADE, SECTIONS, rule_of_key
from gpufleet.infra.definition.stages import KEYS as STAGE_KEYS
from gpufleet.infra.definition.stages import MOST_ON_NODE as MOST_STAGES
from gpufleet.infra.definition.stages import NAME as STAGE_NAME
from gpufleet.infra.definition.stages import RERUN, STAGES, STAYS
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.kind import COMMAND, EXPERIMENTS
from gpufleet.job.kind.command import (
    FORMATS,
    CommandCheckpoint,
    CommandConfig,
    ExitRules,
    Progress,
    Resume,
)
from gpufleet.job.kind.common import Code, Log
from gpufleet.job.kind.convert import Rule, describe, key_of, unwrap
from gpufleet.job.kind.convert import hints as hints_of
from gpufleet.job.kind.variables import SECRET, VARIABLE

FILE = (
    Path(__file__).resolve().with_name("definition.schema.json")
)  # `gpufleet schema` writes the file here, so that editors find it
# A key's schema is shared only if it has at least this many characters. A shorter one is hardly longer than a reference
# to it.
LEAST_SHARED = 100
# The times that the loader accepts: a time with its zone, or a span such as `in 10 h`, of at most 366 days.
_CLOCK = r"([01][0-9]|2[0-3])(:?[0-5][0-9]){0,2}"
_DAY = r"(20[0-9]{2}|2100)-?(0[1-9]|1[0-2])-?(0[1-9]|[12][0-9]|3[01])"
_TIME = rf"{_DAY}[T ]{_CLOCK}(Z|[+-]{_CLOCK})"
_HOURS = r"([0-9]{1,3}|[1-7][0-9]{3}|8[0-6][0-9]{2}|87[0-7][0-9]|878[0-3])(\.[0-9]+)?|8784"
MOMENT = rf"^(in (?=[0-9.]*[1-9])({_HOURS}) h|{_TIME})$"


@dataclass(frozen=True, slots=True)
class Page:
    """What the pages say about the keys of a section: the columns `Value` and `Why` of each key, and values from
    example files.
    """

    rows: dict[str, tuple[str, str]]
    files: list[Any]
    section: str = ""  # the section of the keys, with a dot at its end

    @classmethod
    def read(cls, path: str, *tables: str) -> Page:
        """Reads the tables under these headings. A later table overrides an earlier one, unless its text is empty."""
        rows: dict[str, tuple[str, str]] = {}
        for heading in tables:
            text = "".join(f"{(_PAGES / page).read_text()}\n## " for page in ("definition.md", "parameters.md"))
            rest = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
            for key, value, why in re.findall(r"^\| `([a-z0-9_.]+)` \| (.*?) \| (.*?) ?\|$", rest, re.MULTILINE):
                rows[key] = (value, why or rows.get(key, ("", ""))[1])
        if not rows:
            raise GpufleetError(
                f"docs/ has no table under {' or '.join(tables)}, from which the schema takes its words."
            )
        kind = tables[-1].removeprefix("job.parameters of ")
        named = [file for file in _files() if kind == tables[-1] or file.get("job", {}).get("experiment") == kind]
        words = cls(rows, named)
        for key in path.split("."):
            words = words.section_at(key)
        return replace(words, section="")

    def section_at(self, key: str) -> Page:
        """What the pages say about the section at `key`."""
        files = [file[key] for file in self.files if isinstance(file, dict) and key in file]
        return Page(self.rows, files, f"{self.section}{key}.")

    def words(self, key: str) -> tuple[str, str]:
        """The columns `Value` and `Why` of a key, from the key's own row; if it has none, from the row of its
        section.
        """
        for name in (f"{self.section}{key}", key, self.section.rstrip(".")):
            if name in self.rows:
                return self.rows[name]
        return "", ""

    def describe(self, key: str, allowed: str, about: str = "") -> str:
        """The meaning of a key, and the allowed values. If the pages do not explain the key, the meaning of its
        section, `about`, is used.
        """
        value, why = map(plain, self.words(key))
        return ". ".join(filter(None, ((why or about).rstrip("."), (value or allowed).rstrip(".")))) + "."

    def examples(self, key: str, field_schema: Schema, allowed: str) -> Schema:
        """An example of the key's value: from an example file; if there is none, from the pages; if there is none, any
        value except the default.
        """
        from jsonschema import Draft7Validator  # imported here, because it is a development tool

        values = [file[key] for file in self.files if isinstance(file, dict) and key in file]
        for text in [
            *re.findall("`(.*?)`", " ".join(self.words(key))),
            *re.findall(r"such as (\[.*?\]|\{.*?\}|[^\s;]+)", allowed),
        ]:
            whole = text.replace("...", "0123456789abcdef0")
            values += [yaml.safe_load(whole) if whole[0] in "{[" else whole]
        default = field_schema.get("default")
        for arm in (field_schema, *field_schema.get("anyOf", [])):
            choices = [True, False] if arm.get("type") == "boolean" else arm.get("enum", [])
            values += [choice for choice in choices if choice not in (default, None)]
            values += [arm[name] for name in ("default", "minimum") if arm.get(name) is not None]
        takes = Draft7Validator(field_schema).is_valid
        return {"examples": [next(filter(takes, values))]}


@functools.cache
def _files() -> list[Any]:
    """The definition files in the pages and in examples/."""
    pages = [page.read_text().split("```yaml\n")[1:] for page in sorted(_PAGES.glob("*.md"))]
    texts = [block.partition("```")[0] for blocks in pages for block in blocks]
    texts += [file.read_text() for file in sorted((_PAGES.parent / "examples").rglob("*.yaml"))]
    return [yaml.safe_load(text) for text in texts]


def plain(cell: str) -> str:
    """A cell of a table as text: `**spot** or [block](x.md)` is `spot (the default) or block`."""
    cell = re.sub(r"\[(.*?)\]\([^)]*\)", r"\1", cell).replace("*required*", "required")
    return re.sub(r"^\*\*(.*?)\*\*", r"\1 (the default)", cell).replace("**", "").replace("`", "").strip()


def schema() -> Schema:
    """The schema, as JSON values."""
    pages = {name: Page.read(name, name) for name in SECTIONS}
    pages[COMMAND] = Page.read("job", "job", "A command of your own")
    kinds = {name: (_job(name, pages["job"]), f"parameters of {name}") for name in EXPERIMENTS}
    kinds[COMMAND] = (_section([Job, CommandConfig], pages[COMMAND], but=("experiment", "parameters")), COMMAND)
    kinds[COMMAND][0]["required"].append("command")
    sections = {name: _section([cls], pages[name]) for name, cls in SECTIONS.items() if name != "job"}
    definitions = {}
    for name, config in EXPERIMENTS.items():
        tables = [f"job.parameters of {title}" for title in (_EXPLAINS.get(name), name) if title]
        page = Page.read("job.parameters", "Keys of several experiments", *tables)
        definitions[f"parameters of {name}"] = _section([config], page)
    definitions[COMMAND] = _section([CommandConfig], pages[COMMAND], partial=True)
    definitions |= {
        f"{name} laid over": _section([SECTIONS[name]], pages[name], partial=True) for name in OVERLAID if name != "job"
    }
    laid_over = {name: {"$ref": f"#/definitions/{name} laid over"} for name in OVERLAID if name != "job"}
    every_job: Schema = {
        "type": "object",
        "properties": {
            "experiment": _field(Job, "experiment", pages["job"]),
            "image": _field(Job, "image", pages["job"]),
            "command": _field(CommandConfig, "command", pages[COMMAND]) | _text(Rule()),
        },
    }
    one_job = {
        "job": {"oneOf": [{"required": ["experiment"]}, {"required": ["command"]}]}
    }  # each stage has its own job
    of_stage = {key: laid_over.get(key, {"type": "object"}) for key in STAGE_KEYS if key != "name"}
    stays = "begins on the node of the stage before it, however that one ended: in all stages but the first, or in none"
    switch: Schema = {"type": "boolean", "enum": [True], "description": stays}
    named = pattern(f"^{STAGE_NAME.pattern}$", "1 to 20 of a-z, 0-9 and _, beginning with a letter")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "gpufleet: the definition of one run",
        "type": "object",
        "properties": {
            **sections,
            "job": every_job,
            STAGES: {
                "description": "steps of the run, each with a job and a fleet laid over the file's",
                "type": "array",
                "minItems": 2,
                "maxItems": MOST_STAGES,
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string", **named}, **of_stage, STAYS: switch},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            RERUN: {
                "description": "begins with a later stage, and takes the outputs of earlier ones from another run",
                **_object({"run": {"type": "string"}, "from": {"type": "string"}}),
            },
            "rehearsal": {"description": "the same job, small enough for a laptop: laid over the sections above"},
            "scenarios": {"description": "variants laid over the file, for `gpufleet compare`"},
        },
        "required": [name for name, cls in SECTIONS.items() if _required(cls)],
        "additionalProperties": False,
        "allOf": [
            {"if": {"not": {"required": [STAGES]}}, "then": {"properties": one_job}},
            *between.of_every_kind(),
            *(_kind(name, job, over, laid_over) for name, (job, over) in kinds.items()),
        ],
        "definitions": definitions,
    }


def shared() -> Schema:
    """The schema, in which a key with the same description in several places is described only once, under
    `definitions`.
    """
    tree = json.loads(json.dumps(schema()))  # a copy, because the same Python object occurs several times in schema()
    counts = Counter(json.dumps(section[key]) for section, key in _keys(tree))
    numbers, names, parts = Counter[str](), dict[str, str](), [tree]
    for part in parts:  # the list grows during the loop, because a shared key may contain shared keys
        for section, key in _keys(part):
            text = json.dumps(section[key])
            if counts[text] > 1 and len(text) >= LEAST_SHARED:
                if text not in names:
                    numbers[key] += 1
                    names[text] = f"{key} {numbers[key]}"
                    parts.append(section[key])
                section[key] = {"$ref": f"#/definitions/{names[text]}"}
    tree["definitions"] |= zip(names.values(), parts[1:], strict=True)
    return cast(Schema, tree)


def _keys(part: Any) -> Iterator[tuple[Schema, str]]:
    """Yields each key that a part of the schema describes, with its section; a key comes before the keys within it."""
    for word, child in part.items() if isinstance(part, dict) else enumerate(part if isinstance(part, list) else ()):
        if word == "properties":
            yield from ((child, key) for key in child)
        yield from _keys(child)


def text() -> str:
    return FILE.read_text(encoding="utf-8")


def write() -> None:
    """Writes the shipped file from this clone's code and pages. Each innermost object is on one line."""
    text = json.dumps(shared(), indent=1, ensure_ascii=False) + "\n"
    innermost = re.compile(r"(?<=[\[{])\n\s+([^\[\]{}]*)\n\s+(?=[\]}])")
    FILE.write_text(innermost.sub(lambda match: re.sub(r"\n\s+", " ", match[1]), text), encoding="utf-8")


def modeline(folder: Path, project: Path) -> str:
    """The line that leads an editor from a file in `folder` to the `project`'s copy of the schema; empty if there is no
    copy, because the path to the installed schema is valid on this machine only.
    """
    for file in (project.resolve() / SCHEMA, project.resolve() / "infra" / "definition" / FILE.name):
        if file.is_file():
            return MODELINE + os.path.relpath(file, folder.resolve())
    return ""


def _kind(name: str, job: Schema, overlay: str, laid_over: Schema) -> Schema:
    """The part of the schema for a file whose job is of this kind."""
    own = {"$ref": f"#/definitions/{overlay}"}
    of_job = own if name == COMMAND else _object({"parameters": own})
    sections = {"job": of_job, **laid_over}
    variant = _section([Variant], Page.read("scenarios", "scenarios"))["properties"]
    asks: Schema = {"required": ["command"]}
    storage: Schema = {"properties": {"dataset": {"enum": [None, ""]}, "base_weights": {"type": "null"}}}
    if name != COMMAND:
        asks = {"properties": {"experiment": {"const": name}}, "required": ["experiment"]}
        storage = {"required": ["dataset"]}
    return {
        "if": {"properties": {"job": asks}, "required": ["job"]},
        "then": {
            "properties": {
                "job": job,
                "storage": storage,
                "rehearsal": _object(
                    {**sections, "interruptions": _section([Interruptions], Page.read("rehearsal", "rehearsal"))}
                ),
                "scenarios": {
                    "type": ["object", "null"],
                    "maxProperties": MOST_SCENARIOS,
                    **_names(SCENARIO_NAME, "a name of at most 40 of a-z 0-9 . -, not beginning with . or -"),
                    "additionalProperties": _object({**variant, **sections}),
                },
            },
            "required": ["storage"] if "required" in storage else [],
            "allOf": between.conditions(name),
        },
    }


def _job(experiment: str, page: Page) -> Schema:
    """The section `job` of a ready-made job."""
    parameters = {"$ref": f"#/definitions/parameters of {experiment}"}
    keys = {key: _field(Job, key, page) for key in READY_MADE if key != "parameters"}
    return {**_object({**keys, "parameters": parameters}), "type": "object", "required": ["experiment", "image"]}


def _section(
    classes: list[type[Any]], page: Page, *, partial: bool = False, but: tuple[str, ...] = (), default: Any = None
) -> Any:
    """The keys of dataclasses as one section. If `partial`, the section replaces keys of another section, so that no
    key is required. A key with a `default` in the surrounding section is not required either.
    """
    properties, required = {}, []
    for cls in classes:
        for spec in dataclasses.fields(cls):
            if spec.name in but:
                continue
            properties[key_of(spec.name)] = _field(cls, spec.name, page, partial=partial, default=default)
            if not partial and default is None and spec.name in _required(cls):
                required.append(spec.name)
    section = _object(properties)
    if required:
        section |= {"type": "object", "required": required}
    return {"description": _meaning(classes[-1])} | section


def _meaning(cls: type[Any]) -> str:
    """The first paragraph of the docstring of the section's class."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _object(properties: Schema) -> Schema:
    """The schema of a section that may be empty."""
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _required(cls: type[Any]) -> list[str]:
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing is f.default_factory]


def _field(cls: type[Any], name: str, page: Page, *, partial: bool = False, default: Any = None) -> Schema:
    """The schema of one key. `default` is the default of the surrounding section, if it has one."""
    (spec,) = (field for field in dataclasses.fields(cls) if field.name == name)
    hint, rule = hints_of(cls)[name], rule_of_key(cls, spec)  # type: ignore[arg-type]  # mypy: type[Any] unhashable
    preset = spec.default if default is None else getattr(default, name)
    inner, optional = unwrap(hint)
    if is_dataclass(inner) and isinstance(inner, type):
        own = preset if isinstance(preset, inner) else None
        field_schema: Schema = _section([inner], page.section_at(key_of(name)), partial=partial, default=own)
        if any(page.words(key_of(name))):
            field_schema["description"] = page.describe(key_of(name), "")
        if optional and field_schema["type"] == "object":
            field_schema["type"] = ["object", "null"]
        if words := getattr(inner, "WORDS", {}):
            field_schema |= {
                "type": [*field_schema["type"], "string"],
                "if": {"type": "string"},
                "then": {"enum": [*words]},
            }
        return field_schema
    field_schema = _value(inner, rule) | _KNOWN.get((cls, name), {})
    # a scenario may list a retired type, which is then shown with the reason
    if (cls, name) == (Fleet, "instance_types") and not partial:
        field_schema["items"] = {"enum": sorted(between.USABLE)}
    if optional or (inner is str and spec.default == ""):
        empty = {"type": "null"} if optional else {"enum": [None, ""]}
        field_schema = {"anyOf": [field_schema, empty]}
    allowed = REQUIRED.get((cls, name)) or describe(hint, rule)
    field_schema["description"] = page.describe(key_of(name), allowed, _meaning(cls) if page.section else "")
    if preset is not dataclasses.MISSING and preset is not None and not partial:
        field_schema["default"] = (
            list(preset) if isinstance(preset, tuple) else float(preset) if type(preset) is Decimal else preset
        )
    if (cls, name) in _EXAMPLES:
        return field_schema | {"examples": [_EXAMPLES[cls, name]]}
    return field_schema | page.examples(key_of(name), field_schema, allowed)


def _value(hint: Any, rule: Rule) -> Schema:
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
        return {"type": "string", **pattern(f"^{_TIME}$" if rule.moment else MOMENT, describe(hint, rule))}
    bounds = {"minimum": rule.minimum, "maximum": rule.maximum}
    stated = {key: bound for key, bound in bounds.items() if bound is not None}
    return {"type": "integer" if hint is int else "number", **stated}


def _text(rule: Rule) -> Schema:
    """The schema of text. This schema also accepts numbers and truth values, because YAML reads text that looks like a
    number or a truth value as such a value.
    """
    takes = re.compile(rule.pattern or "[\\s\\S]*").fullmatch
    looks = {"number": "-1.5", "integer": "1", "boolean": "true"}
    kinds = ["string", *(kind for kind, example in looks.items() if takes(example))]
    unsigned = {"minimum": 0} if "integer" in kinds and "number" not in kinds else {}
    form = pattern(_anchored(rule.pattern), rule.allowed) if rule.pattern else _SOME_TEXT
    return {"type": [kind for kind in kinds if kind != "integer" or unsigned], **unsigned, **form}


def _anchored(pattern: str) -> str:
    """The pattern with anchors, because JSON Schema's patterns may otherwise match anywhere in a text."""
    return f"^(?:{pattern})$"


def _names(of: re.Pattern[str], allowed: str) -> Schema:
    return {"propertyNames": pattern(_anchored(of.pattern), allowed)}


_PAGES = Path(__file__).resolve().parents[2] / "docs"
_NO_KEY = "No key: run.json is no secret. Put it under job.secrets, and read $NAME. "
# These tables also explain the keys of other jobs that have no row of their own.
_EXPLAINS = {"kernel-sft": "sft-h100"}
_SOME_TEXT = pattern(r"\S", "text that is not empty")
_TEXT_OF: Schema = {"type": ["string", "number", "boolean"]}
_PLACE = pattern(between.PLACE, PLACE)
_FILLED, _FILLED_AFTER = (
    pattern(between.known_placeholders(extra=extra) + r"[\s\S]*\S", "text with placeholders that stand for something")
    for extra in (False, True)
)
_STARTED, _STARTED_AFTER = (
    {
        **condition,
        "pattern": between.no_key(condition["pattern"][1:]),
        "patternErrorMessage": _NO_KEY + condition["patternErrorMessage"],
    }
    for condition in (_FILLED, _FILLED_AFTER)
)
_BELOW = pattern(between.NAMES_BELOW + r"[\s\S]*\S", "names below checkpoint.folder")
_SECRET = {"type": "string", **pattern(_anchored(SECRET.pattern), "ssm:/name or secretsmanager:name")}
_VARIABLE = "a variable of the environment: letters, digits and _, not beginning with a digit"
_GIVEN = {"propertyNames": pattern(f"^{between.NODES_OWN}{VARIABLE.pattern}$", f"{_VARIABLE}; AWS_... is the node's")}
_SECRETS: Schema = _names(VARIABLE, _VARIABLE) | {"additionalProperties": _SECRET}
_ZONE_IDS = "|".join(f"{region.zone_id_prefix}az[1-8]" for region in known_regions().values())
# Restrictions that come from checks.py, and not from a type or a rule of the key.
_KNOWN: dict[tuple[type[Any], str], Schema] = {
    (Fleet, "region"): {"type": "string", "enum": [*known_regions()]},
    (Fleet, "zones"): {
        "items": {
            "anyOf": [
                {"enum": [zone for region in known_regions().values() for zone in region.zones]},
                {
                    "type": "string",
                    **pattern(_anchored(_ZONE_IDS), "a zone's name or id, such as us-east-2a or use2-az1"),
                },
            ]
        },
        "uniqueItems": True,
    },
    (Fleet, "instance_types"): {"items": {"enum": sorted(between.SHIPPED.instances)}, "uniqueItems": True},
    (Job, "experiment"): {"enum": [*EXPERIMENTS]},
    (Storage, "dataset"): _PLACE,
    (Storage, "base_weights"): _PLACE,
    (Storage, "inputs"): {
        **_names(INPUT_NAME, "a name of at most 40 of a-z 0-9 _, beginning with a letter"),
        "additionalProperties": _TEXT_OF | pattern(between.ANYWHERE, ANYWHERE),
    },
    (Code, "folder"): pattern(between.FOLDER, "a folder, relative to the project"),
    (CommandConfig, "command"): _STARTED,
    (CommandConfig, "setup"): _STARTED,
    (CommandConfig, "workdir"): pattern(
        between.INSIDE + between.known_placeholders()[1:] + r"[\s\S]*\S",
        "a folder of the run: {code}, {checkpoints}, ...",
    ),
    (Resume, "args"): _STARTED_AFTER,
    (Resume, "env"): {"additionalProperties": _TEXT_OF | _FILLED_AFTER},
    (CommandConfig, "outputs"): {"items": _TEXT_OF | _FILLED},
    (CommandCheckpoint, "folder"): pattern(
        between.OF_ITS_OWN + between.known_placeholders()[1:] + r"[\s\S]*\S", "{checkpoints}, or a folder of its own"
    ),
    (CommandCheckpoint, "each"): {
        "anyOf": [_TEXT_OF | _BELOW, {"type": "array", "items": _TEXT_OF | _BELOW}],
    },
    (CommandCheckpoint, "also"): {"items": _TEXT_OF | _BELOW},
    (Progress, "file"): _FILLED,
    (Account, "tags"): _names(TAG_KEY, "as run.owner, without aws: or gpufleet: in front, and not Name"),
    (CommandConfig, "env"): _GIVEN | {"additionalProperties": _TEXT_OF | _STARTED},
    (CommandConfig, "secrets"): _SECRETS,
    (Log, "env"): _GIVEN | {"additionalProperties": _TEXT_OF | pattern(between.no_key(), _NO_KEY)},
    (Log, "secrets"): _SECRETS,
    (CommandConfig, "registry"): _SECRET,
}
# Examples for keys of which no page and no file has an example.
_EXAMPLES: dict[tuple[type[Any], str], Any] = {
    (CommandConfig, "workdir"): "{code}/trainer",
    (Code, "exclude"): ["data", "*.ckpt"],
    (Log, "env"): {"WANDB_PROJECT": "mine"},
    (Log, "secrets"): {"WANDB_API_KEY": "ssm:/mine/wandb"},
    (Resume, "env"): {"RESUME_FROM": "{checkpoint}"},
    (CommandCheckpoint, "complete"): FORMATS["hf-trainer"].complete,
    (CommandCheckpoint, "unless"): FORMATS["hf-trainer"].unless,
    (CommandCheckpoint, "also"): ["tokenizer.json"],
    (Progress, "file"): "{outputs}/log.jsonl",
    (ExitRules, "fatal"): [2],
    (ExitRules, "again"): [75],
    (Estimate, "step_ms"): [590],
}


if __name__ == "__main__":
    write()
