"""A comparison for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from infra.bill.record import quantiles
from infra.compare import deadline
from infra.compare.rows import Row
from infra.definition.model import StackDefinition


def record(
    definition: StackDefinition, listed: list[Row], rows: list[Row], edge: list[Row], switch: deadline.Policy | None
) -> dict[str, Any]:
    """Keys as documented in docs/compare.md."""
    front = {id(row) for row in edge}
    return {
        "schema": 1,
        "stack": definition.name,
        "region": definition.fleet.region,
        "scenarios": [record_row(row) for row in listed],
        "options": [{**record_row(row), "frontier": id(row) in front} for row in rows],
        "deadline_policy": None if switch is None else asdict(switch),
    }


def record_row(row: Row) -> dict[str, Any]:
    """One scenario or option."""
    return {
        "scenario": row.scenario,
        "type": row.type,
        "capacity": row.capacity,
        "nodes": row.nodes,
        "gpus_used": row.ranks,
        "claim": {
            "hours": None if row.claim.hours is None else str(row.claim.hours),
            "usd": None if row.claim.usd is None else str(row.claim.usd),
        },
        "reference": row.reference,
        "tokens": row.tokens,
        "dataset": row.dataset or None,
        "gpu_hours": None if row.billed_gpu_h is None else round(row.billed_gpu_h, 4),
        "gpu_hours_used": None if row.used_gpu_h is None else round(row.used_gpu_h, 4),
        "compute_hours": None if row.compute_h is None else round(row.compute_h, 6),
        "rates": {
            rate.region: {
                "on_demand": None if rate.on_demand is None else str(rate.on_demand),
                "spot": None if rate.spot is None else str(rate.spot),
            }
            for rate in row.rates
        },
        "hours": row.hours and quantiles(row.hours),
        "wall_hours": row.wall_hours and quantiles(row.wall_hours),
        "usd": row.usd and quantiles(row.usd),
        "free_usd": None if row.free_usd is None else str(row.free_usd),
        "interruptions": None if row.interruptions is None else round(row.interruptions, 3),
        "fits": row.fits,
        "launchable": row.launchable,
        "over_limit": row.over_limit,
        "late": round(row.late, 4),
        "basis": row.basis,
        "why": row.why,
        "nearest": row.nearest,
        "lost": row.lost,
    }
