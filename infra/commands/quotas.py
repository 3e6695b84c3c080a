"""Which Service Quota counts an instance type's vCPUs. Pure.

Codes: public tables (AWS documentation does not list them in one place), read 2026-11-21. The name of the P5 spot code
was not confirmed, so `doctor` prints the name that AWS gives for each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.catalog import load_catalog
from infra.definition import Fleet


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a fleet needs of one quota."""

    code: str
    types: tuple[str, ...]
    least: int  # vCPUs of the smallest of `types`: one node
    vcpu: int  # of the largest
    recommended: int  # two nodes: after a node ends, its vCPUs stay counted until EC2 has noticed


_CODES = (  # family, spot, on demand
    (r"g|vt", "L-3819A6DF", "L-DB2E81BA"),
    (r"p[234]", "L-7212CCBC", "L-417A185B"),
    (r"p5", "L-C4BD4855", "L-417A185B"),
)


def quota_code(instance_type: str, capacity: str) -> str | None:
    """The quota's code; None where it is not known (P6)."""
    for family, spot, on_demand in _CODES:
        if re.match(rf"({family})[0-9a-z-]*\.", instance_type):
            return spot if capacity == "spot" else on_demand
    return None


def needs(fleet: Fleet) -> tuple[list[Need], list[str]]:
    """The quotas a fleet is counted against, and the types whose quota is not known."""
    by_code: dict[str, list[str]] = {}
    unknown = []
    for name in fleet.instance_types:
        code = quota_code(name, fleet.capacity)
        if code is None:
            unknown.append(name)
        else:
            by_code.setdefault(code, []).append(name)
    catalog = load_catalog()
    found = []
    for code, names in by_code.items():
        sizes = [kind.vcpu for name in names if (kind := catalog.instances.get(name))]
        least, most = min(sizes, default=0), max(sizes, default=0)
        found.append(Need(code=code, types=tuple(names), least=least, vcpu=most, recommended=2 * most))
    return found, unknown
