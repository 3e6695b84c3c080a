"""Definitions for the tests of the bill, built without a file, so that a change in stacks/ moves no golden figure."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.model import Disk, Estimate, Fleet, Job, Keep, Limits, Run, StackDefinition, Storage
from gpufleet.job.experiments.growth.spec import GrowthConfig


def definition(
    *,
    types: tuple[str, ...] = ("g5.2xlarge",),
    region: str = "us-east-2",
    capacity: Any = "spot",
    config: GrowthConfig | None = None,
    root: Disk | None = None,
    data: Disk | None = None,
    dataset: str = "data/tinystories",
    keep: Keep | None = None,
    max_usd: str = "3.00",
    max_hours: str = "2",
    **estimate: Any,
) -> StackDefinition:
    """tinystories-growth at 1000 steps per phase and batch 16, unless told otherwise."""
    return StackDefinition(
        name="tinystories-growth",
        source=Path("stacks/tinystories-growth.yaml"),
        purpose="",
        run=Run(id="r1", owner="you"),
        job=Job(experiment="tinystories-growth", image="repo:tag", parameters=config or GrowthConfig()),
        fleet=Fleet(
            region=region, zones=tuple(region + letter for letter in "abc"), instance_types=types, capacity=capacity
        ),
        storage=Storage(dataset=dataset, root=root or Disk(size_gib=100), data=data, keep=keep or Keep(days=7)),
        limits=Limits(max_usd=Decimal(max_usd), max_hours=Decimal(max_hours)),
        estimate=Estimate(**{key: decimals(value) for key, value in estimate.items()}),
    )


def on_nodes(of: StackDefinition, count: int, cards: Any = "one") -> StackDefinition:
    """The definition on several nodes, which must be in one zone."""
    return replace(
        of, fleet=replace(of.fleet, nodes=count, cards=cards, zones=of.fleet.zones[: 1 if count > 1 else None])
    )


def decimals(value: Any) -> Any:
    """A number, or a tuple of numbers, in the form that the loader returns."""
    return tuple(map(Decimal, value)) if isinstance(value, tuple) else Decimal(value)


def growth(**changes: Any) -> GrowthConfig:
    """The job with some of its settings changed: `sequences`, `state`, `compute` or any top-level field."""
    config = GrowthConfig()
    sequences, state = changes.pop("sequences", None), changes.pop("state", None)
    compute = changes.pop("compute", None)
    if sequences:
        config = replace(config, batch=replace(config.batch, sequences=sequences))
    if state:
        config = replace(config, precision=replace(config.precision, phase3_state=state))
    if compute:
        config = replace(config, precision=replace(config.precision, compute=compute))
    return replace(config, **changes)
