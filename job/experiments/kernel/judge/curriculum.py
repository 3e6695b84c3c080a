"""Adaptive curriculum: decides which samples an epoch draws, and how often.

In the first epoch every task weighs the same. After an evaluation, samples of tasks with a pass rate between 20 and 80
% weigh WEIGHT times as much: such tasks are neither hopeless nor mastered. The name comes from the plan, the definition
is ours. A sample without a task weighs 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpufleet.job.experiments.kernel.judge.catalog import TASKS, KernelTask

LOW, HIGH, WEIGHT = 0.2, 0.8, 3.0
CALLED = re.compile(r"torch\.(?:nn\.functional\.)?(\w+)")
IN_CODE = re.compile(r"\.(\w+)|\b(\w+)\(")  # only as code, because `where` is also an English word


def tasks_of(question: str) -> frozenset[str]:
    """The tasks that a pair practises: the task whose prompt is the pair's question; else all tasks that the question
    names, itself or by a torch function, in any case and without underscores (`nn.ReLU` practises relu).
    """
    same = [task for task in TASKS if task.prompt.strip() in question]
    if same:
        return frozenset({max(same, key=lambda task: len(task.prompt)).name})  # one prompt may begin like another
    plain = question.lower().replace("_", "")
    words, functions = set(re.findall(r"\w+", plain)), {one or other for one, other in IN_CODE.findall(plain)}
    names = set()
    for task in TASKS:
        called = set(CALLED.findall(task.reference))
        if task.name.replace("_", "") in words or (called and called <= functions):
            names.add(task.name)
    return frozenset(names)


def require_practice(pairs: Iterable[frozenset[str]], tried: Sequence[KernelTask], beginning: str) -> None:
    """Raises ValueError, whose text begins with `beginning`, if no pair practises one of the tasks in `tried`."""
    names = {task.name for task in tried}
    if not any(names & tasks for tasks in pairs):
        raise ValueError(
            f"{beginning} asks for one of the {len(tried)} tasks or names one of their functions (docs/kernels.md), so"
            " no pair can be drawn more often. Use other pairs, more of generate.tasks, or off."
        )


def weights(tasks: Sequence[Collection[str]], pass_rates: Mapping[str, float]) -> list[float]:
    """The weight of each sample, from the pass rates of its tasks in the last evaluation; 1 without tasks or rates."""
    return [WEIGHT if any(LOW <= pass_rates.get(task, -1.0) <= HIGH for task in own) else 1.0 for own in tasks]


def order(weight: Sequence[float], *, seed: int, epoch: int, begun: int = 0) -> list[int]:
    """Sample indices, drawn with replacement in proportion to their weights, heavier ones first. There are as many
    indices as weights, minus the `begun` samples that the epoch drew before the weights were known. A pure function of
    its arguments.
    """
    count = len(weight) - begun
    drawn = random.Random(f"{seed} {epoch}").choices(range(len(weight)), weights=weight, k=count)
    return sorted(drawn, key=lambda index: -weight[index])
