"""Builds the dataclasses of infra.definition from a tree of text, and collects all problems in the tree.

The allowed values of keys are in rules.py; those of a job's parameters are in the field metadata of its config.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from itertools import islice
from typing import Any, Literal

from gpufleet.infra.definition.model import (
    SUPERVISOR_IMAGE,
    Account,
    Estimate,
    Fleet,
    Goal,
    Job,
    Limits,
    Notify,
    Run,
    Storage,
)
from gpufleet.infra.definition.rules import REQUIRED, RULES
from gpufleet.infra.definition.yaml_tree import MAX_DEPTH, Items, Mapping, Node, Scalar, find_node
from gpufleet.infra.errors import Problem
from gpufleet.job.kind import COMMAND, EXPERIMENTS, KINDS, JobConfig
from gpufleet.job.kind.convert import Rule, describe, key_of, rule_of, unwrap
from gpufleet.job.kind.convert import hints as hints_of

SECTIONS: dict[str, type[Any]] = {
    "run": Run,
    "job": Job,
    "fleet": Fleet,
    "storage": Storage,
    "limits": Limits,
    "goal": Goal,
    "account": Account,
    "notify": Notify,
    "estimate": Estimate,
}
# The right section of a key, to be named if the key is in a wrong section.
_HOME = {f.name: section for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
# Names of the same keys in other tools, and our names.
_ALSO = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "learning_rate": "lr",
    "learning-rate": "lr",
    "accelerators": "instance_types",
    "instance_type": "instance_types",
    "num_nodes": "nodes",
    "spot": "capacity",
    "use_spot": "capacity",
    "on_demand": "capacity",
    "envs": "env",
    "environment": "env",
    "run": "command",
    "script": "command",
    "commands": "command",
    "workdir": "code",
    "working_dir": "code",
    "budget": "max_usd",
    "max_cost": "max_usd",
    "max_price": "max_usd",
    "max_duration": "max_hours",
    "timeout": "max_hours",
    "disk_size": "size_gib",
}
_CAPACITY = "Write capacity: spot, or capacity: on-demand."
# What to write for a key of another tool, if naming our key is not enough.
_INSTEAD = dict.fromkeys(("spot", "use_spot", "on_demand"), _CAPACITY)
_ELSEWHERE = dict.fromkeys(  # what to write instead of a key that has no meaning in its section
    ("max_price", "spot_price", "max_spot_price", "max_price_per_hour"),
    "A ceiling for the price of an hour is limits.usd_per_hour.",
)
READY_MADE = ("experiment", "image", "parameters")  # the keys of a section `job` with a ready-made job
_BAD: Any = object()
_SCALARS = (str, bool, datetime, int, float, Decimal)


@dataclass(slots=True)
class Findings:
    """The problems of one tree. Each path is reported once, and consequences of a problem are not reported."""

    tree: Mapping
    # The problem of each path; None if the path is already explained by another problem.
    found: dict[str, Problem | None] = field(default_factory=dict)

    @property
    def bad(self) -> KeysView[str]:
        """The paths whose values are invalid."""
        return self.found.keys()

    @property
    def problems(self) -> list[Problem]:
        """The problems in the order in which they were found."""
        return [problem for problem in self.found.values() if problem]

    def add(
        self,
        path: str,
        allowed: str,
        hint: str = "",
        value: str | None = None,
        node: Node | None = None,
        default: str = "",
        unknown_key: bool = False,
    ) -> None:
        """Adds a problem at `path`, with the text in the file. If the file lacks the path, the problem is reported for
        the section that should have it, with the `default` that applies. Pass `node` if it cannot be found by `path`,
        because an unknown key may contain dots and brackets.
        """
        # limited, because a key may have any number of characters
        separators = islice(re.finditer(r"[.\[]", path), 2 * MAX_DEPTH)
        if path in self.found or any(path[: match.start()] in self.found for match in separators):
            return
        node = node or find_node(self.tree, path)
        if node is not None:
            written = value if value is not None else _written(node)
            self.found[path] = Problem(
                path=node.path, value=written, allowed=allowed, hint=hint, line=node.line, unknown_key=unknown_key
            )
            return
        above, _, key = path.rpartition(".")
        parent = find_node(self.tree, above)
        origin = f"{parent.path}.{key}".lstrip(".") if parent else path
        line = parent.line if parent else None
        written = value or (f"{default} (the default)" if default else "")
        self.found[path] = Problem(path=origin, value=written, allowed=allowed, hint=hint, line=line)

    def written_elsewhere(self, path: str) -> None:
        """Notes that another problem explains `path`, so that it is not reported as missing too."""
        if find_node(self.tree, path) is None:
            self.found[path] = None


def nearest(word: str, names: Iterable[str]) -> str:
    """A hint such as `Nearest: zones.`; empty if no name is similar."""
    meant = _meant(word, names)
    return f"Nearest: {meant}." if meant else ""


def _meant(word: str, names: Iterable[str]) -> str:
    """The name whose spelling is nearest to `word`; empty if none is similar."""
    import difflib  # imported here, because only the message of an error needs it

    known, low = sorted(names), word.lower()
    if _ALSO.get(low) in known:
        return _ALSO[low]
    close = difflib.get_close_matches(low, known, n=1, cutoff=0.6)
    # finds, for example, sft for sft-h100
    begun = [name for name in known if len(low) > 2 and name.startswith(f"{low}-")]
    return (close or begun)[0] if close or len(begun) == 1 else ""


def build(cls: type[Any], node: Node | None, path: str, findings: Findings, default: Any = None) -> Any:
    """The dataclass at `path`. A wrong or missing value is reported and replaced by a placeholder. A key that the file
    lacks gets its value from `default`, if the surrounding section gives one, or else from `cls`.
    """
    if cls is Job:
        return _job(node, findings)
    names = [f.name for f in dataclasses.fields(cls)]
    hints = hints_of(cls)  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable
    keys, node = list(map(key_of, names)), _as_keys(cls, node)
    hint_text = _as_section(cls, hints, node.text) if isinstance(node, Scalar) else ""
    entries = entries_of(node, path, f"a section with the keys {', '.join(keys)}", findings, hint_text)
    if not entries.keys() <= set(keys):
        check_keys(entries, keys, path, findings, _nested_keys(names, hints))
    values = _values(cls, names, entries, path, findings, default)
    return cls(**values) if default is None else dataclasses.replace(default, **values)


def _job(node: Node | None, findings: Findings) -> Job:
    """The section `job`: a ready-made job with its parameters, or a command with its keys."""
    hint_text = _as_section(Job, hints_of(Job), node.text) if isinstance(node, Scalar) else ""
    allowed = f"a section with the keys {', '.join(READY_MADE)}; or command in place of experiment"
    entries = entries_of(node, "job", allowed, findings, hint_text)
    if "command" in entries and "experiment" in entries:
        findings.add("job", "one of them", value="both command and experiment")
    check_keys(entries, job_keys(node), "job", findings)
    if not _is_command(node):
        values = _values(Job, ["experiment", "image"], entries, "job", findings)
        return Job(**values, parameters=_parameters(entries, "job.parameters", findings))
    images = ["image", "supervisor_image"]
    values = _values(Job, images, entries, "job", findings)
    if "supervisor_image" not in entries:
        values["supervisor_image"] = SUPERVISOR_IMAGE
    kind = KINDS[COMMAND]
    names = [f.name for f in dataclasses.fields(kind)]
    config = kind(**_values(kind, names, entries, "job", findings))
    return Job(**values, experiment=COMMAND, parameters=config)


@cache
def _command_keys() -> list[str]:
    """The keys of a command. The module of these keys is imported only here, because most bills do not need it."""
    return [f.name for f in dataclasses.fields(KINDS[COMMAND])]


def job_keys(node: Node | None, *, laid_over: bool = False) -> list[str]:
    """The keys that `job` may have, given its `node`; `laid_over`: in a rehearsal or scenario."""
    if not _is_command(node):
        return ["parameters"] if laid_over else list(READY_MADE)
    return _command_keys() if laid_over else ["image", "supervisor_image", *_command_keys()]


def _is_command(node: Node | None) -> bool:
    """Whether `job` is a user's command: it has the key `command`, or it has neither `command` nor `experiment` but
    other keys of a command. So a mistyped `command` is reported as one problem, and the keys beside it are not
    reported.
    """
    if not isinstance(node, Mapping) or "experiment" in node.entries:
        return isinstance(node, Mapping) and "command" in node.entries
    return bool(node.entries.keys() & set(_command_keys())) or _meant_one(node.entries.keys()) == "command"


def _meant_one(keys: Iterable[str]) -> str:
    """`command` or `experiment`, whichever is misspelled among `keys`; empty if neither is."""
    return next((meant for key in keys if (meant := _meant(key, ("command", "experiment")))), "")


def _values(
    cls: type[Any], names: Iterable[str], entries: dict[str, Node], path: str, findings: Findings, default: Any = None
) -> dict[str, Any]:
    """The typed values of a section's fields `names`, except those that keep their default."""
    hints = hints_of(cls)  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        if spec.name not in names:
            continue
        hint, rule, where = hints[spec.name], rule_of_key(cls, spec), f"{path}.{key_of(spec.name)}"
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        preset = spec.default if default is None else getattr(default, spec.name)
        allowed = REQUIRED.get((cls, spec.name), "")
        written = entries.get(key_of(spec.name))
        value = _BAD if written is None else _convert(hint, written, where, rule, findings, preset, allowed)
        if value is not _BAD:
            values[spec.name] = value
        elif required and default is None:
            if written is None:
                findings.add(where, allowed or describe(hint, rule))
            values[spec.name] = _placeholder(hint)
    return values


