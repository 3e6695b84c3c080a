"""One row of a comparison: a way to do a piece of work, drafted from the catalog and filled by simulated runs.

Rows are drafted one by one and simulated together: they share their luck, so that their differences are not noise, and
rows with the same exposure share its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date
from decimal import Decimal
from statistics import median

from gpufleet.infra.bill import side
from gpufleet.infra.bill.lines import CENT_100
from gpufleet.infra.bill.options import BillBasis, TypeCost
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.bill.side import Prepared, Quantiles, Side
from gpufleet.infra.catalog import Catalog, Instance
from gpufleet.infra.definition.model import Capacity, Claim, Limits, StackDefinition
from gpufleet.infra.risk import simulation
from gpufleet.infra.risk.hazard import Hazards
from gpufleet.infra.text import hours
from gpufleet.job.kind import JobConfig
from gpufleet.job.text import counted

# words for a row's basis
BASIS = {"measured": "measured", "declared": "declared", "guessed": "guessed", "derived": "target"}


@dataclass(frozen=True, slots=True)
class Study:
    """The data for every row of a comparison, besides its work. `find_basis` returns the project's data for a
    definition, with the measurements on these types; None: there are none.
    """

    catalog: Catalog
    _: KW_ONLY
    hazards: Hazards = field(default_factory=dict)
    hours_left: float | None = None  # to the deadline; None without one
    today: date | None = None  # the day for the age of prices
    find_basis: Callable[[StackDefinition, Iterable[str]], BillBasis] | None = None

    def basis(self, work: StackDefinition, types: Iterable[str]) -> BillBasis:
        """The data for the work's rows on these types."""
        found = self.find_basis(work, types) if self.find_basis else BillBasis(work, self.catalog)
        return replace(found, hazards=self.hazards, today=self.today)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Compute dollars of the run in one region, without interruptions and set-up. None: no price is known there."""

    region: str
    on_demand: Decimal | None
    spot: Decimal | None  # at the median zone


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to do one piece of work. Figures are None if they cannot be known; `why` has the reason."""

    scenario: str  # every scenario with this work, the first one leading
    type: str
    capacity: Capacity
    region: str
    gpus: str = ""
    gpu_count: int = 0  # per node
    ranks: int = 0  # GPUs used, on all nodes
    nodes: int = 1
    note: str = ""
    claim: Claim = field(default_factory=Claim)
    reference: bool = False
    tokens: int = 0  # trained on; 0: not counted
    steps: int = 0  # optimizer steps
    dataset: str = ""  # the prepared one with these counts and size; empty: from job.parameters.data
    used_gpu_h: float | None = None  # GPUs used x hours of work, without set-up and idle time
    billed_gpu_h: float | None = None  # all GPUs of the nodes x node-hours, p50
    work: str = ""  # phases, their hours, the GPUs they use
    compute_h: float | None = None  # optimizer steps alone; a held node's hours if they are longer
    hours: Quantiles | None = None  # node-hours
    wall_hours: Quantiles | None = None
    usd: Quantiles | None = None  # to finish, with everything in the bill
    dearest_usd: Decimal | None = None  # p50 in the most expensive zone, which a limit is compared with
    inputs_usd: Decimal = Decimal(0)  # the part of usd for the transfer of inputs from another region
    free_usd: Decimal | None = None  # mean USD that AWS does not charge, for interrupted first hours; not in usd
    interruptions: Quantiles | None = None
    rates: tuple[Rate, ...] = ()
    fits: bool = False
    launchable: bool = False
    why: str = ""  # does not fit, has no price, has left EC2
    nearest: str = ""  # the change that would make it fit
    untried: str = ""  # why it is unknown whether its GPUs hold a command
    limits: Limits | None = None  # the file's; None if nothing is priced
    over_limit: bool = False  # whether p90 passes limits.max_usd or limits.max_hours
    # probability that it costs less than the work's own fleet; None if that has no figures
    cheaper: float | None = None
    late: float = 0.0  # probability of missing the deadline, including the time to stop
    basis: str = ""  # claim, target (roofline and an efficiency), measured, declared, guessed (from other GPUs)
    lost: str = ""  # why it is not the first
    prepared: Prepared | None = field(default=None, repr=False)  # None without figures: `why` has the reason
    side: Side | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """`p5.4xlarge`, or `p5.4xlarge x2` on two nodes."""
        return f"{self.type} x{self.nodes}".removesuffix(" x1")

    @property
    def mean_usd(self) -> Decimal:
        """The mean of a row with figures; else zero."""
        return self.usd.mean if self.usd else Decimal(0)

    @property
    def ranked(self) -> bool:
        """Whether it could be run as it is."""
        return self.launchable and self.fits and self.usd is not None


def draft(basis: BillBasis, name: str, option: TypeCost, capacity: Capacity, *, likely: bool = False) -> Row:
    """The row before simulation. The definition's limits are marked, never applied. `likely`: as in side.prepare."""
    definition = basis.definition
    fleet, instance, runtime = definition.fleet, option.instance, option.runtime
    config, variant = definition.job.parameters, definition.variant
    unfit = next((phase for phase in option.fits if not phase.fits), None)
    why = _unlaunchable(option, fleet.region) or _lacking(config, instance)
    if fleet.is_gang and config.demands.one_node:
        why = f"is for one node: {config.demands.one_node}"
    prepared = None
    if runtime is not None and option.hourly(capacity) is not None and unfit is None:
        prepared = side.prepare(basis, [option], capacity, likely=likely)
    return Row(
        scenario=name,
        type=option.type,
        capacity=capacity,
        region=fleet.region,
        gpus=instance.gpus,
        gpu_count=instance.gpu_count,
        ranks=runtime.ranks if runtime else 0,
        nodes=definition.nodes,
        note=variant.note,
        claim=variant.claim,
        tokens=sum(phase.steps * phase.tokens_per_step for phase in config.phases() if phase.flops_per_token),
        steps=sum(phase.steps for phase in config.phases()),
        dataset="" if basis.dataset_bytes is None else definition.storage.dataset,
        compute_h=_compute_h(definition, option),
        used_gpu_h=None if runtime is None else runtime.ranks * sum(p.seconds for p in runtime.phases) / 3600,
        work="" if runtime is None else _work(runtime),
        fits=unfit is None,
        launchable=not why,
        why=why or (f"phase {unfit.phase}: {unfit.why}" if unfit else option.left_out.get(capacity) or option.why),
        nearest=unfit.nearest if unfit else "",
        untried=option.untried,
        basis=BASIS[runtime.speed] if runtime else "target",
        limits=definition.limits,
        prepared=prepared,
    )


