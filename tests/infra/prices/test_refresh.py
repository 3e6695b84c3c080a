"""A refresh works figure by figure: a price without an answer keeps its old figure, date and source, and is named."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from gpufleet.infra.catalog import SHIPPED, files
from gpufleet.infra.catalog.files import Prices
from gpufleet.infra.prices import price_list
from gpufleet.infra.prices.refresh import PATIENCE, Refreshed, refresh
from tests.infra.aws_prices import Ec2, PriceList, refused

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
OLD = files.read(SHIPPED)
TYPES = ["g5.2xlarge", "g6f.large"]
REGION = "us-east-2"
NODES = {("g5.2xlarge", REGION): "1.30", ("g6f.large", REGION): "0.21"}


def history(*prices: tuple[str, str, str]) -> Ec2:
    """(type, zone id, USD) since yesterday."""
    rows: list[dict[str, Any]] = [
        {
            "AvailabilityZone": "us-east-2a",
            "AvailabilityZoneId": f"use2-{zone}",
            "InstanceType": type_,
            "SpotPrice": usd,
            "Timestamp": NOW - timedelta(days=1),
        }
        for type_, zone, usd in prices
    ]
    return Ec2(rows=rows)


SPOT = history(("g5.2xlarge", "az1", "0.40"), ("g5.2xlarge", "az2", "0.50"), ("g6f.large", "az3", "0.03"))


def run(pricing: PriceList, ec2: Ec2 = SPOT, old: Prices = OLD, types: list[str] | None = None) -> Refreshed:
    return refresh(old, types or TYPES, [REGION], pricing=pricing, ec2_in=lambda region: ec2, now=NOW)


def test_what_aws_answers_gets_todays_date_and_its_source() -> None:
    done = run(PriceList(nodes=NODES))
    price = done.prices.on_demand["g5.2xlarge", REGION]
    assert (price.amount, price.as_of, price.status) == (Decimal("1.30"), date(2026, 11, 21), "verified")
    assert price.source == "AWS Price List, published 2026-11-19"
    cheapest, dearest = done.prices.spot["g5.2xlarge", REGION]
    assert (cheapest.zone, cheapest.price.amount, dearest.zone) == ("az1", Decimal("0.40"), "az2")
    assert cheapest.price.source == "EC2 spot price history, median of 7 days"
    assert done.prices.services["s3_storage", REGION].as_of == date(2026, 11, 21)
    assert done.read == 2 + len(price_list.ITEMS) + 3
    assert not done.kept


def test_the_old_prices_are_not_touched() -> None:
    before = files.read(SHIPPED)
    run(PriceList(nodes=NODES), old=OLD)
    assert before == OLD


def test_what_was_not_asked_stays_as_it_was() -> None:
    done = run(PriceList(nodes=NODES))
    for key, price in OLD.on_demand.items():
        if key not in NODES:
            assert done.prices.on_demand[key] == price
    assert done.prices.services["transfer_between_regions", REGION] == OLD.services["transfer_between_regions", REGION]


def test_a_throttled_question_keeps_that_figure_with_its_date_and_the_rest_is_read() -> None:
    done = run(PriceList(nodes=NODES, errors={"g5.2xlarge": refused("ThrottlingException")}))
    assert done.prices.on_demand["g5.2xlarge", REGION] == OLD.on_demand["g5.2xlarge", REGION]
    assert done.prices.on_demand["g6f.large", REGION].amount == Decimal("0.21")
    (kept,) = done.kept
    assert kept.what == "on-demand price of g5.2xlarge in us-east-2"
    assert kept.why == "GetProducts: ThrottlingException no"
    assert kept.as_of == OLD.on_demand["g5.2xlarge", REGION].as_of
    assert kept.failed


@pytest.mark.parametrize(
    "error",
    [refused("AccessDeniedException"), NoCredentialsError(), EndpointConnectionError(endpoint_url="https://prices")],
)
def test_missing_rights_credentials_or_network_are_asked_about_once_and_spot_is_still_read(error: Exception) -> None:
    pricing = PriceList(nodes=NODES, errors={"g5.2xlarge": error})
    done = run(pricing)
    assert len(pricing.asked) == 1
    assert len(done.failed) == len(TYPES) + len(price_list.ITEMS)
    assert done.read == 3
    assert done.prices.on_demand == OLD.on_demand


def test_a_price_list_that_only_fails_is_not_asked_for_ever() -> None:
    broken = refused("InternalErrorException")
    names = [*TYPES, *(item.usage_type for item in price_list.ITEMS.values())]
    pricing = PriceList(errors=dict.fromkeys(names, broken))
    done = run(pricing)
    assert len(pricing.asked) == PATIENCE
    assert len(done.failed) == len(TYPES) + len(price_list.ITEMS)


def test_failures_that_are_not_in_a_row_stop_nothing() -> None:
    names = [item.usage_type for item in price_list.ITEMS.values()]
    pricing = PriceList(nodes=NODES, errors=dict.fromkeys(names[:: PATIENCE - 1], refused("ThrottlingException")))
    done = run(pricing)
    assert len(pricing.asked) == len(TYPES) + len(price_list.ITEMS)
    assert {kept.why for kept in done.failed} == {"GetProducts: ThrottlingException no"}


def test_a_reason_is_one_short_line() -> None:
    page = ClientError(
        {"Error": {"Code": "500", "Message": "<!doctype html>\n<title>no</title>\n" * 50}}, "GetProducts"
    )
    (kept,) = run(PriceList(nodes=NODES, errors={"g5.2xlarge": page})).kept
    assert "\n" not in kept.why
    assert len(kept.why) <= 200


def test_without_the_right_to_read_the_spot_history_the_rest_is_read() -> None:
    done = run(PriceList(nodes=NODES), Ec2(error=refused("UnauthorizedOperation", "DescribeSpotPriceHistory")))
    assert done.prices.spot == OLD.spot
    (kept,) = done.kept
    assert kept.what == "all spot prices in us-east-2"
    assert "DescribeSpotPriceHistory: UnauthorizedOperation" in kept.why
    assert kept.as_of == date(2026, 1, 21)


def test_an_empty_answer_keeps_a_known_price_and_is_no_failure() -> None:
    done = run(PriceList(nodes={("g6f.large", REGION): "0.21"}, empty={"EBS:SnapshotUsage"}))
    assert [(kept.what, kept.failed) for kept in done.kept] == [
        ("on-demand price of g5.2xlarge in us-east-2", False),
        ("ebs_snapshot in us-east-2", False),
    ]
    assert done.prices.on_demand["g5.2xlarge", REGION] == OLD.on_demand["g5.2xlarge", REGION]
    assert not done.failed


def test_a_type_that_is_not_sold_there_and_never_was_is_no_news() -> None:
    done = run(PriceList(nodes=NODES), types=[*TYPES, "p3dn.24xlarge"])
    assert not done.kept
    assert ("p3dn.24xlarge", REGION) not in done.prices.on_demand


def test_a_type_priced_for_the_first_time_is_there() -> None:
    nodes = {**NODES, ("p3dn.24xlarge", REGION): "20"}
    done = run(PriceList(nodes=nodes), types=[*TYPES, "p3dn.24xlarge"])
    assert done.prices.on_demand["p3dn.24xlarge", REGION].amount == 20
    assert not done.moved


def test_no_spot_price_in_seven_days_keeps_the_old_zones_and_says_so() -> None:
    done = run(PriceList(nodes=NODES), history(("g6f.large", "az3", "0.03")))
    assert done.prices.spot["g5.2xlarge", REGION] == OLD.spot["g5.2xlarge", REGION]
    (kept,) = done.kept
    assert (kept.what, kept.why) == ("spot prices of g5.2xlarge in us-east-2", "no spot price in 7 days")


def test_a_zone_without_a_price_is_left_out_where_others_answer_and_is_named() -> None:
    done = run(PriceList(nodes=NODES))
    assert "g5.2xlarge in us-east-2 az3" in done.gone
    assert [zone.zone for zone in done.prices.spot["g5.2xlarge", REGION]] == ["az1", "az2"]


def test_a_zone_whose_id_is_not_known_takes_no_old_price_away_and_is_named() -> None:
    ec2 = history(("g5.2xlarge", "az1", "0.40"))
    ec2.rows.append({**ec2.rows[0], "AvailabilityZone": "us-east-2c", "AvailabilityZoneId": ""})
    ec2.rows.append({**ec2.rows[0], "AvailabilityZone": "us-east-2-chi-1a", "AvailabilityZoneId": ""})
    done = run(PriceList(nodes=NODES), ec2, types=["g5.2xlarge"])
    zones = {zone.zone: zone.price for zone in done.prices.spot["g5.2xlarge", REGION]}
    old = {zone.zone: zone.price for zone in OLD.spot["g5.2xlarge", REGION]}
    assert zones["az1"].amount == Decimal("0.40")
    assert (zones["az2"], zones["az3"]) == (old["az2"], old["az3"])
    assert not done.gone
    (kept,) = done.kept
    assert (kept.what, kept.failed, kept.as_of) == ("spot price of g5.2xlarge in us-east-2c", True, date(2026, 1, 21))
    assert kept.why == "AWS gives no id for this zone"


def test_where_no_zone_has_a_known_id_all_old_spot_prices_stay() -> None:
    ec2 = history(("g5.2xlarge", "az1", "0.40"))
    ec2.rows[0]["AvailabilityZoneId"] = ""
    done = run(PriceList(nodes=NODES), ec2, types=["g5.2xlarge"])
    assert done.prices.spot["g5.2xlarge", REGION] == OLD.spot["g5.2xlarge", REGION]
    assert [kept.why for kept in done.kept] == ["AWS gives no id for this zone"]


@pytest.mark.parametrize(
    ("usd", "shown"), [("3.636", False), ("3.6361", True), ("0.404", False), ("0.4039", True), ("1.212", False)]
)
def test_a_price_that_moved_by_more_than_three_times_is_shown(usd: str, shown: bool) -> None:
    """The old price is 1.212."""
    done = run(PriceList(nodes={**NODES, ("g5.2xlarge", REGION): usd}))
    assert [moved.what for moved in done.moved] == (["on-demand price of g5.2xlarge in us-east-2"] if shown else [])


def test_a_spot_zone_at_several_times_its_old_price_is_shown_with_both() -> None:
    done = run(PriceList(nodes=NODES), history(("g5.2xlarge", "az1", "1.30"), ("g6f.large", "az3", "0.03")))
    (moved,) = done.moved
    assert moved.what == "spot price of g5.2xlarge in us-east-2 az1"
    assert (moved.old.amount, moved.new) == (Decimal("0.3617"), Decimal("1.30"))


def test_what_was_refreshed_survives_the_files(tmp_path: Any) -> None:
    done = run(PriceList(nodes=NODES))
    assert files.read(files.write(done.prices, tmp_path, NOW.date())) == done.prices
