"""What a node of the run has cost, from what it and others have left of it: its record and its last heartbeat.

Never less than it did. A killed node says nothing after its last heartbeat; the fleet's history says when AWS ended it.
Until AWS has answered it counts until the next node's launch, as a fleet of one launches none before; where AWS knows
only that it is gone, for GONE_S after its last heartbeat. A node that was told of its end is billed until that end.

The node's own Python reads this: no newer than 3.9 here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from gpufleet.job.contract import aws
from gpufleet.job.contract.attempt import AttemptRecord, Beat
from gpufleet.job.contract.lives import UNTOLD, Lives
from gpufleet.job.contract.reading import epoch, iso
from gpufleet.job.contract.terms import Rates

CENT_100 = Decimal("0.0001")
MINIMUM_S = Decimal(aws.MINIMUM_S)
HOUR_S = Decimal(3600)
GONE_S = 120.0  # two heartbeats: one that was due, and one that may have been on its way
BOOT_S = 480.0  # the newest node, before its first heartbeat: what the bills take for a small one's set-up


@dataclass(frozen=True)
class NodeCost:
    """`usd` is compute, disks and address. `ceiling_s`: counted at the ceiling of a spot price."""

    seconds: Decimal  # as billed: 60 at least
    lived_s: Decimal
    usd: Decimal
    compute_usd: Decimal
    ceiling_s: Decimal


def hours(seconds: Decimal) -> Decimal:
    """Seconds as hours."""
    return seconds / HOUR_S


def of_node(
    rates: Rates, node: AttemptRecord, beat: Beat | None, lives: Lives = UNTOLD, until: float | None = None
) -> NodeCost:
    """The cost of a node, whose record names it. `until`: the launch of the next one; None: there is none."""
    last = beat or Beat()
    lived = _lived_s(node, beat, lives, until)
    seconds = max(lived, MINIMUM_S)
    seen = last.attempt_s
    compute = rates.ceiling * hours(seen) if last.compute_usd is None else last.compute_usd
    tail = max(seconds - seen, Decimal(0))
    # The hour of the last heartbeat has its price; a later one's is not known here.
    known = Decimal(0) if last.usd_per_hour is None else min(tail, HOUR_S - seen % HOUR_S)
    compute += hours(known) * (last.usd_per_hour or 0) + hours(tail - known) * rates.ceiling
    untold = tail - known + (seen if last.compute_usd is None else last.ceiling_s or Decimal(0))
    return NodeCost(
        seconds=seconds,
        lived_s=lived,
        usd=(compute + hours(seconds) * rates.extras).quantize(CENT_100),
        compute_usd=compute.quantize(CENT_100),
        ceiling_s=untold if rates.moves else Decimal(0),
    )


def _lived_s(node: AttemptRecord, beat: Beat | None, lives: Lives, until: float | None) -> Decimal:
    launched = node.launched
    last = beat or Beat()
    lived = last.attempt_s if last.lived_s is None else last.lived_s
    if not launched:
        return lived
    ended = lives.ended.get(node.instance)
    told = [ended] if ended is not None else [lives.seen.get(node.instance)]
    if ended is None and node.exit is not None:
        told += [epoch(node.exit.at), epoch(node.exit.ends_at)]
    elif ended is None:
        least = launched + (BOOT_S if beat is None else float(lived) + GONE_S)
        if until is None:
            told.append(least)
        elif node.instance in lives.gone and beat is not None:
            told.append(min(least, until))
        else:
            told.append(until)
    return max([lived, *(Decimal(f"{at - launched:.3f}") for at in told if at is not None)])


def untold(launched: Mapping[str, float]) -> list[AttemptRecord]:
    """Records in place of those that nodes, by name and launch, have not left: they ended before they could."""
    return [AttemptRecord(instance=name, launched_at=iso(at)) for name, at in launched.items()]


def next_launch(launched: float, launches: Iterable[float], nodes: int = 1) -> float | None:
    """The first of the launches that came after this one. Several nodes live at once: the launch of one says nothing of
    another's end.
    """
    return None if nodes > 1 else min((each for each in launches if each > launched), default=None)
