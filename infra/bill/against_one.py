"""What several nodes of one run buy, held against one node: time, never money."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill import runtime as runtimes
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.bill.side import Quantiles, Side, quantiles_of
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence.roofline import between_nodes_bytes

WORTH = 0.7  # of so many times one node's speed, from which nobody is warned


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainstOne:
    """`speedup` counts steps, those of the phase that takes longest; None: somebody has stated how long they take."""

    nodes: int
    speedup: float | None
    over_all_cards: float | None  # the same with fleet.cards: all; None: no other cards
    gb: float  # that each node sends in a step
    gbps: float
    efa: bool
    usd: Decimal  # p50 to finish, more than one node's
    hours: Decimal  # p50 by the wall, waits for capacity included, less than one node's
    idle_usd: Quantiles  # what nodes cost that wait for the others

    def sentence(self) -> str:
        """For the bill."""
        if self.speedup is None:
            return f"What one node would take is not known: how long a step of {self.nodes} takes is stated."
        over = f"{self.gbps:g} Gb/s of {'EFA' if self.efa else 'TCP'}"
        others = f", {self.over_all_cards:.2f} with fleet.cards: all" if self.over_all_cards else ""
        speed = (
            f"{self.nodes} nodes train {self.speedup:.2f} times as fast as one (each sends {self.gb:.1f} GB a step over"
            f" {over}{others}). "
        )
        if self.hours < 0:
            return f"{speed}They buy no time: {self.usd:+.2f} USD, and {-self.hours:.1f} h later than one (p50)."
        return f"{speed}They buy time: {self.usd:+.2f} USD for {-self.hours:.1f} h against one (p50)."

    def warnings(self) -> Iterator[str]:
        """What a reader should doubt."""
        if self.speedup is not None and self.speedup < WORTH * self.nodes:
            more = f"; fleet.cards: all would be {self.over_all_cards:.2f}" if self.over_all_cards else ""
            times = f"{self.speedup:.2f} times as fast as one for {self.nodes} times its price"
            yield f"{self.nodes} nodes are {times}{more}"
        if not self.efa:
            yield "nodes of this type have no EFA on these cards: they talk over TCP, whose speed nobody has measured"

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        return {
            "count": self.nodes,
            "speedup": None if self.speedup is None else round(self.speedup, 3),
            "speedup_all_cards": None if self.over_all_cards is None else round(self.over_all_cards, 3),
            "gb_a_step": round(self.gb, 3),
            "gbps": self.gbps,
            "efa": self.efa,
            "usd_more": str(self.usd),
            "hours_less": str(self.hours),
            "waiting_usd": str(self.idle_usd.mean),
        }


def against_one(definition: StackDefinition, several: Side, one: Side) -> AgainstOne:
    """What the first side buys; both of the same type and capacity."""
    fleet, instance = definition.fleet, several.option.instance
    at = max(range(len(several.runtime.phases)), key=lambda index: several.runtime.phases[index].seconds)
    idle = several.needed.idle_hours * several.exposure.usd_h
    stated = several.runtime.speed in ("declared", "guessed")
    others = fleet.cards == "one" and instance.efa_cards > 1 and not stated
    return AgainstOne(
        nodes=fleet.nodes,
        speedup=None if stated else _speedup(several.runtime, one.runtime, at),
        over_all_cards=_speedup(_over_all_cards(definition, several), one.runtime, at) if others else None,
        gb=between_nodes_bytes(definition.job.parameters.phases()[at], fleet.nodes) / 1e9,
        gbps=instance.between_nodes_gbps(fleet.cards),
        efa=instance.has_efa(fleet.cards),
        usd=several.needed_usd.p50 - one.needed_usd.p50,
        hours=one.wall_hours.p50 - several.wall_hours.p50,
        idle_usd=quantiles_of(idle),
    )


def _speedup(several: Runtime, one: Runtime, at: int) -> float:
    return one.phases[at].step_ms / several.phases[at].step_ms if several.phases[at].step_ms else 1.0


def _over_all_cards(definition: StackDefinition, several: Side) -> Runtime:
    return runtimes.hours(
        definition.job.parameters,
        several.option.instance,
        definition.estimate,
        definition.storage.root,
        nodes=definition.nodes,
        cards="all",
    )
