"""A line of the bill says how it is counted, from the bill over run.json to the meter and the receipt."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.bill import lines, record
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import Catalog, load_catalog
from gpufleet.infra.catalog.files import Price
from gpufleet.infra.catalog.items import known_items
from gpufleet.infra.definition.model import StackDefinition
from tests.infra.cost_definitions import definition
from tests.job.supervisor_world import Bench

GATEWAY = Price(amount=Decimal("0.25"), unit="hour", source="a test", as_of=date(2026, 11, 26), status="verified")


def gateway(plan: StackDefinition, catalog: Catalog) -> list[lines.Charge]:
    """What somebody writes who adds an hourly line; its price is a row of services.csv."""
    item = catalog.price("nat_gateway", plan.fleet.region)
    return [lines.Charge(name="NAT gateway", item="nat_gateway", units=1, price=item)]


def test_one_more_hourly_charge_is_a_row_and_a_function_and_the_meter_counts_it_by_the_hour(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    catalog = load_catalog()
    before = price(definition(), catalog, runs=100)
    monkeypatch.setitem(catalog.services, ("nat_gateway", "us-east-2"), GATEWAY)
    monkeypatch.setattr(lines, "HOURLY", (*lines.HOURLY, gateway))
    bill = price(definition(), catalog, runs=100)

    (line,) = [line for line in bill.lines if line.name == "NAT gateway"]
    assert (line.kind, line.amount) == ("hourly", (line.quantity * GATEWAY.amount).quantize(Decimal("0.0001")))
    bench = Bench(tmp_path, estimate=record.to_json(bill), rates=record.rates(bill), extras=record.extras(bill))
    run = bench.attempt()
    run.run()
    assert run.run_file.rates("g5.2xlarge", "us-east-2a").extras == sum(before.hourly_usd.values()) + GATEWAY.amount
    rows = {row["name"]: row for row in bench.json("receipt.json")["lines"]}
    hours = Decimal(rows["public IPv4"]["actual"]) / Decimal("0.005")
    assert Decimal(rows["NAT gateway"]["actual"]) == pytest.approx(hours * GATEWAY.amount, abs=Decimal("0.0001") * 50)
    assert rows["NAT gateway"]["note"] == ""  # counted, not copied from the bill


def test_every_line_of_a_bill_has_a_row_of_its_receipt(tmp_path: Path) -> None:
    bill = price(definition(), load_catalog(), runs=100)
    bench = Bench(tmp_path, estimate=record.to_json(bill), rates=record.rates(bill), extras=record.extras(bill))
    bench.attempt().run()
    rows = bench.json("receipt.json")["lines"]
    assert [(row["name"], row["estimate"]) for row in rows] == [(each.name, str(each.amount)) for each in bill.lines]


def test_prices_refresh_knows_where_aws_lists_every_line() -> None:
    items = {line.item for line in price(definition(), load_catalog(), runs=100).lines if line.item}
    assert items <= set(known_items())
