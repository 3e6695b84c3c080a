"""two-tower: every member's model trained at once on the full candidate matrix. A micro-batch counts queries.

A member is one fold's model, of the honest protocol or of the optimistic one; a "token" is one query of one member.
The model tower runs once per member and step, and its share is spread over the queries, so that FLOP per step is exact
at the whole batch. One phase per family (the config's own, or each of the sweep's), then the refit on all queries,
which is sized for as many epochs as the folds and ends at their median; the baselines follow it, on the CPU.
"""

from __future__ import annotations

from itertools import pairwise

from job.sizing.common import GB, Memory, PhaseSize, Rung, cuts
from job.spec.two_tower import VARIANTS, Towers, TwoTowerConfig, variants

# 274 kernels and 354 views a chunk, however many members: 8.3 CPU-ms at 1 and 9.2 at 20 members of toy width (torch
# 2.13.0, a busy Xeon core, 2026-11-21), and 5 us for each launch, which is an estimate.
LAUNCH_MS = 10.0
GROUP_SCORES = 1 << 23  # that the loss holds at once, or one member's (job/models/two_tower.py's GROUP)
SCORE_TENSORS = 3  # of those: a group's gradient until the next group's products and their logarithms stand beside it
# LambdaRank, ten folds of at most 100 trees at 0.17 s and 2 s of features, measured on a CPU; trees and features go
# through every query and model of each fold.
BASELINES_CORE_S, BASELINES_OF = 190.0, 342 * 1131 * 10
MOST_RANKED = 10_000  # models that LambdaRank takes for a query: kMaxPosition of LightGBM's rank_objective.hpp, 4.7
REFIT = "refit"
VALIDATION = "1-nDCG@10"  # mean of the honest members on the folds they watch


def problems(config: TwoTowerConfig) -> list[tuple[str, str]]:
    found = []
    if unknown := [name for name in config.sweep if name not in VARIANTS]:
        return [("sweep", f"{', '.join(unknown)}: not among {', '.join(VARIANTS)}")]
    if len(set(config.sweep)) < len(config.sweep):
        found.append(("sweep", "each variant once"))
    t = config.towers
    found += [(f"towers.{name}", "at least one width") for name in ("query", "model") if not getattr(t, name)]
    for name, family in variants(config):  # p has a model tower of its own, and the config's query tower
        query, model = family.towers.query, family.towers.model
        if query and model and query[-1] != model[-1]:
            whose = f"those of {name} in the sweep do" if config.sweep else "towers.model does"
            found.append(("towers.query", f"widths that end with {model[-1]}, as {whose}: there both meet"))
    if config.data.folds > config.data.queries:
        found.append(("data.folds", f"at most the number of queries, {config.data.queries}"))
    if config.data.folds < 3:
        found.append(("data.folds", "at least 3: one to test on, one for inner validation, the rest to train on"))
    if config.objective == "sampled" and config.sampled.negatives >= config.data.models:
        found.append(("sampled.negatives", f"at most {config.data.models - 1}: there are {config.data.models} models"))
    return found


def parameters(config: TwoTowerConfig) -> int:
    """Of one member: heads, fusion, query tower, model embedding and model tower, biases included."""
    t = config.towers
    return query_parameters(t) + model_parameters(t) + config.data.models * t.embedding


def query_parameters(t: Towers) -> int:
    heads = t.heads * ((t.sentence + 1) * t.head + (t.head + 1) * t.head)
    return heads + (t.heads * t.head + 1) * t.fusion + _tower((t.fusion, *t.query))


def model_parameters(t: Towers) -> int:
    return _tower((t.embedding, *t.model))


