"""two-tower: trains every member's model at once on the full candidate matrix. A micro-batch counts queries.

A member is one fold's model, of the honest protocol or of the optimistic one; a "token" is one query of one member. The
model tower runs once per member and step, and its share is spread over the queries, so that FLOP per step is exact at
the whole batch. One phase per family (the config's own, or each of the sweep's), then the refit on all queries, which
is billed for as many epochs as the folds, and ends at the median of theirs. The baselines follow the refit, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal, get_args

from gpufleet.job.experiments.spec import ExperimentConfig, cuts
from gpufleet.job.kind import common
from gpufleet.job.kind.batch import rows_per_rank
from gpufleet.job.kind.job import Processes

# 274 kernels and 354 views a chunk, however many members: 8.3 CPU-ms at 1 and 9.2 at 20 members of toy width (torch
# 2.13.0, a busy Xeon core, 2026-11-21), and 5 us for each launch, which is an estimate.
LAUNCH_MS = 10.0
# number of scores that the loss has in memory at once; at least those of one member
# (job/experiments/two_tower/model.py's GROUP)
GROUP_SCORES = 1 << 23
# number of copies of a group's scores, because the gradient of a group stays in memory until the logarithms of the next
# group exist
SCORE_TENSORS = 3
# LambdaRank, ten folds of at most 100 trees at 0.17 s and 2 s of features, measured on a CPU; trees and features take
# time in proportion to queries and models of each fold.
BASELINES_CORE_S, BASELINES_OF = 190.0, 342 * 1131 * 10
MOST_RANKED = 10_000  # models per query in LambdaRank: kMaxPosition of LightGBM's rank_objective.hpp, 4.7
REFIT = "refit"
VALIDATION = "1-nDCG@10"  # the honest members' mean on the folds that they watch


Variant = Literal["o", "p", "q", "r", "weak-2m", "full"]


VARIANTS: tuple[str, ...] = get_args(Variant)


@dataclass(frozen=True, kw_only=True, slots=True)
class Towers:
    """Widths are listed from input to output. The default is config `o`: 1,255,104 trainable parameters."""

    sentence: int = common.bounded(384, 4, 65536)  # width of the frozen sentence embedding
    heads: int = common.bounded(4, 1, 64)
    head: int = common.bounded(96, 1, 65536)  # width of one head: sentence -> head -> ReLU -> head
    fusion: int = common.bounded(384, 1, 65536)  # width after the layer that joins the heads
    query: tuple[int, ...] = common.bounded((256, 192, 128), 1, 65536)  # after the fusion layer
    embedding: int = common.bounded(256, 1, 65536)  # of a model id
    model: tuple[int, ...] = common.bounded((512, 384, 256, 128), 1, 65536)
    dropout: float = common.bounded(0.18, 0.0, 0.9)
    temperature: float = common.bounded(0.09, 1e-3, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weak:
    """Labels for discovery queries from similar training queries, made anew for every fold."""

    # the similarity is also the weight of a neighbour, so it is not negative
    similarity: float = common.bounded(0.4, 0.0, 1.0)
    confidence: float = common.bounded(0.5, 0.0, 1.0)
    neighbours: int = common.bounded(10, 1, 1000)
    queries: int = common.bounded(101, 0, 1_000_000)  # number of discovery queries that are used


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Queries with labels, models to rank, and where queries and models come from."""

    source: Literal["million-llms", "generated-relevance"] = "million-llms"
    queries: int = common.bounded(342, 2, 1_000_000)
    models: int = common.bounded(1131, 2, 1_000_000)
    folds: int = common.bounded(10, 3, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerOptim:
    """AdamW, cosine to a tenth, clipped per fold."""

    lr: float = common.bounded(8e-4, 1e-9, 1.0)
    weight_decay: float = common.bounded(5e-5, 0.0, 1.0)
    clip: float = common.bounded(1.0, 0.0, 1e6)
    head_diversity: float = common.bounded(0.015, 0.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Objective `sampled` only: per step and fold, `batch` queries with one relevant model against `negatives`."""

    batch: int = common.bounded(96, 1, 1_000_000)
    negatives: int = common.bounded(4, 1, 1000)
    # the share of negatives that are chosen from the irrelevant models with the best scores
    hard: float = common.bounded(0.7, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerConfig(ExperimentConfig):
    """two-tower: rank models for a query; cross-validation that never looks at its own test fold."""

    trainer: ClassVar[str] = "gpufleet.job.experiments.two_tower.run:TwoTower"
    processes: ClassVar[Processes] = "per GPU"
    demands: ClassVar[common.Demands] = common.Demands(one_node="its models never need each other")
    dataset_class: ClassVar[str] = "gpufleet.job.experiments.two_tower.data:RankingData"
    dataset_kind: ClassVar[str] = "ranking"
    leaves_speed: ClassVar[tuple[str, ...]] = (
        "steps_per_epoch",
        "epochs",
        "patience",
        "first_stop",
        "weak.similarity",
        "weak.confidence",
        "weak.neighbours",
    )

    # variants of this config, trained one after another; if there are none, this config itself is trained
    sweep: tuple[Variant, ...] = ()
    # whether to train also by the protocol of the original plan, for a second table; this doubles the work
    optimistic: bool = True
    epochs: int = common.bounded(35, 1, 10_000)
    steps_per_epoch: int = common.bounded(100, 1, 1_000_000)
    # the training of a member stops after this many epochs without a better validation loss
    patience: int = common.bounded(15, 1, 10_000)
    first_stop: int = common.bounded(15, 0, 10_000)  # no member stops before this epoch
    objective: Literal["full", "sampled"] = "full"
    # number of queries per backward pass; None for the largest number that fits
    chunk: int | None = common.bounded(None, 1, 1_000_000)
    seed: int = common.bounded(42, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int = common.added_later(1, 1, 8)  # that share the folds of a run; on a CPU, processes
    towers: Towers = Towers()
    data: Ranking = Ranking()
    weak: Weak = Weak()
    sampled: Sampled = Sampled()
    optim: TowerOptim = TowerOptim()
    precision: common.Compute = common.Compute(compute="fp32")
    checkpoint: common.Checkpoint = common.Checkpoint()
    guard: common.Guard = common.added_later(common.Guard(), version="0.1.0")
    log: common.Log = common.Log(every=100)

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if unknown := [name for name in self.sweep if name not in VARIANTS]:
            return [("sweep", f"{', '.join(unknown)}: not among {', '.join(VARIANTS)}")]
        if len(set(self.sweep)) < len(self.sweep):
            problems.append(("sweep", "each variant once"))
        t = self.towers
        problems += [(f"towers.{name}", "at least one width") for name in ("query", "model") if not getattr(t, name)]
        for name, family in variants(self):  # variant p has a model tower of its own, and the query tower of the config
            query, model = family.towers.query, family.towers.model
            if query and model and query[-1] != model[-1]:
                whose = f"those of {name} in the sweep do" if self.sweep else "towers.model does"
                allowed = f"widths that end with {model[-1]}, as {whose}: both towers have the same last width"
                problems.append(("towers.query", allowed))
        if self.data.folds > self.data.queries:
            problems.append(("data.folds", f"at most the number of queries, {self.data.queries}"))
        if self.data.folds < 3:
            problems.append(
                ("data.folds", "at least 3: one to test on, one for inner validation, the rest to train on")
            )
        if self.objective == "sampled" and self.sampled.negatives >= self.data.models:
            problems.append(
                ("sampled.negatives", f"at most {self.data.models - 1}: there are {self.data.models} models")
            )
        return problems

    @common.remembered
    def phases(self) -> tuple[common.PhaseSize, ...]:
        families = variants(self)
        largest = max((family for _, family in families), key=parameters)
        sizes = [
            _phase(family, f"{name}-folds" if self.sweep else "folds", members(family), queries(family))
            for name, family in families
        ]
        refit = _phase(largest, REFIT, 1, max(queries(family, refit=True) for _, family in families))
        return (*sizes, refit)

    def ranks(self, gpu_count: int, nodes: int = 1) -> int:
        """As many as share the members with at least one for each; the refit trains on one of them."""
        count = members(self)
        most = common.processes(self.device, self.gpus, gpu_count, count)
        return -(-count // -(-count // most))

    @common.remembered
    def memory(self, phase_index: int, rung: common.Rung, ranks: int = 1) -> common.Memory:
        """The memory of a step. The scores of only a few members are in memory at a time, because the loss frees each
        group. All other tensors are in memory for all members at once. The peak is reached either with the scores, or
        with twice the gradient of the model tower's widest layer. An unsplit batch allocates the weights' gradients
        only while its activations are freed.
        """
        family, every, whole = _of_phase(self, phase_index)
        count, step = -(-every // ranks), batch(family, whole)
        weights, chunk = count * parameters(family) * 4, min(rung.micro, step)
        t, models = family.towers, family.data.models
        widths = 3 * t.heads * t.head + 2 * t.fusion + 2 * sum(t.query), t.embedding + 2 * sum(t.model)
        activations = count * 4 * (chunk * widths[0] + models * widths[1])
        if t.dropout:  # the random bits of dropout, 16 per hidden unit, are made for all chunks and all members at once
            units = t.heads * t.head + t.fusion + sum(t.query[:-1]), sum(t.model[:-1])
            activations += every * 2 * (step * units[0] + models * units[1])
        group = max(1, min(count, GROUP_SCORES // (chunk * models)))
        scores = SCORE_TENSORS * group * chunk * models * 4
        widest = 2 * count * models * max(t.model) * 4
        held = count * whole * (models + t.sentence) * 4  # the targets and sentence vectors of every member
        best = weights if every > 1 else 0
        state = {"weights": weights + best + held, "gradients": weights, "moments": 2 * weights}
        peak = (3 + (chunk < step)) * weights + best + held + activations + max(scores, widest)
        return common.in_gb(**state, activations=activations, logits=scores, peak=peak)

    def ladder(self, ranks: int = 1) -> tuple[common.Rung, ...]:
        """Every query at once, then chunks of 512, 256, 128, 64 with gradients summed over them."""
        whole = rows_per_rank(self, ranks)
        rungs = cuts(whole, self.chunk, [m for m in (whole, 512, 256, 128, 64) if m <= whole])
        return tuple(rung for rung in rungs if not rung.checkpointing)

    def products(self) -> str:
        return "tf32" if self.precision.compute == "fp32" else self.precision.compute

    def shortened(self, steps: int) -> TwoTowerConfig:
        per_epoch = max(1, min(self.steps_per_epoch, steps // len(self.phases()) // common.EVALUATIONS_PROBED))
        epochs = min(self.epochs, common.EVALUATIONS_PROBED)  # each epoch is evaluated
        return replace(self, epochs=epochs, steps_per_epoch=per_epoch)

    @common.remembered
    def rows(self) -> int:
        """Queries per step, in the phase with the most."""
        return max(batch(self, _of_phase(self, index)[2]) for index in range(len(self.phases())))

    @common.remembered
    def sizes(self) -> common.Sizes:
        """A checkpoint has every member's weights, moments and best weights so far, and the scores of finished
        families. final/ has the refit on all queries, and the scores of every fold. A run that ends early leaves
        nothing, because half of a cross-validation is no result. The dataset has one byte for each label, and four for
        each number of a sentence vector.
        """
        families = [family for _, family in variants(self)]
        of_phases = [_of_phase(self, index) for index in range(len(self.phases()))]
        sized = [(count, count * parameters(family)) for family, count, _ in of_phases]
        checkpoints = [(16 if count > 1 else 12) * weights + _scores_bytes(self) for count, weights in sized]
        vectors = (self.data.queries + max(family.weak.queries for family in families)) * self.towers.sentence * 4
        return common.Sizes(
            checkpoints=tuple(checkpoints),
            phase_ends=tuple(whole - 8 * weights for whole, (_, weights) in zip(checkpoints, sized, strict=True)),
            exports={},
            final={"results": 4 * max(map(parameters, families)) + _scores_bytes(self)},
            final_if_cut=(0,) * len(of_phases),
            dataset=self.data.queries * self.data.models + vectors,
        )


def variants(config: TwoTowerConfig) -> tuple[tuple[str, TwoTowerConfig], ...]:
    """(name, config) of each model family that a run trains, in order: the sweep's, or the config's own as `tower`.

    `o` changes nothing. p and q have the towers of the published runs; r, weak-2m and full have their numbers of weak
    labels, which are counted in queries of 1131 models (public record of the runs, read 2026-11-21); the thresholds of
    r and weak-2m are chosen here, between those of o and full.
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


def parameters(config: TwoTowerConfig) -> int:
    """The parameters of one member: heads, fusion, query tower, model embedding and model tower, biases included."""
    t = config.towers
    return query_parameters(t) + model_parameters(t) + config.data.models * t.embedding


def query_parameters(t: Towers) -> int:
    heads = t.heads * ((t.sentence + 1) * t.head + (t.head + 1) * t.head)
    return heads + (t.heads * t.head + 1) * t.fusion + _tower((t.fusion, *t.query))


def model_parameters(t: Towers) -> int:
    return _tower((t.embedding, *t.model))


def fold_sizes(config: TwoTowerConfig) -> tuple[int, ...]:
    """Judged queries of each fold: the first folds have one more if the division leaves a remainder."""
    queries, folds = config.data.queries, config.data.folds
    return tuple(queries // folds + (fold < queries % folds) for fold in range(folds))


def members(config: TwoTowerConfig) -> int:
    """The number of models trained at once."""
    return config.data.folds * (2 if config.optimistic else 1)


def queries(config: TwoTowerConfig, *, refit: bool = False) -> int:
    """The number of rows in a member's matrix, which are its training and discovery queries. The number is the largest
    of all members.
    """
    if refit:
        return config.data.queries + config.weak.queries
    sizes = fold_sizes(config)
    held_out = min(sizes) if config.optimistic else min(a + b for a, b in pairwise((*sizes, sizes[0])))
    return config.data.queries - held_out + config.weak.queries


def batch(config: TwoTowerConfig, rows: int) -> int:
    """The number of queries of a member in one step: all its rows, or as many as the objective samples."""
    return config.sampled.batch if config.objective == "sampled" else rows


def flops_per_step(config: TwoTowerConfig, q: int) -> int:
    """FLOPs of the forward and backward passes of one member with `q` queries: both towers, and the matrix of
    scores.
    """
    t, n = config.towers, config.data.models
    return 6 * (q * query_parameters(t) + n * model_parameters(t) + q * n * t.query[-1])


def baselines_core_s(config: TwoTowerConfig) -> float:
    """Core-seconds of LambdaRank over all folds; the other baselines take almost no time."""
    data = config.data
    if data.models > MOST_RANKED:
        return 0.0
    return BASELINES_CORE_S * (data.queries * data.models * data.folds / BASELINES_OF)


def _phase(config: TwoTowerConfig, name: str, count: int, rows: int) -> common.PhaseSize:
    q = batch(config, rows)
    total = count * parameters(config)
    steps = config.epochs * config.steps_per_epoch
    last = name == REFIT
    return common.PhaseSize(
        name=name,
        params_total=total,
        params_active=total,
        params_trained=total,
        flops_per_token=flops_per_step(config, q) // q,
        attention=None,
        optimizer_traffic_bytes_per_param=28,
        steps=steps,
        tokens_per_step=count * q,
        models=count,
        evaluations=0 if last else config.epochs,
        evaluation_tokens=0 if last else count * max(fold_sizes(config)),
        cpu_core_s=baselines_core_s(config) if last else 0.0,
        may_stop_early=True,
        micro_launch_ms=LAUNCH_MS,  # for each chunk, because each chunk repeats both towers and the scores
        validation=None if last else VALIDATION,
    )


def _of_phase(config: TwoTowerConfig, phase_index: int) -> tuple[TwoTowerConfig, int, int]:
    """The config, the number of members and the number of queries of a phase. For the refit it is the config of the
    largest family.
    """
    families = [family for _, family in variants(config)]
    if phase_index < len(families):
        family = families[phase_index]
        return family, members(family), queries(family)
    largest = max(families, key=parameters)
    return largest, 1, max(queries(family, refit=True) for family in families)


def _scores_bytes(config: TwoTowerConfig) -> int:
    """Bytes of fp32 scores: those of the model of each fold on every judged query, and with `optimistic` one more for
    each query.
    """
    tables = config.data.folds + (1 if config.optimistic else 0)
    return 4 * len(variants(config)) * tables * config.data.queries * config.data.models


def _tower(widths: tuple[int, ...]) -> int:
    return sum((before + 1) * after for before, after in pairwise(widths))