def filled(
    rows: Sequence[Row],
    hours_left: float | None,
    *,
    runs: int,
    attempts: int = simulation.MAX_ATTEMPTS,
    below: Decimal | None = None,
) -> list[Row]:
    """The rows, each priced one simulated `runs` times; `attempts`: as in risk.simulate. `below`: drops rows whose mean
    is not below so many USD.
    """
    prepared = [row.prepared for row in rows if row.prepared is not None]
    outcomes = iter(_simulated([each.exposure.unlimited for each in prepared], runs=runs, attempts=attempts))
    found = []
    for row in rows:
        if row.prepared is None:
            found.append(row)
            continue
        outcome = next(outcomes)
        if below is None or side.mean_usd(row.prepared, outcome) < below:
            found.append(_figures(row, side.settle(row.prepared, outcome, outcome), hours_left))
    return found


def _simulated(exposures: Sequence[simulation.Exposure], *, runs: int, attempts: int) -> list[simulation.SimulatedRuns]:
    """The simulated runs of each exposure, in order. Equal exposures share a simulation; one that nothing can interrupt
    is simulated once."""
    found: dict[simulation.Exposure, simulation.SimulatedRuns] = {}
    different = list(dict.fromkeys(exposures))
    for many, some in (
        (runs, [each for each in different if each.is_drawn]),
        (1, [each for each in different if not each.is_drawn]),
    ):
        outcomes = simulation.simulate_each(some, runs=many, attempts=attempts)
        found.update(zip(some, outcomes, strict=True))
    return [found[each] for each in exposures]


def _figures(row: Row, found: Side, hours_left: float | None) -> Row:
    """The row with the figures of its simulated runs."""
    outcome, (stop_usd, stop_h) = found.needed, found.reserve
    assert row.limits is not None
    dearest = found.option.hourly(row.capacity)
    more = Decimal(0) if dearest is None else (dearest.amount - found.price.amount) * row.nodes
    over = found.metered_usd.p90 + more * found.hours.p90 + stop_usd > row.limits.max_usd
    return replace(
        row,
        over_limit=over or (found.hours.p90 + stop_h) * row.nodes > row.limits.max_hours,
        hours=found.hours.times(row.nodes),
        billed_gpu_h=float(found.hours.p50) * row.nodes * row.gpu_count,
        wall_hours=found.wall_hours,
        usd=found.usd,
        dearest_usd=side.exact(float(found.usd.p50 + more * found.hours.p50)),
        free_usd=side.exact(float((outcome.metered_usd - outcome.usd).mean())),
        interruptions=found.interruptions,
        late=0.0 if hours_left is None else float((outcome.wall_hours + found.exposure.reserve_h > hours_left).mean()),
        side=found,
    )


def _compute_h(definition: StackDefinition, option: TypeCost) -> float | None:
    if option.runtime is None:
        return None
    held = definition.variant.hold_hours
    return option.runtime.compute_s / 3600 if held is None else max(float(held), option.runtime.compute_s / 3600)


def _work(runtime: Runtime) -> str:
    """A text such as `sft 0.05 h, generate 0.01 h, each on 8 GPUs`."""
    phases = ", ".join(f"{phase.name} {hours(phase.seconds / 3600)} h" for phase in runtime.phases)
    spare = f", {hours(runtime.held_s / 3600)} h held or spare" if runtime.held_s else ""
    gpus = f"{runtime.ranks} GPUs" if runtime.ranks > 1 else "one GPU"
    return f"{phases} on {gpus}{spare}"


def _unlaunchable(option: TypeCost, region: str) -> str:
    instance = option.instance
    if instance.unusable:
        return instance.unusable
    if instance.regions is not None and region not in instance.regions:
        return f"not offered in {region}"
    return ""


def _lacking(config: JobConfig, instance: Instance) -> str:
    """Why a file that lists the type would be refused, and a node of it too."""
    asked = config.gpus_needed()
    if asked <= instance.gpu_count:
        return ""
    return f"has {counted(instance.gpu_count, 'GPU')}, and job.parameters.gpus asks for {asked}: leave that out"


def rate(row: Row, option: TypeCost, region: str, catalog: Catalog) -> Rate:
    """Compute hours x price, for the tables of an experiment."""

    def amount(price: Decimal | None) -> Decimal | None:
        if price is None or row.compute_h is None:
            return None
        return (Decimal(f"{row.compute_h:.6f}") * price * row.nodes).quantize(CENT_100)

    zones = catalog.spot_prices.get((option.type, region), ())
    on_demand = catalog.on_demand_prices.get((option.type, region))
    return Rate(
        region=region,
        on_demand=amount(on_demand.amount if on_demand else None),
        spot=amount(median(zone.price.amount for zone in zones) if zones else None),
    )