def entries_of(node: Node | None, path: str, allowed: str, findings: Findings, hint: str = "") -> dict[str, Node]:
    """The entries of a section. Empty if it has no keys, or if the value is not a section; the latter is reported."""
    if isinstance(node, Mapping):
        return node.entries
    if node is not None and not (isinstance(node, Scalar) and node.is_null):
        findings.add(path, allowed, hint, node=node)
    return {}


def _as_keys(cls: type[Any], node: Node | None) -> Node | None:
    """If the node is a single word and `cls` allows this word as a short form, the section that the word means;
    otherwise the node itself.
    """
    if not isinstance(node, Scalar) or node.text not in (words := getattr(cls, "WORDS", {})):
        return node
    entries: dict[str, Node] = {key: replace(node, text=text) for key, text in words[node.text].items()}
    return Mapping(path=node.path, line=node.line, entries=entries)


def _as_section(cls: type[Any], hints: dict[str, Any], text: str) -> str:
    """A hint that shows how to write a value as a section. If the value has a unit, as in `50 steps`, the hint uses the
    key with this unit. Otherwise it names each key that accepts the value, required keys first.
    """
    plain = re.sub(r"(?<=[0-9]) ?Gi?B?$", "", text, flags=re.IGNORECASE)
    specs = dataclasses.fields(cls)
    if amount := re.fullmatch(r"([0-9.]+) ?([A-Za-z]{2,})", plain):
        meant = [spec for spec in specs if spec.name.startswith(amount[2].lower().rstrip("s"))]
        plain, specs = (amount[1], tuple(meant)) if meant else (plain, specs)
    required = [spec for spec in specs if spec.default is dataclasses.MISSING is spec.default_factory]
    takes = [
        spec.name
        for spec in required or specs
        if (kind := unwrap(hints[spec.name])[0]) in _SCALARS or typing.get_origin(kind) is Literal
        if _scalar(kind, plain, rule_of_key(cls, spec))[0] is not _BAD
    ]
    ways = " or ".join(f"{{{name}: {plain}}}" for name in takes)
    is_clear = len(takes) == 1 or (1 < len(takes) < 4 and re.fullmatch("[0-9.]+", plain))
    return f"Write {ways}." if is_clear and plain else ""


