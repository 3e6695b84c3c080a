"""Dated facts: instance types, GPUs and prices, each row with its source and its date.

The data are the CSV files beside this module. Newer prices that `gpufleet prices refresh` wrote into a project's
`prices/` override them. `status` is `verified` (read in the named source) or `inferred` (derived from another region or
type, or written from memory); every bill says which of its prices are inferred. This module never asks AWS. Some facts
are surprising:

- The catalog has spot prices by zone *id* (az1 for use2-az1). A definition may name zones (us-east-2a), but AWS maps
  names to ids differently in each account. Without an account, names cannot be matched with ids. So callers take the
  dearest zone of the region, unless the definition gives ids. The catalog has no Local Zones (Atlanta, Los Angeles).
- The shipped spot prices come from an undated file made between 2026-01-21 and 2026-05-18. Their date in the catalog is
  the earlier of the two.
- A fractional GPU is one device with a share: g6f.xlarge has gpu_count 1 and gpu_share 0.125, never 0 GPUs.
- A type without a GPU has gpu_count 0. Its `gpu` is the whole machine, with the type's name and without a peak. So a
  step time that is stated for c7i.xlarge is never used for c7i.16xlarge.
- A region is known as soon as it has a row in regions.csv, even if public sources lack some of its prices. `missing`
  names the prices that a bill in that region would need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from gpufleet.infra.catalog import files
from gpufleet.infra.catalog.files import Price, SpotPrice, Status
from gpufleet.infra.catalog.items import known_items
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.catalog.table import read_table
from gpufleet.infra.errors import GpufleetError, PriceMissing

__all__ = [
    "Catalog",
    "Gpu",
    "Instance",
    "Price",
    "SpotPrice",
    "Status",
    "check_region",
    "load_catalog",
    "project_prices",
]

SHIPPED = Path(__file__).parent
# Turing is the oldest GPU generation that works: CUDA 13 in the training image has dropped Volta, and the AMI's open
# driver never supported Volta (the release notes of the Base OSS Nvidia Driver AMI for AL2023 list G4dn, G5, G6, G6e,
# G7, G7e, P4d and newer; read 2026-11).
LEAST_CAPABILITY = 7.5
# The items of services.csv that every bill needs.
BILLED = tuple(name for name, item in known_items().items() if item.in_every_bill)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One whole GPU. A peak is the rate of dense matrix products; None if no source states it."""

    name: str
    memory_gb: float  # nominal, decimal GB
    bf16_tflops: float | None
    fp32_tflops: float | None
    bandwidth_gb_s: float | None
    # the connection between the GPUs of one node; `link_gb_s` is its rate in one direction by the data sheet
    link: Literal["nvlink", "pcie"]
    link_gb_s: float
    bf16: bool  # whether the hardware computes in bf16
    capability: float  # its compute capability, from NVIDIA's list of CUDA GPUs

    def peak_tflops(self, products: str) -> float | None:
        """TFLOPS of dense matrix products in `bf16`, `tf32` or `fp32`. TF32 begins with compute capability 8.0, at half
        the rate of bf16 (NVIDIA's data sheets of A100, L40S, H100 and B200); older GPUs then compute in fp32.
        """
        if products == "tf32" and self.capability >= 8:
            return None if self.bf16_tflops is None else self.bf16_tflops / 2
        return self.bf16_tflops if products == "bf16" else self.fp32_tflops

    def has_a_roofline(self, products: str) -> bool:
        """Whether the data sheet gives the speed of a job whose matrix products are computed in `products`."""
        return self.peak_tflops(products) is not None and self.bandwidth_gb_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One EC2 instance type. Network and EBS figures are the sustained baseline, not the burst."""

    type: str
    vcpu: int
    memory_gib: float
    gpu: Gpu
    gpu_count: int
    gpu_share: float  # below 1 for a slice of a GPU
    nvme_gb: float  # the instance store; 0 if there is none
    network_gbps: float  # the rate of all network cards together
    network_cards: int
    card_gbps: float  # the rate of the first card, if all cards share the whole rate
    # number of cards with an Elastic Fabric Adapter: all cards or none; in p6-b300, all except the first
    efa_cards: int
    ebs_gbps: float
    regions: tuple[str, ...] | None  # regions that offer the type; None if not known
    left_ec2: date | None  # at the latest from this day on, the type cannot be launched

    @property
    def gpu_memory_gb(self) -> float:
        """The memory of one device, as the job sees it."""
        return self.gpu.memory_gb * self.gpu_share

    @property
    def unusable(self) -> str:
        """Why no run can use this type; empty if a run can."""
        if self.left_ec2:
            return f"left EC2 by {self.left_ec2}"
        if self.gpu_count and self.gpu.capability < LEAST_CAPABILITY:
            has = f"{self.gpu.name}, with compute capability {self.gpu.capability}"
            return f"has {has}; the AMI's driver and CUDA 13 need at least {LEAST_CAPABILITY}"
        if self.gpu_share < 1:  # EC2 User Guide, NVIDIA drivers: only GRID works; open modules refuse a vGPU (2026-11)
            return f"has a slice of one {self.gpu.name}, which needs NVIDIA's GRID driver; the AMI has another driver"
        return ""

    def too_old(self, capability: float) -> str:
        """Why a job that needs this compute capability cannot run on the type's GPU; empty if it can."""
        if self.gpu.capability >= capability:
            return ""
        return f"{self.gpu.name} has compute capability {self.gpu.capability}, but the job needs {capability}"

    def between_nodes_gbps(self, cards: str) -> float:
        """Gbit/s to another node, over the first network card (`one`) or over all cards (`all`)."""
        return self.network_gbps if cards == "all" else self.card_gbps

    def has_efa(self, cards: str) -> bool:
        """Whether these cards have an Elastic Fabric Adapter; if not, nodes communicate over TCP."""
        return self.efa_devices(cards) > 0

    def efa_devices(self, cards: str) -> int:
        """The number of Elastic Fabric Adapters of a node launched with these cards."""
        return self.efa_cards if cards == "all" else int(self.efa_cards == self.network_cards)

    def used(self, ranks: int) -> str:
        """The part of a node that this many processes use: `8 GPUs`, `one GPU`, or all `16 vCPUs`."""
        if not self.gpu_count:
            return f"{self.vcpu} vCPUs"
        return f"{ranks} GPUs" if ranks > 1 else "one GPU"

    @property
    def gpus(self) -> str:
        """`8 x H100`, `1/8 of one L4` for a slice, or `none`."""
        if not self.gpu_count:
            return "none"
        if self.gpu_share < 1:
            return f"1/{1 / self.gpu_share:g} of one {self.gpu.name}"
        return f"{self.gpu_count} x {self.gpu.name}"


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All facts as of one date, built by `load_catalog`."""

    as_of: date  # the date of the newest price in the catalog
    name: str  # the folder of its newest prices: prices/2026-11-21, or shipped
    instances: dict[str, Instance]
    services: dict[tuple[str, str], Price] = field(repr=False)
    on_demand_prices: dict[tuple[str, str], Price] = field(repr=False)
    spot_prices: dict[tuple[str, str], tuple[SpotPrice, ...]] = field(repr=False)
    # Announced on-demand prices, with the day from which each applies. `in_force_on` moves the prices that apply into
    # `on_demand_prices`.
    dated_prices: dict[tuple[str, str], tuple[Price, ...]] = field(default_factory=dict, repr=False)

    def in_force_on(self, day: date) -> Catalog:
        """A copy of the catalog with the on-demand prices that apply on `day`."""
        if not self.dated_prices:
            return self
        return replace(self, on_demand_prices=files.in_force(self.on_demand_prices, self.dated_prices, day))

    def types_for(self, gpus: int) -> dict[str, Instance]:
        """The types for a job that asks for `gpus` GPUs: those with GPUs, or all types if `gpus` is 0."""
        return {name: instance for name, instance in self.instances.items() if instance.gpu_count or not gpus}

    def regions(self) -> tuple[str, ...]:
        """The regions that have prices, even if only of a few items."""
        return self._regions

    @cached_property
    def _regions(self) -> tuple[str, ...]:
        priced = {region for _, region in self.services}
        return tuple(name for name in known_regions() if name in priced)

    def missing(self, region: str) -> tuple[str, ...]:
        """Items of services.csv that a bill in this region needs but that have no price; empty if there are none."""
        return tuple(item for item in BILLED if (item, region) not in self.services)

    def billed_regions(self) -> tuple[str, ...]:
        """The regions for which a bill can be made."""
        return tuple(region for region in self.regions() if not self.missing(region))

    def zones(self, region: str) -> tuple[str, ...]:
        """The names of the region's zones, such as us-east-2a; empty if the catalog lacks the region."""
        known = known_regions().get(region)
        return known.zones if known else ()

    def zone_id_prefix(self, region: str) -> str:
        """The prefix of the region's zone ids; empty if the catalog lacks the region."""
        known = known_regions().get(region)
        return known.zone_id_prefix if known else ""

    def price(self, item: str, region: str) -> Price:
        """The price of a service item (`ebs_gp3_storage`, `public_ipv4`, ...). Raises PriceMissing."""
        price = self.services.get((item, region))
        if price is None:
            elsewhere = [known for known in self.regions() if (item, known) in self.services]
            how = f" (`gpufleet prices refresh --region {region}` reads it from AWS)" if self.zones(region) else ""
            raise PriceMissing(f"no price for {item} in {region}{how}; known in: {', '.join(elsewhere)}")
        return price

    def on_demand(self, type_: str, region: str) -> Price:
        """The on-demand Linux price per node-hour. Raises PriceMissing."""
        price = self.on_demand_prices.get((type_, region))
        if price is None:
            raise PriceMissing(self._missing("on-demand", type_, region, self.on_demand_prices))
        return price

    def spot(self, type_: str, region: str, zones: Sequence[str] = ()) -> tuple[SpotPrice, ...]:
        """Spot prices per node-hour, the cheapest zone first; if `zones` (az1, ...) are given, only of these. Raises
        PriceMissing if no zone has a price.
        """
        if priced := self.spot_zones(type_, region, zones):
            return priced
        elsewhere = self.spot_zones(type_, region)
        if not elsewhere:
            raise PriceMissing(self._missing("spot", type_, region, self.spot_prices))
        known = ", ".join(sorted(zone.zone for zone in elsewhere))
        raise PriceMissing(f"no spot price for {type_} in {', '.join(zones)} of {region}; known in {known}")

    def spot_zones(self, type_: str, region: str, zones: Sequence[str] = ()) -> tuple[SpotPrice, ...]:
        """Like `spot`, but empty instead of raising."""
        known = self.spot_prices.get((type_, region), ())
        return tuple(zone for zone in known if zone.zone in zones) if zones else known

    def nearest_type(self, type_: str, among: Iterable[str] | None = None) -> str | None:
        """The instance type whose spelling is nearest to `type_`, of all types or of those in `among`. Its family must
        be similar too, because g4dn is not a misspelling of trn1.
        """
        import difflib  # imported here, because only the message of an error needs it

        written, names = type_.lower(), sorted(self.instances if among is None else among)
        if "." in written:
            families = {name.partition(".")[0] for name in names}
            meant = difflib.get_close_matches(written.partition(".")[0], sorted(families))
            names = [name for name in names if name.partition(".")[0] in meant]
        close = difflib.get_close_matches(written, names, n=1)
        return close[0] if close else None

    def unknown_type(self, type_: str) -> str:
        """The sentence for an unknown type."""
        near = self.nearest_type(type_)
        return f"{type_} is not an instance type of the catalog" + (f"; nearest: {near}" if near else "")

    def _missing(self, kind: str, type_: str, region: str, known: Mapping[tuple[str, str], object]) -> str:
        if type_ not in self.instances:
            return self.unknown_type(type_)
        elsewhere = [known_region for known_type, known_region in known if known_type == type_]
        where = f"; known in: {', '.join(elsewhere)}" if elsewhere else ", nor in any other region"
        return f"{type_} has no {kind} price in {region}{where}"


