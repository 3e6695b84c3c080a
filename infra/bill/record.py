"""Writes the bill as plain values: JSON for programs, stack outputs, and the parts of run.json that come from the bill.

Money and hours are decimal strings. Nothing depends on the clock, because run.json contains these bytes.
"""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.fit import Fit
from gpufleet.infra.bill.lines import NOT_PRICED, account_discount
from gpufleet.infra.bill.side import Side
from gpufleet.infra.risk.hazard import Hazard
from gpufleet.infra.risk.save_interval import BestInterval
from gpufleet.infra.show.sheet import plain

SCHEMA = 1
LINE = ("name", "kind", "quantity", "unit", "unit_price", "amount", "source", "as_of", "inferred")


def to_json(bill: Bill) -> dict[str, Any]:
    """Keys as documented in docs/bill.md."""
    nodes = bill.chosen.exposure.nodes
    return {
        "schema": SCHEMA,
        "stack": bill.stack,
        "scenario": bill.scenario or None,
        "only_priced": bill.only_priced or None,
        "run": bill.run,
        "region": bill.region,
        "capacity": bill.capacity,
        "type": bill.chosen.type,
        "zone": bill.chosen.zone,
        "lines": [plain(line, *LINE) | ({"item": line.item} if line.kind == "fixed" else {}) for line in bill.lines],
        "usd": plain(bill.usd),
        "hours": plain(bill.hours.times(nodes)),
        **({"buys_hours": plain(bill.buys)} if bill.buys else {}),
        "wall_hours": plain(bill.chosen.wall_hours),
        "needed": {
            "usd": plain(bill.chosen.needed_usd),
            "hours": plain(bill.chosen.needed_hours.times(nodes)),
        },
        "metered": {"usd": plain(bill.chosen.metered_usd)},
        "uninterrupted": {"usd": str(bill.chosen.total), "hours": str(bill.chosen.compute.quantity)},
        "spot": bill.spot and _side(bill.spot),
        "on_demand": bill.on_demand and _side(bill.on_demand),
        bill.capacity.replace("-", "_"): _side(bill.chosen),
        "interruptions": plain(bill.chosen.interruptions),
        "interruptions_expected": round(float(bill.chosen.interruptions.mean), 3),
        "hazard_per_hour": None if bill.hazard is None else str(bill.hazard),
        "hazard": bill.chance and _hazard(bill.chance),
        "cadence": bill.cadence and _cadence(bill.cadence),
        "usd_at_hazard": {str(hazard): str(usd) for _, hazard, usd in bill.usd_at_hazard},
        "unknown": _unknown(bill),
        "break_even_hazard": None if bill.break_even_hazard is None else round(bill.break_even_hazard, 2),
        "types": [
            {
                "type": option.type,
                "hours": f"{option.runtime.total_s / 3600:.4f}" if option.runtime else None,
                "spot": {spot.zone: str(spot.price.amount) for spot in option.spot},
                "on_demand": str(option.on_demand.amount) if option.on_demand else None,
                "fits": option.holds_the_job,
                "why": option.why,
                **({"left_out": dict(option.left_out)} if option.left_out else {}),
            }
            for option in bill.types
        ],
        "fits": [asdict(fit) | {"needs_gb": round(fit.needs_gb, 2), "memory": _memory(fit)} for fit in bill.fits],
        "notice": [
            {
                "type": notice.type,
                "phase": notice.phase,
                "checkpoint_gb": round(notice.checkpoint_gb, 3),
                "seconds": round(notice.total_s, 1),
                "fits": notice.fits,
            }
            for notice in bill.notice
        ],
        "phases": predicted(bill),
        "basis": bill.chosen.runtime.basis,
        "calibrated": bill.calibrated,
        "cap": bill.cap and plain(bill.cap, "max_usd", "max_hours", "probability", "first", "at_hours"),
        **({"goals": [plain(goal, "name", "wanted", "share") for goal in bill.goals]} if bill.goals else {}),
        "kept": plain(bill.kept, "what", "gb", "usd_per_month", "days") | {"parts": plain(dict(bill.kept.parts))},
        "not_priced": list(NOT_PRICED),
        "account_discount_usd": str(account_discount(bill.chosen.lines)),
        "warnings": list(bill.warnings),
        "prices_as_of": bill.prices_as_of.isoformat(),
    }


