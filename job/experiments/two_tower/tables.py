"""Makes tables from scores: nDCG@10, nDCG@5 and MRR per fold, their mean, spread and interval, and which method beats
which.

The mean is over folds. `std` is the standard deviation between them (n - 1). `interval95` is the interval of the mean
by Student's t, limited to the possible values of a metric (0 to 1) or of a difference of two metrics (-1 to 1). A
method beats another if the mean over folds of the paired differences (query by query) is larger than the spread of
these differences between folds.
"""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpufleet.job.experiments.student import t95
from gpufleet.job.experiments.two_tower.arrays import Floats
from gpufleet.job.experiments.two_tower.folds import Indices
from gpufleet.job.experiments.two_tower.ranking_metrics import ndcg, reciprocal_rank

METRICS = ("ndcg@10", "ndcg@5", "mrr")


def per_query(scores_QM: Floats, gains_QM: NDArray[np.float64]) -> dict[str, Tensor]:
    """Each metric of each query, float64 [Q]."""
    scores, wanted = torch.from_numpy(scores_QM), torch.from_numpy(gains_QM)
    values = ndcg(scores, wanted, 10), ndcg(scores, wanted, 5), reciprocal_rank(scores, wanted)
    return dict(zip(METRICS, values, strict=True))


def method(name: str, values: dict[str, Tensor], fold_Q: Indices, epochs: list[int] | None) -> dict[str, Any]:
    """One row of a table; `epochs`: the chosen epoch of each fold."""
    folds = int(fold_Q.max()) + 1
    rows: list[dict[str, Any]] = []
    for fold in range(folds):
        own = torch.from_numpy(fold_Q == fold)
        row = {metric: round(values[metric][own].mean().item(), 6) for metric in METRICS}
        rows.append({"fold": fold, "queries": int(own.sum()), **row, "epoch": epochs[fold] if epochs else None})
    summary = {metric: spread([row[metric] for row in rows], (0.0, 1.0)) for metric in METRICS}
    return {"method": name, "note": None, "folds": rows, **summary}


def absent(name: str, note: str) -> dict[str, Any]:
    """A method that could not run, with the reason."""
    return {"method": name, "note": note, "folds": [], **dict.fromkeys(METRICS)}


def compared(name: str, ours: Tensor, other: str, theirs: Tensor, fold_Q: Indices) -> dict[str, Any]:
    """Compares nDCG@10 of two methods, paired by query."""
    difference = ours - theirs
    folds = [difference[torch.from_numpy(fold_Q == fold)].mean().item() for fold in range(int(fold_Q.max()) + 1)]
    summary = spread(folds, (-1.0, 1.0))
    return {
        "method": name,
        "against": other,
        "difference": summary,
        "queries_won": int((difference > 0).sum()),
        "queries_lost": int((difference < 0).sum()),
        "beats": summary["mean"] > summary["std"],
    }


def verdict(comparisons: list[dict[str, Any]], name: str, missing: list[str]) -> str:
    """The sentence about the comparison in results.json."""
    own = [c for c in comparisons if c["method"] == name and c["against"] != "random"]
    lost = [c for c in own if not c["beats"]]
    margins = "; ".join(
        f"{c['against']} by {c['difference']['mean']:+.4f} nDCG@10 (spread over folds {c['difference']['std']:.4f})"
        for c in own
    )
    unseen = f" Not compared: {', '.join(missing)}." if missing else ""
    if lost:
        names = " and ".join(c["against"] for c in lost)
        return f"{name} does not beat {names} outside the fold-to-fold spread: {margins}.{unseen}"
    return f"{name} beats {margins}.{unseen}"


def spread(values: list[float], possible: tuple[float, float] = (-math.inf, math.inf)) -> dict[str, Any]:
    """Mean, standard deviation and the mean's 95% interval, limited to the range `possible`."""
    mean, std = fmean(values), stdev(values)
    half = t95(len(values) - 1) * std / math.sqrt(len(values))
    interval = [round(max(mean - half, possible[0]), 6), round(min(mean + half, possible[1]), 6)]
    return {"mean": round(mean, 6), "std": round(std, 6), "interval95": interval}


def text(tables: list[dict[str, Any]]) -> str:
    """The tables for people, in Markdown."""
    lines: list[str] = []
    for table in tables:
        lines += [
            f"{table['protocol']}: {table['note']}",
            "",
            "| method | nDCG@10 | nDCG@5 | MRR |",
            "|---|---|---|---|",
        ]
        for row in table["methods"]:
            cells = [
                row["note"] or "-" if row[metric] is None else f"{row[metric]['mean']:.4f} ± {row[metric]['std']:.4f}"
                for metric in METRICS
            ]
            lines.append(f"| {row['method']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
