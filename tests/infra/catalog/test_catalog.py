"""The catalog: every fact has a source and a date, and a missing fact is reported, never guessed."""

from __future__ import annotations

import csv
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra import catalog
from gpufleet.infra.catalog import SHIPPED, load_catalog, read_catalog
from gpufleet.infra.errors import GpufleetError, PriceMissing
from tests.own_prices import shipped_catalog

FILES = sorted(Path(catalog.__file__).parent.glob("*.csv"))
CATALOG = shipped_catalog()
REGIONS = (
    "us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1", "eu-north-1", "eu-west-2", "ap-northeast-1",
    "ap-south-1", "ap-southeast-2", "ca-central-1", "sa-east-1", "ap-northeast-2", "eu-south-2",
)  # fmt: skip
WITHOUT_BILLS = {"eu-north-1", "eu-south-2"}  # no public source has the price of requests and logs there


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_names_its_source_and_its_date(path: Path) -> None:
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        assert row["source"].strip()
        assert date(2020, 1, 1) < date.fromisoformat(row["as_of"]) <= datetime.now(UTC).date()
        assert row.get("status", "verified") in {"verified", "inferred"}


def test_prices_are_positive_and_no_dearer_than_a_node_can_be() -> None:
    hourly = [*CATALOG.on_demand_prices.values(), *(s.price for zones in CATALOG.spot_prices.values() for s in zones)]
    assert all(Decimal("0.01") < price.amount < 300 for price in hourly)


def test_a_region_costs_no_less_than_virginia_and_no_more_than_sao_paulo() -> None:
    """A mistyped price would lie outside of the range of all others."""
    for (type_, region), price in CATALOG.on_demand_prices.items():
        first = CATALOG.on_demand_prices.get((type_, "us-east-1"))
        if first is not None:
            most = Decimal(2) if region == "sa-east-1" else Decimal("1.5")  # its p6-b300 costs 1.97 times Virginia's
            assert 1 - Decimal("0.0001") <= price.amount / first.amount <= most, (type_, region)


def test_spot_costs_no_more_than_on_demand() -> None:
    """Spot prices are published with four decimals."""
    for (type_, region), zones in CATALOG.spot_prices.items():
        listed = CATALOG.on_demand_prices.get((type_, region))
        if listed is not None:
            assert zones[-1].price.amount <= listed.amount + Decimal("0.00005"), (type_, region)


def test_a_type_is_priced_only_where_it_is_offered() -> None:
    for type_, region in (*CATALOG.on_demand_prices, *CATALOG.spot_prices):
        instance = CATALOG.instances[type_]
        assert instance.left_ec2 or (instance.regions and region in instance.regions), (type_, region)


def test_spot_zones_come_cheapest_first_and_without_local_zones() -> None:
    for zones in CATALOG.spot_prices.values():
        amounts = [spot.price.amount for spot in zones]
        assert amounts == sorted(amounts)
        assert all(re.fullmatch(r"az[1-6]", spot.zone) for spot in zones)


def test_every_priced_type_has_specifications() -> None:
    priced = {type_ for type_, _ in (*CATALOG.on_demand_prices, *CATALOG.spot_prices)}
    assert priced <= set(CATALOG.instances)


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_has_what_a_bill_needs_or_names_what_it_lacks(region: str) -> None:
    lacks = CATALOG.missing(region)
    assert bool(lacks) == (region in WITHOUT_BILLS)
    assert all(CATALOG.price(item, region).amount > 0 for item in catalog.BILLED if item not in lacks)
    for item in lacks:
        with pytest.raises(PriceMissing, match=rf"no price for {item} .*`gpufleet prices refresh --region {region}`"):
            CATALOG.price(item, region)


def test_a_price_taken_over_from_another_region_says_so() -> None:
    assert CATALOG.price("s3_storage", "us-east-1").status == "verified"
    assert CATALOG.price("s3_storage", "us-east-2").status == "inferred"
    assert CATALOG.on_demand("g7e.4xlarge", "us-east-2").status == "inferred"


@pytest.mark.parametrize(
    ("type_", "region", "on_demand", "spot"),
    [
        ("g5.2xlarge", "us-east-2", "1.212", ("0.3596", "0.3739")),
        ("g6e.2xlarge", "us-east-1", "2.24208", None),
        ("p5.48xlarge", "us-east-1", "55.04", ("17.6289", "55.04")),  # in two zones spot costs as much as on demand
    ],
)
def test_known_prices(type_: str, region: str, on_demand: str, spot: tuple[str, str] | None) -> None:
    own = load_catalog()
    assert own.on_demand(type_, region).amount == Decimal(on_demand)
    if spot:
        zones = own.spot(type_, region)
        assert (zones[0].price.amount, zones[-1].price.amount) == tuple(map(Decimal, spot))