def outputs(bill: Bill) -> dict[str, str]:
    """One dollar string per line, then the total."""
    return {line.name: f"${line.amount:.4f}" for line in bill.lines} | {"total": f"${bill.usd.p50:.4f}"}


def rates(bill: Bill) -> dict[str, Any]:
    """The types' hourly prices for the meter. While AWS gives no spot price, the meter uses the type's on-demand price,
    or the spot price of the bill if there is none. `gpus`: how many GPUs a node must have; a node with fewer is
    refused.
    """
    prices: dict[str, Any] = {}
    for option in bill.types:
        most, spot = bill.market.metered(option.offers)
        if most is None:
            continue
        by_zone = {zone: str(spot.amount) for zone in bill.zones} if spot else {}
        gpus = option.instance.gpu_count
        prices[option.type] = {"on_demand": str(most.amount), "spot": by_zone, "gpus": gpus}
    return prices


def extras(bill: Bill) -> dict[str, Any]:
    """USD per node-hour of each hourly line except compute, and the sum in USD of the lines that do not depend on
    hours.
    """
    fixed = (line.amount for line in bill.lines if line.kind == "fixed")
    return {
        "hourly_usd": {name: str(usd) for name, usd in bill.hourly_usd.items()},
        "fixed_usd": str(sum(fixed, Decimal(0))),
    }


def predicted(bill: Bill) -> list[dict[str, Any]]:
    """The predicted figures that the job prints before its first step."""
    memory = {fit.phase: fit.needs_gb for fit in bill.fits if fit.type == bill.chosen.type}
    return [
        {
            "phase": phase.name,
            "params_total": phase.params_total,
            "params_active": phase.params_active,
            "flops_per_token": phase.flops_per_token,
            "steps": phase.steps,
            "step_ms": round(phase.step_ms, 2),
            "tokens_per_s": round(phase.tokens_per_s, 1),
            "mfu": None if phase.mfu is None else round(phase.mfu, 4),
            "memory_gb": round(memory[phase.name], 2),
            "bound": phase.bound,
        }
        for phase in bill.chosen.runtime.phases
        if phase.steps
    ]


def _memory(fit: Fit) -> dict[str, float] | None:
    """GB per GPU of each part; None if not predicted."""
    return None if fit.memory is None else {name: round(gb, 2) for name, gb in fit.memory.parts.items()}


def _unknown(bill: Bill) -> dict[str, Any]:
    """The parts of the range: USD to finish if only the speed is unknown, if only the price is, and so on."""
    of = bill.chosen.exposure.unknown
    alone = {name: plain({"p10": low, "p90": high}) for name, (low, high) in bill.span_usd.items()}
    return {
        "interruptions": plain(bill.chosen.alone_usd),
        "speed": alone.get("speed"),
        "price": alone.get("price"),
        "measured": bill.measured_usd and plain(bill.measured_usd),
        "sigma": plain(of, "faster", "slower", "price", "setup"),
    }


def _hazard(chance: Hazard) -> dict[str, Any]:
    p10, p90 = chance.quantile(0.1), chance.quantile(0.9)
    return {"median": round(chance.median, 4), "p10": round(p10, 4), "p90": round(p90, 4), "source": chance.source}


def _cadence(best: BestInterval) -> dict[str, Any]:
    return {
        "interval_s": round(best.interval_s, 1),
        "present_s": round(best.present_s, 1),
        "saved_usd": f"{best.saved_usd:.4f}",
        "saved_hours": f"{best.saved_h:.4f}",
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "type": side.type,
        "zone": side.zone,
        "usd_per_hour": str(side.price.amount),
        "usd": plain(side.usd),
        "hours": plain(side.hours.times(side.exposure.nodes)),
        "uninterrupted_usd": str(side.total),
    }