def fold_sizes(config: TwoTowerConfig) -> tuple[int, ...]:
    """Judged queries of each fold: the first ones have one more."""
    queries, folds = config.data.queries, config.data.folds
    return tuple(queries // folds + (fold < queries % folds) for fold in range(folds))


def members(config: TwoTowerConfig) -> int:
    """Models trained at once."""
    return config.data.folds * (2 if config.optimistic else 1)


def queries(config: TwoTowerConfig, *, refit: bool = False) -> int:
    """Rows of a member's matrix: its training queries and the discovery queries, the most that any member has."""
    if refit:
        return config.data.queries + config.weak.queries
    sizes = fold_sizes(config)
    held_out = min(sizes) if config.optimistic else min(a + b for a, b in pairwise((*sizes, sizes[0])))
    return config.data.queries - held_out + config.weak.queries


def batch(config: TwoTowerConfig, rows: int) -> int:
    """Queries of a member in one step: all of its rows, or as many as the objective samples."""
    return config.sampled.batch if config.objective == "sampled" else rows


def flops_per_step(config: TwoTowerConfig, q: int) -> int:
    """Forward and backward of one member with `q` queries: both towers and the matrix of scores."""
    t, n = config.towers, config.data.models
    return 6 * (q * query_parameters(t) + n * model_parameters(t) + q * n * t.query[-1])


def baselines_core_s(config: TwoTowerConfig) -> float:
    """Core-seconds of LambdaRank over all folds; the other baselines take none worth a line."""
    data = config.data
    if data.models > MOST_RANKED:
        return 0.0
    return BASELINES_CORE_S * (data.queries * data.models * data.folds / BASELINES_OF)


def ranks(config: TwoTowerConfig, gpu_count: int) -> int:
    """One process on one GPU."""
    return 1


def phases(config: TwoTowerConfig) -> tuple[PhaseSize, ...]:
    families = variants(config)
    largest = max((family for _, family in families), key=parameters)
    sizes = [
        _phase(family, f"{name}-folds" if config.sweep else "folds", members(family), queries(family))
        for name, family in families
    ]
    refit = _phase(largest, REFIT, 1, max(queries(family, refit=True) for _, family in families))
    return (*sizes, refit)


def memory(
    config: TwoTowerConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    """The scores of a few members at a time (the loss frees each group), everything else of all members at once. When
    the scores are gone, the model tower's widest layer takes its gradient twice; a batch that is not cut makes the
    weights' gradients only as its activations go.
    """
    family, count, whole = _of_phase(config, phase_index)
    step = batch(family, whole)
    weights, chunk = count * parameters(family) * 4, min(micro_batch, step)
    t, models = family.towers, family.data.models
    widths = 3 * t.heads * t.head + 2 * t.fusion + 2 * sum(t.query), t.embedding + 2 * sum(t.model)
    activations = count * 4 * (chunk * widths[0] + models * widths[1])
    if t.dropout:  # its 16 bits per hidden unit are drawn for all chunks at once
        units = t.heads * t.head + t.fusion + sum(t.query[:-1]), sum(t.model[:-1])
        activations += count * 2 * (step * units[0] + models * units[1])
    group = max(1, min(count, GROUP_SCORES // (chunk * models)))
    scores = SCORE_TENSORS * group * chunk * models * 4
    widest = 2 * count * models * max(t.model) * 4
    held = count * whole * (models + t.sentence) * 4  # every member's own targets and sentence vectors
    best = weights if count > 1 else 0
    return Memory(
        weights_gb=(weights + best + held) / GB,
        gradients_gb=weights / GB,
        moments_gb=2 * weights / GB,
        activations_gb=activations / GB,
        logits_gb=scores / GB,
        total_gb=((3 + (chunk < step)) * weights + best + held + activations + max(scores, widest)) / GB,
    )


def rows_per_rank(config: TwoTowerConfig, ranks: int) -> int:
    """Queries of a step, in the phase that has most of them."""
    return max(batch(config, _of_phase(config, index)[2]) for index in range(len(phases(config))))


def ladder(config: TwoTowerConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """Every query at once, then chunks of 512, 256, 128, 64 with gradients summed over them."""
    whole = rows_per_rank(config, ranks)
    rungs = cuts(whole, config.chunk, [m for m in (whole, 512, 256, 128, 64) if m <= whole])
    return tuple(rung for rung in rungs if not rung.checkpointing)


def checkpoint_bytes(config: TwoTowerConfig, phase_index: int) -> int:
    """Every member's weights, moments and best weights so far, and the scores of the families that are done."""
    family, count, _ = _of_phase(config, phase_index)
    return (16 if count > 1 else 12) * count * parameters(family) + _scores_bytes(config)


def end_bytes(config: TwoTowerConfig, phase_index: int) -> int:
    """Weights, the best ones, scores."""
    family, count, _ = _of_phase(config, phase_index)
    return checkpoint_bytes(config, phase_index) - 8 * count * parameters(family)


def export_bytes(config: TwoTowerConfig) -> dict[str, int]:
    return {}


def final_bytes(config: TwoTowerConfig) -> dict[str, int]:
    """The refit on all queries and every fold's scores: both are what a run is for, and both are brought home."""
    return {"results": 4 * max(parameters(family) for _, family in variants(config)) + _scores_bytes(config)}


def cut_bytes(config: TwoTowerConfig, phase_index: int) -> int:
    """Half a cross-validation is no result."""
    return 0


def dataset_bytes(config: TwoTowerConfig) -> int:
    """One byte per label, four per number of a sentence vector."""
    discovery = max(family.weak.queries for _, family in variants(config))
    vectors = (config.data.queries + discovery) * config.towers.sentence * 4
    return config.data.queries * config.data.models + vectors


def weights_bytes(config: TwoTowerConfig) -> int:
    """The sentence encoder runs once, when the dataset is prepared."""
    return 0


def _phase(config: TwoTowerConfig, name: str, count: int, rows: int) -> PhaseSize:
    q = batch(config, rows)
    total = count * parameters(config)
    steps = config.epochs * config.steps_per_epoch
    last = name == REFIT
    return PhaseSize(
        name=name,
        params_total=total,
        params_active=total,
        params_trained=total,
        flops_per_token=flops_per_step(config, q) // q,
        attention=None,
        state_bytes_per_param=16,
        optimizer_traffic_bytes_per_param=28,
        steps=steps,
        tokens_per_step=count * q,
        evaluations=0 if last else config.epochs,
        evaluation_tokens=0 if last else count * max(fold_sizes(config)),
        cpu_core_s=baselines_core_s(config) if last else 0.0,
        micro_launch_ms=LAUNCH_MS,  # of each chunk: both towers and the scores are made anew
        validation=None if last else VALIDATION,
    )


def _of_phase(config: TwoTowerConfig, phase_index: int) -> tuple[TwoTowerConfig, int, int]:
    """(config, members, queries) of a phase; the refit's is the largest family's."""
    families = [family for _, family in variants(config)]
    if phase_index < len(families):
        family = families[phase_index]
        return family, members(family), queries(family)
    largest = max(families, key=parameters)
    return largest, 1, max(queries(family, refit=True) for family in families)


def _scores_bytes(config: TwoTowerConfig) -> int:
    """fp32: each fold's model on every judged query, and once more per query for the optimistic protocol."""
    tables = config.data.folds + (1 if config.optimistic else 0)
    return 4 * len(variants(config)) * tables * config.data.queries * config.data.models


def _tower(widths: tuple[int, ...]) -> int:
    return sum((before + 1) * after for before, after in pairwise(widths))
