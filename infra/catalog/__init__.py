"""Dated facts: instance types, GPUs and prices, each row with its source and its date.

The CSV files beside this module are the data; `status` is `verified` (read in the named source), or `inferred` (derived
from another region or type, or recalled), and every bill says which of its prices are inferred. Nothing here asks AWS.

Three things that surprise:

- A spot price is known by zone *id* (az1 = use2-az1), a definition names zones (us-east-2a), and which name is which
  id differs per account. Without an account the two cannot be matched, so callers take the dearest zone of the region.
  Local Zones (Atlanta, Los Angeles) are left out.
- The spot figures come from an undated file made between 2026-01-21 and 2026-05-18; the earlier day is their date.
- A fractional GPU is one device with a share: g6f.xlarge has gpu_count 1 and gpu_share 0.125, never 0 GPUs.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Literal

from infra.errors import PriceMissing

Status = Literal["verified", "inferred"]

# Zone names as accounts see them.
_ZONES = {"us-east-1": "abcdef", "us-east-2": "abc", "us-west-2": "abcd", "eu-west-1": "abc"}
_SPOT_ZONES = ("az1", "az2", "az3", "az4", "az5", "az6")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One whole GPU. Peaks are dense; None where the figure was not found."""

    name: str
    memory_gb: float  # nominal, decimal GB
    bf16_tflops: float | None
    fp32_tflops: float | None
    bandwidth_gb_s: float | None
    bf16: bool  # computes in bf16 natively


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One EC2 instance type. Network and EBS figures are the sustained baseline, not the burst."""

    type: str
    vcpu: int
    memory_gib: float
    gpu: Gpu
    gpu_count: int
    gpu_share: float  # below 1 for a slice of a GPU
    nvme_gb: float  # instance store; 0 = none
    network_gbps: float
    ebs_gbps: float
    ebs_iops: int | None
    regions: tuple[str, ...] | None  # where it is offered; None = not known
    left_ec2: date | None  # no longer launchable since; the last day it can have been

    @property
    def gpu_memory_gb(self) -> float:
        """Memory of one device as the job sees it."""
        return self.gpu.memory_gb * self.gpu_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """USD for one unit."""

    amount: Decimal
    unit: str
    source: str
    as_of: date
    status: Status


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotPrice:
    """A spot price in one zone, named by zone id within its region (az1)."""

    zone: str
    price: Price


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """All facts of one date. Built by `load_catalog`."""

    instances: dict[str, Instance]
    services: dict[tuple[str, str], Price] = field(repr=False)
    on_demand_prices: dict[tuple[str, str], Price] = field(repr=False)
    spot_prices: dict[tuple[str, str], tuple[SpotPrice, ...]] = field(repr=False)

    def instance(self, type_: str) -> Instance | None:
        """None if the catalog has never heard of it."""
        return self.instances.get(type_)

    def instance_types(self) -> tuple[str, ...]:
        return tuple(self.instances)

    def regions(self) -> tuple[str, ...]:
        return tuple(_ZONES)

    def zones(self, region: str) -> tuple[str, ...]:
        """Zone names, us-east-2a and so on; empty for a region the catalog does not cover."""
        return tuple(region + letter for letter in _ZONES.get(region, ""))

    def price(self, item: str, region: str) -> Price:
        """Price of a service item (`ebs_gp3_storage`, `public_ipv4`, ...). Raises PriceMissing."""
        found = self.services.get((item, region))
        if found is None:
            raise PriceMissing(f"no price for {item} in {region}; regions with prices: {', '.join(_ZONES)}")
        return found

    def on_demand(self, type_: str, region: str) -> Price:
        """On-demand Linux price per node-hour. Raises PriceMissing."""
        found = self.on_demand_prices.get((type_, region))
        if found is None:
            raise PriceMissing(self._missing("on-demand", type_, region, self.on_demand_prices))
        return found

    def spot(self, type_: str, region: str) -> tuple[SpotPrice, ...]:
        """Spot prices per node-hour, cheapest zone first. Raises PriceMissing when no zone of the region has one."""
        found = self.spot_prices.get((type_, region))
        if found is None:
            raise PriceMissing(self._missing("spot", type_, region, self.spot_prices))
        return found

    def nearest_type(self, type_: str) -> str | None:
        """The instance type spelled most like `type_`."""
        close = difflib.get_close_matches(type_, self.instances, n=1)
        return close[0] if close else None

    def _missing(self, kind: str, type_: str, region: str, known: Mapping[tuple[str, str], object]) -> str:
        if type_ not in self.instances:
            near = self.nearest_type(type_)
            return f"{type_} is not a GPU instance type of the catalog" + (f"; nearest: {near}" if near else "")
        elsewhere = [known_region for known_type, known_region in known if known_type == type_]
        return f"{type_} has no {kind} price in {region}; known in: {', '.join(elsewhere) or 'no region'}"


@cache
def load_catalog() -> Catalog:
    """The catalog shipped with this version."""
    gpus = {row["gpu"]: _gpu(row) for row in _rows("gpus.csv")}
    return Catalog(
        instances={row["type"]: _instance(row, gpus) for row in _rows("instances.csv")},
        services={
            (row["item"], region): _price(row, row["usd"], row["unit"])
            for row in _rows("services.csv")
            for region in row["regions"].split()
        },
        on_demand_prices={
            (row["type"], region): _price(row, row["usd_per_hour"], "node-hour")
            for row in _rows("on_demand.csv")
            for region in row["regions"].split()
        },
        spot_prices={(row["type"], row["region"]): _spot(row) for row in _rows("spot.csv")},
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (Path(__file__).parent / name).open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        name=row["gpu"],
        memory_gb=float(row["memory_gb"]),
        bf16_tflops=_optional(row["bf16_tflops"]),
        fp32_tflops=_optional(row["fp32_tflops"]),
        bandwidth_gb_s=_optional(row["bandwidth_gb_s"]),
        bf16=row["bf16"] == "yes",
    )


def _instance(row: dict[str, str], gpus: dict[str, Gpu]) -> Instance:
    return Instance(
        type=row["type"],
        vcpu=int(row["vcpu"]),
        memory_gib=float(row["memory_gib"]),
        gpu=gpus[row["gpu"]],
        gpu_count=int(row["gpu_count"]),
        gpu_share=float(row["gpu_share"]),
        nvme_gb=float(row["nvme_gb"]),
        network_gbps=float(row["network_gbps"]),
        ebs_gbps=float(row["ebs_gbps"]),
        ebs_iops=int(row["ebs_iops"]) if row["ebs_iops"] else None,
        regions=None if row["regions"] == "unknown" else tuple(row["regions"].split()),
        left_ec2=date.fromisoformat(row["left_ec2"]) if row["left_ec2"] else None,
    )


def _spot(row: dict[str, str]) -> tuple[SpotPrice, ...]:
    source = row["source"] + ", undated, between 2026-01-21 and 2026-05-18"
    zones = [
        SpotPrice(zone=zone, price=_price({**row, "source": source, "status": "verified"}, row[zone], "node-hour"))
        for zone in _SPOT_ZONES
        if row[zone]
    ]
    return tuple(sorted(zones, key=lambda spot: spot.price.amount))


def _price(row: dict[str, str], amount: str, unit: str) -> Price:
    status: Status = "verified" if row["status"] == "verified" else "inferred"
    return Price(
        amount=Decimal(amount), unit=unit, source=row["source"], as_of=date.fromisoformat(row["as_of"]), status=status
    )


def _optional(text: str) -> float | None:
    return float(text) if text else None
