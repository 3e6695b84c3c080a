"""`gpufleet receipts --focus`: rows that a team's cost tools read, and that sum to the receipts."""

from __future__ import annotations

import csv
import io
import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.evidence import focus, receipts
from tests.receipt_tree import node, place, receipt

ACCOUNT = "123456789012"
# The columns that FOCUS 1.0 requires, and those of them that may be null (specification 1.0, 2024-06).
MANDATORY = {
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd"),
    *("BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd"),
    *("ChargePeriodStart", "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity"),
    *("PricingUnit", "ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
}
NULLABLE = {"BillingAccountName", "ChargeClass", "PricingQuantity", "PricingUnit"}


def rows(*trees: dict[str, object]) -> list[dict[str, str]]:
    found = [receipts.parse(json.dumps(tree).encode()) for tree in trees]
    return list(csv.DictReader(io.StringIO(focus.table(found, ACCOUNT))))


def test_a_run_s_rows_sum_to_its_cost_to_the_hundredth_of_a_cent() -> None:
    found = rows(receipt("1.2345", run="r1"), receipt("0.9001", run="r2"))
    for run, cost in (("r1", "1.2345"), ("r2", "0.9001")):
        own = [each for each in found if json.loads(each["Tags"])["gpufleet:run"] == run]
        for column in ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost"):
            assert sum(Decimal(each[column]) for each in own) == Decimal(cost)


def test_each_row_has_every_column_and_a_value_where_there_must_be_one() -> None:
    for each in rows(receipt()):
        assert set(each) >= MANDATORY
        assert {name for name in MANDATORY if not each[name]} <= NULLABLE
        assert (each["BillingAccountId"], each["BillingCurrency"]) == (ACCOUNT, "USD")


@pytest.mark.parametrize(
    ("at", "day", "month"),
    [
        ("2026-11-21T18:00:00.000Z", ("2026-11-21", "2026-11-22"), ("2026-11-01", "2026-12-01")),
        ("2026-12-31T23:59:59.999Z", ("2026-12-31", "2027-01-01"), ("2026-12-01", "2027-01-01")),
        ("2028-02-29T00:00:00.000Z", ("2028-02-29", "2028-03-01"), ("2028-02-01", "2028-03-01")),
    ],
)
def test_its_day_and_month_are_those_of_the_run_s_end(at: str, day: tuple[str, str], month: tuple[str, str]) -> None:
    each = rows(receipt(counted_until=at))[0]
    for kind, (start, end) in (("Charge", day), ("Billing", month)):
        moments = [each[f"{kind}PeriodStart"], each[f"{kind}PeriodEnd"]]
        assert moments == [f"{start}T00:00:00Z", f"{end}T00:00:00Z"]
        assert all(datetime.fromisoformat(moment).tzinfo for moment in moments)


def test_a_line_is_of_its_service_and_spot_compute_has_a_price_that_moves() -> None:
    found = {each["ChargeDescription"].split(" of run")[0]: each for each in rows(receipt())}
    said = {
        name: (each["ServiceCategory"], each["ServiceName"], each["PricingCategory"]) for name, each in found.items()
    }
    assert said == {
        "compute": ("Compute", "Amazon Elastic Compute Cloud", "Dynamic"),
        "root disk": ("Storage", "Amazon Elastic Block Store", "Standard"),
    }


def test_the_region_is_that_of_all_nodes_and_else_left_out() -> None:
    assert rows(receipt(attempts=[node("i-1", seconds="3600.000")]))[0]["RegionId"] == "us-east-2"
    assert rows(receipt())[0]["RegionId"] == "us-east-2"
    two = [node("i-1", seconds="1.000"), node("i-2", seconds="1.000", zone="eu-west-1a")]
    assert rows(receipt(attempts=two))[0]["RegionId"] == ""


def test_the_command_prints_real_runs_alone_and_wants_the_account_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place(tmp_path, receipt(run="r1"), "r1")
    place(tmp_path, receipt(run="r2", device="cpu"), "r2")
    (tmp_path / "stacks").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["receipts", "--focus", ACCOUNT]) == 0
    said = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {json.loads(each["Tags"])["gpufleet:run"] for each in said} == {"r1"}
    with pytest.raises(SystemExit):
        main(["receipts", "--focus", "mine"])
    assert "allowed are the 12 digits" in capsys.readouterr().err
