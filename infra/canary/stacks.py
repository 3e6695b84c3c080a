"""The canary's two stacks, as texts of definition files, and the choice of the types and zones on which they run.

`canary` loses two nodes and ends by itself. `canary-cap`, whose script has no end, runs twice: first `gpufleet stop`
ends it, and then it is made to exceed its cap. Neither stack keeps anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.infra.account import checks, doctor, quotas, rights
from gpufleet.infra.account.aws import pages
from gpufleet.infra.bill.answer import headline
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import problems
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import CANARY, load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused, DefinitionError, GpufleetError, PriceMissing

NAMES = RUN, CAP = "canary", "canary-cap"
MOST_USD = Decimal("0.50")
# USD for each stack; with FIS_USD the sum is below MOST_USD, because a node takes minutes to stop
LIMITS = {RUN: Decimal("0.19"), CAP: Decimal("0.05")}
FLIGHTS = {RUN: 1, CAP: 2}  # how often each stack runs
PAST_USD = Decimal("0.02")  # the most that a node past its limit costs before its timer ends it
# hours for the third node: a booting node ends its run if less than five minutes are left, and needs four minutes until
# it knows its price
THIRD_H = Decimal("0.15")
FIS_USD = Decimal("0.20")  # two action-minutes at 0.10 USD (AWS Price List of AWSFIS, 2024-10-01)
TRIED = 8  # the number of types that are tried at most, beginning with the cheapest
TYPES = 3  # number of types in a fleet, so that AWS can take another type if no zone has one of them
SCRIPT = Path(__file__).parent / "code" / "train.py"
PYTORCH = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"
# for a run that needs no torch; this image is small, so a node boots sooner
PYTHON = "public.ecr.aws/docker/library/python:3.13-slim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Steps and times of the canary's runs, on AWS or in the embedded AWS."""

    steps: int  # steps of the run that is interrupted
    pace_s: float  # seconds per step
    every: int  # steps between two checkpoints
    fails_at: int  # the step at which the script fails once; it is long after the first checkpoint and the notice
    cap_hours: Decimal  # limits.max_hours of `canary-cap`, including the boot; renew_capped raises it after a slow boot
    heartbeat_s: float
    poll_s: float
    patience_s: float  # how long to wait for any one event, such as a node
    stop_s: float  # seconds until the tested schedule fires, and until the tested fleet expires
    device: str = "cuda"
    gpus: int = 1  # GPUs of a node
    setup_minutes: float = 6

    def without_gpu(self) -> Scale:
        """This scale for nodes without a GPU."""
        return replace(self, gpus=0, device="cpu")


AWS = Scale(
    steps=300, pace_s=0.5, every=20, fails_at=240, cap_hours=Decimal("0.25"), heartbeat_s=10, poll_s=5,
    patience_s=1500, stop_s=150,
)  # fmt: skip
EMBEDDED = Scale(
    steps=240, pace_s=0.1, every=20, fails_at=200, cap_hours=Decimal("0.025"), heartbeat_s=1, poll_s=0.3,
    patience_s=400, stop_s=20, device="cpu", setup_minutes=0.05,
)  # fmt: skip
CAPPED_S = 90  # seconds of a run before its cap ends it: for some steps, the meter's reserve and the run's end


def text(name: str, run: str, region: str, zones: list[str], types: list[str], scale: Scale) -> str:
    """The definition file of one of the two stacks."""
    capped = name == CAP
    step_ms = json.dumps({load_catalog().instances[type_].gpu.name: scale.pace_s * 1000 for type_ in types})
    here = EMBEDDED
    if capped:
        last, fails_at, length, saves = 10**6, "", "", f"minutes: {scale.every * scale.pace_s / 60:.4f}"
    else:
        last, fails_at, length = scale.steps, f" {scale.fails_at}", f"steps: {scale.steps}, "
        saves = f"steps: {scale.every}"
    command = "python3 train.py {checkpoints} {outputs}"
    return f"""\
# {name}: `gpufleet canary` writes this file. {"Its run reaches its cap on purpose." if capped else "It runs first."}
run: {{id: {run}, owner: canary}}
job:
  image: {PYTHON if capped or not scale.gpus else PYTORCH}
  code: {{folder: {CANARY}}}
  command: {command} {last} {scale.pace_s} {scale.every}{fails_at}
  device: {scale.device}
  checkpoint:
    each: step-{{step}}/
    complete: whole
    every: {{{saves}}}
    size_gb: 0.064
    keep_on_disk: 3
    heartbeat_s: {scale.heartbeat_s}
  progress: {{stdout: '^step (?P<step>\\d+) loss (?P<loss>[\\d.]+)'}}
  stop: {{grace_s: 5}}
  exit: {{again: [3]}}
  work: {{{length}step_ms: {step_ms}}}
fleet:
  region: {region}
  zones: {json.dumps(zones)}
  instance_types: {json.dumps(types)}
storage:
  keep: {{bucket: false}}
estimate:
  capacity_wait_minutes: 0.05
  setup_minutes: {scale.setup_minutes}
  restart_minutes: {scale.setup_minutes}
rehearsal:
  job:
    command: {command} {4 * here.every} {here.pace_s} {here.every}
    device: cpu
    work: {{steps: {4 * here.every}}}
    checkpoint: {{heartbeat_s: {here.heartbeat_s}}}
  estimate:
    step_ms: [{here.pace_s * 1000}]
    capacity_wait_minutes: {here.setup_minutes}
    setup_minutes: {here.setup_minutes}
    restart_minutes: {here.setup_minutes}
  interruptions: {{with_notice: 1, without_notice: 1}}
limits: {{max_usd: {LIMITS[name]}, max_hours: {scale.cap_hours if capped else 1}}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The types and zones on which the stacks run, and the most that the stacks may cost."""

    types: list[str]
    zones: list[str]
    usd: Decimal  # the most that both caps and the notice can cost
    lines: list[str]  # the bill as text


