"""pass@k, fast_p and intervals over tasks. Standard library only."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean, variance

from gpufleet.job.experiments.student import Z95, t95

DRAWS = 2000
LEVEL = 0.95
SAME = 1e-9  # shares that differ by less are equal up to rounding


def pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """The mean over tasks of 1 - C(n - c, k) / C(n, k), from (n candidates, c correct) per task. This is the chance
    that at least one of k candidates, drawn without replacement, is correct (Chen et al. 2021, arXiv 2107.03374). None
    if a task has fewer than k candidates.
    """
    if not counts or any(n < k for n, _ in counts):
        return None
    return fmean(1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts)


def fast_p(speedups: Sequence[Sequence[float | None]], p: float) -> float | None:
    """The mean over tasks of the share of candidates that are correct and more than `p` times as fast as the reference
    (KernelBench, arXiv 2502.10517). None stands for an incorrect or untimed candidate.
    """
    if not speedups or not all(speedups):
        return None
    return fmean(sum(s is not None and s > p for s in task) / len(task) for task in speedups)


def share_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Wilson's interval (1927; Brown, Cai, DasGupta 2001, Statistical Science 16:101) of the mean share of correct
    candidates from (n candidates, c correct) per task, with the effective number of independent candidates that the
    candidates' spread over tasks implies. With few tasks this number is not well known, so the interval uses Student's
    t (Korn, Graubard 1998, Survey Methodology 24:193). If no candidate or every candidate is correct, there is no
    spread to estimate, and each task is treated as one candidate; a bootstrap would not take into account that the next
    candidate may differ. Raises ValueError if there are no tasks.
    """
    if not counts:
        raise ValueError("no tasks, no interval")
    shares = [correct / n for n, correct in counts]
    share, worth = fmean(shares), float(sum(n for n, _ in counts))
    if share in (0.0, 1.0) or len(counts) == 1:
        worth = float(len(counts))
    elif spread := variance(shares) / len(counts):
        worth = min(worth, share * (1 - share) / spread * (Z95 / t95(len(counts) - 1)) ** 2)
    middle = share + Z95**2 / (2 * worth)
    width = Z95 * math.sqrt(share * (1 - share) / worth + (Z95 / (2 * worth)) ** 2)
    scale = 1 + Z95**2 / worth
    return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)


def interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """The bootstrap interval of a mean over tasks. Raises ValueError if there are no values."""
    if not values:
        raise ValueError("no tasks, no interval")
    draw = random.Random(seed)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    tail = int(DRAWS * (1 - LEVEL) / 2)
    return means[tail], means[-1 - tail]


def paired_interval(one: Sequence[float], other: Sequence[float], *, seed: int) -> tuple[float, float]:
    """The interval of the mean difference `one` - `other`. Both are shares, with a value per task in the same order. If
    all tasks differ by the same amount, all samples of the bootstrap are equal. Then the interval is widened by the
    share of tasks that could differ although no observed task did (Wilson's interval, as in share_interval).
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    low, high = interval(differences, seed=seed)
    if max(differences) - min(differences) < SAME:
        _, unseen = share_interval([(1, 0)] * len(differences))
        low, high = max(-1.0, low - unseen), min(1.0, high + unseen)
    return low, high