def load_catalog(project: Path | None = None, *, shipped: Path = SHIPPED, day: date | None = None) -> Catalog:
    """The shipped catalog, with newer prices from the newest folder in the project's `prices/`. `project`: the folder
    with `prices/`. If it is None, the project is the nearest folder with `stacks/` at or above the working directory,
    so that the program, the commands and a test project each find their own prices. The same files give the same
    catalog, except for prices that apply only from a later day on. `day`: the day of the bill, by default today. Raises
    GpufleetError if a price file is broken.
    """
    refreshed_folders = files.folders(project_prices(Path.cwd()) if project is None else project / "prices")
    return read_catalog(shipped, refreshed_folders[-1] if refreshed_folders else None).in_force_on(
        day or datetime.now(UTC).date()
    )


def project_prices(start: Path) -> Path:
    """The folder `prices/` in the nearest folder with `stacks/` at or above `start`, or in `start` itself if there is
    no such folder.
    """
    return next((folder for folder in (start, *start.parents) if (folder / "stacks").is_dir()), start) / "prices"


@cache
def read_catalog(shipped: Path, refreshed: Path | None) -> Catalog:
    """The facts in `shipped`, with those prices of `refreshed` that are not older. Prices with a future date are left
    out.
    """
    gpus = read_table(shipped / "gpus.csv", "gpu", _gpu)
    prices, name = files.read(shipped), "shipped"
    if refreshed is not None:
        over = files.read(refreshed)
        name = f"prices/{refreshed.name}" if over.newest >= prices.newest else name
        prices = files.newer(prices, over)
    return Catalog(
        as_of=prices.newest,
        name=name,
        instances=_offered(read_table(shipped / "instances.csv", "type", lambda row: _instance(row, gpus)), prices),
        services=prices.services,
        on_demand_prices=prices.on_demand,
        spot_prices=prices.spot,
        dated_prices=prices.dated,
    )


