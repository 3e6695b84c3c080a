"""The lines of a bill: one small function per charge. Amounts are exact decimals, rounded once, to 1/100 cent.

What a line counts is an upper bound where the run decides (checkpoints kept, saves made); docs/bill.md explains each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal

from infra.catalog import Catalog, Price
from infra.cost.runtime import Runtime
from infra.definition import Disk, StackDefinition
from job import sizing

MONTH_H = Decimal(730)  # AWS bills months as hours of use; 730 = 365 x 24 / 12
CENT_100 = Decimal("0.0001")
FREE_IOPS, FREE_MIBPS = 3000, 125  # included in every gp3 volume
KEPT_CHECKPOINTS = 3  # best, last, last but one: at most three different ones; without evaluations there is no best
SAVE_REQUESTS = 6  # beside a checkpoint's data: two small files, manifest, best.json, metrics, a listing
# Of what `up` sends: the provider's aws_s3_object leaves its SDK's uploader at 5 MiB (AWS SDK for Go v2, read 2026-11).
INPUT_PART_BYTES = 5 * 1024 * 1024
SMALL_FILES_GB = 0.02  # metrics, job log, reports, run.json, job archive together: assumption
LOG_GB_PER_BOOT = 0.005  # boot and container log of one attempt: assumption
LOG_LINE_BYTES = 250
UNKEPT_DAYS = 1  # a bucket that goes with the stack: assumed destroyed within a day

NOT_PRICED = (
    "taxes, support, credits, savings plans, free tiers",
    "incoming data (free)",
    "log storage and API calls (below a cent)",
    "checkpoints until newer ones replace them, and compiled graphs (cents)",
    "a dataset, weights or snapshot that exists already",
    "what others add to the bucket",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One charge. `amount` is quantity x unit_price, rounded to 4 decimals."""

    name: str
    quantity: Decimal
    unit: str
    unit_price: Decimal
    amount: Decimal
    source: str
    as_of: date
    inferred: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """What a run leaves in its bucket, GB."""

    dataset: float  # and base weights that the stack uploads
    checkpoints: float
    exports: float
    final: float
    small: float = SMALL_FILES_GB

    @property
    def total(self) -> float:
        return self.dataset + self.checkpoints + self.exports + self.final + self.small


def line(name: str, quantity: float, price: Price) -> Line:
    """A line with its quantity rounded to a millionth first, so that amount = quantity x unit price can be checked."""
    exact = Decimal(f"{quantity:.6f}")
    return Line(
        name=name,
        quantity=exact,
        unit=price.unit,
        unit_price=price.amount,
        amount=(exact * price.amount).quantize(CENT_100, rounding=ROUND_HALF_EVEN),
        source=price.source,
        as_of=price.as_of,
        inferred=price.status == "inferred",
    )


def stored(definition: StackDefinition, dataset_bytes: int | None) -> Stored:
    """Upper bound of what lies in the bucket when the run has ended."""
    config = definition.job.parameters
    kept = max(  # of the phase that leaves most: one without optimizer steps saves nothing over the one before
        (KEPT_CHECKPOINTS - (1 if phase.evaluations else 2)) * sizing.checkpoint_bytes(config, index)
        + sizing.end_bytes(config, index)
        for index, phase in enumerate(sizing.phases(config))
    )
    return Stored(
        dataset=dataset_gb(definition, dataset_bytes) + weights_gb(definition),
        checkpoints=kept / 1e9,
        exports=sum(sizing.export_bytes(config).values()) / 1e9,
        final=sum(sizing.final_bytes(config).values()) / 1e9,
    )


def dataset_gb(definition: StackDefinition, dataset_bytes: int | None) -> float:
    """What the stack puts into its own bucket; nothing for a dataset that lies in S3 already."""
    if definition.storage.dataset.startswith("s3://"):
        return 0.0
    if dataset_bytes is None:
        return sizing.dataset_bytes(definition.job.parameters) / 1e9
    return dataset_bytes / 1e9


def weights_gb(definition: StackDefinition) -> float:
    """Base weights that the stack puts into its own bucket."""
    place = definition.storage.base_weights
    return 0.0 if place is None or place.startswith("s3://") else sizing.weights_bytes(definition.job.parameters) / 1e9


