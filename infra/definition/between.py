"""Rules between the keys of a definition file, as conditions of a JSON Schema: the rules of checks.py and
job.kind.command that JSON Schema can express. tests/infra/definition/test_json_schema.py compares them with the loader,
and names the rules that JSON Schema cannot express.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from gpufleet.infra.catalog import Instance, load_catalog
from gpufleet.infra.catalog.regions import Region, known_regions
from gpufleet.infra.definition.checks import BUCKET, ROOT_MINIMUM_GIB
from gpufleet.infra.definition.model import Notify
from gpufleet.infra.definition.stages import STAGES
from gpufleet.infra.market.fallback import MOST_HEARTBEAT_S
from gpufleet.job.kind import COMMAND, EXPERIMENTS
from gpufleet.job.kind.command import (
    ALONE,
    FORMATS,
    GIVES_RANKS,
    GROUPS,
    NODE_RANK,
    PLACEHOLDER,
    PLACEHOLDER_NAMES,
    STATIC,
)
from gpufleet.job.kind.common import DEVICE_RESERVE_GB
from gpufleet.job.kind.variables import KEY_LIKE

Schema = dict[str, Any]

# A folder's name, as far as the text alone can be checked. (What `a/..` means is known only when the path is resolved.)
_PLAIN = r"(?!\s)[^:\\\x00-\x1f\x7f]*[^:\\\s\x00-\x1f\x7f]"
_OUTSIDE = r"(\./+)*\.\.(/|$)|/"
BELOW = rf"^(?!(.*/)?\.\.(/|$))(?![~/])(?!\.?/*$){_PLAIN}$"
PLACE = rf"^(?:{BUCKET.pattern})$|{BELOW}"
ANYWHERE = rf"^(?:{BUCKET.pattern})$|^(?!~){_PLAIN}$"
FOLDER = rf"^(?!~){_PLAIN}$"
INSIDE = rf"^(?!{_OUTSIDE})"
OF_ITS_OWN = rf"^(?!{_OUTSIDE})(?!(\.?/)*(\.|\{{code\}})?/*$)"
NAMES_BELOW = r"^(?!/|(.*/)?\.\.(/|$))"
NODES_OWN = "(?!AWS_|GPUFLEET_)"
_COUNTED = r"\{(step|epoch)(:[0-9a-z]+)?\}"


def no_key(pattern: str = "") -> str:
    """A pattern for text that contains nothing like a secret key."""
    return rf"^(?![\s\S]*(?:{KEY_LIKE.pattern})){pattern}"


def known_placeholders(*, extra: bool = False) -> str:
    """A pattern for text in which every placeholder is known; if `extra`, the placeholders that have a value after a
    restore are known too.
    """
    names = PLACEHOLDER_NAMES.pattern + ("|checkpoint|step|epoch" if extra else "")
    unknown = PLACEHOLDER.pattern.replace(r"\{(", rf"\{{(?!(?:{names})(?::[0-9a-z]+)?\}}(?!\}}))(", 1)
    return rf"^(?![\s\S]*{unknown})"


def pattern(text: str, allowed: str) -> Schema:
    """A pattern, with the message that VS Code and the YAML language server show if a text does not match."""
    return {"pattern": text, "patternErrorMessage": f"Allowed: {allowed}."}


def limited(path: str, value: Any) -> Schema:
    """The condition that the value at `path`, if the file has one, matches `value`."""
    for key in reversed(path.split(".")):
        value = {"properties": {key: value}}
    schema: Schema = value
    return schema


def has(path: str, value: Schema | None = None) -> Schema:
    """The condition that the file has a value at `path` that is not null and matches `value`."""
    schema: Schema = {"not": {"type": "null"}, **(value or {})}
    for key in reversed(path.split(".")):
        schema = {"type": "object", "properties": {key: schema}, "required": [key]}
    return schema


def each_of(path: str, value: Schema, *, one: bool = False) -> Schema:
    """The condition that the text at `path`, or each text of a list there, matches `value`. If `one`, a single matching
    text is enough.
    """
    text = {"type": "string", **value}
    return limited(path, {"if": {"type": "array"}, "then": {"contains" if one else "items": text}, "else": text})


def when(condition: Schema, then: Schema) -> Schema:
    return {"if": condition, "then": then}


def every(*schemas: Schema) -> Schema:
    return {"allOf": [*schemas]}


def some(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def no(schema: Schema) -> Schema:
    return {"not": schema}


# the catalog as shipped, because the schema must not depend on a project's prices
SHIPPED = load_catalog(Path(__file__).parent)
USABLE: dict[str, Instance] = {name: kind for name, kind in SHIPPED.instances.items() if not kind.unusable}
_LISTED = "fleet.instance_types"
_NONE: Schema = {"type": "null"}
_EMPTY: Schema = {"anyOf": [{"enum": [None, ""]}, {"type": ["array", "object"], "maxItems": 0, "maxProperties": 0}]}


def _types(of: Any) -> Schema:
    """A condition that allows only instance types for which `of` is true."""
    return limited(_LISTED, {"items": {"enum": sorted(name for name, kind in USABLE.items() if of(kind))}})


def of_every_kind() -> Iterator[Schema]:
    """The rules for every file."""
    listed = {region for kind in USABLE.values() for region in kind.regions or ()}
    for region in known_regions().values():
        here = has("fleet.region", {"const": region.name})
        yield when(here, every(*_in_region(region, offers=region.name in listed)))
    yield limited("storage.root", {"properties": {"size_gib": {"minimum": ROOT_MINIMUM_GIB}, "snapshot": _NONE}})
    several, one = has("fleet.nodes", {"minimum": 2}), {"maxItems": 1}
    alone: Schema = {"properties": {"zones": one, "instance_types": one}}
    yield when(several, every(limited("fleet", alone), limited("fleet.fallback", {"const": "none"})))
    yield when(has("fleet.cards", {"const": "all"}), every(several, _types(lambda kind: kind.efa_cards > 1)))
    yield when(has("fleet.capacity", {"const": "block"}), has("fleet.block"))
    yield when(has("fleet.block"), limited("fleet", alone))
    falls_back = every(has("limits.deadline"), limited("fleet.capacity", {"const": "spot"}))
    yield when(has("fleet.fallback", {"const": "on-demand"}), falls_back)
    silent = limited("silent_hours", {"const": float(Notify().silent_hours)})
    asked = {"properties": {"notify": some(_NONE, every(limited("webhook", _NONE), silent), has("email"))}}
    yield asked


def _in_region(region: Region, *, offers: bool) -> Iterator[Schema]:
    names = {"items": {"enum": [*region.zones]}}
    prefix = region.zone_id_prefix
    ids = {
        "items": {"type": "string", **pattern(f"^{prefix}az[1-8]$", f"ids of zones of {region.name}, as {prefix}az1")}
    }
    yield limited("fleet.zones", some(names, ids))
    if offers:
        yield _types(lambda kind: kind.regions is None or region.name in kind.regions)
    yield limited("account.kms_key", pattern(f"^arn:aws:kms:{region.name}:", f"a key of {region.name}"))


def of_ready_made(name: str) -> Iterator[Schema]:
    """The rules for a file whose job is this experiment."""
    config: Any = EXPERIMENTS[name]()
    on_gpus = no(has("job.parameters.device", {"const": "cpu"}))
    asked = has("job.parameters.precision.compute", {"const": "bf16"})
    if config.products() == "bf16":
        asked = no(has("job.parameters.precision.compute", {"const": "fp32"}))
    yield when(every(on_gpus, asked), _types(lambda kind: kind.gpu.bf16))
    if hasattr(config.precision, "base"):
        narrow = replace(config, precision=replace(config.precision, base="fp8")).demands.capability
        fp8 = has("job.parameters.precision.base", {"const": "fp8"})
        yield when(every(on_gpus, fp8), _types(lambda kind: not kind.too_old(narrow)))
    yield when(has("fleet.fallback", {"const": "on-demand"}), _heartbeat("job.parameters"))
    if hasattr(config, "candidates"):
        whole = {"part": no({"const": "judge"}), "candidates": _EMPTY}
        yield when(no(has(STAGES)), limited("job.parameters", {"properties": whole}))
    no_inputs = limited("storage.inputs", _NONE)
    if hasattr(getattr(config, "eval", None), "judge"):
        by_name = has("job.parameters.eval.judge", {"not": {"enum": ["", "base"]}})
        yield when(no(by_name), no_inputs)
        yield when(every(by_name, no(has(STAGES))), has("storage.inputs"))
    else:
        yield no_inputs
    if config.demands.one_node:
        yield limited("fleet.nodes", {"maximum": 1})
    if not config.sizes().base_weights:
        yield limited("storage.base_weights", _NONE)
    else:
        generated = has("job.parameters.data.source", {"pattern": "^generated-"})
        yield when(no(generated), has("storage.base_weights"))
    yield from _enough_gpus("job.parameters.gpus", on_gpus)
    phases = sum(1 for phase in config.phases() if phase.steps)
    yield limited("estimate.step_ms", {"minItems": phases, "maxItems": phases})
    lists = {"optim.lr": phases, "optim.betas": 2, "optim.momentum": 2}
    for path in (*lists, "eval.prompts", "towers.query", "towers.model"):
        value: Any = config
        for key in path.split("."):
            value = getattr(value, key, None)
        if isinstance(value, tuple):
            most = {"maxItems": lists[path]} if path in lists else {}
            yield limited(f"job.parameters.{path}", {"minItems": lists.get(path, 1), **most})


def _heartbeat(of: str) -> Schema:
    return limited(f"{of}.checkpoint.heartbeat_s", {"maximum": MOST_HEARTBEAT_S})


def _enough_gpus(path: str, condition: Schema) -> Iterator[Schema]:
    """A condition for the number of GPUs: at least one, and at most as many as each listed type has (1, 2, 4 or 8)."""
    counts = sorted({kind.gpu_count for kind in USABLE.values() if kind.gpu_count})
    yield when(condition, _types(lambda kind: kind.gpu_count > 0))
    for fewer, count in pairwise(counts):
        asks = has(path, {"minimum": fewer + 1})
        yield when(every(condition, asks), _types(lambda kind, count=count: kind.gpu_count >= count))


def of_a_command() -> Iterator[Schema]:
    """The rules for a file whose job is a command."""
    on_demand = has("fleet.capacity", {"enum": ["on-demand", "block"]})
    yield limited("estimate.step_ms", {"minItems": 1, "maxItems": 1})
    saves_nothing = some(has("job.checkpoint", {"const": "none"}), has("job.checkpoint.format", {"const": "none"}))
    rewritten = has("job.checkpoint.rewritten", {"const": True})
    named = has("job.checkpoint.each", {"not": _EMPTY})
    yield when(every(named, rewritten), each_of("job.checkpoint.each", {"not": {"pattern": _COUNTED}}))
    yield when(
        every(named, no(rewritten)), each_of("job.checkpoint.each", pattern(_COUNTED, "names with {step} or {epoch}"))
    )
    by_format = has("job.checkpoint.format", {"enum": [name for name, form in FORMATS.items() if form.each]})
    yield when(no(some(named, saves_nothing)), every(by_format, no(rewritten)))
    has_interval = some(*(has(f"job.checkpoint.every.{key}") for key in ("steps", "minutes", "epochs")))
    yield some(on_demand, saves_nothing, has_interval)
    none_beside = dict.fromkeys(("each", "complete", "unless", "also"), _EMPTY)
    yield when(saves_nothing, limited("job.checkpoint", {"properties": none_beside}))
    yield from _lengths()
    yield from _output()
    yield from _signals()
    yield from _hardware()


def _lengths() -> Iterator[Schema]:
    steps, epochs, hours, per_epoch = (
        has(f"job.work.{key}") for key in ("steps", "epochs", "hours", "steps_per_epoch")
    )
    for one, other in combinations((steps, epochs, hours), 2):
        yield no(every(one, other))
    saves = {key: has(f"job.checkpoint.every.{key}") for key in ("steps", "minutes", "epochs")}
    for one, other in combinations(saves.values(), 2):
        yield no(every(one, other))
    counts_steps = some(steps, every(epochs, per_epoch))
    yield when(saves["steps"], counts_steps)
    yield when(saves["epochs"], some(epochs, every(steps, per_epoch)))
    yield when(has("job.work.step_ms"), no(every(epochs, no(per_epoch))))
    yield when(has("job.work.epoch_minutes"), no(counts_steps))
    above_0 = {"exclusiveMinimum": 0}
    for key, most in (("step_ms", 1e9), ("epoch_minutes", 1e6)):
        yield limited(f"job.work.{key}", {"additionalProperties": {**above_0, "exclusiveMaximum": most}})
    bounds = {"properties": {"low": above_0}, "required": ["low", "likely", "high"]}
    yield when(hours, limited("job.work.hours", bounds))
    falls_back = has("fleet.fallback", {"const": "on-demand"})
    yield when(falls_back, every(some(steps, epochs, hours), _heartbeat("job")))


def _output() -> Iterator[Schema]:
    """The rules for how a command reports its step: by its own patterns, by a file, or by the patterns of a format."""
    telling = [name for name, form in FORMATS.items() if form.progress]
    stdout = has("job.progress.stdout", {"not": _EMPTY})
    silent = every(no(stdout), no(has("job.progress.file")))
    by_checkpoint = every(no(has("job.progress.format")), has("job.checkpoint.format", {"enum": telling}))
    yield when(silent, some(has("job.progress.format", {"enum": telling}), by_checkpoint))
    unknown = rf"\(\?P<(?!({'|'.join(GROUPS)})>)"
    yield each_of("job.progress.stdout", pattern(rf"^(?![\s\S]*{unknown})", f"groups named {', '.join(GROUPS)}"))

    def names_one(group: str) -> Schema:
        return each_of("job.progress.stdout", pattern(rf"\(\?P<({group})>", "a group step or epoch"), one=True)

    yield when(stdout, names_one("step|epoch"))
    counts_steps = no(every(has("job.work.epochs"), no(has("job.work.steps_per_epoch"))))
    says_steps = some(names_one("step"), names_one("batch"), has("job.work.steps_per_epoch"))
    yield when(every(stdout, has("job.work.steps"), counts_steps), says_steps)


def _signals() -> Iterator[Schema]:
    """The rules for commands with torchrun, and for several nodes."""
    torchrun = has("job.command", {"pattern": r"^(?![\s\S]*--signals-to-handle)[\s\S]*torchrun"})
    apart = {"not": {"enum": ["USR1", "USR2"]}}
    yield when(torchrun, limited("job.stop", {"properties": {"signal": apart, "request": apart}}))
    several = has("fleet.nodes", {"minimum": 2})
    yield when(several, limited("job.command", pattern(rf"^(?![\s\S]*{ALONE.pattern})", f"{STATIC}, of several nodes")))
    ranks = pattern(rf"\{{node_rank\}}|{NODE_RANK}", "{node_rank}, by which each node knows its ranks")
    gives = has("job.command", pattern(GIVES_RANKS.pattern, "a rendezvous, which gives out ranks"))
    by_env = has("job.env", no({"additionalProperties": no(ranks)}))
    yield when(several, some(by_env, gives, *(has(f"job.{key}", ranks) for key in ("command", "setup", "workdir"))))


def _hardware() -> Iterator[Schema]:
    on_cpu = has("job.device", {"const": "cpu"})
    on_gpus = no(on_cpu)
    yield from _enough_gpus("job.gpus", on_gpus)
    like = some(*({"items": {"enum": names}} for names in _by_gpus().values()))
    any_gpus = some(on_cpu, has("job.gpus"), has("job.checkpoint.same_gpus", {"const": False}))
    yield some(any_gpus, limited(_LISTED, like))
    for memory in sorted({kind.gpu_memory_gb for kind in USABLE.values()}):
        too_much = has("job.memory_gb", {"exclusiveMinimum": memory - DEVICE_RESERVE_GB})
        yield when(every(on_gpus, too_much), _types(lambda kind, memory=memory: kind.gpu_memory_gb > memory))
    gpus = "|".join(sorted({re.escape(kind.gpu.name) for kind in SHIPPED.instances.values()}))
    names = {"propertyNames": pattern(f"^([1-9][0-9]{{0,2}} ?x ?)?({gpus})$", "a GPU, or so many: L40S, 8 x H100")}
    yield limited("job.work", {"properties": {"step_ms": names, "epoch_minutes": names}})


def _by_gpus() -> dict[int, list[str]]:
    types_by_gpus: dict[int, list[str]] = {}
    for name, kind in sorted(USABLE.items()):
        types_by_gpus.setdefault(kind.gpu_count, []).append(name)
    return types_by_gpus


def conditions(name: str) -> list[Schema]:
    """The rules between the keys of a file with this kind of job."""
    return [*(of_a_command() if name == COMMAND else of_ready_made(name))]
