"""Answers of the Price List and of the spot price history in AWS's format, and clients that give these answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.catalog.items import known_items

ITEMS = {  # (service, usage type) -> (unit, USD), in the list's own units
    ("AmazonEC2", "EBS:VolumeUsage.gp3"): ("GB-Mo", "0.08"),
    ("AmazonEC2", "EBS:VolumeP-IOPS.gp3"): ("IOPS-Mo", "0.005"),
    ("AmazonEC2", "EBS:VolumeP-Throughput.gp3"): ("GiBps-mo", "40.96"),
    ("AmazonEC2", "EBS:SnapshotUsage"): ("GB-Mo", "0.05"),
    ("AmazonS3", "TimedStorage-ByteHrs"): ("GB-Mo", "0.023"),
    ("AmazonS3", "Requests-Tier1"): ("Requests", "0.000005"),
    ("AmazonS3", "Requests-Tier2"): ("Requests", "0.0000004"),
    ("AmazonCloudWatch", "DataProcessing-Bytes"): ("GB", "0.50"),
    ("AmazonCloudWatch", "TimedStorage-ByteHrs"): ("GB-Mo", "0.03"),
    ("AWSDataTransfer", "DataTransfer-Out-Bytes"): ("GB", "0.09"),
    ("AWSDataTransfer", "DataTransfer-Regional-Bytes"): ("GB", "0.01"),
    ("AmazonVPC", "PublicIPv4:InUseAddress"): ("Hrs", "0.005"),
    ("AmazonEC2", "NatGateway-Hours"): ("Hrs", "0.045"),
    ("AmazonEC2", "NatGateway-Bytes"): ("GB", "0.045"),
}
SHIPPED = {item: price.amount for (item, _), price in load_catalog().services.items()}
for name, each in known_items().items():  # one more type of the catalog, at the catalog's price
    unit, factor = next(iter(each.units.items()))
    ITEMS.setdefault((each.service, each.usage_type), (unit, f"{SHIPPED[name] / factor:f}"))


def product(*tiers: tuple[str, str, str], term: str = "OnDemand", **attributes: str) -> str:
    """One product as the Price List writes it; `tiers` are (from, unit, USD)."""
    sku = "22222222XXXXXXXX"
    dimensions = {
        f"{sku}.JRTCKXETXF.{index}": {
            "unit": unit,
            "beginRange": begin,
            "endRange": "Inf",
            "description": "",
            "appliesTo": [],
            "rateCode": f"{sku}.JRTCKXETXF.{index}",
            "pricePerUnit": {"USD": usd},
        }
        for index, (begin, unit, usd) in enumerate(tiers)
    }
    offer = {"priceDimensions": dimensions, "sku": sku, "effectiveDate": "2026-11-01T00:00:00Z"}
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": sku},
            "serviceCode": "AmazonEC2",
            "terms": {term: {f"{sku}.JRTCKXETXF": offer}},
            "version": "20261119170000",
            "publicationDate": "2026-11-19T17:00:00Z",
        }
    )


def node(usd: str, region: str = "us-east-2") -> str:
    return product(("0", "Hrs", usd), regionCode=region, marketoption="OnDemand")


def announced(usd: str, *, then: str, begin: str) -> str:
    """A node of us-east-2 with a second term: such a price list announces a change."""
    found = json.loads(node(usd))
    (name, term), *_ = found["terms"]["OnDemand"].items()
    dimensions = {key: {**each, "pricePerUnit": {"USD": then}} for key, each in term["priceDimensions"].items()}
    found["terms"]["OnDemand"][f"{name}.2"] = {**term, "effectiveDate": begin, "priceDimensions": dimensions}
    return json.dumps(found)


def refused(code: str, operation: str = "GetProducts") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, operation)


@dataclass
class PriceList:
    """A Price List that knows some nodes' prices, and every service item in every region unless told otherwise."""

    nodes: dict[tuple[str, str], str] = field(default_factory=dict)  # (type, region) -> USD
    products: dict[tuple[str, str], str] = field(
        default_factory=dict
    )  # (type, region) -> the products to answer instead
    errors: dict[str, Exception] = field(default_factory=dict)  # by instance type or usage type without prefix
    empty: set[str] = field(default_factory=set)  # usage types without an answer
    asked: list[dict[str, str]] = field(default_factory=list)

    def get_paginator(self, operation: str) -> PriceList:
        assert operation == "get_products"
        return self

    def paginate(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        wanted = {each["Field"]: each["Value"] for each in arguments["Filters"]}
        self.asked.append(wanted)
        if "instanceType" in wanted:
            key = (wanted["instanceType"], wanted["regionCode"])
            if key[0] in self.errors:
                raise self.errors[key[0]]
            found = self.products.get(key) or (node(self.nodes[key], key[1]) if key in self.nodes else "")
            yield {"PriceList": [found] if found else []}
            return
        usage_type = wanted["usagetype"]
        bare = re.sub(r"^[A-Z]{2}[A-Z0-9]*-", "", usage_type)
        if bare in self.errors:
            raise self.errors[bare]
        if bare in self.empty or usage_type.startswith(("USE1-", "EUW1-")):
            yield {"PriceList": []}
            return
        yield {"PriceList": [product(("0", *ITEMS[arguments["ServiceCode"], bare]), usagetype=usage_type)]}


@dataclass
class Ec2:
    """Spot price history in two pages, and the account's zones."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    zones: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    zones_error: Exception | None = None

    def get_paginator(self, operation: str) -> Ec2:
        assert operation == "describe_spot_price_history"
        return self

    def paginate(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        if self.error:
            raise self.error
        half = len(self.rows) // 2
        yield {"SpotPriceHistory": self.rows[:half], "NextToken": "more"}
        yield {"SpotPriceHistory": self.rows[half:], "NextToken": ""}

    def describe_availability_zones(self, **arguments: Any) -> dict[str, Any]:
        if self.zones_error:
            raise self.zones_error
        found = [{"ZoneName": name, "ZoneId": id_} for name, id_ in self.zones.items()]
        return {"AvailabilityZones": found}
