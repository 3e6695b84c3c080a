"""Parameters, FLOPs and bytes of two-tower, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from gpufleet.job.experiments.two_tower import baselines
from gpufleet.job.experiments.two_tower import spec as two_tower
from gpufleet.job.experiments.two_tower.folds import members, refit_member, rows_of
from gpufleet.job.experiments.two_tower.members import Members
from gpufleet.job.experiments.two_tower.model import TwoTowerModel, draw_noise
from gpufleet.job.experiments.two_tower.ranking import generate
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig, Variant, variant, variants
from gpufleet.job.kind import batch
from gpufleet.job.kind.common import Rung
from tests.job import two_tower_world as world
from tests.job.memory_count import Alive

FULL = TwoTowerConfig()
HONEST = replace(FULL, optimistic=False)
SWEEP = replace(FULL, sweep=("o", "p", "q", "r", "weak-2m", "full"))


@pytest.mark.parametrize(("name", "count"), [("o", 1_255_104), ("p", 2_036_544), ("q", 1_719_200)])
def test_counts_are_to_the_digit_and_those_of_the_module(name: Variant, count: int) -> None:
    config = variant(FULL, name)
    assert two_tower.parameters(config) == count
    with torch.device("meta"):
        assert sum(p.numel() for p in TwoTowerModel(config.towers, 1131).parameters()) == count


def test_the_rehearsals_model_has_its_parameters() -> None:
    config = world.config(world.REHEARSAL)
    assert two_tower.parameters(config) == 53_664
    assert sum(p.numel() for p in TwoTowerModel(config.towers, 120).parameters()) == 53_664


def test_a_fold_step_of_443_queries_is_4_9_gflop_and_one_of_all_discovery_queries_61() -> None:
    assert round(two_tower.flops_per_step(FULL, 443) / 1e9, 1) == 4.9
    assert round(two_tower.flops_per_step(FULL, 14_950) / 1e9) == 61


def test_phases_are_the_folds_and_the_refit_and_one_of_folds_per_family_of_a_sweep() -> None:
    assert [(p.name, p.steps, p.params_total) for p in HONEST.phases()] == [
        ("folds", 3500, 12_551_040),
        ("refit", 3500, 1_255_104),
    ]
    assert FULL.phases()[0].params_total == 25_102_080
    assert [p.name for p in SWEEP.phases()] == [
        *(f"{name}-folds" for name, _ in variants(SWEEP)),
        "refit",
    ]
    refit, largest = len(variants(SWEEP)), 2_036_544  # of the families the second
    assert SWEEP.phases()[refit].params_total == largest
    assert SWEEP.sizes().checkpoints[refit] - SWEEP.sizes().phase_ends[refit] == 8 * largest  # two moments


@pytest.mark.parametrize("optimistic", [True, False])
@pytest.mark.parametrize(("queries", "folds"), [(23, 5), (20, 5), (24, 5), (342, 10), (7, 3)])
def test_the_sized_rows_are_those_of_the_fullest_member(queries: int, folds: int, optimistic: bool) -> None:
    config = replace(FULL, optimistic=optimistic, data=replace(FULL.data, queries=queries, folds=folds))
    assert max(len(m.train) for m in members(config)) + config.weak.queries == two_tower.queries(config)
    assert len(refit_member(queries).train) + config.weak.queries == two_tower.queries(config, refit=True)


def test_rows_hold_as_many_queries_as_were_sized() -> None:
    config = world.config()
    tables = generate(23, 31, 12, 16, seed=1)
    for member in members(config):
        rows = rows_of(member, tables, config.weak, two_tower.queries(config))
        assert rows.targets.shape == (two_tower.queries(config), 31)


def test_a_score_sized_tensor_of_all_folds_at_full_is_two_thirds_of_a_gigabyte() -> None:
    full = variant(HONEST, "full")
    held = full.memory(0, Rung(micro=10**6)).weights_gb - 2 * 4 * 12_551_040 / 1e9
    sentences = 10 * two_tower.queries(full) * 384 * 4 / 1e9
    assert round(10 * 14_950 * 1131 * 4 / 1e9, 2) == 0.68
    assert held - sentences == pytest.approx(0.68, rel=0.03)


def test_a_step_of_the_sampled_objective_is_as_long_as_its_batch() -> None:
    sampled = replace(FULL, objective="sampled")
    folds, refit = sampled.phases()
    assert (folds.tokens_per_step, refit.tokens_per_step) == (20 * 96, 96)
    assert folds.flops_per_token == two_tower.flops_per_step(FULL, 96) // 96
    assert sampled.ladder()[0].micro == 96
    assert sampled.memory(0, Rung(micro=96)).total_gb < FULL.memory(0, Rung(micro=443)).total_gb


def test_memory_is_predicted_within_a_tenth_where_a_large_batch_is_cut() -> None:
    config = replace(FULL, data=replace(FULL.data, folds=3, models=100), weak=replace(FULL.weak, queries=2000))
    count, rows = two_tower.members(config), two_tower.queries(config)
    module = Members(config, count, 0, torch.float32)
    with Alive([]) as alive:
        x, targets = torch.zeros(count, rows, 384), torch.zeros(count, rows, 100)
        noise = draw_noise(config.towers, count, rows, 100, torch.Generator())
        assert noise is not None
        inputs = x[:, :64], targets[:, :64], torch.ones(count, 64), noise.query[:, :64], noise.model
        torch.autograd.backward(module(*inputs).loss_sum)
    memory, state = config.memory(0, Rung(micro=64)), 4 * count * two_tower.parameters(config)
    assert alive.peak == pytest.approx(memory.total_gb * 1e9 - 4 * state, rel=0.1)  # weights, best ones, two moments


@pytest.mark.parametrize(
    ("dropout", "counted"),
    [(0.18, {443: 0.965, 256: 1.004, 128: 0.999, 64: 0.986}), (0.0, {443: 0.698, 256: 0.719, 128: 0.714, 64: 0.702})],
)
def test_memory_is_what_torchs_allocator_counts(dropout: float, counted: dict[int, float]) -> None:
    """GB of a step of both protocols' folds on a pretended A10G (docs/decisions, cuda-without-a-gpu)."""
    towers = replace(FULL.towers, dropout=dropout)
    if not dropout:  # counted with other towers
        towers = replace(towers, query=(256, 128, 64), model=(384, 256, 128, 64))
    config = replace(FULL, towers=towers)
    for micro, gigabytes in counted.items():
        assert config.memory(0, Rung(micro=micro)).total_gb == pytest.approx(gigabytes, rel=0.08)


