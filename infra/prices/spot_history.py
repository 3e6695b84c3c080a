"""Reads spot prices per zone over 7 days (DescribeSpotPriceHistory).

A price in the history applies until the next one of its zone. The answer includes the newest price before the 7 days,
which applies from their start. So the median is taken over time, and not over changes of the price. Zones are named by
id, such as az1. If a zone's id is not known, its prices are left out, and its name is reported.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

DAYS = 7
SOURCE = f"EC2 spot price history, median of {DAYS} days"
# matches us-east-2a, but no Local Zone such as us-east-1-atl-1a
_ZONE_NAME = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]+[a-z]")
_ZONE_ID = re.compile(r"[a-z]+[0-9]+-(az[0-9]+)")  # matches use2-az1, but no Local Zone such as use1-atl1-az1


@dataclass(frozen=True, kw_only=True, slots=True)
class ZonePrice:
    """USD per node-hour of one type in one zone over the 7 days."""

    type: str
    zone: str
    median: Decimal
    low: Decimal
    high: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneHistory:
    """The prices that were read, and the names of zones without a known id, by type."""

    prices: list[ZonePrice]
    unnamed: Mapping[str, tuple[str, ...]]


def read(ec2: Any, types: Iterable[str], now: datetime) -> ZoneHistory:
    """The prices of these types in all zones of the client's region that have one. Raises botocore's errors. The types
    are passed as a filter. If they were passed as an argument, a type that the region does not know would be an error.
    """
    start = now - timedelta(days=DAYS)
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        StartTime=start,
        EndTime=now,
        Filters=[
            {"Name": "instance-type", "Values": sorted(types)},
            {"Name": "product-description", "Values": ["Linux/UNIX"]},
        ],
    )
    rows = [row for page in pages for row in page.get("SpotPriceHistory") or ()]
    ids = zone_ids(ec2) if any(not row.get("AvailabilityZoneId") for row in rows) else {}
    return ZoneHistory(prices=summarise(rows, ids, start, now), unnamed=_unnamed(rows, ids))


def zone_ids(ec2: Any) -> dict[str, str]:
    """The ids of zones in this account, by zone name, such as use2-az1 for us-east-2a."""
    answer = ec2.describe_availability_zones(Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}])
    return {zone["ZoneName"]: zone["ZoneId"] for zone in answer["AvailabilityZones"] if zone.get("ZoneId")}


def summarise(
    rows: Iterable[Mapping[str, Any]], ids: Mapping[str, str], start: datetime, end: datetime
) -> list[ZonePrice]:
    """The median over time and the extremes per type and zone, sorted; without Local Zones and zones without an id."""
    changes: dict[tuple[str, str], list[tuple[datetime, Decimal]]] = defaultdict(list)
    for row in rows:
        named, usd = _ZONE_ID.fullmatch(_id(row, ids)), Decimal(row["SpotPrice"])
        if named and row["Timestamp"] <= end and usd.is_finite() and usd > 0:
            changes[row["InstanceType"], named[1]].append((row["Timestamp"], usd))
    prices = []
    for (type_, zone), moments in sorted(changes.items()):
        moments.sort()
        holds = [
            (price, (max(until, start) - max(since, start)).total_seconds())
            for (since, price), until in zip(moments, [*(moment for moment, _ in moments[1:]), end], strict=True)
        ]
        in_force = [price for price, seconds in holds if seconds > 0] or [holds[-1][0]]
        prices.append(ZonePrice(type=type_, zone=zone, median=_median(holds), low=min(in_force), high=max(in_force)))
    return prices


def _id(row: Mapping[str, Any], ids: Mapping[str, str]) -> str:
    return row.get("AvailabilityZoneId") or ids.get(row.get("AvailabilityZone", ""), "")


def _unnamed(rows: Iterable[Mapping[str, Any]], ids: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    by_type: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        name = row.get("AvailabilityZone", "")
        if not _id(row, ids) and _ZONE_NAME.fullmatch(name):
            by_type[row["InstanceType"]].add(name)
    return {type_: tuple(sorted(names)) for type_, names in by_type.items()}


def _median(holds: list[tuple[Decimal, float]]) -> Decimal:
    """The median over time: for half of the time, the spot price was not above this price."""
    half = sum(seconds for _, seconds in holds) / 2
    spent = 0.0
    for price, seconds in sorted(holds):
        spent += seconds
        if spent >= half and (seconds > 0 or half == 0):
            return price
    return holds[-1][0]
