"""`max_usd_per_month` of policy.yaml: receipts and the limits of runs that go on, of one owner."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import aws, month
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.review.policy import Policy
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import NAME, advance, declare_bucket, declare_fleet, put
from tests.receipt_tree import receipt

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def keep(root: Path, run: str, usd: str, **changes: Any) -> None:
    """A receipt of November."""
    path = root / "receipts" / NAME / f"{run}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(receipt(usd, run=run, **changes)))


def looked(root: Path, *but: str) -> month.MonthUsd:
    return month.look(root, "you", ["us-east-2"], aws.client, NOW, but=but)


def test_only_this_month_s_receipts_of_the_owner_count(cloud: Cloud, path: Path) -> None:
    root = path.parents[1]
    keep(root, "r0", "1.10", owner="you")
    keep(root, "r1", "2.00")  # of an earlier version, which named no owner
    keep(root, "r2", "4.00", owner="somebody-else")
    keep(root, "r3", "8.00", owner="you", counted_until="2026-10-31T23:59:00.000Z")
    keep(root, "r4", "16.00", owner="you", rehearsal=True)
    assert looked(root) == month.MonthUsd(ended=Decimal("3.10"), reserved={})
    assert looked(root, f"{NAME}/r1").ended == Decimal("1.10")


def test_a_run_that_goes_on_counts_with_its_limit_until_it_has_a_receipt(cloud: Cloud, path: Path) -> None:
    root = path.parents[1]
    for run, owner in (("r1", "you"), ("r2", "you"), ("r3", "somebody-else")):
        declare_fleet(cloud, run=run, owner=owner)
    cloud.tick()
    bucket = declare_bucket(cloud)
    for run in ("r1", "r2"):
        put(cloud, bucket, "run.json", {"limits": {"max_usd": "3.00"}}, run)
    assert looked(root).reserved == {f"{NAME}/r1": Decimal(3), f"{NAME}/r2": Decimal(3)}
    keep(root, "r1", "1.10", owner="you")
    found = looked(root, f"{NAME}/r3")
    assert (found.reserved, found.total) == ({f"{NAME}/r2": Decimal(3)}, Decimal("4.10"))


def test_a_run_in_stages_counts_with_the_limit_of_the_whole(cloud: Cloud, path: Path) -> None:
    bucket = declare_bucket(cloud)
    for stage, usd in (("train", "2.00"), ("judge", "3.00")):
        declare_fleet(cloud, run=f"r1/{stage}")
        advance(cloud, 60)
        put(cloud, bucket, "run.json", {"limits": {"max_usd": usd}}, f"r1/{stage}")
    assert looked(path.parents[1]).reserved == {f"{NAME}/r1": Decimal(3)}


def test_a_run_whose_limit_is_not_to_be_seen_lets_nothing_begin(cloud: Cloud, path: Path) -> None:
    declare_fleet(cloud)
    cloud.tick()
    with pytest.raises(GpufleetError, match=f"run r1 of {NAME} goes on, but its limit is unknown"):
        looked(path.parents[1])


def test_what_fits_to_the_cent_begins() -> None:
    def look() -> month.MonthUsd:
        return month.MonthUsd(ended=Decimal("1.50"), reserved={"a/r1": Decimal(3)})

    rules = Policy(max_usd_per_month=Decimal(10))
    month.require(rules, look, Decimal("5.50"), "run r2")
    with pytest.raises(GpufleetError, match=r"spend 5\.51 USD.*1\.50, 1 run that may spend 3\.00; allowed are 10"):
        month.require(rules, look, Decimal("5.51"), "run r2")


def test_without_the_rule_nobody_is_asked() -> None:
    def look() -> month.MonthUsd:
        raise AssertionError

    month.require(None, look, Decimal(5), "run r2")
    month.require(Policy(), look, Decimal(5), "run r2")
