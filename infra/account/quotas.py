"""Checks of `gpufleet doctor` for Service Quotas: vCPUs of the fleet's types, and VPCs. The checks only read.

The codes come from public tables, read 2026-11-21, because AWS's documentation does not list them in one place. The P5
spot code could not be confirmed, so `doctor` prints AWS's own name of each quota.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpufleet.infra.account import aws, refusals
from gpufleet.infra.account.checks import Check
from gpufleet.infra.account.fleet import find_instances
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Fleet, StackDefinition
from gpufleet.infra.program.resources.tags import STACK_TAG

TYPES_PER_CALL = 100  # the most types that DescribeInstanceTypes accepts
USERS_SHOWN = 3
VPCS_PER_REGION = "L-F678F1CE"  # 5 by default; the quota for internet gateways follows it (AWS General Reference)


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The vCPUs that a fleet needs from one quota."""

    code: str
    types: tuple[str, ...]
    least: int  # the vCPUs if all nodes are of the smallest of `types`
    vcpu: int  # the vCPUs if all nodes are of the largest of `types`
    recommended: int  # `vcpu` and one more node, because a node uses the quota for a while after its end


_CODES = (  # a family of types, and its quota in each market; no quota here limits Capacity Blocks
    (r"g|vt", {"spot": "L-3819A6DF", "on-demand": "L-DB2E81BA"}),
    (r"p[234]", {"spot": "L-7212CCBC", "on-demand": "L-417A185B"}),
    (r"p5", {"spot": "L-C4BD4855", "on-demand": "L-417A185B"}),
    (r"[acdhmrtz](?=\d)|i(?=[ms]?\d)", {"spot": "L-34B43A08", "on-demand": "L-1216C47A"}),  # AWS's standard families
)


def quota_code(instance_type: str, capacity: str) -> str | None:
    """The quota's code; None if the quota is not known, as for P6."""
    for family, codes in _CODES:
        if re.match(rf"({family})[0-9a-z-]*\.", instance_type):
            return codes.get(capacity)
    return None


def needs(fleet: Fleet, capacity: str) -> tuple[list[Need], list[str]]:
    """The quotas that limit a fleet in a market, and the types whose quota is unknown."""
    by_code: dict[str, list[str]] = {}
    unknown = []
    for name in fleet.instance_types:
        code = quota_code(name, capacity)
        if code is None:
            unknown.append(name)
        else:
            by_code.setdefault(code, []).append(name)
    catalog = load_catalog()
    needed = []
    for code, names in by_code.items():
        sizes = [kind.vcpu for name in names if (kind := catalog.instances.get(name))]
        least, most = min(sizes, default=0), max(sizes, default=0)
        count = fleet.nodes
        needed.append(
            Need(code=code, types=tuple(names), least=count * least, vcpu=count * most, recommended=(count + 1) * most)
        )
    return needed, unknown


def vcpu_quotas(definition: StackDefinition, service_quotas: Any, ec2: Any = None) -> Iterator[Check]:
    """Whether each quota has enough vCPUs for the run's nodes and one more, when the vCPUs that others use are
    subtracted.
    """
    if not (counted_in := definition.fleet.market.quotas):
        return
    others = _others(definition, ec2 or aws.client("ec2", definition.fleet.region))
    unknown = list[str]()
    for market in counted_in:
        needed, unknown = needs(definition.fleet, market)
        checks = [_quota(definition, need, others.get(need.code, {}), service_quotas) for need in needed]
        if all(check.state == "problem" for check in checks):
            yield from checks
        else:  # a fleet needs only one type that can launch
            for check in checks:
                yield replace(check, state="warning") if check.state == "problem" else check
    for name in unknown:
        yield Check("quota", f"gpufleet does not know which quota counts {name}: look it up in the console", "warning")


