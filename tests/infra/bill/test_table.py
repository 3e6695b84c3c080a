"""The bill as text. The golden file's figures are worked by hand in test_bill_golden.py."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Disk, Keep
from tests.freezing import assert_frozen
from tests.infra.cost_definitions import definition, growth, on_nodes

GOLDEN = Path(__file__).parent / "golden" / "bill.txt"


def text(today: date | None = None, **changes: Any) -> str:
    return render(price(definition(**changes), load_catalog(), dataset_bytes=22_183_150, runs=2000), today=today)


def test_the_bill_of_tinystories_growth_is_the_golden_one() -> None:
    found = render(price(definition(), load_catalog(), dataset_bytes=22_183_150), today=date(2026, 11, 21))
    assert_frozen(GOLDEN, found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"capacity": "on-demand", "types": ("p5.4xlarge",), "max_usd": "20"},
        {"types": ("g5.2xlarge", "g6e.2xlarge", "g6e.12xlarge"), "region": "us-west-2", "max_usd": "20"},
        {"types": ("p5.48xlarge",), "region": "us-east-1", "max_usd": "9000", "hazard_per_hour": "0.2"},
        {"types": ("g6f.xlarge", "g5.2xlarge"), "keep": Keep(bucket=False)},
        {"config": growth(steps_per_phase=1_000_000), "max_usd": "9000", "max_hours": "9000"},
        {"root": Disk(size_gib=500, iops=16000, throughput_mibps=1000), "data": Disk(size_gib=2000, iops=4000)},
    ],
)
def test_no_line_is_wider_than_100_columns_and_all_is_ascii(changes: dict[str, Any]) -> None:
    found = text(date(2026, 11, 21), **changes)
    assert max(map(len, found.splitlines())) <= 100
    assert found.isascii()


def test_what_fills_a_gpu_and_what_a_gpu_hour_that_trains_costs_are_shown() -> None:
    bill = price(definition(), load_catalog(), dataset_bytes=22_183_150, runs=2000)
    said = " ".join(render(bill).split())
    moe = next(fit for fit in bill.fits if fit.phase == "moe")
    assert moe.memory is not None
    assert (
        f"moe: most of a step is computation, by the data sheet; a GPU holds weights {moe.memory.weights_gb:.1f},"
        in said
    )
    hours = bill.chosen.runtime.compute_s / 3600
    assert f"the steps take {hours:.3g} (" in said
    assert f"{float(bill.usd.p50) / hours:.2f} USD for a GPU-hour that trains" in said
    four = definition(types=("g6e.12xlarge",), region="us-west-2", max_usd="20")  # one of its four GPUs is used
    said = " ".join(render(price(four, load_catalog(), dataset_bytes=22_183_150, runs=2000)).split())
    share = re.search(r"the steps take [0-9.]+ \(([0-9]+)%\)", said)
    assert share is not None
    assert int(share[1]) <= 25


def test_the_age_of_the_prices_is_shown_only_against_a_date() -> None:
    assert "days old" not in text()
    assert "compute is 10 days old;" in text(date(2026, 1, 31))
    assert "compute is of 10 days from now, which cannot be" in " ".join(text(date(2026, 1, 11)).split())


def test_a_bill_says_how_many_of_its_dollars_stand_on_prices_older_than_the_definition_allows() -> None:
    """First the price of compute is recent, and only those of side lines are old; a wider limit gives no warning."""
    bill = price(definition(), load_catalog(), dataset_bytes=22_183_150, runs=200)
    old_ones = [line for line in bill.lines if (date(2026, 1, 31) - line.as_of).days > 90]
    assert 0 < len(old_ones) < len(bill.lines)
    rest = sum(line.amount for line in old_ones) / bill.chosen.total
    young = " ".join(text(date(2026, 1, 31)).split())
    assert f"; {rest:.0%} of the dollars stand on prices older than 90 days: `gpufleet prices refresh`" in young
    old = " ".join(text(date(2026, 11, 21)).split())
    aged = (
        sum(line.amount for line in bill.chosen.lines if (date(2026, 11, 21) - line.as_of).days > 90)
        / bill.chosen.total
    )
    assert f"compute is 304 days old; {aged:.0%} of the dollars stand on prices older than 90 days" in old
    wide = " ".join(text(date(2026, 11, 21), max_price_age_days=3650).split())
    assert "compute is 304 days old." in wide


def test_a_phase_that_does_not_fit_is_marked_and_explained() -> None:
    found = text(types=("g6f.xlarge", "g5.2xlarge"))
    assert "18.7 of 3 GB NO" in found
    assert "g6f.xlarge, phase grown does not fit: needs 18.7 GB" in found
    assert "1/8 of one L4" in found
    assert "Nearest: g6.xlarge" in found.replace("\n  ", " ")


def test_a_run_that_a_limit_may_stop_has_two_totals_and_says_which_is_which() -> None:
    bill = price(definition(hazard_per_hour="3", keep=Keep(bucket=False), max_usd="0.70"), load_catalog(), runs=2000)
    lines = render(bill).split("\n")
    (total,) = (line for line in lines if line.startswith("total = p50 within the limits "))
    (spent,) = (line for line in lines if line.startswith("USD within the limits, done or not "))
    (needed,) = (line for line in lines if line.startswith("USD to finish, were there no limit "))
    assert float(total.split()[-1]) == float(bill.usd.p50) < float(bill.chosen.needed_usd.p50)
    assert spent.split()[-3] == f"{bill.usd.p50:.2f}"
    assert needed.split()[-3] == f"{bill.chosen.needed_usd.p50:.2f}"
    assert "within the limits" not in text(max_usd="9", max_hours="9")


def test_a_limit_below_what_the_whole_run_leaves_in_its_bucket_is_not_exceeded_within_the_limits() -> None:
    bill = price(definition(config=growth(steps_per_phase=10_000_000)), load_catalog(), runs=100)
    assert bill.chosen.exposure.fixed_usd > 300
    # each start is billed for a minute at least
    minute = (bill.chosen.price.amount + sum(bill.hourly_usd.values())) / 60
    assert bill.usd.p90 < 3 + 2 * minute  # an hour may cost more than today
    assert sum(line.amount for line in bill.lines) == bill.usd.p50


def test_a_missing_price_on_the_other_side_is_said_not_zero() -> None:
    found = text(types=("p5.4xlarge",), capacity="on-demand", max_usd="20")
    assert "USD on spot: no price known" in found
    assert "Interruptions: none on demand." in found


def test_prices_that_nobody_read_from_aws_carry_a_mark_and_its_meaning() -> None:
    inferred, read = text(), text(region="us-east-1")
    assert "S3 storage *" in inferred
    assert "* price inferred, not read in any source for us-east-2" in inferred
    assert "S3 storage *" not in read


def test_a_negative_line_of_interruptions_is_explained() -> None:
    why = "Their line is negative: AWS does not charge an interrupted first hour"
    assert why in text(hazard_per_hour="3").replace("\n  ", " ")
    assert "negative" not in text()


def test_the_limit_that_comes_first_is_named() -> None:
    assert "3.00 USD, 2 node-hours (comes first)" in text()
    assert re.search(r"1\.80 USD \(comes first, at \d\.\d\d n", text(max_usd="1.80", max_hours="9", efficiency="0.5"))


def test_one_listed_type_needs_no_table_of_types_and_two_do() -> None:
    assert "listed type" not in text()
    assert "g6e.2xlarge  1 x L40S" in text(types=("g5.2xlarge", "g6e.2xlarge"), region="us-east-1", max_usd="20")


def test_each_listed_type_shows_the_compute_of_all_nodes() -> None:
    two = on_nodes(definition(types=("g5.2xlarge", "g6e.2xlarge")), 2)
    bill = price(two, load_catalog(), runs=200)
    listed = next(line for line in render(bill).splitlines() if line.startswith(bill.chosen.type))
    assert listed.split()[-2] == f"{bill.lines[0].amount}"
