"""What AWS charged is shown beside a receipt, by tag and by line, with what to do if tags are not activated."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from gpufleet.infra.account import actual_bill, aws
from gpufleet.infra.cli import main
from gpufleet.infra.errors import AwsRefused
from gpufleet.job.contract.receipt import Receipt
from tests.receipt_tree import receipt

TODAY = date(2026, 11, 23)
RUN = Receipt.from_json(receipt())
EC2 = "Amazon Elastic Compute Cloud - Compute"
ACTIVE = [{"TagKey": tag, "Type": "UserDefined", "Status": "Active"} for tag in actual_bill.TAGS]


def explorer() -> tuple[Any, Stubber]:
    client = boto3.client("ce", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    return client, Stubber(client)


def day(*groups: tuple[str, str, str], estimated: bool = False) -> dict[str, Any]:
    """One of Cost Explorer's days: service, usage type, USD."""
    return {
        "TimePeriod": {"Start": "2026-11-21", "End": "2026-11-22"},
        "Groups": [
            {"Keys": [service, usage], "Metrics": {"UnblendedCost": {"Amount": usd, "Unit": "USD"}}}
            for service, usage, usd in groups
        ],
        "Estimated": estimated,
    }


def asked(**more: Any) -> dict[str, Any]:
    """The question to Cost Explorer about RUN."""
    tags = [
        {"Tags": {"Key": f"gpufleet:{key}", "Values": [value]}}
        for key, value in (("stack", "small-growth"), ("run", "r1"))
    ]
    kinds = {"Not": {"Dimensions": {"Key": "RECORD_TYPE", "Values": ["Credit", "Refund", "Tax"]}}}
    return {
        "TimePeriod": {"Start": "2026-10-21", "End": "2026-11-23"},
        "Granularity": "DAILY",
        "Metrics": ["UnblendedCost"],
        "GroupBy": [{"Type": "DIMENSION", "Key": "SERVICE"}, {"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
        "Filter": {"And": [*tags, kinds]},
        **more,
    }


def test_a_runs_charges_are_asked_by_its_tags_and_told_by_line_on_all_pages() -> None:
    ce, stub = explorer()
    first = day((EC2, "USE2-SpotUsage:g5.2xlarge", "0.7"), (EC2, "USE2-EBS:VolumeUsage.gp3", "0.1"))
    second = day(
        (EC2, "USE2-SpotUsage:g5.2xlarge", "0.2"),
        ("Amazon Simple Storage Service", "USE2-TimedStorage-ByteHrs", "0.003"),
        ("AmazonCloudWatch", "USE2-TimedStorage-ByteHrs", "0.001"),
        ("AWS Key Management Service", "us-east-2-KMS-Requests", "0.02"),
        estimated=True,
    )
    stub.add_response("get_cost_and_usage", {"ResultsByTime": [first], "NextPageToken": "more"}, asked())
    stub.add_response("get_cost_and_usage", {"ResultsByTime": [second]}, asked(NextPageToken="more"))
    with stub:
        told = actual_bill.charged(ce, RUN, TODAY)
    stub.assert_no_pending_responses()
    assert told.estimated
    assert told.total == Decimal("1.024")
    lines = list(actual_bill.compared(RUN, told, TODAY))
    rows = [line.split()[:5] for line in lines[3:]]
    assert rows[0][:4] == ["compute", "1.0000", "0.9000", "-0.1000"]
    assert "free first hours" in lines[3]
    assert rows[1] == ["disks", "0.1000", "0.1000", "+0.0000"]
    assert ["logs", "0.0000", "0.0010", "+0.0010"] in rows
    assert any("KMS-Requests" in line and line.endswith("no line of the bill") for line in lines)
    assert lines[-2].split() == ["total", "1.1000", "1.0240", "-0.0760"]
    assert "may still change" in lines[-1]


@pytest.mark.parametrize(
    ("today", "said"),
    [(date(2026, 11, 22), "AWS shows charges a day later"), (TODAY, "they were not active during the run")],
)
def test_a_run_of_which_aws_tells_nothing_says_why(today: date, said: str) -> None:
    none = actual_bill.Charged(usd={}, estimated=False)
    assert said in list(actual_bill.compared(RUN, none, today))[-1]


def test_tags_that_are_not_activated_are_named_with_how_it_is_done() -> None:
    ce, stub = explorer()
    stub.add_response("list_cost_allocation_tags", {"CostAllocationTags": [{**ACTIVE[0], "Status": "Inactive"}]})
    with stub, pytest.raises(AwsRefused) as refused:
        actual_bill.require_tags(ce)
    said = str(refused.value)
    assert "gpufleet:stack (Inactive), gpufleet:run (not seen yet) are not active" in said
    assert "aws ce update-cost-allocation-tags-status" in said
    assert "TagKey=gpufleet:run,Status=Active" in said


def test_the_command_asks_for_real_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, changes in (("r1", {}), ("r2", {"device": "cpu"})):
        path = tmp_path / "receipts" / "small-growth" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(receipt(run=name, **changes)))
    ce, stub = explorer()
    stub.add_response("list_cost_allocation_tags", {"CostAllocationTags": ACTIVE})
    stub.add_response("get_cost_and_usage", {"ResultsByTime": [day((EC2, "BoxUsage:g5.2xlarge", "1.0"))]})
    monkeypatch.setattr(aws, "client", lambda service, region: ce)
    monkeypatch.chdir(tmp_path)
    with stub:
        assert main(["receipts", "--aws"]) == 0
    stub.assert_no_pending_responses()
    said = capsys.readouterr().out
    assert "small-growth, run r1, counted until" in said
    assert "run r2, counted" not in said
