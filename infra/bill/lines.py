"""The lines of a bill: one small function per charge. Amounts are exact decimals, rounded once, to 1/100 cent.

Quantities that depend on the run (such as the number of saves) are upper bounds; docs/bill.md explains each line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Literal

from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.catalog import Catalog, Price
from gpufleet.infra.definition.model import Disk, StackDefinition
from gpufleet.job.contract.aws import MINIMUM_S
from gpufleet.job.kind.common import PART_BYTES

MONTH_H = Decimal(730)  # AWS bills a month's price by hours of use; 730 = 365 x 24 / 12
CENT_100 = Decimal("0.0001")
FREE_IOPS, FREE_MIBPS = 3000, 125  # included in every gp3 volume
KEPT_CHECKPOINTS = 3  # at most: the best one (if there are evaluations), the last, the last but one
# requests of each save in addition to those for its data: two small files, manifest, best.json, metrics, a listing
SAVE_REQUESTS = 6
# `up` uploads in parts of 5 MiB, the default of the provider's SDK (AWS SDK for Go v2, read 2026-11)
INPUT_PART_BYTES = 5 * 1024 * 1024
SMALL_FILES_GB = 0.02  # assumed for metrics, job log, reports, run.json and job archive together
LOG_GB_PER_BOOT = 0.005  # assumed for boot and container log of one attempt
LOG_LINE_BYTES = 250
IMAGE_GB = 20  # the image that each boot pulls through the NAT gateway; images of 15 to 20 GB were measured
UNKEPT_DAYS = 1  # a bucket that `destroy` deletes is assumed to live for a day

# What is free for every account each month, by item (AWS's prices of EC2 data transfer and CloudWatch, read 2026-11).
FREE_A_MONTH = {"transfer_out": Decimal(100), "logs_ingestion": Decimal(5)}

NOT_PRICED = (
    "taxes, support, credits, savings plans, free tiers",
    "incoming data (free)",
    "log storage and API calls (below a cent)",
    "checkpoints until newer ones replace them, and compiled graphs (cents)",
    "a dataset, weights or snapshot that exists already",
    "objects that other people add to the bucket",
)


# The kind of a line decides how the job's meter charges it: `compute` at the price of each hour, `hourly` at the line's
# own rate for each node-hour, and `fixed` once, as in the bill. Names of lines are for people.
Kind = Literal["compute", "hourly", "fixed", "interruptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One charge. `amount` is quantity x unit_price, rounded to 4 decimals."""

    name: str
    kind: Kind
    quantity: Decimal
    unit: str
    unit_price: Decimal
    amount: Decimal
    source: str
    as_of: date
    inferred: bool = False
    item: str = ""  # the service's name in the catalog; empty for compute and for interruptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """An hourly charge of a node in addition to compute: `units` times `price` for every `hours` hours."""

    name: str
    item: str
    units: int
    price: Price
    hours: Decimal = Decimal(1)

    @property
    def usd_per_hour(self) -> Decimal:
        """USD per node-hour, rounded to a millionth, as the job's meter charges it."""
        return (self.units * self.price.amount / self.hours).quantize(Decimal("0.000001"))

    def line(self, node_hours: float) -> Line:
        """The bill's line for this number of node-hours."""
        return line(self.name, self.units * (node_hours / float(self.hours)), self.price, "hourly", self.item)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSizes:
    """The GB that a run leaves in its bucket."""

    dataset: float  # including base weights that the stack uploads
    checkpoints: float
    exports: float
    final: float
    small: float = SMALL_FILES_GB

    @property
    def total(self) -> float:
        return self.dataset + self.checkpoints + self.exports + self.final + self.small


def line(name: str, quantity: float, price: Price, kind: Kind, item: str = "") -> Line:
    """A line. Its quantity is rounded to a millionth first, so that amount = quantity x unit price can be checked."""
    exact = Decimal(f"{quantity:.6f}")
    return Line(
        name=name,
        kind=kind,
        quantity=exact,
        unit=price.unit,
        unit_price=price.amount,
        amount=(exact * price.amount).quantize(CENT_100, rounding=ROUND_HALF_EVEN),
        source=price.source,
        as_of=price.as_of,
        inferred=price.status == "inferred",
        item=item,
    )


def account_discount(lines: Iterable[Line]) -> Decimal:
    """USD that an account saves if it has not used the month's free quantities yet."""
    free = (
        min(charge.quantity, FREE_A_MONTH[charge.item]) * charge.unit_price
        for charge in lines
        if charge.item in FREE_A_MONTH
    )
    return sum(free, Decimal(0)).quantize(CENT_100)


def stored(definition: StackDefinition, dataset_bytes: int | None) -> StoredSizes:
    """Upper bound of the data in the bucket when the run has ended."""
    config = definition.job.parameters
    # the phase whose checkpoints are largest is used; a phase without optimizer steps saves no more than the phase
    # before it
    kept_bytes = max(
        (KEPT_CHECKPOINTS - (1 if phase.evaluations else 2)) * config.sizes().checkpoints[index]
        + config.sizes().phase_ends[index]
        for index, phase in enumerate(config.phases())
    )
    return StoredSizes(
        dataset=dataset_gb(definition, dataset_bytes) + weights_gb(definition),
        checkpoints=kept_bytes / 1e9,
        exports=sum(config.sizes().exports.values()) / 1e9,
        final=sum(config.sizes().final.values()) / 1e9,
    )


def dataset_gb(definition: StackDefinition, dataset_bytes: int | None) -> float:
    """GB of the dataset that the stack uploads to its own bucket; 0 if the dataset is already in S3."""
    if definition.storage.dataset.startswith("s3://"):
        return 0.0
    if dataset_bytes is None:
        return definition.job.parameters.sizes().dataset / 1e9
    return dataset_bytes / 1e9


