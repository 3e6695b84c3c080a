"""Sums the dollars of one owner in a calendar month. The sum has the dollars of the receipts, and for each run that
goes on the limit in its run.json. If the caller may not read this limit, the answer is an error, because the run might
spend any amount.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.infra.account.all_runs import ListedRun, all_runs
from gpufleet.infra.account.run_folder import find_buckets
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import receipts
from gpufleet.infra.review.policy import Policy, find_policy
from gpufleet.job.contract import reading
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.text import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthUsd:
    """The USD of one owner in one month (UTC)."""

    ended: Decimal  # dollars of the receipts; a receipt that names no owner is in the sum of every owner
    reserved: dict[str, Decimal]  # the limit of each run that goes on, by STACK/RUN

    @property
    def total(self) -> Decimal:
        return self.ended + sum(self.reserved.values(), Decimal(0))


def look(
    root: Path,
    owner: str,
    regions: Iterable[str],
    client: Callable[[str, str], Any],
    now: datetime,
    *,
    but: Collection[str],
) -> MonthUsd:
    """The dollars of the month so far, with the runs that go on in `regions`, except the runs in `but` (STACK/RUN).
    Raises GpufleetError if a run's limit cannot be read.
    """
    known, _ = receipts.read(root)
    ended = {
        f"{receipt.stack}/{receipt.run}": receipt.actual
        for receipt in known
        if receipt.at[:7] == f"{now:%Y-%m}" and receipt.owner in ("", owner) and not receipt.rehearsal
    }
    running = [run for run in all_runs([], [], sorted({*regions}), client, now) if run.state != "over"]
    reserved: dict[str, Decimal] = {}
    for run in (run for run in running if run.owner == owner):
        name = f"{run.stack}/{run.run.partition('/')[0]}"
        # in a run with stages, the last stage has the whole limit; its fleet exists from the beginning
        if name not in {*but, *ended}:
            reserved[name] = max(reserved.get(name, Decimal(0)), _limit(run, client))
    return MonthUsd(ended=sum((usd for name, usd in ended.items() if name not in but), Decimal(0)), reserved=reserved)


def require(rules: Policy | None, month: Callable[[], MonthUsd], usd: Decimal, spender: str) -> None:
    """Raises GpufleetError if `spender` may spend more USD than the rules still allow in this month. `month` gives the
    sum so far; it is called only if a rule limits the month.
    """
    cap = rules.max_usd_per_month if rules else None
    if cap is None:
        return
    spent = month()
    if spent.total + usd <= cap:
        return
    open_ = f", {counted(len(spent.reserved), 'run')} that may spend {sum(spent.reserved.values()):.2f}"
    raise GpufleetError(
        f"breaks max_usd_per_month of policy.yaml: {spender} may spend {usd:.2f} USD. This month's receipts have"
        f" {spent.ended:.2f}{open_ if spent.reserved else ''}; allowed are {cap:f}."
    )


def require_run(definition: StackDefinition, root: Path, client: Callable[[str, str], Any], now: datetime) -> None:
    """Raises GpufleetError if a run that has not begun would break `max_usd_per_month`."""
    owner, name = definition.run.owner, f"{definition.name}/{definition.run.id}"

    def look_around() -> MonthUsd:
        return look(root, owner, [definition.fleet.region], client, now, but=[name])

    require(find_policy(root), look_around, definition.limits.max_usd, f"run {definition.run.id}")


def _limit(run: ListedRun, client: Callable[[str, str], Any]) -> Decimal:
    """limits.max_usd of a run that goes on. Raises GpufleetError."""
    s3 = client("s3", run.region)
    for bucket in find_buckets(s3, run.stack).ours:
        listed = s3.list_objects_v2(Bucket=bucket["Name"], Prefix=f"{run.run}/{RUN}", MaxKeys=1)
        if not listed.get("KeyCount"):
            continue
        body = s3.get_object(Bucket=bucket["Name"], Key=f"{run.run}/{RUN}")["Body"].read()
        return reading.Fields(json.loads(body)).section("limits").need("max_usd", reading.unsigned)
    raise GpufleetError(
        f"max_usd_per_month of policy.yaml: run {run.run} of {run.stack} goes on, but its limit is unknown, because its"
        " bucket cannot be read. Nothing may begin: end that run, or remove the rule."
    )
