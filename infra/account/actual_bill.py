"""Shows AWS's charges for a run, from Cost Explorer, next to the lines of its receipt: for `gpufleet receipts --aws`.

The charges of a run are found by the tags of its resources. Cost Explorer sees a tag only after the account that pays
has activated it. Credits, refunds and taxes are left out, because only usage is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.evidence.receipts import LINES
from gpufleet.infra.program.resources.tags import RUN_TAG, STACK_TAG
from gpufleet.infra.show.sheet import Sheet
from gpufleet.job.contract.receipt import Receipt, ReceiptLine

REGION = "us-east-1"  # the only region in which Cost Explorer answers
TAGS = (STACK_TAG, RUN_TAG)
BEFORE = 31  # a run may have begun this many days before its end
AFTER = 2  # charges of a run's end may have dates up to this many days later
DELAY = 1  # days until a charge appears in Cost Explorer
CENT = Decimal("0.01")
# Which line of the bill a usage type of AWS belongs to. In most regions a usage type begins with a prefix for the
# region.
_LINES = (
    ("compute", r"(BoxUsage|SpotUsage)\b"),
    ("disks", r"EBS:Volume"),
    ("public IPv4", r"PublicIPv4:"),
    ("S3 storage", r"TimedStorage"),
    ("S3 write requests", r"Requests-Tier1\b"),
    ("S3 read requests", r"Requests-Tier2\b"),
    ("transfer of results", r"DataTransfer-Out-Bytes"),
)
_MERGED = {"root disk": "disks", "data disk": "disks", "interruptions": "compute"}
_NOTES = {
    "compute": "AWS counts the price of each second, free first hours and savings plans",
    "S3 storage": "the receipt has the bill's amount, for all days until expiry",
    "S3 write requests": "the receipt has the bill's amount",
    "S3 read requests": "the receipt has the bill's amount",
    "transfer of results": "the receipt has the bill's amount; AWS charges it after `gpufleet results`",
    "logs": "the receipt has the bill's amount",
}
_HEADS = ("line", "receipt", "AWS", "difference", "what differs")
ACTIVATE = (
    "the account that pays must activate these tags once, and later costs carry them:\n"
    "  aws ce update-cost-allocation-tags-status --cost-allocation-tags-status "
    + " ".join(f"TagKey={tag},Status=Active" for tag in TAGS)
    + "\nCost Explorer knows a tag a day after something first had it. For runs before:\n"
    "  aws ce start-cost-allocation-tag-backfill --backfill-from YYYY-MM-01T00:00:00Z"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Charged:
    """AWS's charges for a run in USD: by line of the bill, or, if no line covers a charge, by AWS's own names."""

    usd: Mapping[str, Decimal]
    estimated: bool  # whether AWS may still change the charges

    @property
    def total(self) -> Decimal:
        return sum(self.usd.values(), Decimal(0))


def require_tags(ce: Any) -> None:
    """Raises AwsRefused, with instructions, if the tags are not active for costs."""
    tags = ce.list_cost_allocation_tags(TagKeys=list(TAGS), Type="UserDefined")["CostAllocationTags"]
    status = {tag["TagKey"]: tag["Status"] for tag in tags}
    if lacking := [f"{tag} ({status.get(tag, 'not seen yet')})" for tag in TAGS if status.get(tag) != "Active"]:
        raise AwsRefused(f"the cost allocation tags {', '.join(lacking)} are not active; {ACTIVATE}")


def charged(ce: Any, receipt: Receipt, today: date) -> Charged:
    """The charges for the receipt's run until today, from Cost Explorer. The request costs 0.01 USD."""
    ended = date.fromisoformat(receipt.at[:10])
    wanted = {
        "TimePeriod": {
            "Start": str(ended - timedelta(days=BEFORE)),
            "End": str(min(ended + timedelta(days=AFTER), today + timedelta(days=1))),  # AWS excludes this day
        },
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "GroupBy": [{"Type": "DIMENSION", "Key": key} for key in ("SERVICE", "USAGE_TYPE")],
        "Filter": {
            "And": [
                *(
                    {"Tags": {"Key": tag, "Values": [value]}}
                    for tag, value in zip(TAGS, (receipt.stack, receipt.run), strict=True)
                ),
                {"Not": {"Dimensions": {"Key": "RECORD_TYPE", "Values": ["Credit", "Refund", "Tax"]}}},
            ]
        },
    }
    usd, estimated, more = dict[str, Decimal](), False, dict[str, str]()
    while True:
        answer = ce.get_cost_and_usage(**wanted, **more)
        for day in answer["ResultsByTime"]:
            estimated |= bool(day.get("Estimated")) and bool(day["Groups"])
            for group in day["Groups"]:
                name = line_of(*group["Keys"])
                usd[name] = usd.get(name, Decimal(0)) + Decimal(group["Metrics"]["UnblendedCost"]["Amount"])
        if not (token := answer.get("NextPageToken")):
            return Charged(usd=usd, estimated=estimated)
        more = {"NextPageToken": token}


def line_of(service: str, usage_type: str) -> str:
    """The line of the bill to which a service's usage type belongs; AWS's own names if there is none."""
    if "CloudWatch" in service:
        return "logs"
    return next((name for name, pattern in _LINES if re.search(pattern, usage_type)), f"{service}, {usage_type}")


def by_line(receipt: Receipt) -> dict[str, Decimal]:
    """The USD of a receipt, summed by the lines to which AWS's charges can be assigned."""
    counted = dict[str, Decimal]()
    for line in receipt.lines:
        name = _MERGED.get(line.name, line.name)
        counted[name] = counted.get(name, Decimal(0)) + line.actual
    return counted


def compared(receipt: Receipt, charges: Charged, today: date) -> Iterator[str]:
    """A table with the lines of the receipt next to AWS's charges, and the reasons for the differences."""
    counted = by_line(receipt)
    yield f"{receipt.stack}, run {receipt.run}, counted until {receipt.at}:"
    if not charges.usd:
        late = (
            "AWS shows charges a day later"
            if today <= date.fromisoformat(receipt.at[:10]) + timedelta(days=DELAY)
            else ""
        )
        yield f"  no charge has the run's tags: {late or 'they were not active during the run, or it cost nothing'}"
        return
    rows = [
        _compared(name, counted.get(name), charges.usd.get(name, Decimal(0))) for name in {**counted, **charges.usd}
    ]
    total = ReceiptLine(name="total", estimate=receipt.actual, actual=charges.total)
    for row in Sheet.build(_COLUMNS, [*rows, total]).text():
        yield f"  {row}"
    if charges.estimated:
        yield "  AWS calls some charges estimated, so they may still change."


_COLUMNS = [column._replace(head=head) for column, head in zip(LINES, _HEADS, strict=True)]


def _compared(name: str, counted: Decimal | None, theirs: Decimal) -> ReceiptLine:
    """AWS's charge for a line of the receipt, and the reason why the two may differ."""
    note, mine = "no line of the bill" if counted is None else _NOTES.get(name, ""), counted or Decimal(0)
    note = note if abs(theirs - mine) >= CENT else ""
    return ReceiptLine(name=name, estimate=mine, actual=theirs, note=note)
