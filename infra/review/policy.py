"""Reads an organisation's rules for all runs from `policy.yaml`, and finds those that a run breaks. Two checks use this
module: `gpufleet diff` takes the facts from definition and bill, and the Pulumi policy pack in `policy/` takes them
from the resources that are about to be declared. The module uses no pulumi, no boto3 and no clock.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as Properties
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpufleet.infra import market
from gpufleet.infra.definition.schema import Findings, build, nearest
from gpufleet.infra.definition.yaml_tree import Items, Mapping, Scalar, UnreadableError, decode, read
from gpufleet.infra.errors import DefinitionError, GpufleetError

if TYPE_CHECKING:
    from gpufleet.infra.bill.bill import Bill
    from gpufleet.infra.bill.fallback import Fallback
    from gpufleet.infra.definition.model import StackDefinition

OBJECT = "aws:s3/bucketObjectv2:BucketObjectv2"
# the name of run.json's resource; if a program declares several runs, such a name ends with this
RUN_CONFIG = "run-config"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The rules that every run must obey.

    If a key is missing (None) or false, there is no such rule. Patterns may contain * and ?. `max_usd_per_month` is
    checked only before a run begins (infra/account/month.py), because no definition says what others have spent.
    """

    max_usd_per_run: Decimal | None = field(default=None, metadata={"minimum": 0.01, "maximum": 1_000_000})
    max_usd_per_hour: Decimal | None = field(default=None, metadata={"minimum": 0.001, "maximum": 10_000})
    allowed_types: tuple[str, ...] | None = None  # patterns of allowed types, such as g5.*
    allowed_regions: tuple[str, ...] | None = None
    spot_only: bool = False
    required_owner: tuple[str, ...] | None = None  # patterns such as *@example.org; the owner must match one of them
    max_usd_per_month: Decimal | None = field(default=None, metadata={"minimum": 0.01, "maximum": 10_000_000})


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts about a run that the rules use. If `usd_p90` is None, the run is over and has no bill to check."""

    region: str
    instance_types: tuple[str, ...]
    capacity: str
    owner: str
    usd_p90: Decimal | None
    usd_per_hour: Decimal | None = None  # the price of the dearest node that the fleet may take; None if not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """One rule that a run breaks."""

    rule: str
    message: str


RULES = {  # the demand of each rule, in the words that the policy pack shows
    "max_usd_per_run": "The 90th percentile of a run's bill is at most this many dollars.",
    "max_usd_per_hour": "A node costs at most this many dollars an hour: zones and types above it are left out.",
    "allowed_types": "Every instance type that the fleet may pick is on the list.",
    "allowed_regions": "The run's region is on the list.",
    "spot_only": "The fleet asks for spot capacity.",
    "required_owner": "run.owner, the tag gpufleet:owner, is on the list.",
}


def facts(definition: StackDefinition, bill: Bill | None, fallbacks: Iterable[Fallback] = ()) -> Facts:
    """The facts that a policy's rules use: from a definition file, its bill, and its fallback's price."""
    priced: tuple[Bill | Fallback | None, ...] = (bill, *fallbacks)
    markets = definition.fleet.market.fleets
    hourly = [price for option in (bill.types if bill else ()) for name in markets if (price := option.hourly(name))]
    return Facts(
        region=definition.fleet.region,
        instance_types=definition.fleet.instance_types,
        capacity=_in_words(markets),
        owner=definition.run.owner,
        usd_p90=max((side.usd.p90 for side in priced if side), default=None),
        usd_per_hour=max((hourly_price.amount for hourly_price in hourly), default=None),
    )


def held_to(definition: StackDefinition, rules: Policy | None) -> StackDefinition:
    """The definition, in which limits.usd_per_hour is lowered to that of the rules. A definition that can only be
    priced has no limit per hour.
    """
    own, theirs = definition.limits.usd_per_hour, None if rules is None else rules.max_usd_per_hour
    if theirs is None or definition.variant.only_priced:
        return definition
    lower = theirs if own is None else min(own, theirs)
    return replace(definition, limits=replace(definition.limits, usd_per_hour=lower))


def declared(type_: str, name: str, properties: Properties[str, Any]) -> Facts | None:
    """The facts in run.json, if the resource, whose keys are spelled as in the engine, is run.json; None for any other
    resource.

    The program declares the object run.json before the fleet, which depends on it. So a rule that refuses it prevents
    the fleet, even if nobody looked at a preview. No other property is read: in a first preview the bucket's name is
    unknown, and reading it would be an error.
    """
    if type_ != OBJECT or not f"-{name}".endswith(f"-{RUN_CONFIG}"):
        return None
    run = json.loads(properties["content"])
    fallback = run.get("fallback")
    p90 = [run["estimate"]["usd"]["p90"], (fallback or {}).get("usd_p90", 0)]
    markets = market.find(run["capacity"], "on-demand" if fallback else "none").fleets
    hourly = [
        Decimal(usd)
        for option in run["estimate"]["types"]
        for name, prices in (("spot", option["spot"].values()), ("on-demand", [option["on_demand"]]))
        if name in markets
        for usd in prices
        if usd and name not in option.get("left_out", {})
    ]
    return Facts(
        region=run["region"],
        instance_types=tuple(option["type"] for option in run["estimate"]["types"]),
        capacity=_in_words(markets),
        owner=run["run"]["owner"],
        usd_p90=max(map(Decimal, p90)),
        usd_per_hour=max(hourly, default=None),
    )


def _in_words(markets: Sequence[str]) -> str:
    return ", then ".join(markets)


def broken(policy: Policy, run_facts: Facts) -> tuple[Broken, ...]:
    """Every rule that the run breaks, in the order of the file's keys."""
    rules: list[Broken] = []
    cap = policy.max_usd_per_run
    if cap is not None and run_facts.usd_p90 is not None and run_facts.usd_p90 > cap:
        rules.append(Broken(rule="max_usd_per_run", message=f"p90 is {run_facts.usd_p90:f} USD, allowed are {cap:f}"))
    ceiling, dearest = policy.max_usd_per_hour, run_facts.usd_per_hour
    if ceiling is not None and dearest is not None and dearest > ceiling:
        message = f"a node costs up to {dearest:f} USD an hour, allowed are {ceiling:f}"
        rules.append(Broken(rule="max_usd_per_hour", message=message))
    if policy.allowed_types is not None:
        others = [type_ for type_ in run_facts.instance_types if not _matches(type_, policy.allowed_types)]
        if others:
            rules.append(_not_allowed("allowed_types", "instance types", ", ".join(others), policy.allowed_types))
    if policy.allowed_regions is not None and not _matches(run_facts.region, policy.allowed_regions):
        rules.append(_not_allowed("allowed_regions", "region", run_facts.region, policy.allowed_regions))
    if policy.spot_only and run_facts.capacity != "spot":
        rules.append(Broken(rule="spot_only", message=f"capacity is {run_facts.capacity}, allowed is spot"))
    if policy.required_owner is not None and not _matches(run_facts.owner, policy.required_owner):
        rules.append(_not_allowed("required_owner", "owner", run_facts.owner, policy.required_owner))
    return tuple(rules)


