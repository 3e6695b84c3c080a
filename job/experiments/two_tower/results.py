"""Writes the results of a finished run: the fold table, the comparison with the baselines, and every fold's scores."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import EXPORTS, RESULTS
from gpufleet.job.experiments.engine import metrics
from gpufleet.job.experiments.engine.experiment import Phase
from gpufleet.job.experiments.two_tower import tables as tables_of
from gpufleet.job.experiments.two_tower.arrays import Floats
from gpufleet.job.experiments.two_tower.folds import Member, fold_of, worth
from gpufleet.job.experiments.two_tower.ranking import Tables
from gpufleet.job.experiments.two_tower.spec import REFIT, TwoTowerConfig

HONEST = "trained on the folds that are neither tested nor watched, epoch chosen on the watched one, tested once"
OPTIMISTIC = (
    "OPTIMISTIC, the original plan's way: trained on all other folds, best epoch picked on the test fold itself; "
    "too good by construction, shown for comparison with earlier figures only; the baselines learn from the honest "
    "protocol's folds and are in its table alone"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerOutcome:
    """The data for all tables. Q judged queries, M models, F families."""

    config: TwoTowerConfig
    tables: Tables
    families: list[str]
    progress: dict[str, Any]
    scores: Floats  # [F, folds, Q, M]
    optimistic: Floats | None  # [F, Q, M]
    baselines: dict[str, Floats | str]  # for each baseline, its scores [Q, M], or the reason why it could not run


def by_query(own: Sequence[Member], tables: Tables, score: Callable[[Member], Floats]) -> Floats:
    """The scores of each query by the member that is tested on it, [Q, M]."""
    scores_QM = np.zeros(tables.labels.shape, dtype=np.float32)
    for member in own:
        scores_QM[member.test] = score(member)
    return scores_QM


def measured(phases: Sequence[Phase], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each phase, the number of steps, the median time of a step and the peak of memory."""
    rows = []
    for phase in phases:
        own = [record for record in records if record["phase"] == phase.name]
        figures = metrics.measured(own)
        rows.append(
            {
                "phase": phase.name,
                "steps": own[-1]["step"] - phase.first if own else 0,
                "step_ms": figures["step_ms"],
                "memory_gb": figures["memory_gb"],
            }
        )
    return rows


def write(outcome: TwoTowerOutcome, workdir: Path, about: dict[str, Any], *, say: Callable[[str], None]) -> None:
    """Writes fold_table.json, fold_table.md, exports/scores.npz, and results.json, which also contains `about`."""
    config, folds = outcome.config, outcome.config.data.folds
    fold_Q, wanted = fold_of(config.data.queries, folds, config.seed), worth(outcome.tables.labels)
    ran = {name: tables_of.per_query(s, wanted) for name, s in outcome.baselines.items() if not isinstance(s, str)}
    missing = {name: why for name, why in outcome.baselines.items() if isinstance(why, str)}
    rows, optimistic_rows, comparisons = [], [], []
    for index, family in enumerate(outcome.families):
        epochs = outcome.progress["families"][family]["epoch"]
        own_scores = outcome.scores[index][fold_Q, np.arange(len(fold_Q))]
        own = tables_of.per_query(own_scores, wanted)
        rows.append(tables_of.method(family, own, fold_Q, epochs[:folds]))
        if outcome.optimistic is not None:
            best = tables_of.per_query(outcome.optimistic[index], wanted)
            optimistic_rows.append(tables_of.method(family, best, fold_Q, epochs[folds:]))
        comparisons += [
            tables_of.compared(family, own["ndcg@10"], name, theirs["ndcg@10"], fold_Q) for name, theirs in ran.items()
        ]
    others = [
        tables_of.absent(name, missing[name]) if name in missing else tables_of.method(name, ran[name], fold_Q, None)
        for name in outcome.baselines
    ]
    tables: list[dict[str, Any]] = [{"protocol": "honest", "note": HONEST, "methods": [*rows, *others]}]
    if optimistic_rows:
        tables.append({"protocol": "optimistic", "note": OPTIMISTIC, "methods": optimistic_rows})
    verdicts = {name: tables_of.verdict(comparisons, name, list(missing)) for name in outcome.families}
    atomic.write_json(workdir / "fold_table.json", {"schema": 1, "tables": tables})
    atomic.write_bytes(workdir / "fold_table.md", tables_of.text(tables).encode())
    _write_scores(workdir / EXPORTS / "scores.npz", outcome, fold_Q)
    atomic.write_json(
        workdir / RESULTS,
        {
            "schema": 1,
            "experiment": "two-tower",
            "verdict": verdicts,
            "comparisons": comparisons,
            "tables": [
                {**t, "methods": [{k: v for k, v in m.items() if k != "folds"} for m in t["methods"]]} for t in tables
            ],
            "families": outcome.progress["families"],
            REFIT: outcome.progress["refit"],
            "scores": f"{EXPORTS}/scores.npz",
            **about,
        },
    )
    for line in (*tables_of.text(tables).splitlines(), *verdicts.values()):
        say(line)


def _write_scores(path: Path, outcome: TwoTowerOutcome, fold_Q: Any) -> None:
    """fold [Q], queries [Q] and models [M] by id, and per family scores [folds, Q, M] fp32: judged queries only."""
    file = io.BytesIO()
    np.savez(
        file,
        fold=fold_Q,
        queries=np.array(outcome.tables.names["queries"]),
        models=np.array(outcome.tables.names["models"]),
        **dict(zip(outcome.families, outcome.scores, strict=True)),
    )
    atomic.write_bytes(path, file.getvalue())
