"""`fleet.zones` by id: the refusals, the bill's prices, the declared resources, and the questions to the account."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from gpufleet.infra.account import aws, checks
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition, Vpc
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.resources.network import VPC_CIDR, subnet_cidr
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.command_files import several_nodes
from tests.infra.cost_definitions import definition, on_nodes
from tests.infra.declared_world import declare

CATALOG = load_catalog()
NOW = datetime(2026, 11, 26, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


def stated(folder: Path, zones: str) -> StackDefinition:
    text = (ROOT / "stacks" / "tinystories-growth.yaml").read_text()
    changed = re.sub(r"zones: \[.*\]", f"zones: [{zones}]", text, count=1)
    assert changed != text
    file = folder / "tinystories-growth.yaml"
    file.write_text(changed)
    return load(file, now=NOW)


@pytest.mark.parametrize(
    ("zones", "path", "allowed"),
    [
        ("us-east-2a, use2-az2", "fleet.zones", "only names, or only ids"),
        ("use1-az1", "fleet.zones[0]", "ids of zones of us-east-2, as use2-az1"),
        ("use2-az1, use2-az9", "fleet.zones[1]", "ids of zones of us-east-2, as use2-az1"),
        ("use2-az1, use2-az1", "fleet.zones[1]", "each zone once (a fleet takes one subnet per zone)"),
        ("use2-atl1-az1", "fleet.zones[0]", "ids of zones of us-east-2, as use2-az1"),  # a Local Zone
    ],
)
def test_what_is_no_list_of_zones_of_the_region_is_refused(tmp_path: Path, zones: str, path: str, allowed: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        stated(tmp_path, zones)
    assert [(each.path, each.allowed) for each in refused.value.problems] == [(path, allowed)]


def in_zones(*zones: str, type_: str = "p5.48xlarge", region: str = "us-east-1") -> StackDefinition:
    plain = definition(types=(type_,), region=region, max_usd="1000")
    return replace(plain, fleet=replace(plain.fleet, zones=zones))


def test_the_bill_stands_on_the_zones_that_the_file_gives() -> None:
    known = {each.zone: each.price.amount for each in CATALOG.spot("p5.48xlarge", "us-east-1")}
    low, *_, high = sorted(known, key=lambda zone: known[zone])
    one, both = price(in_zones(f"use1-{low}"), CATALOG), price(in_zones(f"use1-{low}", f"use1-{high}"), CATALOG)
    assert one.spot is not None
    assert both.spot is not None
    assert (one.spot.price.amount, both.spot.price.amount) == (known[low], known[high])
    assert "(dearest zone)" not in render(one)


def test_the_warning_names_the_zones_that_the_file_may_give_instead() -> None:
    """Only the dearest zone raises the price; the file without that zone is accepted, with the next zone's price."""
    of = {"type_": "p4d.24xlarge", "region": "us-east-2"}
    found = next(
        each for each in price(in_zones("us-east-2a", **of), CATALOG).warnings if "the bill uses the dearest" in each
    )
    said = re.search(r"Without (use2-az\d) that is ([\d.]+): fleet.zones: \[(.*)\]$", found)
    assert said, found
    zones = said[3].split(", ")
    assert said[1] not in zones
    without = price(in_zones(*zones, **of), CATALOG)
    assert without.spot is not None
    assert without.spot.price.amount == Decimal(said[2])


def test_of_several_nodes_one_zone_is_named_and_a_vpc_s_subnets_change_with_it() -> None:
    plain = in_zones("us-east-2a", type_="p4d.24xlarge", region="us-east-2")
    two = on_nodes(replace(plain, limits=replace(plain.limits, max_hours=Decimal(1000))), 2)
    vpc = replace(two.account, vpc=Vpc(id="vpc-1", subnets={"us-east-2a": "subnet-1"}))
    (found,) = (
        each for each in price(replace(two, account=vpc), CATALOG).warnings if "the bill uses the dearest" in each
    )
    assert found.endswith("that is 6.0374: fleet.zones: [use2-az1], and account.vpc.subnets by these")


def test_a_listed_zone_without_a_price_beside_others_is_warned_of() -> None:
    found = price(in_zones("use1-az6", "use1-az8"), CATALOG).warnings
    assert "p5.48xlarge: no spot price is known in use1-az8, where AWS may launch it as well" in found


def test_a_zone_without_a_price_is_said_with_those_that_have_one() -> None:
    with pytest.raises(DefinitionError) as refused:
        price(in_zones("use2-az8", region="us-east-2"), CATALOG)
    known = ", ".join(sorted(each.zone for each in CATALOG.spot("p5.48xlarge", "us-east-2")))
    assert f"no spot price for p5.48xlarge in az8 of us-east-2; known in {known}" in str(refused.value)


def test_a_subnet_is_asked_for_by_id_and_its_private_one_too(tmp_path: Path) -> None:
    made = declare(tmp_path / "project", "pretrain-d64", several_nodes("all").replace("us-east-2a", "use2-az2"))
    assert made.result.ok, made.result.text
    subnets = made.inputs("aws:ec2/subnet:Subnet")
    assert {each["cidrBlock"] for each in subnets} == {"10.0.100.0/22", "10.0.228.0/22"}
    assert all(each["availabilityZoneId"] == "use2-az2" and "availabilityZone" not in each for each in subnets)


def test_no_two_zones_share_an_address_and_none_of_a_name_and_an_id() -> None:
    """A change from names to ids makes the new subnets while the old ones are there."""
    zones = [f"us-east-1{letter}" for letter in "abcdef"] + [f"use1-az{number}" for number in range(1, 9)]
    ranges = [IPv4Network(subnet_cidr(zone, inner=inner)) for zone in zones for inner in (False, True)]
    assert all(each.subnet_of(VPC_CIDR) for each in ranges)
    assert not any(a.overlaps(b) for index, a in enumerate(ranges) for b in ranges[:index])


def test_doctor_asks_for_the_zones_by_id(cloud: Cloud, stack: StackDefinition) -> None:
    ec2 = aws.client("ec2", "us-east-2")
    for zones, state in ((("use2-az1", "use2-az2"), "ok"), (("use2-az7",), "problem")):
        found = list(checks.offerings(replace(stack, fleet=replace(stack.fleet, zones=zones)), ec2))
        assert {each.state for each in found} == {state}, found
    assert "your account has use2-az1, use2-az2, use2-az3" in found[0].fix


def test_spot_prices_of_the_embedded_account_are_those_of_its_zones_ids(cloud: Cloud) -> None:
    known = {f"use1-{each.zone}": each.price.amount for each in CATALOG.spot("p5.48xlarge", "us-east-1")}
    ec2 = cloud.client("ec2", "us-east-1")
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]}
    told = ec2.describe_spot_price_history(InstanceTypes=["p5.48xlarge"])["SpotPriceHistory"]
    prices = {ids[row["AvailabilityZone"]]: Decimal(row["SpotPrice"]) for row in told}
    assert prices
    assert {zone: usd for zone, usd in prices.items() if zone in known} == {
        zone: usd for zone, usd in known.items() if zone in prices
    }
