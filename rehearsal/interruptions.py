"""When the rehearsal takes nodes away: at moments of the training that the definition's seed fixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infra.definition.model import Interruptions, Place, StackDefinition

Kind = Literal["notice", "loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One interruption: as soon as the job has logged `step` or a later one, and is at the place asked for.

    A loss also waits for the first checkpoint in the bucket.
    """

    step: int
    kind: Kind
    place: Place = "step"


def possible(definition: StackDefinition) -> Interruptions:
    """The definition's, as far as AWS makes such: it gives no notice to a node on demand, and credits it no hour."""
    on_demand = definition.fleet.capacity == "on-demand"
    return replace(definition.interruptions, with_notice=0) if on_demand else definition.interruptions


def plan(interruptions: Interruptions, phase_steps: Sequence[int]) -> tuple[Planned, ...]:
    """In the order in which they come, a node each.

    In the first phase: in its second to fourth fifth. At a step, or while saving: spread over all phases but the first,
    so that a phase boundary has been crossed, each in the second to fourth fifth of its share of the steps: there is
    something to lose before it, and something to do after it. Between phases: at the last step of a phase. In a stage:
    after the last step.
    """
    seeded = random.Random(interruptions.seed)
    places: list[tuple[Kind, Place]] = [("notice", interruptions.notice_at)] * interruptions.with_notice
    places += [("loss", interruptions.loss_at)] * interruptions.without_notice
    steps = [count for count in phase_steps if count]
    total = sum(steps)
    first = steps[0] if len(steps) > 1 else 0
    drawn = [(kind, place) for kind, place in places if place in ("step", "save")]
    share = (total - first) / max(1, len(drawn))
    planned = [
        Planned(step=max(1, round(first + share * (number + seeded.uniform(0.2, 0.6)))), kind=kind, place=place)
        for number, (kind, place) in enumerate(drawn)
    ]
    early = [(kind, place) for kind, place in places if place == "first"]
    planned += [Planned(step=max(1, round(steps[0] * seeded.uniform(0.3, 0.7))), kind=k, place=p) for k, p in early]
    ends = [sum(steps[: place + 1]) for place in range(len(steps) - 1)] or [total]
    between = [(kind, place) for kind, place in places if place == "boundary"]
    planned += [
        Planned(step=ends[number % len(ends)], kind=kind, place=place) for number, (kind, place) in enumerate(between)
    ]
    planned += [Planned(step=total, kind=kind, place=place) for kind, place in places if place == "stage"]
    return tuple(sorted(planned, key=lambda one: (one.step, one.place == "stage")))
