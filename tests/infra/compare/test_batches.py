"""The same data in larger batches: each batch has the price of a file that asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking, table
from gpufleet.infra.compare.rows import Row, Study
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.experiments.sft.spec import SftConfig
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
NAMES = ["as in the file", "batch.tokens 32,768", "batch.tokens 65,536", "batch.tokens 131,072"]


@cache
def stack(name: str) -> StackDefinition:
    return load(ROOT / "stacks" / f"{name}.yaml", now=datetime(2026, 11, 21, tzinfo=UTC))


def sft(**changes: Any) -> StackDefinition:
    plain = stack("sft-h100")
    config = plain.job.parameters
    assert isinstance(config, SftConfig)
    return replace(plain, job=replace(plain.job, parameters=replace(config, **changes)))


@cache
def batches() -> tuple[Row, ...]:
    return tuple(ranking.every_batch(sft(), Study(CATALOG), runs=100))


def best(definition: StackDefinition) -> Decimal:
    """The USD of the cheapest of all options on one node, without interruptions."""
    rows = ranking.every_option(definition, (definition,), Study(CATALOG), runs=20)
    return min(row.prepared.total for row in rows if row.ranked and row.nodes == 1 and row.prepared)


def test_each_batch_has_the_steps_that_its_data_take() -> None:
    """40,066 steps of 16,384 tokens are 20,033 of twice as many, and so on, rounded up."""
    assert [row.scenario for row in batches()] == NAMES
    assert [row.steps for row in batches()] == [40_066, 20_033, 10_017, 5_009]


def test_a_batch_costs_what_a_file_that_asks_for_it_costs() -> None:
    prepared = {row.steps: row.prepared for row in batches()}
    for tokens, steps in ((16_384, 40_066), (65_536, 10_017)):
        there = prepared[steps]
        assert there is not None
        assert there.total == pytest.approx(
            best(sft(batch=replace(SftConfig().batch, tokens=tokens))), rel=Decimal("0.01")
        )


def test_more_rows_are_shared_by_more_gpus_and_the_table_says_what_else_changes() -> None:
    """The file's four rows suit one GPU best. With eight rows or more, each of a node's eight GPUs has its own row."""
    own, *larger = batches()
    assert own.ranks <= 4
    assert [row.ranks for row in larger] == [8, 8, 8]
    said = " ".join("\n".join(table.batches(batches())).split())
    assert "This is a different training" in said
    assert all(name in said for name in NAMES)


def test_where_it_saves_nothing_one_sentence_says_so() -> None:
    """kernel-sft has 128 rows a step: eight GPUs have enough of them."""
    rows = ranking.every_batch(stack("kernel-sft"), Study(CATALOG), runs=100)
    assert len(rows) == 4
    assert [*table.batches(rows)] == ["A larger batch, which more GPUs could share, would save nothing."]


def totals(rows: Sequence[Row]) -> list[Decimal]:
    return [row.prepared.total for row in rows if row.prepared]


def test_a_step_that_the_file_says_was_measured_is_of_its_own_batch_and_gpu() -> None:
    """A fast step makes the file's own type the best for its batch; a slow step does not change the other types."""
    plain = sft()
    for step_ms, is_own in ((Decimal(1), True), (Decimal(100_000), False)):
        timed = replace(plain, estimate=replace(plain.estimate, step_ms=(step_ms, Decimal(1))))
        own, *larger = ranking.every_batch(timed, Study(CATALOG), runs=100)
        assert (own.type in timed.fleet.instance_types) is is_own
        assert is_own or totals([own]) == totals(batches()[:1])
        assert totals(larger) == totals(batches()[1:])


def test_no_batch_is_shown_whose_warm_up_is_longer_than_the_run() -> None:
    """12,000 steps of warm-up are too many for 10,017."""
    long = replace(SftConfig().optim, warmup=12_000)
    assert [row.scenario for row in ranking.every_batch(sft(optim=long), Study(CATALOG), runs=20)] == NAMES[:2]


def test_within_a_deadline_the_first_is_in_time_where_anything_is_and_what_may_be_late_says_so() -> None:
    """28.5 h on g7e.2xlarge are too long for a deadline in 10 h; the cheapest type that is in time costs more."""
    hurried = ranking.every_batch(sft(), Study(CATALOG, hours_left=10.0), runs=100)
    assert hurried[0].prepared is not None
    assert hurried[0].prepared.option.runtime is not None
    assert hurried[0].prepared.option.runtime.total_s < 36_000
    assert totals(hurried)[0] > totals(batches())[0]
    too_short = ranking.every_batch(sft(), Study(CATALOG, hours_left=0.1), runs=100)
    assert "late in 100%" in "\n".join(table.batches(too_short))


@pytest.mark.parametrize("name", ["tinystories-growth", "pretrain-d64", "two-tower"])
def test_a_file_that_says_how_many_steps_there_are_has_one_batch(name: str) -> None:
    assert ranking.every_batch(stack(name), Study(CATALOG), runs=20) == []
    assert [*table.batches([])] == []
