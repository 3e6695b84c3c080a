"""When the rehearsal takes nodes away: at training steps that the definition's seed fixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infra.definition import Interruptions

Kind = Literal["notice", "loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One interruption: as soon as the job has logged `step` or a later one."""

    step: int
    kind: Kind


def plan(interruptions: Interruptions, phase_steps: Sequence[int]) -> tuple[Planned, ...]:
    """Spread over all phases but the first, so that a phase boundary has been crossed; a node each, in step order.

    Each falls into the second to fourth fifth of its share of the steps: there is something to lose before it, and
    something to do after it.
    """
    seeded = random.Random(interruptions.seed)
    kinds: list[Kind] = ["notice"] * interruptions.with_notice
    kinds += ["loss"] * interruptions.without_notice
    total = sum(phase_steps)
    first = phase_steps[0] if len(phase_steps) > 1 else 0
    share = (total - first) / max(1, len(kinds))
    return tuple(
        Planned(step=round(first + share * (number + seeded.uniform(0.2, 0.6))), kind=kind)
        for number, kind in enumerate(kinds)
    )
