"""two-tower: every fold's model trained at once on the full candidate matrix. A micro-batch counts queries.

A "token" is one query of one fold. The model tower runs once per fold and step, and its share is spread over the
queries, so that FLOP per step is exact at the whole batch.
"""

from __future__ import annotations

from itertools import pairwise

from job.config.two_tower import Towers, TwoTowerConfig
from job.sizing.common import GB, Memory, PhaseSize, Rung, cuts

LAUNCH_MS = 11.0  # some hundred small kernels, forward, backward, clip and update: an estimate
TENSORS = 5  # score-sized tensors alive at the peak: scores, log-probabilities, targets, two gradients
BYTES_PER_LABEL = 8
BASELINES_CORE_S = 60.0  # popularity, LambdaRank and random over all folds: an estimate


def problems(config: TwoTowerConfig) -> list[tuple[str, str]]:
    t, found = config.towers, []
    if not t.query or not t.model or t.query[-1] != t.model[-1]:
        found.append(("towers.query", "must end at the width of towers.model, where both towers meet"))
    if config.data.folds > config.data.queries:
        found.append(("data.folds", f"at most the number of queries, {config.data.queries}"))
    if config.data.folds < 3:
        found.append(("data.folds", "at least 3: one to test on, one for inner validation, the rest to train on"))
    return found


def parameters(config: TwoTowerConfig) -> int:
    """Of one fold: heads, fusion, query tower, model embedding and model tower, biases included."""
    return (
        query_parameters(config.towers)
        + model_parameters(config.towers)
        + config.data.models * (config.towers.embedding)
    )


def query_parameters(t: Towers) -> int:
    fused = t.heads * t.head
    heads = t.heads * ((t.sentence + 1) * t.head + (t.head + 1) * t.head)
    fusion = (fused + 1) * fused
    return heads + fusion + _tower((fused, *t.query))


def model_parameters(t: Towers) -> int:
    return _tower((t.embedding, *t.model))


def flops_per_step(config: TwoTowerConfig) -> int:
    """Forward and backward of one fold: both towers and the matrix of scores."""
    q, n, meet = _queries(config), config.data.models, config.towers.query[-1]
    return 6 * (q * query_parameters(config.towers) + n * model_parameters(config.towers) + q * n * meet)


def ranks(config: TwoTowerConfig, gpu_count: int) -> int:
    """One process on one GPU."""
    return 1


def phases(config: TwoTowerConfig) -> tuple[PhaseSize, ...]:
    folds, q = config.data.folds, _queries(config)
    total = folds * parameters(config)
    steps = config.epochs * config.steps_per_epoch
    return (
        PhaseSize(
            name="folds",
            params_total=total,
            params_active=total,
            params_trained=total,
            flops_per_token=flops_per_step(config) // q,
            state_bytes_per_param=16,
            optimizer_traffic_bytes_per_param=28,
            steps=steps,
            tokens_per_step=folds * q,
            evaluations=config.epochs,
            evaluation_tokens=folds * q,
            cpu_core_s=BASELINES_CORE_S,
            launch_ms=LAUNCH_MS,
        ),
    )


def memory(
    config: TwoTowerConfig, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1
) -> Memory:
    folds = config.data.folds
    total = folds * parameters(config) * 4
    queries = min(micro_batch, _queries(config))
    t = config.towers
    widths = t.heads * t.head * 3 + 2 * sum(t.query), t.embedding + 2 * sum(t.model)
    activations = folds * 4 * 2 * (queries * widths[0] + config.data.models * widths[1])
    scores = TENSORS * folds * queries * config.data.models * 4
    held = config.data.folds * _queries(config) * config.data.models * 4  # every fold's own targets
    return Memory(
        weights_gb=(total + held) / GB,
        gradients_gb=total / GB,
        moments_gb=2 * total / GB,
        activations_gb=activations / GB,
        logits_gb=scores / GB,
        total_gb=(4 * total + held + activations + scores) / GB,
    )


def ladder(config: TwoTowerConfig, ranks: int = 1) -> tuple[Rung, ...]:
    """Every query at once, then chunks of 512, 256, 128, 64 with gradients summed over them."""
    whole = _queries(config)
    rungs = cuts(whole, config.chunk, [m for m in (whole, 512, 256, 128, 64) if m <= whole])
    return tuple(rung for rung in rungs if not rung.checkpointing)


def checkpoint_bytes(config: TwoTowerConfig, phase_index: int) -> int:
    """Every fold's weights, moments, and its best weights so far."""
    return 16 * config.data.folds * parameters(config)


def export_bytes(config: TwoTowerConfig) -> dict[str, int]:
    """The refit on all queries, and every fold's scores."""
    scores = 4 * config.data.folds * config.data.queries * config.data.models
    return {"scores": scores, "refit": 4 * parameters(config)}


def dataset_bytes(config: TwoTowerConfig) -> int:
    embeddings = _queries(config) * config.towers.sentence * 4
    return config.data.queries * config.data.models * BYTES_PER_LABEL + embeddings


def weights_bytes(config: TwoTowerConfig) -> int:
    """The sentence encoder runs once, when the dataset is prepared."""
    return 0


def _queries(config: TwoTowerConfig) -> int:
    """Judged and discovery queries together."""
    return config.data.queries + config.weak.queries


def _tower(widths: tuple[int, ...]) -> int:
    return sum((before + 1) * after for before, after in pairwise(widths))
