"""Adaptive curriculum: which samples an epoch draws, and how often.

The first time every task weighs the same. After an evaluation the samples of tasks whose pass rate lies between 20 and
80 % count WEIGHT times: neither hopeless nor done. The name is the plan's, this meaning is ours. A sample without a
task weighs 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpufleet.job.experiments.kernel.judge.catalog import TASKS, KernelTask

LOW, HIGH, WEIGHT = 0.2, 0.8, 3.0
CALLED = re.compile(r"torch\.(?:nn\.functional\.)?(\w+)")
IN_CODE = re.compile(r"\.(\w+)|\b(\w+)\(")  # not in a sentence: where is a word of English too


def tasks_of(question: str) -> frozenset[str]:
    """The tasks that a pair is practice for: the one whose prompt the question is, else those that it names, or of
    which it names all torch functions, in any case and without underscores (`nn.ReLU` is practice for relu).
    """
    same = [task for task in TASKS if task.prompt.strip() in question]
    if same:
        return frozenset({max(same, key=lambda task: len(task.prompt)).name})  # one may begin like another
    plain = question.lower().replace("_", "")
    words, functions = set(re.findall(r"\w+", plain)), {one or other for one, other in IN_CODE.findall(plain)}
    found = set()
    for task in TASKS:
        called = set(CALLED.findall(task.reference))
        if task.name.replace("_", "") in words or (called and called <= functions):
            found.add(task.name)
    return frozenset(found)


def require_practice(pairs: Iterable[frozenset[str]], tried: Sequence[KernelTask], said: str) -> None:
    """Raises ValueError, which begins with `said`, where the tasks of no pair are among those tried."""
    names = {task.name for task in tried}
    if not any(names & tasks for tasks in pairs):
        raise ValueError(
            f"{said} asks for one of the {len(tried)} tasks or names what they compute with (docs/kernels.md): there "
            "is nothing to draw more of. Use other pairs, more of generate.tasks, or off."
        )


def weights(tasks: Sequence[Collection[str]], pass_rates: Mapping[str, float]) -> list[float]:
    """Per sample, from its tasks' pass rates in the last evaluation; 1 where there are none."""
    return [WEIGHT if any(LOW <= pass_rates.get(task, -1.0) <= HIGH for task in own) else 1.0 for own in tasks]


def order(weight: Sequence[float], *, seed: int, epoch: int, begun: int = 0) -> list[int]:
    """Sample indices, as many as there are weights, less the `begun` that the epoch had drawn before these were known,
    drawn in proportion to them, with replacement, hardest-to-place (the heavier) first. A pure function of its
    arguments.
    """
    count = len(weight) - begun
    drawn = random.Random(f"{seed} {epoch}").choices(range(len(weight)), weights=weight, k=count)
    return sorted(drawn, key=lambda index: -weight[index])
