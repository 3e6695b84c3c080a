"""Reads on-demand and service prices from the AWS Price List (GetProducts).

An answer is a list of products. Each product is a JSON text. The text has `product.attributes`, and under
`terms.OnDemand` the price dimensions, each with unit, USD, and the quantity from which it applies. Four facts are
surprising (public clients of this API, and the SDK's own example, read 2026-11):

- Usage types have the region's prefix, but old ones in us-east-1 have none: USE2-EBS:VolumeUsage.gp3 in us-east-2 is
  EBS:VolumeUsage.gp3 there.
- gp3 throughput is priced per GiB/s; a bill counts MiB/s.
- Capacity Blocks are listed as instances at 0 USD. A filter by marketoption, and the condition that a price is above 0,
  exclude them.
- A term applies from its effectiveDate on. If there are several terms, the newest one that already applies gives the
  price; announced terms are reported too.

If an answer is ambiguous, there is no price, because a guess would look like a fact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import Any

from gpufleet.infra.catalog.items import known_items
from gpufleet.infra.catalog.regions import known_regions

API_REGION = "us-east-1"  # the Price List's endpoint in this region answers for every region


class NoFigure(Exception):
    """AWS answered, but without a usable price. `empty`: whether AWS lists no such product at all."""

    def __init__(self, why: str, *, empty: bool = False) -> None:
        super().__init__(why)
        self.empty = empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """A price in the catalog's unit, and the day on which AWS published it. `later`: its announced values, by day."""

    amount: Decimal
    published: str
    later: tuple[tuple[date, Decimal], ...] = ()

    @property
    def source(self) -> str:
        return f"AWS Price List, published {self.published}" if self.published else "AWS Price List"


_ONE = Decimal(1)
ITEMS = known_items()


def on_demand(pricing: Any, type_: str, region: str, day: date) -> Quote:
    """USD per node-hour of a Linux node on `day`. Raises NoFigure, and botocore's errors."""
    filters = {
        "instanceType": type_,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "operation": "RunInstances",
        "marketoption": "OnDemand",
    }
    return _quote(list(_products(pricing, "AmazonEC2", filters)), {"hrs": _ONE}, region, day)


def service(pricing: Any, name: str, region: str, day: date) -> Quote:
    """USD per unit of a service item on `day`, in the first tier. Raises NoFigure, and botocore's errors."""
    item, products = ITEMS[name], []
    for prefix in known_regions()[region].usage_prefixes:
        usage_type = prefix + item.usage_type
        matching = _products(pricing, item.service, {"usagetype": usage_type})
        products += [product for product in matching if _attributes(product).get("usagetype") == usage_type]
        if products:
            break
    return _quote(products, item.units, region, day)


def _products(pricing: Any, service_code: str, filters: dict[str, str]) -> Iterator[dict[str, Any]]:
    pages = pricing.get_paginator("get_products").paginate(
        ServiceCode=service_code,
        FormatVersion="aws_v1",
        Filters=[{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()],
    )
    for page in pages:
        for text in page.get("PriceList") or ():
            try:
                product = json.loads(text)
            except ValueError:
                raise NoFigure("the answer is not JSON") from None
            if not isinstance(product, dict):
                raise NoFigure("the answer is not a product")
            yield product


def _quote(products: list[dict[str, Any]], units: Mapping[str, Decimal], region: str, day: date) -> Quote:
    """The price on which all products of the region agree on `day`, with its announced changes."""
    here = [product for product in products if _region(product) in (region, None)]
    if not here:
        raise NoFigure("the Price List has no such product", empty=True)
    try:
        begins = sorted({begin for product in here for begin in _terms(product) if begin > day})
        amount = _amount(here, units, day)
        later = tuple(_changes(here, units, amount, begins))
    except (KeyError, TypeError, AttributeError, ValueError, InvalidOperation) as error:
        raise NoFigure(f"the answer has an unknown form ({type(error).__name__}: {error})") from None
    published = max(str(product.get("publicationDate", ""))[:10] for product in here)
    return Quote(amount=amount, published=published, later=later)


def _changes(
    products: list[dict[str, Any]], units: Mapping[str, Decimal], amount: Decimal, days: Iterable[date]
) -> Iterator[tuple[date, Decimal]]:
    """Yields the future values of `amount`, each with the day from which it applies. Ambiguous changes are left out."""
    for day in days:
        try:
            new = _amount(products, units, day)
        except NoFigure:
            continue
        if new != amount:
            yield day, new
        amount = new


def _amount(products: list[dict[str, Any]], units: Mapping[str, Decimal], day: date) -> Decimal:
    """The amount on which all products agree on `day`. Raises NoFigure."""
    tiers = [tier for product in products if (tier := _first_tier(product, day)) is not None]
    if not tiers:
        raise NoFigure("the Price List has the product without a price above 0", empty=True)
    known = {(units[unit] * usd).normalize() for unit, usd in tiers if unit in units}
    if len(known) != 1 or any(unit not in units for unit, _ in tiers):
        shown = ", ".join(sorted(f"{usd:f} per {unit}" for unit, usd in tiers))
        raise NoFigure(f"the Price List gives no single price: {shown}")
    return known.pop()


def _terms(product: dict[str, Any]) -> dict[date, list[dict[str, Any]]]:
    """The product's on-demand terms, by the day from which they apply (the calendar's first day if AWS gives none)."""
    by_day: dict[date, list[dict[str, Any]]] = {}
    for term in product["terms"].get("OnDemand", {}).values():
        begin = str(term.get("effectiveDate") or "")[:10]
        by_day.setdefault(date.fromisoformat(begin) if begin else date.min, []).append(term)
    return by_day


def _first_tier(product: dict[str, Any], day: date) -> tuple[str, Decimal] | None:
    """Unit and USD of the lowest tier that has a price on that day; None if there is none."""
    terms = _terms(product)
    in_force = max((begin for begin in terms if begin <= day), default=None)
    tiers = [
        (
            Decimal(dimension.get("beginRange") or 0),
            dimension["unit"].lower(),
            Decimal(dimension["pricePerUnit"]["USD"]),
        )
        for term in (() if in_force is None else terms[in_force])
        for dimension in term["priceDimensions"].values()
        if "USD" in dimension["pricePerUnit"]
    ]
    priced = sorted(tier for tier in tiers if tier[2] > 0)
    return priced[0][1:] if priced else None


def _attributes(product: dict[str, Any]) -> dict[str, Any]:
    attributes = product.get("product", {}).get("attributes", {})
    return attributes if isinstance(attributes, dict) else {}


def _region(product: dict[str, Any]) -> str | None:
    attributes = _attributes(product)
    return attributes.get("regionCode") or attributes.get("fromRegionCode")