def _nested_keys(names: list[str], hints: dict[str, Any]) -> dict[str, list[str]]:
    """The keys of the sections `names`, by section, each with its path, such as `optim.lr` for the key `lr` of
    `optim`.
    """
    paths_by_key: dict[str, list[str]] = {}
    for name in names:
        inner, _ = unwrap(hints[name])
        for spec in dataclasses.fields(inner) if is_dataclass(inner) else ():
            paths_by_key.setdefault(key_of(spec.name), []).append(f"{name}.{key_of(spec.name)}")
    return paths_by_key


def check_keys(
    entries: dict[str, Node],
    names: list[str],
    path: str,
    findings: Findings,
    below: dict[str, list[str]] | None = None,
) -> None:
    """Reports every key that is not one of `names`. The report has the nearest name, or the section to which the key
    belongs, which may be one of the sections `below`. The key that was meant is then not reported as missing.
    """
    prefix = f"{path}." if path else ""
    for key, node in entries.items():
        if key in names:
            continue
        meant = ""
        if (other := _ALSO.get(key.lower())) in names:
            renamed = f"It is called {path.rpartition('.')[2]}.{other}."
            hint, meant = _INSTEAD.get(key.lower(), renamed), f"{prefix}{other}"
        elif inside := (below or {}).get(other or key):
            hint, meant = f"It is called {' or '.join(inside)}.", f"{prefix}{inside[0]}"
        elif key in _HOME:  # a section that has exactly this key is a better hint than a similar name
            hint, meant = f"It belongs under {_HOME[key]}.", f"{_HOME[key]}.{key}"
        elif near := _meant(key, names):
            hint, meant = f"Nearest: {near}.", f"{prefix}{near}"
        elif key in _command_keys() and path != "job":
            hint = "It belongs under job, but only if the job is a command of your own."
        else:
            hint = _ELSEWHERE.get(key.lower(), "")
        findings.add(f"{prefix}{key}", ", ".join(names), hint, value=key or "''", node=node, unknown_key=True)
        if meant:
            findings.written_elsewhere(meant)