def test_a10g_is_70_teraflops_and_not_the_125_of_the_a10() -> None:
    instance = CATALOG.instances.get("g5.2xlarge")
    assert instance is not None
    gpu = instance.gpu
    assert (gpu.bf16_tflops, gpu.memory_gb, gpu.bandwidth_gb_s) == (70, 24, 600)


@pytest.mark.parametrize(
    ("type_", "products", "tflops"),
    [
        ("p4d.24xlarge", "bf16", 312),
        ("p4d.24xlarge", "tf32", 156),  # NVIDIA's A100 data sheet
        ("p4d.24xlarge", "fp32", 19.5),
        ("g4dn.xlarge", "tf32", 8.1),  # a T4 has none
        ("p6-b300.48xlarge", "fp32", 75),
        ("g7.2xlarge", "bf16", 203),
        ("g7e.2xlarge", "bf16", 480),
        ("p3.2xlarge", "bf16", None),
    ],
)
def test_a_gpus_peak_depends_on_what_its_products_are_in(type_: str, products: str, tflops: float | None) -> None:
    instance = CATALOG.instances.get(type_)
    assert instance is not None
    assert instance.gpu.peak_tflops(products) == tflops


def test_a_slice_of_a_gpu_is_one_gpu_with_its_share_of_memory() -> None:
    instance = CATALOG.instances.get("g6f.xlarge")
    assert instance is not None
    assert (instance.gpu_count, instance.gpu_share, instance.gpu_memory_gb) == (1, 0.125, 3.0)


@pytest.mark.parametrize("type_", ["p3.2xlarge", "p3.8xlarge", "p3.16xlarge"])
def test_p3_left_ec2_in_may_2026(type_: str) -> None:
    instance = CATALOG.instances.get(type_)
    assert instance is not None
    assert instance.left_ec2 is not None
    assert (instance.left_ec2.year, instance.left_ec2.month) == (2026, 5)


def test_what_the_driver_and_cuda_cannot_drive_is_not_for_use() -> None:
    unusable = {name for name, each in CATALOG.instances.items() if each.unusable and not each.left_ec2}
    assert unusable == {"p3dn.24xlarge", "g6f.large", "g6f.xlarge", "g6f.2xlarge", "g6f.4xlarge", "gr6f.4xlarge"}


def test_an_unknown_type_is_none_and_its_price_error_names_the_nearest() -> None:
    assert CATALOG.instances.get("g5.2xlrage") is None
    with pytest.raises(PriceMissing, match=r"nearest: g5\.2xlarge"):
        CATALOG.on_demand("g5.2xlrage", "us-east-2")


def test_a_missing_spot_price_says_where_there_is_none() -> None:
    with pytest.raises(PriceMissing, match=r"g7\.2xlarge has no spot price in us-east-2, nor in any other region"):
        CATALOG.spot("g7.2xlarge", "us-east-2")
    with pytest.raises(PriceMissing, match=r"p5\.4xlarge has no spot price in us-east-2; known in: eu-west-2"):
        CATALOG.spot("p5.4xlarge", "us-east-2")


def test_a_region_without_prices_is_an_error_that_lists_the_regions() -> None:
    with pytest.raises(PriceMissing, match="in me-south-1; known in: us-east-1, us-east-2, us-west-2, eu-west-1"):
        CATALOG.price("s3_storage", "me-south-1")
    assert CATALOG.zones("me-south-1") == ()


def test_zones_are_names_of_their_region() -> None:
    assert CATALOG.regions() == REGIONS
    assert set(CATALOG.billed_regions()) == set(REGIONS) - WITHOUT_BILLS
    assert CATALOG.zones("us-east-2") == ("us-east-2a", "us-east-2b", "us-east-2c")
    assert CATALOG.zones("ap-northeast-1") == ("ap-northeast-1a", "ap-northeast-1c", "ap-northeast-1d")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("g9.xlarge,4,16,NoGpu,1,1,0,5,1,1,unknown,,a test,2026-01-01", "'NoGpu' is not known"),
        ("g9.xlarge,4", "invalid literal"),
        ("g9.xlarge,4,16,L4,-1,1,0,5,1,1,unknown,,a test,2026-01-01", "-1 GPUs with a share of 1"),
        ("g9.xlarge,4,16,L4,1,0,0,5,1,1,unknown,,a test,2026-01-01", "1 GPUs with a share of 0"),
        ("g5.xlarge,4,16,A10G,1,1,0,5,1,1,unknown,,a test,2026-01-01", "g5.xlarge is there twice"),
    ],
)
def test_a_broken_row_of_the_types_is_an_error_with_its_line(tmp_path: Path, row: str, said: str) -> None:
    for path in SHIPPED.glob("*.csv"):
        (tmp_path / path.name).write_text(path.read_text())
    types = tmp_path / "instances.csv"
    types.write_text(types.read_text() + row + "\n")
    line = len(types.read_text().splitlines())
    with pytest.raises(GpufleetError, match=rf"instances\.csv, line {line}: .*{said}"):
        read_catalog(tmp_path, None)