def vpc_quota(definition: StackDefinition, ec2: Any, service_quotas: Any) -> Iterator[Check]:
    """Whether the region has room for one more VPC. Each stack makes one unless the file names one."""
    if definition.account.vpc:
        return
    vpcs = list(aws.pages(ec2, "describe_vpcs", "Vpcs"))
    quota = _granted(service_quotas, "vpc", VPCS_PER_REGION)
    most = int(quota["Value"])
    finding = f"{quota['QuotaName']} ({VPCS_PER_REGION}) is {most}; {len(vpcs)} in {definition.fleet.region}"
    if any(aws.tags_of(vpc).get(STACK_TAG) == definition.name for vpc in vpcs):
        yield Check("network", f"{finding}, this stack's among them")
    elif len(vpcs) < most:
        yield Check("network", finding)
    else:
        fix = (
            f"{_increase(definition, 'vpc', VPCS_PER_REGION, 2 * most)}\n"
            "          or run `pulumi destroy` for a stack that is done, or delete an unused VPC"
        )
        yield Check("network", f"{finding}, and `pulumi up` makes one more", "problem", fix)


def _granted(service_quotas: Any, service: str, code: str) -> dict[str, Any]:
    """A quota as it is for this account: AWS's default, unless the account has asked for more."""
    arguments = {"ServiceCode": service, "QuotaCode": code}
    answer = refusals.absent(lambda: service_quotas.get_service_quota(**arguments), "NoSuchResourceException")
    return dict((answer or service_quotas.get_aws_default_service_quota(**arguments))["Quota"])


def _increase(definition: StackDefinition, service: str, code: str, wanted: int) -> str:
    """The command that asks AWS for a higher quota."""
    return (
        f"aws service-quotas request-service-quota-increase --region {definition.fleet.region} "
        f"--service-code {service} --quota-code {code} --desired-value {wanted}"
    )


def _others(definition: StackDefinition, ec2: Any) -> dict[str, dict[str, int]]:
    """For each quota, the vCPUs that each machine in the region uses, by the machine's id and type. This stack's own
    machines are left out, because they end before a new run begins.
    """
    states = [("instance-state-name", ["pending", "running"])]
    machines = [
        machine
        for machine in find_instances(ec2, states)
        if aws.tags_of(machine).get(STACK_TAG) != definition.name and machine["Placement"].get("Tenancy") != "host"
    ]
    types = sorted({machine["InstanceType"] for machine in machines})
    vcpus = {
        type_["InstanceType"]: int(type_["VCpuInfo"]["DefaultVCpus"])
        for start in range(0, len(types), TYPES_PER_CALL)
        for type_ in ec2.describe_instance_types(InstanceTypes=types[start : start + TYPES_PER_CALL])["InstanceTypes"]
    }
    vcpus_by_quota: dict[str, dict[str, int]] = {}
    for machine in machines:
        kind, capacity = machine["InstanceType"], machine.get("InstanceLifecycle", "on-demand")
        if code := quota_code(kind, capacity):
            vcpus_by_quota.setdefault(code, {})[f"{machine['InstanceId']} ({kind})"] = vcpus[kind]
    return vcpus_by_quota


def _quota(definition: StackDefinition, need: Need, others: dict[str, int], service_quotas: Any) -> Check:
    quota, used = _granted(service_quotas, "ec2", need.code), sum(others.values())
    free = int(quota["Value"]) - used
    kinds = ", ".join(need.types)
    market = definition.fleet.market
    nodes, takes = market.filled_in("{number} node{s}"), market.filled_in("take{es} ")
    takes += f"{need.vcpu}" if need.least == need.vcpu else f"{need.least} to {need.vcpu}"
    users = ", ".join(list(others)[:USERS_SHOWN]) + (" and others" if len(others) > USERS_SHOWN else "")
    in_use = f", {used} of them in use by {users}" if used else ""
    finding = f"{quota['QuotaName']} ({need.code}) is {int(quota['Value'])} vCPUs{in_use}; {nodes} of {kinds} {takes}"
    fix = _increase(definition, "ec2", need.code, used + need.recommended)
    if free < need.least and used:
        fix += "\n          or wait until a machine above has ended"
    if free < need.least:
        console = "(AWS grants it more often if you ask in the console and describe the use in a sentence)"
        return Check("quota", finding, "problem", f"{fix}\n          {console}")
    if free < need.vcpu:
        return Check("quota", f"{finding}: the larger types cannot launch", "warning", fix)
    if free < need.recommended:
        worth = {2: "two"}.get(definition.nodes + 1, definition.nodes + 1)
        why = f"; with the vCPUs of {worth} nodes, a replacement could start while the old node still counts"
        return Check("quota", finding + why, "warning", fix)
    return Check("quota", finding)
