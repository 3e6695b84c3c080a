"""Makes the bill of a run in stages: the bill of each stage with its range, their sum, and each stage's share of the
limits.

A stage may use the file's limits minus what later stages need: the metered p50 and the clean stop of each. So a stage
that costs too much takes no money from later stages, and money that a stage saves goes to later stages. The node
includes what earlier stages have really spent (job/contract/spent.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from typing import Any

from gpufleet.infra import text
from gpufleet.infra.bill import record
from gpufleet.infra.bill.answer import amount_within, figures_within, picture
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.limits import enough, least_usd
from gpufleet.infra.bill.runtime import WARM_S
from gpufleet.infra.bill.several import Several, repeated
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import Problem
from gpufleet.infra.show.sheet import Column, Sheet, plain
from gpufleet.infra.text import about_hours
from gpufleet.job.text import counted

Need = tuple[Decimal, Decimal]  # metered USD and node-hours that half of the runs need, with a clean stop


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedBill:
    """The bills of all stages. `launched`: each stage as it runs; its limits are for it and all stages before it
    together.
    """

    whole: StackDefinition
    launched: tuple[StackDefinition, ...]
    bills: tuple[Bill, ...]
    together: Several

    @property
    def usd(self) -> Quantiles:
        """USD of the whole run, if each stage has its own random draws."""
        return self.together.independent

    @property
    def wall_h(self) -> Decimal:
        """Wall-clock hours: the sum of the stages' medians."""
        return sum((bill.chosen.wall_hours.p50 for bill in self.bills), Decimal(0))

    def lines(self) -> Iterator[str]:
        """The whole bill, a row for each stage."""
        low, middle, high = figures_within(self.usd)
        limits, region = self.whole.limits, self.whole.fleet.region
        yield from text.wrap(
            f"{self.whole.name}: about {middle} USD ({low} to {high} in eight runs of ten),"
            f" {about_hours(self.wall_h)} h, {counted(len(self.bills), 'stage')} one after another in {region};"
            f" stops at {limits.max_usd.normalize():f} USD."
        )
        yield from picture(self.usd, limits.max_usd)
        yield from Sheet.build(COLUMNS, list(zip(self.launched, self.bills, strict=True))).text()
        rule = (
            "A stage begins when the one before is done, and may use `up to` together with all before it: the rest is"
            " what later stages need."
        )
        if self.whole.stages[-1].fleet_of:
            rule = (
                "The stages share one node, whose boot is in the first one's bill. Each later one begins within"
                f" {WARM_S:.0f} s (assumed), however the one before ended, while what is left is enough for nine cases"
                " in ten. Each may use `up to`."
            )
        yield from text.wrap(f"{rule} Prices: {self.together.price_age}.")
        warned: dict[str, list[str]] = {}
        for stage, bill in zip(self.launched, self.bills, strict=True):
            for warning in bill.warnings:
                warned.setdefault(warning, []).append(stage.stage)
        for warning, stages in warned.items():
            yield from text.wrap(f"Warning, {', '.join(stages)}: {warning}")

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        return {
            "schema": record.SCHEMA,
            "stack": self.whole.name,
            "run": self.whole.run.id,
            "usd": plain(self.usd),
            "wall_hours": {"p50": str(self.wall_h)},
            "max_usd": str(self.whole.limits.max_usd),
            "stages": [
                {"stage": stage.stage, "up_to_usd": str(stage.limits.max_usd), **record.to_json(bill)}
                for stage, bill in zip(self.launched, self.bills, strict=True)
            ],
        }


Row = tuple[StackDefinition, Bill]


def _figure(part: str) -> Column:
    def amount(row: Row) -> str:
        return amount_within(getattr(row[1].usd, part), row[1].usd)

    return Column(f"usd_{part}", f"USD {part}", "USD", of=amount)


COLUMNS = (
    Column("stage", of=lambda row: row[0].stage),
    Column("on", of=lambda row: f"{row[1].chosen.type} {row[1].market.bought}"),
    *map(_figure, ("p10", "p50", "p90")),
    Column("hours", "h", "h", 2, lambda row: row[1].chosen.wall_hours.p50),
    Column("up_to", "up to USD", "USD", 2, lambda row: row[0].limits.max_usd),
)


def price_stages(
    whole: StackDefinition, price: Callable[[StackDefinition], Bill], today: date
) -> tuple[StagedBill | None, list[Problem]]:
    """The bill, and reasons to refuse the definition. There is no bill if fewer than half of all runs fit within the
    limits. `price` gives the bill of one stage; its errors are raised.
    """
    if whole.stages[-1].fleet_of:
        return _price_trials(whole, price, today)
    needs = [_need(price(stage)) for stage in whole.stages]
    if wrong := list(_too_low(whole, needs)):
        return None, wrong
    launched, alone = [], []
    for index, stage in enumerate(whole.stages):
        later, others = _total(needs[index + 1 :]), _total([*needs[:index], *needs[index + 1 :]])
        launched.append(_limited(stage, whole, later))
        alone.append(_limited(stage, whole, others))
    bills = [price(stage) for stage in alone]
    together = repeated(list(zip(alone, bills, strict=True)), 1, today)
    staged = StagedBill(whole=whole, launched=tuple(launched), bills=tuple(bills), together=together)
    return staged, []


def _price_trials(
    whole: StackDefinition, price: Callable[[StackDefinition], Bill], today: date
) -> tuple[StagedBill | None, list[Problem]]:
    """The bill of stages that share a node: each has limits of its own, and none keeps dollars for later ones."""
    bills, first = tuple(map(price, whole.stages)), whole.stages[0]
    if (least := least_usd(first, bills[0])) > (usd := whole.limits.max_usd):
        allowed = f"at least {least} USD, which nine in ten of {first.stage} need, the first stage on the node"
        return None, [whole.problem("limits.max_usd", str(usd), allowed)]
    together = repeated(list(zip(whole.stages, bills, strict=True)), 1, today)
    return StagedBill(whole=whole, launched=whole.stages, bills=bills, together=together), []


def _need(bill: Bill) -> Need:
    usd, hours = bill.chosen.reserve
    of_each = bill.chosen.needed_hours.p50 + hours
    return enough(bill.chosen.metered_usd.p50 + usd), enough(bill.market.nodes * of_each)


def _total(needs: Sequence[Need]) -> Need:
    return sum((usd for usd, _ in needs), Decimal(0)), sum((hours for _, hours in needs), Decimal(0))


def _limited(stage: StackDefinition, whole: StackDefinition, reserved: Need) -> StackDefinition:
    """The stage with the file's limits minus the amounts `reserved` for later stages."""
    usd, hours = whole.limits.max_usd - reserved[0], whole.limits.max_hours - reserved[1]
    return replace(stage, limits=replace(whole.limits, max_usd=usd, max_hours=hours))


def _too_low(whole: StackDefinition, needs: Sequence[Need]) -> Iterator[Problem]:
    limits, named = whole.limits, ("limits.max_usd", "limits.max_hours")
    parts = zip(named, (limits.max_usd, limits.max_hours), _total(needs), ("USD", "node-hours"), strict=True)
    for at, (key, limit, least, unit) in enumerate(parts):
        if limit < least:
            by_stage = ", ".join(f"{stage.stage} {need[at]}" for stage, need in zip(whole.stages, needs, strict=True))
            allowed = f"at least {least} {unit}: half of the simulated runs need this or more in {by_stage}"
            yield whole.problem(key, str(limit), allowed)