def node_lines(definition: StackDefinition, catalog: Catalog, node_hours: float, compute: Price) -> list[Line]:
    """What running nodes cost: compute, their disks, their addresses. A start is billed for 60 s at least."""
    node_hours = max(node_hours, 60 / 3600) * definition.nodes
    storage, region = definition.storage, definition.fleet.region
    found = [line("compute", node_hours, compute), *_disk("root disk", storage.root, node_hours, catalog, region)]
    if storage.data:
        found += _disk("data disk", storage.data, node_hours, catalog, region)
    found.append(line("public IPv4", node_hours, catalog.price("public_ipv4", region)))
    return found


def bucket_lines(
    definition: StackDefinition, catalog: Catalog, runtime: Runtime, dataset_bytes: int | None
) -> list[Line]:
    """What does not depend on how long the node lives: storage until expiry, requests, transfer, logs."""
    region, config, keep = definition.fleet.region, definition.job.parameters, definition.storage.keep
    held = stored(definition, dataset_bytes)
    days = keep.days if keep.bucket else UNKEPT_DAYS
    writes = sum(
        (phase.saves - 1) * math.ceil(sizing.checkpoint_bytes(config, i) / sizing.PART_BYTES)
        + math.ceil(sizing.end_bytes(config, i) / sizing.PART_BYTES)
        + phase.saves * (2 * runtime.ranks + SAVE_REQUESTS)
        for i, phase in enumerate(runtime.phases)
        if phase.saves
    )
    writes += (held.exports + held.final) * 1e9 / sizing.PART_BYTES + 100
    writes += held.dataset * 1e9 / INPUT_PART_BYTES
    writes += runtime.total_s / config.checkpoint.heartbeat_s * 3  # heartbeat, metrics, job log
    reads = (held.final + held.dataset) * 1e9 / sizing.PART_BYTES + 100
    reads += runtime.total_s / config.checkpoint.heartbeat_s  # whether somebody has asked it to stop
    logs_gb = LOG_GB_PER_BOOT + sizing.total_steps(config) / config.log.every * LOG_LINE_BYTES / 1e9
    return [
        line("S3 storage", held.total * days * 24 / float(MONTH_H), catalog.price("s3_storage", region)),
        line("S3 write requests", writes / 1000, catalog.price("s3_write_requests", region)),
        line("S3 read requests", reads / 1000, catalog.price("s3_read_requests", region)),
        line("transfer of results", held.final + held.small, catalog.price("transfer_out", region)),
        line("logs", logs_gb, catalog.price("logs_ingestion", region)),
    ]


def _disk(name: str, disk: Disk, node_hours: float, catalog: Catalog, region: str) -> list[Line]:
    """gp3 by GiB-second, a line for each of what `gp3_usd_per_month` counts."""
    months = node_hours / float(MONTH_H)
    found = [line(name, disk.size_gib * months, catalog.price("ebs_gp3_storage", region))]
    if disk.iops > FREE_IOPS:
        price = catalog.price("ebs_gp3_iops", region)
        found.append(line(f"{name} IOPS above {FREE_IOPS}", (disk.iops - FREE_IOPS) * months, price))
    if disk.throughput_mibps > FREE_MIBPS:
        price = catalog.price("ebs_gp3_throughput", region)
        found.append(line(f"{name} MiB/s above {FREE_MIBPS}", (disk.throughput_mibps - FREE_MIBPS) * months, price))
    return found


def per_hour(definition: StackDefinition, catalog: Catalog) -> tuple[Decimal, Decimal]:
    """(disks, address) in USD per node-hour, for the job's meter."""
    storage, region = definition.storage, definition.fleet.region
    disks = [storage.root, *([storage.data] if storage.data else [])]
    monthly = sum(gp3_usd_per_month(catalog, region, d.size_gib, d.iops, d.throughput_mibps) for d in disks)
    return (monthly / MONTH_H).quantize(Decimal("0.000001")), catalog.price("public_ipv4", region).amount


def gp3_usd_per_month(catalog: Catalog, region: str, size_gib: int, iops: int, mibps: int) -> Decimal:
    """Of one volume: size always, IOPS and throughput only above what is included."""
    usd = size_gib * catalog.price("ebs_gp3_storage", region).amount
    usd += max(0, iops - FREE_IOPS) * catalog.price("ebs_gp3_iops", region).amount
    return usd + max(0, mibps - FREE_MIBPS) * catalog.price("ebs_gp3_throughput", region).amount
