"""The price of the same work in every region, and the expected price of a fleet that picks zones by price."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache

import pytest

from gpufleet.infra.bill.options import BillBasis, type_cost
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking, table
from gpufleet.infra.compare.rows import Row, Study
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("everything_known")

NOW = datetime(2026, 11, 21, tzinfo=UTC)
CATALOG = load_catalog()


@cache
def sft() -> StackDefinition:
    return load(ROOT / "stacks" / "sft-h100.yaml", now=NOW)


@cache
def regions() -> tuple[Row, ...]:
    return tuple(ranking.every_region(sft(), Study(CATALOG), runs=100))


def test_every_region_in_which_a_bill_can_be_made_has_a_total_and_the_cheapest_is_first() -> None:
    found = [row.region for row in regions()]
    assert set(found) <= {region for region in CATALOG.regions() if not CATALOG.missing(region)}
    assert {"us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1"} <= set(found)
    means = [row.usd.mean for row in regions() if row.usd]
    assert means == sorted(means)
    assert len([*table.regions(list(regions()))]) > len(found)


def test_a_regions_total_is_that_of_its_own_prices() -> None:
    own = {
        row.type: row
        for row in ranking.every_option(sft(), (sft(),), Study(CATALOG), runs=100)
        if row.capacity == "spot"
    }
    (here,) = [row for row in regions() if row.region == sft().fleet.region]
    other = own[here.type]
    assert other.prepared is not None
    assert here.prepared is not None
    assert here.prepared.total == other.prepared.total
    assert here.prepared.total == min(
        row.prepared.total for row in own.values() if row.prepared is not None and row.ranked
    )


def test_inputs_in_a_bucket_are_brought_for_two_cents_a_gigabyte() -> None:
    """The weights in bf16 are 2 x 8,030,261,248 B = 16.0605 GB at 0.02 USD; uploading a local dataset is free."""
    there = replace(sft(), storage=replace(sft().storage, base_weights="s3://models/llama"))
    found = {row.region: row.inputs_usd for row in ranking.every_region(there, Study(CATALOG), runs=20)}
    assert found.pop(sft().fleet.region) == 0
    assert set(found.values()) == {Decimal("0.3212")}


def test_a_fleet_that_picks_by_price_expects_the_harmonic_mean_and_a_limit_is_held_at_the_dearest() -> None:
    """Two zones at 1 and 3 USD: weights 1 and 1/3, so (1 + 1) / (1 + 1/3) = 1.5."""
    type_ = "p4d.24xlarge"
    zones = CATALOG.spot_prices[type_, "us-east-1"][:2]
    priced = tuple(
        replace(zone, price=replace(zone.price, amount=Decimal(usd))) for zone, usd in zip(zones, (1, 3), strict=True)
    )
    catalog = replace(CATALOG, spot_prices={**CATALOG.spot_prices, (type_, "us-east-1"): priced})
    option = type_cost(BillBasis(replace(sft(), fleet=replace(sft().fleet, capacity="spot")), catalog), type_)
    likely, dearest = option.likely("spot"), option.hourly("spot")
    assert (likely and likely.amount, dearest and dearest.amount) == (Decimal("1.5000"), Decimal(3))
    (row,) = [
        each
        for each in ranking.every_option(sft(), (sft(),), Study(catalog), types=[type_], runs=100)
        if each.capacity == "spot"
    ]
    assert row.usd is not None
    assert row.hours is not None
    assert row.dearest_usd is not None
    assert row.dearest_usd == pytest.approx(row.usd.p50 + Decimal("1.5") * row.hours.p50)
    between = row.usd.p90 + Decimal("0.5") * row.hours.p90  # the run needs an amount between the two
    held = replace(sft(), limits=replace(sft().limits, max_usd=between, max_hours=Decimal(10_000)))
    (over,) = [
        each
        for each in ranking.every_option(held, (held,), Study(catalog), types=[type_], runs=100)
        if each.capacity == "spot"
    ]
    assert over.over_limit