def weights_gb(definition: StackDefinition) -> float:
    """GB of base weights, and of a judge, that the stack uploads to its own bucket."""
    weights = definition.storage.weights(definition.job.parameters.sizes())
    return sum(held for place, held in weights if not place.startswith("s3://")) / 1e9


def node_lines(definition: StackDefinition, catalog: Catalog, node_hours: float, compute: Price) -> list[Line]:
    """The hourly lines: compute first, then the other charges. AWS bills at least 60 s for each start."""
    node_hours = max(node_hours, MINIMUM_S / 3600) * definition.nodes
    charges = hourly_charges(definition, catalog)
    return [line("compute", node_hours, compute, "compute"), *(charge.line(node_hours) for charge in charges)]


def hourly_charges(definition: StackDefinition, catalog: Catalog) -> list[Charge]:
    """The hourly charges of a node other than compute."""
    return [charge for charges in HOURLY for charge in charges(definition, catalog)]


def bucket_lines(
    definition: StackDefinition, catalog: Catalog, runtime: Runtime, dataset_bytes: int | None
) -> list[Line]:
    """The lines that do not depend on how long nodes live: storage until objects expire, requests, transfer, logs."""
    region, config, keep = definition.fleet.region, definition.job.parameters, definition.storage.keep
    held = stored(definition, dataset_bytes)
    days = keep.days if keep.bucket else UNKEPT_DAYS
    writes = sum(
        (phase.saves - 1) * math.ceil(config.sizes().checkpoints[i] / PART_BYTES)
        + math.ceil(config.sizes().phase_ends[i] / PART_BYTES)
        + phase.saves * (2 * runtime.ranks + SAVE_REQUESTS)
        for i, phase in enumerate(runtime.phases)
        if phase.saves
    )
    writes += (held.exports + held.final) * 1e9 / PART_BYTES + 100
    writes += held.dataset * 1e9 / INPUT_PART_BYTES
    writes += runtime.total_s / config.checkpoint.heartbeat_s * 3  # heartbeat, metrics, job log
    reads = (held.final + held.dataset) * 1e9 / PART_BYTES + 100
    reads += runtime.total_s / config.checkpoint.heartbeat_s  # requests for stop.json
    steps = sum(phase.steps for phase in runtime.phases)
    logs_gb = LOG_GB_PER_BOOT + steps / config.log.every * LOG_LINE_BYTES / 1e9

    def fixed(name: str, quantity: float, item: str) -> Line:
        return line(name, quantity, catalog.price(item, region), "fixed", item)

    nat = []
    if definition.fleet.cards == "all" and not definition.account.vpc:
        wall_h = runtime.total_s / 3600
        nat = [
            fixed("NAT gateway", wall_h, "nat_gateway"),
            fixed("NAT gateway's address", wall_h, "public_ipv4"),
            fixed("NAT traffic", IMAGE_GB * definition.nodes, "nat_traffic"),
        ]
    return [
        *(line(name, 1, usd, "fixed", item) for name, item, usd in definition.fleet.market.fees(catalog.as_of)),
        *nat,
        fixed("S3 storage", held.total * days * 24 / float(MONTH_H), "s3_storage"),
        fixed("S3 write requests", writes / 1000, "s3_write_requests"),
        fixed("S3 read requests", reads / 1000, "s3_read_requests"),
        fixed("transfer of results", held.final + held.small, "transfer_out"),
        fixed("logs", logs_gb, "logs_ingestion"),
    ]


def _disks(definition: StackDefinition, catalog: Catalog) -> list[Charge]:
    storage, region = definition.storage, definition.fleet.region
    data = _disk("data disk", storage.data, catalog, region) if storage.data else []
    return [*_disk("root disk", storage.root, catalog, region), *data]


def _disk(name: str, disk: Disk, catalog: Catalog, region: str) -> list[Charge]:
    """The charges of a gp3 disk: one for each part that `gp3_usd_per_month` counts."""

    def monthly(name: str, units: int, key: str) -> list[Charge]:
        price = catalog.price(key, region)
        return [Charge(name=name, item=key, units=units, price=price, hours=MONTH_H)] if units > 0 else []

    return [
        *monthly(name, disk.size_gib, "ebs_gp3_storage"),
        *monthly(f"{name} IOPS above {FREE_IOPS}", disk.iops - FREE_IOPS, "ebs_gp3_iops"),
        *monthly(f"{name} MiB/s above {FREE_MIBPS}", disk.throughput_mibps - FREE_MIBPS, "ebs_gp3_throughput"),
    ]


def _address(definition: StackDefinition, catalog: Catalog) -> list[Charge]:
    if definition.fleet.cards == "all":  # in this case the NAT gateway has a public address, and the nodes have none
        return []
    return [
        Charge(
            name="public IPv4",
            item="public_ipv4",
            units=1,
            price=catalog.price("public_ipv4", definition.fleet.region),
        )
    ]


# The hourly charges of a node. To add a charge, add a row to services.csv and a function here.
HOURLY: tuple[Callable[[StackDefinition, Catalog], list[Charge]], ...] = (_disks, _address)


def gp3_usd_per_month(catalog: Catalog, region: str, size_gib: int, iops: int, mibps: int) -> Decimal:
    """USD per month of one gp3 volume: for its size, and for IOPS and throughput above what AWS includes."""
    usd = size_gib * catalog.price("ebs_gp3_storage", region).amount
    usd += max(0, iops - FREE_IOPS) * catalog.price("ebs_gp3_iops", region).amount
    return usd + max(0, mibps - FREE_MIBPS) * catalog.price("ebs_gp3_throughput", region).amount