def _parameters(entries: dict[str, Node], where: str, findings: Findings) -> JobConfig:
    experiment = entries.get("experiment")
    name = experiment.text if isinstance(experiment, Scalar) else ""
    if name in EXPERIMENTS:
        config: JobConfig = build(EXPERIMENTS[name], entries.get("parameters"), where, findings)
        return config
    known = "one of " + ", ".join(sorted(EXPERIMENTS))
    findings.add("job.experiment", known if name else REQUIRED[Job, "experiment"], nearest(name, EXPERIMENTS))
    return next(iter(KINDS.values()))()


def rule_of_key(cls: type[Any], spec: dataclasses.Field[Any]) -> Rule:
    """The rule for values of this field, in addition to its type."""
    return RULES.get((cls, spec.name)) or rule_of(spec)


def _convert(
    hint: Any, node: Node, path: str, rule: Rule, findings: Findings, default: Any = None, allowed: str = ""
) -> Any:
    """The typed value, or _BAD if a problem was reported. `default`: the values of keys that the section lacks."""
    inner, optional = unwrap(hint)
    null = isinstance(node, Scalar) and node.is_null
    if null and optional:
        return None
    if is_dataclass(inner) and isinstance(inner, type):
        return build(inner, node, path, findings, default if isinstance(default, inner) else None)
    allowed = allowed or describe(hint, rule)
    if typing.get_origin(inner) is tuple:
        if rule.one and isinstance(node, Scalar):
            node = Items(path=node.path, line=node.line, items=[node])
        if not isinstance(node, Items):
            hint_text = _as_list(path, node.text, findings) if isinstance(node, Scalar) and node.text else ""
            findings.add(path, allowed, hint_text)
            return _BAD
        if rule.most is not None and not 1 <= len(node.items) <= rule.most:
            written = f"{len(node.items)} of them" if node.items else "an empty list"
            findings.add(path, f"a list of 1 to {rule.most}", value=written)
            return _BAD
        arm = typing.get_args(inner)[0]
        values = [_convert(arm, item, f"{path}[{index}]", rule, findings) for index, item in enumerate(node.items)]
        return _BAD if _BAD in values else tuple(values)
    if typing.get_origin(inner) is dict:
        if not isinstance(node, Mapping):
            key = path.rpartition(".")[2]
            name = "L40S" if key in ("step_ms", "epoch_minutes") else "NAME"
            value = re.sub(r"(?<=[0-9]) ?(ms|min)$", "", _written(node)) if isinstance(node, Scalar) else ""
            first = node.items[0] if isinstance(node, Items) and node.items else None
            if isinstance(first, Scalar) and "=" in first.text:  # the list has the form [KEY=value]
                name, _, value = first.text.partition("=")
            findings.add(path, allowed, f"Write {key}: {{{name}: {value}}}." if value else "", node=node)
            return _BAD
        if rule.most is not None and len(node.entries) > rule.most:
            findings.add(path, f"at most {rule.most}", value=f"{len(node.entries)} of them")
            return _BAD
        arm = typing.get_args(inner)[1]
        named = {key: _convert(arm, child, f"{path}.{key}", rule, findings) for key, child in node.entries.items()}
        return _BAD if _BAD in named.values() else named
    if not isinstance(node, Scalar):
        findings.add(path, allowed, value="a list" if isinstance(node, Items) else "a section")
        return _BAD
    if inner is str and default == "" and (null or not node.text.strip()):  # so that a rehearsal can remove the key
        return ""
    if null:
        findings.add(path, allowed, value="" if not node.text else node.text)
        return _BAD
    value, hint_text = _scalar(inner, node.text, rule)
    if value is _BAD:
        findings.add(path, allowed, hint_text, value=_written(node) or "''")
    return value


