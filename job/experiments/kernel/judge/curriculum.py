"""An adaptive curriculum, which decides which samples an epoch uses, and how often. In the first epoch, all tasks have
the same weight. After an evaluation, samples of tasks with a pass rate between 20 and 80 % have WEIGHT times as much
weight, because such tasks are neither hopeless nor mastered. A sample without a task has the weight 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpufleet.job.experiments.kernel.judge.catalog import TASKS, KernelTask

LOW, HIGH, WEIGHT = 0.2, 0.8, 3.0
CALLED = re.compile(r"torch\.(?:nn\.functional\.)?(\w+)")
IN_CODE = re.compile(r"\.(\w+)|\b(\w+)\(")  # matches names only in code, because `where` is also an English word


def tasks_of(question: str) -> frozenset[str]:
    """The tasks that a pair practises: the task whose prompt is the pair's question. If there is none, all tasks that
    the question names, either by the task's name or by a torch function, in upper or lower case and without underscores
    (`nn.ReLU` practises relu).
    """
    same = [task for task in TASKS if task.prompt.strip() in question]
    if same:
        # the longest one, because one prompt may be the beginning of another
        return frozenset({max(same, key=lambda task: len(task.prompt)).name})
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
    """The weight of each sample, from the pass rates of its tasks in the last evaluation; 1 if it has no tasks, or if
    there are no rates.
    """
    return [WEIGHT if any(LOW <= pass_rates.get(task, -1.0) <= HIGH for task in own) else 1.0 for own in tasks]


def order(weight: Sequence[float], *, seed: int, epoch: int, begun: int = 0) -> list[int]:
    """Indices of samples, chosen at random with replacement in proportion to their weights; those with more weight come
    first. There are as many indices as weights, minus `begun`, the number of samples that the epoch used before the
    weights were known. This is a pure function of its arguments.
    """
    count = len(weight) - begun
    drawn = random.Random(f"{seed} {epoch}").choices(range(len(weight)), weights=weight, k=count)
    return sorted(drawn, key=lambda index: -weight[index])
