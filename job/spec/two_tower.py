"""two-tower's run config: a query tower and a model tower, ten folds trained at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from job.spec.common import Checkpoint, Compute, Guard, Log, bounded

Variant = Literal["o", "p", "q", "r", "weak-2m", "full"]
VARIANTS: tuple[str, ...] = get_args(Variant)


@dataclass(frozen=True, kw_only=True, slots=True)
class Towers:
    """Widths are listed from input to output. The default is config `o`: 1,255,104 trainable parameters."""

    sentence: int = bounded(384, 4, 65536)  # width of the frozen sentence embedding
    heads: int = bounded(4, 1, 64)
    head: int = bounded(96, 1, 65536)  # width of one head: sentence -> head -> ReLU -> head
    fusion: int = bounded(384, 1, 65536)  # width after the layer that joins the heads
    query: tuple[int, ...] = bounded((256, 192, 128), 1, 65536)  # after the fusion layer
    embedding: int = bounded(256, 1, 65536)  # of a model id
    model: tuple[int, ...] = bounded((512, 384, 256, 128), 1, 65536)
    dropout: float = bounded(0.18, 0.0, 0.9)
    temperature: float = bounded(0.09, 1e-3, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weak:
    """Labels for discovery queries from similar training queries, made anew for every fold."""

    similarity: float = bounded(0.4, 0.0, 1.0)  # it is a neighbour's weight too, so not negative
    confidence: float = bounded(0.5, 0.0, 1.0)
    neighbours: int = bounded(10, 1, 1000)
    queries: int = bounded(101, 0, 1_000_000)  # discovery queries used


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Queries with labels, models to rank, and where they come from."""

    source: Literal["million-llms", "generated-relevance"] = "million-llms"
    queries: int = bounded(342, 2, 1_000_000)
    models: int = bounded(1131, 2, 1_000_000)
    folds: int = bounded(10, 3, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerOptim:
    """AdamW, cosine to a tenth, clipped per fold."""

    lr: float = bounded(8e-4, 1e-9, 1.0)
    weight_decay: float = bounded(5e-5, 0.0, 1.0)
    clip: float = bounded(1.0, 0.0, 1e6)
    head_diversity: float = bounded(0.015, 0.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Objective `sampled` only: per step and fold, `batch` queries with one relevant model against `negatives`."""

    batch: int = bounded(96, 1, 1_000_000)
    negatives: int = bounded(4, 1, 1000)
    hard: float = bounded(0.7, 0.0, 1.0)  # share of the negatives drawn from the best-scored irrelevant models


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerConfig:
    """two-tower: rank models for a query; cross-validation that never looks at its own test fold."""

    sweep: tuple[Variant, ...] = ()  # variants of this config, trained one after another; none = this config itself
    optimistic: bool = True  # also train the original plan's way, for a second table: it doubles the work
    epochs: int = bounded(35, 1, 10_000)
    steps_per_epoch: int = bounded(100, 1, 1_000_000)
    patience: int = bounded(15, 1, 10_000)  # epochs without a better inner validation
    first_stop: int = bounded(15, 0, 10_000)  # no stop before this epoch
    objective: Literal["full", "sampled"] = "full"
    chunk: int | None = bounded(None, 1, 1_000_000)  # queries per backward; None = the largest that fits
    seed: int = bounded(42, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    towers: Towers = Towers()
    data: Ranking = Ranking()
    weak: Weak = Weak()
    sampled: Sampled = Sampled()
    optim: TowerOptim = TowerOptim()
    precision: Compute = Compute(compute="fp32")
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    log: Log = Log(every=100)


def variants(config: TwoTowerConfig) -> tuple[tuple[str, TwoTowerConfig], ...]:
    """(name, config) of each model family that a run trains, in order: the sweep's, or the config's own as `tower`.

    `o` changes nothing. p and q are the records' towers, r, weak-2m and full their counts of weak labels in queries of
    1131 models (public record of the runs, read 2026-11-21); the thresholds of r and weak-2m are ours, between those of
    o and full.
    """
    if not config.sweep:
        return (("tower", config),)
    return tuple((name, variant(replace(config, sweep=()), name)) for name in config.sweep)


def variant(config: TwoTowerConfig, name: Variant) -> TwoTowerConfig:
    """`config` with the changes that `name` stands for. Raises ValueError for an unknown name."""
    towers, weak = config.towers, config.weak
    match name:
        case "o":
            return config
        case "p":
            return replace(config, towers=replace(towers, embedding=512, model=(768, 512, 256, 128)))
        case "q":
            query, model = (512, 384, 256, 128), (384, 320, 256, 192, 160, 128)
            return replace(config, towers=replace(towers, heads=6, query=query, model=model))
        case "r":
            return replace(config, weak=replace(weak, similarity=0.35, confidence=0.4, queries=433))
        case "weak-2m":
            return replace(config, weak=replace(weak, similarity=0.3, confidence=0.35, queries=1426))
        case "full":
            return replace(config, weak=Weak(similarity=0.25, confidence=0.3, neighbours=15, queries=14_950))
    raise ValueError(f"sweep: {name!r} is not one of {', '.join(VARIANTS)}")
