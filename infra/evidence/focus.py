"""Writes receipts as rows of FOCUS 1.0, the FinOps Foundation's format for bills, so that a team's own cost tools can
read them. A row is one line of a receipt, and the sum of a run's rows is its cost. A receipt has the time until which
costs are included, but not the time from which they are, so the period of a row is the day on which the run ended.
Receipts have no quantities or unit prices.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from gpufleet.job.contract.receipt import Receipt, ReceiptLine, money

# FOCUS's category of the service, and the service, by the first words of a line's name. All other lines belong to EC2.
SERVICES = {
    "S3": ("Storage", "Amazon Simple Storage Service"),
    "what others add to the bucket": ("Storage", "Amazon Simple Storage Service"),
    "root disk": ("Storage", "Amazon Elastic Block Store"),
    "data disk": ("Storage", "Amazon Elastic Block Store"),
    "public IPv4": ("Networking", "Amazon Virtual Private Cloud"),
    "NAT": ("Networking", "Amazon Virtual Private Cloud"),
    "transfer": ("Networking", "AWS Data Transfer"),
    "logs": ("Management and Governance", "AmazonCloudWatch"),
}
EC2 = ("Compute", "Amazon Elastic Compute Cloud")
DYNAMIC = {"spot"}  # markets whose prices change, for FOCUS's PricingCategory


def table(receipts: Iterable[Receipt], account: str) -> str:
    """The rows of all runs except rehearsals, as CSV with a heading. `account`: the number of the paying AWS
    account.
    """
    rows = [row(receipt, line, account) for receipt in receipts if not receipt.rehearsal for line in receipt.lines]
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def row(receipt: Receipt, line: ReceiptLine, account: str) -> dict[str, Any]:
    """One row, by FOCUS's column names. An empty text stands for FOCUS's null."""
    ended = datetime.fromisoformat(receipt.at).astimezone(UTC)
    day = ended.replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    cost = money(line.actual)
    category, service = next((named for name, named in SERVICES.items() if line.name.startswith(name)), EC2)
    regions = {attempt.zone[:-1] for attempt in receipt.attempts}
    region = regions.pop() if len(regions) == 1 else ""
    bought = "Dynamic" if receipt.capacity in DYNAMIC and (category, service) == EC2 else "Standard"
    return {
        **dict.fromkeys(("BilledCost", "EffectiveCost", "ContractedCost", "ListCost"), cost),
        **{"ContractedUnitPrice": "", "ListUnitPrice": "", "BillingCurrency": "USD"},
        **dict.fromkeys(("BillingAccountId", "SubAccountId"), account),
        **{"BillingAccountName": "", "SubAccountName": ""},
        "BillingPeriodStart": _moment(month),
        "BillingPeriodEnd": _moment((month + timedelta(days=32)).replace(day=1)),
        "ChargePeriodStart": _moment(day),
        "ChargePeriodEnd": _moment(day + timedelta(days=1)),
        **{"ChargeCategory": "Usage", "ChargeClass": "", "ChargeFrequency": "Usage-Based"},
        "ChargeDescription": f"{line.name} of run {receipt.run} of {receipt.stack}",
        **dict.fromkeys(("CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName"), ""),
        **dict.fromkeys(("CommitmentDiscountStatus", "CommitmentDiscountType"), ""),
        **dict.fromkeys(("ConsumedQuantity", "ConsumedUnit", "PricingQuantity", "PricingUnit"), ""),
        "PricingCategory": bought,
        **dict.fromkeys(("ProviderName", "PublisherName", "InvoiceIssuerName"), "AWS"),
        **{"RegionId": region, "RegionName": region, "ServiceCategory": category, "ServiceName": service},
        **dict.fromkeys(("ResourceId", "ResourceName", "ResourceType", "SkuId", "SkuPriceId"), ""),
        "Tags": json.dumps({"gpufleet:stack": receipt.stack, "gpufleet:run": receipt.run}),
    }


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