def shipped(region: str = "us-east-2") -> dict[str, str]:
    """By name, the files that `gpufleet init` writes: the stack whose run is interrupted, on the cheapest types, and
    its script. `gpufleet canary` runs both stacks in a project of its own, on types that the account offers.
    """
    priced = _cheapest(region, AWS.gpus)
    types = [kind for kind, usd in priced if _interrupted_usd(kind, usd, region, AWS) <= LIMITS[RUN]][:TYPES]
    definition_file = text(RUN, "r1", region, list(load_catalog().zones(region)), types, AWS)
    return {f"stacks/{RUN}.yaml": definition_file, f"{CANARY}/{SCRIPT.name}": SCRIPT.read_text(encoding="utf-8")}


def write(project: Path, run: str, region: str, chosen: tuple[list[str], list[str]], scale: Scale) -> None:
    """Writes both definition files, and the script."""
    types, zones = chosen
    (project / CANARY).mkdir(exist_ok=True)
    (project / CANARY / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    for name in NAMES:
        (project / "stacks" / f"{name}.yaml").write_text(text(name, run, region, zones, types, scale), encoding="utf-8")


def renew_capped(project: Path, run: str, scale: Scale, boot_s: float) -> None:
    """Gives `canary-cap` a new run id, and a cap that leaves time to train even if a boot takes `boot_s` seconds."""
    file = project / "stacks" / f"{CAP}.yaml"
    hours = max(scale.cap_hours, Decimal(f"{(2 * boot_s + CAPPED_S) / 3600:.3f}"))
    renewed = re.sub(r"(?m)^(run: \{id: [^,-]+)[^,]*", rf"\1-{run}", file.read_text(encoding="utf-8"))
    file.write_text(re.sub(r"(?m)(?<=max_hours: )[\d.]+", str(hours), renewed), encoding="utf-8")


def definition(project: Path, name: str) -> StackDefinition:
    """The definition of one of the stacks, from its file."""
    return load(project / "stacks" / f"{name}.yaml", now=datetime.now(UTC), past_deadline=True)


def choose(project: Path, run: str, region: str, client: Callable[[str], Any], scale: Scale, *, notice: bool) -> Chosen:
    """Chooses the cheapest types that the account may launch, in the zones that offer them, and writes the files.
    Raises GpufleetError, with a sentence for each obstacle, before anything is made in the account.
    """
    reasons, fitting, zones = list[str](), list[str](), set[str]()
    cheapest = dict(_cheapest(region, scale.gpus))
    offers = _offers(client("ec2"), region, list(cheapest))
    for kind in list(cheapest)[:TRIED]:
        if len(fitting) == TYPES:
            break
        if not offers.get(kind, set()) or not zones <= offers[kind]:
            reasons.append(f"{kind}: not offered in {', '.join(sorted(zones)) or region}")
            continue
        write(project, run, region, ([kind], sorted(offers[kind])), scale)
        try:
            if (needed := _interrupted_usd(kind, cheapest[kind], region, scale)) > LIMITS[RUN]:
                raise PriceMissing(f"with two interruptions it needs {needed:.2f} USD of {LIMITS[RUN]}")
            for name in NAMES:
                _bill(project, name)
        except (DefinitionError, PriceMissing) as error:
            reasons.append(f"{kind} costs more than the canary may ({_first(error)})")
            continue
        allowed = list(quotas.vcpu_quotas(definition(project, RUN), client("service-quotas"), client("ec2")))
        if lacking := [check for check in allowed if check.state == "problem"]:
            reasons.append(f"{kind}: {lacking[0].found}. {lacking[0].fix.splitlines()[0]}")
            continue
        fitting, zones = [*fitting, kind], zones or offers[kind]
    if not fitting:
        raise AwsRefused(
            "the canary found no type that it may launch, and nothing was made:\n  - " + "\n  - ".join(reasons)
        )
    write(project, run, region, (fitting, sorted(zones)), scale)
    _refuse_account(definition(project, RUN), client)
    lines, most = [], Decimal(0)
    for name in NAMES:
        twice = ", twice" if FLIGHTS[name] == 2 else ""
        lines.append(f"{name}{twice}: {headline(_bill(project, name))}")
        most += FLIGHTS[name] * LIMITS[name]
    if notice:
        lines.append(f"a notice by AWS Fault Injection Service: {FIS_USD} USD, two action-minutes")
        most += FIS_USD
    if most > MOST_USD:
        raise GpufleetError(f"the canary would cost up to {most} USD; allowed are {MOST_USD}. Nothing was made")
    return Chosen(types=fitting, zones=sorted(zones), usd=most, lines=lines)


def _interrupted_usd(kind: str, spot: Decimal, region: str, scale: Scale) -> Decimal:
    """The USD that the interrupted run must be able to spend: two nodes at the spot price, and then THIRD_H hours at
    the on-demand price, with which a booting node computes what is left of the limits. Raises PriceMissing.
    """
    # each of the two nodes trains for a minute, and one gets a notice of two minutes
    two_h = Decimal(2 * scale.setup_minutes + 4) / 60
    return two_h * spot + THIRD_H * load_catalog().on_demand(kind, region).amount


def affords_stop(spent_usd: Decimal, *, notice: bool) -> bool:
    """Whether the cost of both runs of `canary-cap` still fits within MOST_USD after the first run has spent
    `spent_usd`, even if both runs exceed their limits.
    """
    both = FLIGHTS[CAP] * (LIMITS[CAP] + PAST_USD)
    return spent_usd + (FIS_USD if notice else 0) + both <= MOST_USD


def _refuse_account(stack: StackDefinition, client: Callable[[str], Any]) -> None:
    """Raises AwsRefused if the account lacks a right, a role or a network; the message names each of them."""
    groups = (
        lambda: rights.check(stack, client("sts"), client("iam")),
        lambda: checks.service_roles(stack, client("iam")),
        lambda: quotas.vpc_quota(stack, client("ec2"), client("service-quotas")),
    )
    failed = [check for group in groups for check in doctor.guarded(group) if check.state == "problem"]
    if failed:
        lines = "\n  - ".join(f"{check.found}. {check.fix}".rstrip(". ") for check in failed)
        raise AwsRefused(f"the canary cannot run in this account, and nothing was made:\n  - {lines}")


def _bill(project: Path, name: str) -> Bill:
    """The stack's bill. Raises DefinitionError if it does not fit into the stack's limits."""
    stack = definition(project, name)
    bill = bill_of(stack, project, load_catalog())
    if wrong := list(problems(stack, bill)):
        raise DefinitionError(str(stack.source), wrong)
    return bill


def _cheapest(region: str, gpus: int) -> Iterator[tuple[str, Decimal]]:
    """The region's usable types with `gpus` GPUs, and the spot price of each in its dearest zone. The cheapest type
    comes first.
    """
    catalog = load_catalog()
    priced = []
    for kind in catalog.instances.values():
        zones = catalog.spot_zones(kind.type, region)
        if zones and not kind.unusable and kind.gpu_count == gpus and region in (kind.regions or (region,)):
            priced.append((max(zone.price.amount for zone in zones), kind.type))
    yield from ((kind, usd) for usd, kind in sorted(priced))


def _offers(ec2: Any, region: str, types: list[str]) -> dict[str, set[str]]:
    """The types that each zone offers, by the zone's name."""
    filters = [{"Name": "instance-type", "Values": types}]
    listed = pages(
        ec2,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=filters,
    )
    zones: dict[str, set[str]] = {}
    known = load_catalog().zones(region)
    for offer in listed:
        if offer["Location"] in known:
            zones.setdefault(offer["InstanceType"], set()).add(offer["Location"])
    return zones


def _first(error: GpufleetError) -> str:
    """The last line of an error, which says what is allowed."""
    return str(error).splitlines()[-1].strip(" -")
