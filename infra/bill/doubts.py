"""Collects a bill's warnings, one sentence each. None depends on the clock, so that the bill is the same every day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

from gpufleet.infra.bill import fit, limits
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.limits import AS_COUNTED
from gpufleet.infra.bill.options import BillBasis
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.catalog import SpotPrice
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.discover.marks import processes_asked
from gpufleet.infra.errors import BeforeLaunch
from gpufleet.infra.evidence.calibration import RefusedCalibration
from gpufleet.infra.risk import unknown
from gpufleet.infra.risk.hazard import gang
from gpufleet.job.contract.aws import NOTICE_S
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.text import counted

_IMAGE_AND_SYSTEM_GIB = 30  # assumed size of image and system on the root disk
# if a larger share of the node-hours is free, p50 falls when interruptions become more frequent
_FREE_SHARE = Decimal("0.1")
_EMPTY_SHARE = 0.05  # the bill warns if a larger share of a step's rows is empty
_SPOILS = Decimal("1.25")  # the bill advises against a zone that costs this many times as much as the next one
_SPREAD = 2  # the bill warns if the dearest spot zone costs this many times as much as the cheapest


def warnings(basis: BillBasis, bill: Bill) -> Iterator[str]:
    """The warnings, in the order in which a reader needs them."""
    definition = basis.definition
    config = definition.job.parameters
    if not bill.calibrated and not batch.is_endless(config):
        faster, slower = (unknown.span(sigma) for sigma in _speed(bill))
        yield (
            f"uncalibrated: {bill.chosen.runtime.basis}; in eight runs of ten the work takes {faster[0]:.0%} to"
            f" {slower[1]:.0%} of those hours"
        )
    for type_, calibration in basis.calibrations.items():
        if isinstance(calibration, RefusedCalibration) and type_ in definition.fleet.instance_types:
            yield f"{type_}: {calibration.why}"
    if definition.fleet.is_gang:
        yield from _several(definition, bill)
    yield from map(BeforeLaunch, schedule(definition.job.parameters, bill.chosen.runtime))
    if not batch.is_endless(config):
        yield from map(BeforeLaunch, _limits(bill))
    yield from _free_hours(bill)
    yield from _types(definition, bill)
    if held := config.demands.held_minutes:
        usd = bill.chosen.exposure.usd_h * held / 60
        yield (
            f"job.exit.hold_minutes: a run that fails keeps its node for {held:g} min more, which costs"
            f" {usd:.2f} USD, and never passes a limit"
        )
    for notice in bill.notice if bill.market.is_interrupted and config.saves else ():
        if not notice.saves:
            why = "job.stop.saves is false" if config.saves_on_signal is False else "nobody has shown job.stop.saves"
            yield (
                f"{notice.type}: a notice is counted as saving nothing, since {why}: up to one checkpoint interval is"
                " lost at each interruption"
            )
        elif not notice.fits:
            yield (
                f"{notice.type}, phase {notice.phase}: save and upload take {notice.total_s:.0f} s, a notice gives"
                f" {NOTICE_S:.0f} s: up to one checkpoint interval is lost at each interruption"
            )
    storage = next(line.amount for line in bill.lines if line.item == "s3_storage")
    if 2 * storage > bill.usd.p50 and definition.storage.keep.bucket:
        yield (
            f"{storage / bill.usd.p50:.0%} of p50 is keeping the bucket for storage.keep.days: {bill.kept.days};"
            " delete what you do not need, or keep it for fewer days"
        )
    if basis.dataset_bytes is None and config.dataset_kind and not definition.storage.dataset.startswith("s3://"):
        yield "the size of the dataset is assumed from what job.parameters.data says of it"
    if definition.account.vpc:
        yield "not priced: NAT gateways and endpoints of account.vpc, and their traffic"
    if definition.account.kms_key:
        yield "not priced: account.kms_key and the requests to it"


def _several(definition: StackDefinition, bill: Bill) -> Iterator[str]:
    """Warnings about nodes that train together."""
    nodes, endless = definition.nodes, batch.is_endless(definition.job.parameters)
    if not endless and not bill.chosen.option.instance.has_efa(definition.fleet.cards):
        yield "nodes of this type have no EFA on these cards: they use TCP, whose speed nobody has measured"
    if not endless and bill.market.is_interrupted:
        yield f"that {nodes} nodes are interrupted {gang(nodes):.1f} times as often as one is an assumption"
    if definition.storage.data and definition.storage.data.snapshot:
        yield f"each of {nodes} nodes has a data volume of its own from the snapshot, loaded as it is read"


def _speed(bill: Bill) -> tuple[float, float]:
    return bill.chosen.exposure.unknown.faster, bill.chosen.exposure.unknown.slower


def cut_short(bill: Bill) -> str:
    """A warning that fewer than nine runs in ten end within limits.max_usd; empty if enough do."""
    cap, needed = bill.cap, bill.chosen.metered_usd
    if cap is None or not needed.p50 <= cap.max_usd < needed.p90:
        return ""
    return (
        f"limits.max_usd {cap.max_usd} lies between p50 {needed.p50:.2f} and p90 {needed.p90:.2f} {AS_COUNTED}: "
        f"{cap.probability:.0%} of runs stop before they are done"
    )


def _limits(bill: Bill) -> Iterator[str]:
    cap = bill.cap
    if cap is None:
        return
    if short := cut_short(bill):
        yield short
    elif cap.probability >= 0.01:
        yield f"{cap.probability:.0%} of runs stop at {cap.first} before they are done"
    if late := limits.expiry_warning(bill):
        yield late
    if slow := limits.too_slow(bill, min(bill.chosen.exposure.hours_at_cap()), cap.first):
        yield slow


def schedule(config: JobConfig, runtime: Runtime) -> Iterator[str]:
    """Warnings about settings of the job that would make a paid run worthless."""
    yield from config.doubts(max(phase.steps for phase in runtime.phases))


def _leave_out(definition: StackDefinition, zones: Sequence[SpotPrice], prefix: str) -> str:
    """If one zone alone makes the price high: a warning that says what leaving it out would save. `prefix`: the first
    part of zone ids.
    """
    *others, high = zones
    if not others or high.price.amount < _SPOILS * others[-1].price.amount:
        return ""
    # the nodes of a run with several nodes are always in one zone
    remaining = others[:1] if definition.fleet.is_gang else others
    named = ", ".join(sorted(prefix + zone.zone for zone in remaining))
    subnets = ", and account.vpc.subnets by these" if definition.account.vpc else ""
    return f". Without {prefix}{high.zone} that is {remaining[-1].price.amount}: fleet.zones: [{named}]{subnets}"


def _free_hours(bill: Bill) -> Iterator[str]:
    side = bill.chosen
    free_usd = side.metered_usd.p50 - side.needed_usd.p50
    if not free_usd:
        return
    node_hours = free_usd / side.price.amount
    if node_hours > _FREE_SHARE * side.needed_hours.p50 * side.exposure.nodes:
        yield (
            f"The p50 assumes that AWS waives {counted(round(node_hours, 1), 'node-hour')} (it does not bill an "
            "instance that it interrupts in its first hour). If AWS billed them, p50 would be "
            f"{side.metered_usd.p50:.2f}"
        )


def _types(definition: StackDefinition, bill: Bill) -> Iterator[str]:
    config, prefix = definition.job.parameters, known_regions()[bill.region].zone_id_prefix
    needs_gb = fit.scratch_gb(config)
    for option in bill.types:
        offer = option.offers[bill.capacity]
        if reason := offer.left_out:
            yield f"left out of the fleet: {reason}"
            continue
        instance, nodes = option.instance, definition.nodes
        used, paid = config.ranks(instance.gpu_count, nodes), instance.gpu_count * nodes
        if used < paid and config.device == "cuda":
            has = f"{nodes} nodes of {option.type} have" if definition.fleet.is_gang else f"{option.type} has"
            yield f"{has} {paid} GPUs, this job uses {'one' if used == 1 else used}"
        asked = processes_asked(getattr(config, "command", ""))
        if asked is not None and asked != instance.gpu_count and config.device == "cuda":
            yield BeforeLaunch(
                f"{option.type} has {counted(instance.gpu_count, 'GPU')}, and job.command starts"
                f" {counted(asked, 'process')} on each node: write {{gpus}} there, or list a type with {asked}"
            )
        rows, empty = config.rows() or 0, batch.empty_rows(config, used)
        if empty > _EMPTY_SHARE * rows and config.device == "cuda":
            yield f"{option.type}: a step of {rows} rows takes {used} GPUs as long as one of {rows + empty}"
        room_gb = instance.nvme_gb or (definition.storage.root.size_gib - _IMAGE_AND_SYSTEM_GIB) * 1.073741824
        if needs_gb > room_gb:
            yield BeforeLaunch(
                f"{option.type}: checkpoints and exports may need {needs_gb:.0f} GB of scratch, there are about"
                f" {room_gb:.0f}; raise storage.root.size_gib"
            )
        if offer.zones:
            low, high = offer.zones[0], offer.zones[-1]
            if high.price.amount >= _SPREAD * low.price.amount:
                yield (
                    f"{option.type}: spot zones differ, {low.price.amount} ({low.zone}) to {high.price.amount}"
                    f" ({high.zone}); the bill uses the dearest{_leave_out(definition, offer.zones, prefix)}"
                )
            known = {zone.zone for zone in offer.zones}
            unknown = [prefix + zone for zone in definition.fleet.zone_ids if zone not in known]
            if unknown and definition.limits.usd_per_hour is not None:
                named = ", ".join(unknown)
                yield f"{option.type}: left out in {named}, not known to cost at most {definition.limits.usd_per_hour}"
            elif unknown:
                yield f"{option.type}: no spot price is known in {', '.join(unknown)}, where AWS may launch it as well"
            if option.on_demand and high.price.amount >= option.on_demand.amount:
                yield f"{option.type}: spot in {high.zone} costs as much as on demand"
    if len(bill.types) > 1 and definition.estimate.step_ms is not None:
        yield "estimate.step_ms is used for every listed type, although the types differ in speed"