def test_full_fits_a_24_gb_card_at_once_with_both_protocols() -> None:
    full = variant(FULL, "full")
    rung = batch.choose_rung(full, 24.0)
    assert rung is not None
    assert rung.micro == two_tower.queries(full, refit=True)


def test_the_ladder_cuts_queries_and_never_checkpoints() -> None:
    full = variant(FULL, "full")
    assert [rung.micro for rung in full.ladder()][1:] == [512, 256, 128, 64]
    assert not any(rung.checkpointing for rung in full.ladder())
    assert [rung.micro for rung in replace(FULL, chunk=128).ladder()] == [128, 64]
    needs = [full.memory(0, Rung(micro=rung.micro)).total_gb for rung in full.ladder()]
    assert needs == sorted(needs, reverse=True)


def test_a_checkpoint_holds_weights_moments_best_weights_and_scores() -> None:
    scores = 10 * 342 * 1131 * 4
    assert HONEST.sizes().checkpoints[0] == 16 * 12_551_040 + scores
    assert HONEST.sizes().checkpoints[1] == 12 * 1_255_104 + scores
    assert HONEST.sizes().phase_ends[0] == 8 * 12_551_040 + scores
    assert HONEST.sizes().phase_ends[1] == 4 * 1_255_104 + scores


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (replace(FULL, sweep=("o", "o")), "sweep"),
        (replace(FULL, sweep=cast(Any, ("o", "z"))), "sweep"),
        (replace(FULL, towers=replace(FULL.towers, query=(64, 32))), "towers.query"),
        (replace(FULL, sweep=("o", "p"), towers=replace(FULL.towers, query=(32,), model=(32,))), "towers.query"),
        (replace(FULL, data=replace(FULL.data, folds=2)), "data.folds"),
        (replace(FULL, data=replace(FULL.data, queries=8)), "data.folds"),
    ],
)
def test_what_cannot_be_trained_is_named(config: TwoTowerConfig, path: str) -> None:
    assert [found for found, _ in config.problems()] == [path]


def test_an_unknown_variant_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="'z' is not one of o, p, q, r, weak-2m, full"):
        variant(FULL, "z")  # type: ignore[arg-type]


def test_a_variant_of_a_sweep_is_the_scenario_of_its_name() -> None:
    changed = dict(variants(SWEEP))
    assert changed["o"] == FULL
    assert changed["full"].weak.queries == 14_950
    assert [(changed[n].data.queries + changed[n].weak.queries) * 1131 // 1000 for n in ("o", "r")] == [501, 876]


@pytest.mark.parametrize(
    ("data", "core_s"),
    [
        ({}, 190.0),
        ({"queries": 684}, 380.0),
        ({"folds": 5}, 95.0),
        ({"models": 10_000}, 190.0 * 10_000 / 1131),
        ({"models": 10_001}, 0.0),
    ],
    ids=str,
)
def test_lambdarank_is_billed_by_queries_models_and_folds_where_it_runs(data: dict[str, Any], core_s: float) -> None:
    config = replace(FULL, data=replace(FULL.data, **data))
    assert [phase.cpu_core_s for phase in config.phases()] == [0.0, pytest.approx(core_s, rel=1e-12)]
    missing = baselines.lambdarank_missing(config.data.models) or ""
    assert ("models per query" in missing) == (core_s == 0)