def broken_by_any(
    policy: Policy,
    priced: Iterable[tuple[StackDefinition, Bill, Iterable[Fallback]]],
    usd_p90: Decimal | None = None,
) -> tuple[Broken, ...]:
    """Every rule that the parts of a run break, each rule only once. A stage is checked with its own hardware, but with
    the dollars of the whole run, `usd_p90`; None for a run without stages.
    """
    breaches: dict[str, Broken] = {}
    for part in priced:
        of_part = facts(*part)
        of_run = of_part if usd_p90 is None else replace(of_part, usd_p90=usd_p90)
        breaches |= {breach.rule: breach for breach in broken(policy, of_run)}
    return tuple(breaches.values())


def find_policy(folder: Path) -> Policy | None:
    """The rules of the policy.yaml in `folder`; None if there is none. Raises the errors of load()."""
    return load(folder / "policy.yaml") if (folder / "policy.yaml").is_file() else None


def load(path: Path) -> Policy:
    """The rules in `path`. Raises DefinitionError with every problem, and GpufleetError if there is no such file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GpufleetError(f"{path} cannot be read: {error.strerror}") from None
    return parse(raw, str(path))


def parse(raw: bytes, source: str) -> Policy:
    """The rules in the bytes of a policy file; none if it is empty. Raises DefinitionError with every problem."""
    try:
        text = decode(raw)
        holds, see = "rules (spot_only: true, max_usd_per_run: 50, ...)", "`gpufleet docs review`"
        tree = read(text, holds=holds, see=see) if _says_something(text) else Mapping(path="", line=1)
    except UnreadableError as error:
        raise DefinitionError(source, error.problems) from None
    findings = Findings(tree=tree)
    names = [spec.name for spec in dataclasses.fields(Policy)]
    for key, node in tree.entries.items():
        if key not in names:
            findings.add(key, ", ".join(names), nearest(key, names), value=key or "''", node=node, unknown_key=True)
        # A key without a value is an error, because a rule whose value was deleted by mistake must not be ignored.
        elif isinstance(node, Scalar) and node.is_null:
            findings.add(key, "a value", "Omit the key if there should be no such rule.", node=node)
    owner = tree.entries.get("required_owner")
    if isinstance(owner, Scalar) and not owner.is_null:  # a single pattern needs no brackets
        alone = Items(path=owner.path, line=owner.line, items=[owner])
        tree = replace(tree, entries={**tree.entries, "required_owner": alone})
    policy: Policy = build(Policy, tree, "", findings)
    for name in ("allowed_types", "allowed_regions", "required_owner"):
        if getattr(policy, name) == () and not findings.problems:
            findings.add(f".{name}", "at least one name or pattern", "Omit the key if there should be no such rule.")
    if findings.problems:
        raise DefinitionError(source, findings.problems)
    return policy


def _says_something(text: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _matches(value: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def _not_allowed(rule: str, subject: str, value: str, allowed: Sequence[Any]) -> Broken:
    return Broken(rule=rule, message=f"{subject} {value}, allowed: {', '.join(allowed)}")
