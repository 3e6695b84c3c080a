"""Adaptive curriculum: which samples an epoch draws, and how often.

The first time every task weighs the same. After an evaluation the samples of tasks whose pass rate lies between 20 and
80 % count WEIGHT times: neither hopeless nor done. The name is the plan's, this meaning is ours. A sample without a
task weighs 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

LOW, HIGH, WEIGHT = 0.2, 0.8, 3.0


def weights(tasks: Sequence[str], pass_rates: Mapping[str, float]) -> list[float]:
    """Per sample, from its task's pass rate in the last evaluation; 1 where there is none."""
    return [WEIGHT if LOW <= pass_rates.get(task, -1.0) <= HIGH else 1.0 for task in tasks]


def order(count: int, weight: Sequence[float] | None, *, seed: int, epoch: int) -> list[int]:
    """`count` sample indices for one epoch, a pure function of its arguments. Without weights, or with equal ones: each
    once, shuffled. Otherwise drawn in proportion, with replacement, hardest-to-place (the heavier) first.
    """
    draw = random.Random(f"{seed} {epoch}")
    if weight is None or len(set(weight)) <= 1:
        indices = list(range(count))
        draw.shuffle(indices)
        return indices
    drawn = draw.choices(range(len(weight)), weights=weight, k=count)
    return sorted(drawn, key=lambda index: -weight[index])
