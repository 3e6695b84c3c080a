"""The meaning of the Price List's answers, in its own format; an answer with several prices gives no price."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.prices import price_list
from gpufleet.infra.prices.price_list import NoFigure
from tests.infra.aws_prices import announced, node, product

DAY = date(2026, 11, 21)


@pytest.fixture
def pricing() -> Any:
    return boto3.client(
        "pricing", region_name="us-east-1", aws_access_key_id="testing", aws_secret_access_key="testing"
    )


def asked(pricing: Any, *pages: list[str]) -> Stubber:
    """A stub that answers one question with these pages; botocore checks each against the API's own shapes."""
    stub = Stubber(pricing)
    for index, page in enumerate(pages):
        more = {"NextToken": f"page-{index + 1}"} if index + 1 < len(pages) else {}
        stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": page, **more})
    stub.activate()
    return stub


def test_the_price_of_a_node_and_the_day_it_was_published(pricing: Any) -> None:
    asked(pricing, [node("1.2120000000")])
    quote = price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", DAY)
    assert quote.amount == Decimal("1.212")
    assert quote.source == "AWS Price List, published 2026-11-19"


@pytest.mark.parametrize(
    ("day", "usd", "later"),
    [
        (date(2026, 11, 21), "1.212", ((date(2026, 12, 1), Decimal("1.1")),)),
        (date(2026, 11, 30), "1.212", ((date(2026, 12, 1), Decimal("1.1")),)),
        (date(2026, 12, 1), "1.1", ()),
    ],
)
def test_of_two_terms_the_newest_that_has_begun_counts_and_the_other_is_told(
    pricing: Any, day: date, usd: str, later: tuple[tuple[date, Decimal], ...]
) -> None:
    asked(pricing, [announced("1.212", then="1.1", begin="2026-12-01T00:00:00Z")])
    quote = price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", day)
    assert (quote.amount, quote.later) == (Decimal(usd), later)


def test_a_term_that_repeats_the_price_is_no_change(pricing: Any) -> None:
    asked(pricing, [announced("1.212", then="1.2120", begin="2026-12-01T00:00:00Z")])
    assert price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", DAY).later == ()


def test_every_page_is_read(pricing: Any) -> None:
    stub = asked(pricing, [], [], [node("1.212")])
    assert price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", DAY).amount == Decimal("1.212")
    stub.assert_no_pending_responses()


def test_a_capacity_block_at_0_usd_is_no_price(pricing: Any) -> None:
    asked(pricing, [product(("0", "Hrs", "0.0000000000"), regionCode="us-east-2")])
    with pytest.raises(NoFigure, match="without a price above 0") as refused:
        price_list.on_demand(pricing, "p5e.48xlarge", "us-east-2", DAY)
    assert refused.value.empty


def test_a_capacity_block_beside_the_node_does_not_count(pricing: Any) -> None:
    asked(pricing, [product(("0", "Hrs", "0.0"), regionCode="us-east-2"), node("55.04")])
    assert price_list.on_demand(pricing, "p5.48xlarge", "us-east-2", DAY).amount == Decimal("55.04")


@pytest.mark.parametrize(
    ("page", "said", "empty"),
    [
        ([], "no such product", True),
        ([node("1.0", "us-gov-east-1")], "no such product", True),
        ([product(("0", "Hrs", "1.0"), term="Reserved", regionCode="us-east-2")], "without a price above 0", True),
        ([node("1.0"), node("1.1")], r"no single price: 1\.0 per hrs, 1\.1 per hrs", False),
        ([product(("0", "Quantity", "900"), regionCode="us-east-2")], "no single price: 900 per quantity", False),
        (["{not json"], "not JSON", False),
        (["[]"], "not a product", False),
        (['{"product": {"attributes": {"regionCode": "us-east-2"}}}'], "unknown form", False),
        ([announced("1", then="2", begin="some day")], "unknown form", False),
        (
            [announced("1", then="2", begin="2026-11-20T00:00:00Z"), node("1")],
            "no single price: 1 per hrs, 2 per",
            False,
        ),
        ([product(("0", "Hrs", "one dollar"), regionCode="us-east-2")], "unknown form", False),
    ],
)
def test_an_answer_without_one_clear_price_says_why(pricing: Any, page: list[str], said: str, empty: bool) -> None:
    asked(pricing, page)
    with pytest.raises(NoFigure, match=said) as refused:
        price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", DAY)
    assert refused.value.empty is empty