def _as_list(path: str, text: str, findings: Findings) -> str:
    """A hint how to write one value as a list: once, or once per phase if each phase has its own value."""
    if path not in ("job.parameters.optim.lr", "estimate.step_ms"):
        return f"Write [{text}]."
    experiment = find_node(findings.tree, "job.experiment")
    name = experiment.text if isinstance(experiment, Scalar) else ""
    if name not in EXPERIMENTS:
        return ""
    count = sum(1 for phase in EXPERIMENTS[name]().phases() if phase.steps)
    if count == 1:
        return f"Write [{text}]."
    words = {2: "two", 3: "three", 4: "four"}.get(count, str(count))
    return f"One per phase, {words} values, as in [{', '.join([text] * count)}]."


def _scalar(hint: Any, text: str, rule: Rule) -> tuple[Any, str]:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return (text, "") if text in choices else (_BAD, nearest(text, choices))
    if hint is str:
        if rule.pattern:
            if re.fullmatch(rule.pattern, text):
                return text, ""
            return _BAD, rule.hint if isinstance(rule.hint, str) else rule.hint(text)
        return (text, "") if text.strip() else (_BAD, "")
    if hint is bool:
        if text in ("true", "false"):
            return text == "true", ""
        meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text.lower(), text.lower())
        return _BAD, f"Write {meant}." if meant in ("true", "false") else ""
    if hint is datetime:
        value, hint_text = _time(text)
        return (_BAD, "Write a time or a span.") if rule.moment and isinstance(value, timedelta) else (value, hint_text)
    assert hint in (int, float, Decimal), hint
    return _numeric(hint, text, rule)


def _numeric(hint: Any, text: str, rule: Rule) -> tuple[Any, str]:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text) or len(text) > 40:
        return _BAD, "Write a plain number, without unit, sign or separator." if re.search(r"[0-9]", text) else ""
    value = Decimal(f"{Decimal(text):f}")  # 1e3 is shown as 1000 everywhere
    if hint is int and value != value.to_integral_value():
        return _BAD, ""
    if hint is int and not re.fullmatch(r"[+-]?[0-9]+", text):  # YAML reads 1e3 and 3.0 as floats
        return _BAD, f"Write {int(value)}." if abs(value) < 10**12 else ""
    if re.match(r"[+-]?0[0-9]", text):  # YAML 1.1 reads 010 as 8, and other readers as 10
        return _BAD, f"Write {value:f}." if abs(value) < 10**12 else ""
    if not rule.includes(value):
        return _BAD, ""
    return hint(text) if hint is not Decimal else value, ""


def _time(text: str) -> tuple[Any, str]:
    """A time in UTC or a span such as `in 10 h`, or _BAD with a hint."""
    if span := re.fullmatch(r"(in |\+)?([0-9]{1,5}(?:\.[0-9]{1,4})?) ?(h|hours?|hrs?|m|min|minutes?|d|days?)", text):
        hours = float(span[2]) * {"h": 1.0, "m": 1 / 60, "d": 24.0}[span[3][0]]
        written = f"in {hours:.6g} h"
        return (timedelta(seconds=round(hours * 3600)), "") if text == written else (_BAD, f"Write {written}.")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return _BAD, ""
    if re.fullmatch(r"[0-9-]+", text):
        return _BAD, f"A date has no hour: write {text}T00:00:00Z."
    if moment.tzinfo is None:
        return _BAD, f"Say which time zone: {text}Z for UTC."
    if moment.microsecond:
        return _BAD, "Whole seconds only: the fleet's expiry has no fractions."
    if not 2000 <= moment.year <= 2100:  # this also keeps the conversion to UTC within the calendar
        return _BAD, ""
    return moment.astimezone(UTC), ""


def _placeholder(hint: Any) -> Any:
    """A value that stands for a required one that is missing, so that the other keys can still be checked. The missing
    value is already reported.
    """
    made: dict[Any, Any] = {tuple: (), dict: {}, str: "", Decimal: Decimal(1), int: 1}
    made[datetime] = datetime(2000, 1, 1, tzinfo=UTC)
    return made[typing.get_origin(hint) or hint]


def _written(node: Node) -> str:
    if isinstance(node, Scalar):
        from gpufleet.job.kind.variables import without_keys  # imported here, because only an error needs it

        return without_keys(node.text)
    return "a list" if isinstance(node, Items) else "a section"