def _offered(instances: dict[str, Instance], prices: files.Prices) -> dict[str, Instance]:
    """The types with all regions that offer them. If instances.csv lacks a region, because the region was added later,
    a price in this region shows that it offers the type.
    """
    listed = {region for instance in instances.values() for region in instance.regions or ()}
    added: dict[str, list[str]] = {}
    for type_, region in {**prices.on_demand, **prices.dated}:
        if region not in listed:
            added.setdefault(type_, []).append(region)
    return {
        name: instance
        if instance.regions is None or name not in added
        else replace(instance, regions=(*instance.regions, *added[name]))
        for name, instance in instances.items()
    }


def _gpu(row: dict[str, str]) -> Gpu:
    return Gpu(
        name=row["gpu"],
        memory_gb=float(row["memory_gb"]),
        bf16_tflops=_optional(row["bf16_tflops"]),
        fp32_tflops=_optional(row["fp32_tflops"]),
        bandwidth_gb_s=_optional(row["bandwidth_gb_s"]),
        link="nvlink" if row["link"] == "nvlink" else "pcie",
        link_gb_s=float(row["link_gb_s"]),
        bf16=row["bf16"] == "yes",
        capability=float(row["capability"]),
    )


def _instance(row: dict[str, str], gpus: dict[str, Gpu]) -> Instance:
    count, share = int(row["gpu_count"]), float(row["gpu_share"])
    if count < 0 or not 0 < share <= 1 or (share < 1 and count != 1):
        raise ValueError(f"{count} GPUs with a share of {share:g}; allowed: 0 or more whole GPUs, or a share of one")
    return Instance(
        type=row["type"],
        vcpu=int(row["vcpu"]),
        memory_gib=float(row["memory_gib"]),
        gpu=gpus[row["gpu"]] if count else _machine(row["type"]),
        gpu_count=count,
        gpu_share=share,
        nvme_gb=float(row["nvme_gb"]),
        network_gbps=float(row["network_gbps"]),
        # tables that are older than 2026-11-26 lack these three columns
        network_cards=int(row.get("network_cards") or 1),
        card_gbps=float(row.get("card_gbps") or row["network_gbps"]),
        efa_cards=int(row.get("efa_cards") or 0),
        ebs_gbps=float(row["ebs_gbps"]),
        regions=None if row["regions"] == "unknown" else tuple(row["regions"].split()),
        left_ec2=date.fromisoformat(row["left_ec2"]) if row["left_ec2"] else None,
    )


def _machine(type_: str) -> Gpu:
    """The Gpu of a type that has none: it stands for the whole machine, and has no peak."""
    return Gpu(
        name=type_,
        memory_gb=0.0,
        bf16_tflops=None,
        fp32_tflops=None,
        bandwidth_gb_s=None,
        link="pcie",
        link_gb_s=math.inf,
        bf16=False,
        capability=0.0,
    )


def _optional(text: str) -> float | None:
    return float(text) if text else None


def check_region(region: str) -> None:
    """Raises GpufleetError if no price is known for the region that --region names."""
    if region not in (known := load_catalog().regions()):
        raise GpufleetError(f"--region {region}: allowed are {', '.join(known)}, the regions with prices")