def test_two_products_of_one_price_are_one_price(pricing: Any) -> None:
    asked(pricing, [node("1.0"), node("1.00")])
    assert price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", DAY).amount == 1


def test_the_first_tier_that_costs_something_counts(pricing: Any) -> None:
    tiers = (("10240", "GB", "0.085"), ("0", "GB", "0.0"), ("100", "GB", "0.09"), ("51200", "GB", "0.07"))
    asked(pricing, [product(*tiers, usagetype="USE2-DataTransfer-Out-Bytes", fromRegionCode="us-east-2")])
    assert price_list.service(pricing, "transfer_out", "us-east-2", DAY).amount == Decimal("0.09")


def test_throughput_per_gib_becomes_per_mib(pricing: Any) -> None:
    asked(pricing, [product(("0", "GiBps-mo", "40.96"), usagetype="USE2-EBS:VolumeP-Throughput.gp3")])
    assert price_list.service(pricing, "ebs_gp3_throughput", "us-east-2", DAY).amount == Decimal("0.04")


def test_requests_become_thousands(pricing: Any) -> None:
    asked(pricing, [product(("0", "Requests", "0.0000050000"), usagetype="EU-Requests-Tier1")])
    assert price_list.service(pricing, "s3_write_requests", "eu-west-1", DAY).amount == Decimal("0.005")


def test_us_east_1_is_asked_without_its_prefix_and_then_with_it(pricing: Any) -> None:
    stub = asked(pricing, [])
    answer = [product(("0", "Hrs", "0.005"), usagetype="USE1-PublicIPv4:InUseAddress", regionCode="us-east-1")]
    filters = [{"Type": "TERM_MATCH", "Field": "usagetype", "Value": "USE1-PublicIPv4:InUseAddress"}]
    stub.add_response(
        "get_products",
        {"FormatVersion": "aws_v1", "PriceList": answer},
        {"ServiceCode": "AmazonVPC", "FormatVersion": "aws_v1", "Filters": filters},
    )
    assert price_list.service(pricing, "public_ipv4", "us-east-1", DAY).amount == Decimal("0.005")
    stub.assert_no_pending_responses()


def test_a_usage_type_of_a_similar_name_is_another_product(pricing: Any) -> None:
    asked(pricing, [product(("0", "GB-Mo", "0.01"), usagetype="USE2-TimedStorage-ByteHrs-Other")])
    with pytest.raises(NoFigure, match="no such product"):
        price_list.service(pricing, "s3_storage", "us-east-2", DAY)


def test_what_aws_refuses_is_passed_on(pricing: Any) -> None:
    stub = Stubber(pricing)
    stub.add_client_error("get_products", "AccessDeniedException", "not allowed")
    with stub, pytest.raises(ClientError, match="AccessDeniedException"):
        price_list.on_demand(pricing, "g5.2xlarge", "us-east-2", DAY)


def test_every_item_and_region_of_the_list_is_one_of_the_catalog() -> None:
    catalog = load_catalog()
    for name, item in price_list.ITEMS.items():
        for region in catalog.billed_regions():
            if (found := catalog.services.get((name, region))) is not None:
                assert found.unit == item.unit


def test_the_filters_ask_for_a_shared_linux_node_on_demand(pricing: Any) -> None:
    stub = Stubber(pricing)
    wanted = {
        "instanceType": "g6f.large",
        "regionCode": "us-west-2",
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "operation": "RunInstances",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    stub.add_response(
        "get_products",
        {"FormatVersion": "aws_v1", "PriceList": [node("0.202", "us-west-2")]},
        {"ServiceCode": "AmazonEC2", "FormatVersion": "aws_v1", "Filters": filters},
    )
    with stub:
        assert price_list.on_demand(pricing, "g6f.large", "us-west-2", DAY).amount == Decimal("0.202")
