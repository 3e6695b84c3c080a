"""Seven days of spot prices, in the shape of DescribeSpotPriceHistory, by zone id."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import ANY, Stubber

from gpufleet.infra.prices import spot_history
from tests.infra.aws_prices import Ec2, refused

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
START = NOW - timedelta(days=7)


def row(usd: str, hours_ago: float, zone: str = "us-east-2a", type_: str = "g5.2xlarge", **more: str) -> dict[str, Any]:
    return {
        "AvailabilityZone": zone,
        "InstanceType": type_,
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": usd,
        "Timestamp": NOW - timedelta(hours=hours_ago),
        **more,
    }


def only_price(rows: list[dict[str, Any]], ids: dict[str, str] | None = None) -> spot_history.ZonePrice:
    (found,) = spot_history.summarise(rows, ids or {"us-east-2a": "use2-az3"}, START, NOW)
    return found


def test_the_median_is_over_time_and_not_over_changes() -> None:
    """The price was 0.90 for 6 of the 7 days; short drops to 0.30 and 0.40 are two of the three changes."""
    found = only_price([row("0.40", 12), row("0.90", 168), row("0.30", 24)])
    assert (found.median, found.low, found.high) == (Decimal("0.90"), Decimal("0.30"), Decimal("0.90"))


def test_the_price_before_the_window_holds_from_its_start() -> None:
    """The price is 0.50 for 100 of the window's 168 hours, and 0.70 for 68."""
    assert only_price([row("0.50", 2000), row("0.70", 68)]).median == Decimal("0.50")
    assert only_price([row("0.50", 2000), row("0.70", 100)]).median == Decimal("0.70")


def test_a_price_that_was_replaced_at_the_windows_start_never_held_in_it() -> None:
    found = only_price([row("9.00", 400), row("0.50", 300)])
    assert (found.median, found.low, found.high) == (Decimal("0.50"),) * 3


def test_a_single_change_at_this_very_moment_is_the_price() -> None:
    assert only_price([row("0.50", 0)]).median == Decimal("0.50")


def test_zones_are_named_by_their_id_and_local_zones_are_left_out() -> None:
    ids = {"us-east-1a": "use1-az6", "us-east-1-atl-1a": "use1-atl1-az1"}
    rows = [row("0.5", 1, "us-east-1a"), row("0.6", 1, "us-east-1-atl-1a"), row("0.7", 1, "us-east-1z")]
    assert only_price(rows, ids).zone == "az6"


def test_an_id_in_the_row_itself_needs_no_table_of_zones() -> None:
    ec2 = Ec2(
        rows=[row("0.5", 1, AvailabilityZoneId="use2-az2")], zones_error=refused("UnauthorizedOperation", "Describe")
    )
    assert [zone.zone for zone in spot_history.read(ec2, ["g5.2xlarge"], NOW).prices] == ["az2"]


def test_all_pages_count_and_types_and_zones_come_sorted() -> None:
    zones = {"us-east-2a": "use2-az1", "us-east-2b": "use2-az2"}
    rows = [
        row("0.9", 1, "us-east-2b", "p5.48xlarge"),
        row("0.5", 1, "us-east-2b"),
        row("0.4", 1, "us-east-2a"),
        row("0.8", 1, "us-east-2a", "p5.48xlarge"),
    ]
    found = spot_history.read(Ec2(rows=rows, zones=zones), ["g5.2xlarge", "p5.48xlarge"], NOW).prices
    assert [(each.type, each.zone, str(each.median)) for each in found] == [
        ("g5.2xlarge", "az1", "0.4"),
        ("g5.2xlarge", "az2", "0.5"),
        ("p5.48xlarge", "az1", "0.8"),
        ("p5.48xlarge", "az2", "0.9"),
    ]


def test_the_real_client_is_asked_by_filter_for_seven_days_of_linux_and_follows_the_token() -> None:
    """botocore checks question and answers against the API's own shapes."""
    ec2 = boto3.client("ec2", region_name="us-east-2", aws_access_key_id="testing", aws_secret_access_key="testing")
    stub = Stubber(ec2)
    question = {
        "StartTime": START,
        "EndTime": NOW,
        "Filters": [
            {"Name": "instance-type", "Values": ["g5.2xlarge", "g6.xlarge"]},
            {"Name": "product-description", "Values": ["Linux/UNIX"]},
        ],
    }
    first, second = [row("0.5", 100)], [row("0.7", 50)]
    stub.add_response("describe_spot_price_history", {"SpotPriceHistory": first, "NextToken": "t"}, question)
    stub.add_response(
        "describe_spot_price_history", {"SpotPriceHistory": second, "NextToken": ""}, {**question, "NextToken": "t"}
    )
    zones = [{"ZoneName": "us-east-2a", "ZoneId": "use2-az1", "State": "available"}]
    stub.add_response("describe_availability_zones", {"AvailabilityZones": zones}, {"Filters": ANY})
    with stub:
        (found,) = spot_history.read(ec2, ["g6.xlarge", "g5.2xlarge"], NOW).prices
    assert (found.zone, found.low, found.high) == ("az1", Decimal("0.5"), Decimal("0.7"))
    stub.assert_no_pending_responses()


def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        spot_history.read(Ec2(error=refused("UnauthorizedOperation", "DescribeSpotPriceHistory")), ["g5.xlarge"], NOW)
