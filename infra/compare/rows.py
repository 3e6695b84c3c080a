"""The rows of a comparison. A row is a way to do a piece of work. A row is drafted from the catalog, and simulated runs
fill in its costs and hours. Rows are drafted one by one and simulated together. All rows use the same random numbers,
so that the differences between rows are not noise. Rows with the same exposure to interruptions share the simulated
runs of this exposure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date
from decimal import Decimal
from statistics import median

from gpufleet.infra.bill import side
from gpufleet.infra.bill.fit import Fit
from gpufleet.infra.bill.lines import CENT_100
from gpufleet.infra.bill.options import BillBasis, TypeCost
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.bill.side import Prepared, Quantiles, Side
from gpufleet.infra.catalog import Catalog, Instance
from gpufleet.infra.definition.model import Capacity, Claim, StackDefinition
from gpufleet.infra.risk import simulation
from gpufleet.infra.risk.hazard import Hazards
from gpufleet.infra.text import hours
from gpufleet.job.text import counted

# the mark that tables show for the source of a row's speed
BASIS = {"measured": "measured", "declared": "declared", "guessed": "guessed", "derived": "target"}


@dataclass(frozen=True, slots=True)
class Study:
    """The data that all rows of a comparison share. `find_basis` returns the project's data for a definition, including
    measurements on these types; it is None if there is no project.
    """

    catalog: Catalog
    _: KW_ONLY
    hazards: Hazards = field(default_factory=dict)
    hours_left: float | None = None  # hours to the deadline; None if there is none
    today: date | None = None  # the day on which the age of prices is measured
    find_basis: Callable[[StackDefinition, Iterable[str]], BillBasis] | None = None

    def basis(self, work: StackDefinition, types: Iterable[str]) -> BillBasis:
        """The data for the work's rows on these types."""
        basis = self.find_basis(work, types) if self.find_basis else BillBasis(work, self.catalog)
        return replace(basis, hazards=self.hazards, today=self.today)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The dollars of the run's compute in one region, without interruptions and set-up; None if no price is known."""

    region: str
    on_demand: Decimal | None
    spot: Decimal | None  # the spot price in the zone with the median price


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way to do a piece of work. Costs and hours are None if they cannot be known; `reason` then says why."""

    scenario: str  # the names of all scenarios with this work, in the file's order
    work: StackDefinition  # the work, with the size of its prepared dataset filled in
    capacity: Capacity
    option: TypeCost | None = None  # the work on one type; None for a run elsewhere, which has only a claim
    refusal: str = ""  # why a fleet cannot launch the type for this work; empty if it can
    # The prepared dataset whose counts and size are used; empty if the counts and the size come from
    # job.parameters.data.
    dataset: str = ""
    rates: tuple[Rate, ...] = ()
    inputs_usd: Decimal = Decimal(0)  # the part of `usd` that pays the transfer of inputs from another region
    prepared: Prepared | None = field(default=None, repr=False)  # None if the row has no costs; `reason` says why
    side: Side | None = field(default=None, repr=False)  # None before its runs are simulated
    hours_left: float | None = None  # hours to the deadline; None if there is none
    # Probability that the row costs less than the fleet in the work's file; None if that fleet has no cost.
    cheaper: float | None = None
    lost: str = ""  # why the row is not the first one

    @property
    def type(self) -> str:
        return self.option.type if self.option else "elsewhere"

    @property
    def region(self) -> str:
        return self.work.fleet.region if self.option else ""

    @property
    def nodes(self) -> int:
        return self.work.nodes if self.option else 1

    @property
    def place(self) -> str:
        """`p5.4xlarge`, or `p5.4xlarge x2` on two nodes."""
        return f"{self.type} x{self.nodes}".removesuffix(" x1")

    @property
    def gpus(self) -> str:
        """The GPUs of a node, in words."""
        return self.option.instance.gpus if self.option else ""

    @property
    def runtime(self) -> Runtime | None:
        return self.option.runtime if self.option else None

    @property
    def ranks(self) -> int:
        """GPUs used, on all nodes."""
        return self.runtime.ranks if self.runtime else 0

    @property
    def claim(self) -> Claim:
        return self.work.variant.claim

    @property
    def reference(self) -> bool:
        """Whether the work ran or was planned elsewhere."""
        return self.option is None

    @property
    def tokens(self) -> int:
        """Tokens trained on; 0 if they are not counted."""
        phases = self.work.job.parameters.phases() if self.option else ()
        return sum(phase.steps * phase.tokens_per_step for phase in phases if phase.flops_per_token)

    @property
    def steps(self) -> int:
        """Optimizer steps; 0 for a run elsewhere."""
        return sum(phase.steps for phase in self.work.job.parameters.phases()) if self.option else 0

    @property
    def used_gpu_h(self) -> float | None:
        """The number of used GPUs times hours of work, without set-up and idle time."""
        if self.runtime is None or self.option is None:
            return None
        used = min(self.ranks, self.work.nodes * self.option.instance.gpu_count)
        return used * sum(phase.seconds for phase in self.runtime.phases) / 3600

    @property
    def billed_gpu_h(self) -> float | None:
        """The number of all GPUs of the nodes times node-hours, p50."""
        return float(self.hours.p50) * self.option.instance.gpu_count if self.option and self.hours else None

    @property
    def compute_h(self) -> float | None:
        """Hours of optimizer steps; if the node is kept longer than its work, the hours for which it is kept."""
        if self.runtime is None:
            return None
        return max(float(self.work.variant.hold_hours or 0), self.runtime.compute_s / 3600)

    @property
    def basis(self) -> str:
        """The source of the speed: claim, target (a share of the roofline), measured, declared, or guessed (from other
        GPUs).
        """
        if self.option is None:
            return "claim"
        return BASIS[self.runtime.speed] if self.runtime else "target"

    @property
    def unfit(self) -> Fit | None:
        """The first phase that does not fit into the GPUs' memory."""
        return next((phase for phase in self.option.fits if not phase.fits), None) if self.option else None

    @property
    def fits(self) -> bool:
        return self.option is not None and self.unfit is None

    @property
    def launchable(self) -> bool:
        return self.option is not None and not self.refusal

    @property
    def reason(self) -> str:
        """Why the row cannot be run or priced: its type cannot be launched, the work does not fit, or a price is
        missing.
        """
        if self.option is None or self.refusal:
            return self.refusal
        if self.unfit:
            return f"phase {self.unfit.phase}: {self.unfit.why}"
        return self.option.left_out.get(self.capacity) or self.option.why

    @property
    def nearest(self) -> str:
        """The change that would make the work fit."""
        return self.unfit.nearest if self.unfit else ""

    @property
    def untried(self) -> str:
        """Why it is unknown whether a command fits into the memory of the row's GPUs."""
        return self.option.untried if self.option else ""

    @property
    def ranked(self) -> bool:
        """Whether the row can be run as it is."""
        return self.launchable and self.fits and self.side is not None

    @property
    def hours(self) -> Quantiles | None:
        return self.side.hours.times(self.nodes) if self.side else None

    @property
    def wall_hours(self) -> Quantiles | None:
        return self.side.wall_hours if self.side else None

    @property
    def usd(self) -> Quantiles | None:
        """USD to finish, with everything that a bill includes."""
        return self.side.usd.plus(self.inputs_usd) if self.side else None

    @property
    def mean_usd(self) -> Decimal:
        """The mean USD of the row; zero if the row has no cost."""
        return self.side.usd.mean + self.inputs_usd if self.side else Decimal(0)

    @property
    def dearer_usd_h(self) -> Decimal:
        """USD per hour by which all nodes together cost more in the most expensive zone than at the price that the row
        uses.
        """
        dearest = self.option.hourly(self.capacity) if self.option else None
        if dearest is None or self.side is None:
            return Decimal(0)
        return (dearest.amount - self.side.price.amount) * self.nodes

    @property
    def dearest_usd(self) -> Decimal | None:
        """p50 in the most expensive zone, without `inputs_usd`. The limits are compared with this cost."""
        return side.exact(float(self.side.usd.p50 + self.dearer_usd_h * self.side.hours.p50)) if self.side else None

    @property
    def free_usd(self) -> Decimal | None:
        """Mean USD of interrupted first hours, which AWS does not charge and `usd` does not include."""
        return side.exact(float((self.side.needed.metered_usd - self.side.needed.usd).mean())) if self.side else None

    @property
    def interruptions(self) -> Quantiles | None:
        return self.side.interruptions if self.side else None

    @property
    def over_limit(self) -> bool:
        """Whether p90 exceeds limits.max_usd or limits.max_hours."""
        if self.side is None:
            return False
        stop_usd, stop_h = self.side.reserve
        usd = self.side.metered_usd.p90 + self.dearer_usd_h * self.side.hours.p90 + stop_usd
        limits = self.work.limits
        return usd > limits.max_usd or (self.side.hours.p90 + stop_h) * self.nodes > limits.max_hours

    @property
    def late(self) -> float:
        """The probability of missing the deadline, including the time to stop."""
        if self.side is None or self.hours_left is None:
            return 0.0
        return float((self.side.needed.wall_hours + self.side.exposure.reserve_h > self.hours_left).mean())


def draft(basis: BillBasis, name: str, option: TypeCost, capacity: Capacity, *, likely: bool = False) -> Row:
    """The row before simulation. The definition's limits do not stop its runs. `likely`: see side.prepare."""
    work = basis.definition
    priced = option.runtime is not None and option.hourly(capacity) is not None and option.holds_the_job
    return Row(
        scenario=name,
        work=work,
        capacity=capacity,
        option=option,
        refusal=_refusal(work, option.instance),
        dataset="" if basis.dataset_bytes is None else work.storage.dataset,
        prepared=side.prepare(basis, [option], capacity, likely=likely) if priced else None,
    )


def filled(
    rows: Sequence[Row],
    hours_left: float | None,
    *,
    runs: int,
    attempts: int = simulation.MAX_ATTEMPTS,
    below: Decimal | None = None,
) -> list[Row]:
    """The rows. Each row that has a price is simulated `runs` times. `attempts`: see simulation.simulate. `below`: rows
    whose mean is not below this many USD are left out.
    """
    prepared = [row.prepared for row in rows if row.prepared is not None]
    outcomes = iter(_simulated([ready.exposure.unlimited for ready in prepared], runs=runs, attempts=attempts))
    rows_filled = []
    for row in rows:
        if row.prepared is None:
            rows_filled.append(row)
            continue
        outcome = next(outcomes)
        if below is None or side.mean_usd(row.prepared, outcome) < below:
            settled = side.settle(row.prepared, outcome, outcome, outcome)
            rows_filled.append(replace(row, side=settled, hours_left=hours_left))
    return rows_filled


def _simulated(exposures: Sequence[simulation.Exposure], *, runs: int, attempts: int) -> list[simulation.SimulatedRuns]:
    """The simulated runs of each exposure, in order. Equal exposures share a simulation. An exposure in which nothing
    is random is simulated with one run.
    """
    by_exposure: dict[simulation.Exposure, simulation.SimulatedRuns] = {}
    different = list(dict.fromkeys(exposures))
    for many, some in (
        (runs, [exposure for exposure in different if exposure.is_drawn]),
        (1, [exposure for exposure in different if not exposure.is_drawn]),
    ):
        outcomes = simulation.simulate_each(some, runs=many, attempts=attempts)
        by_exposure.update(zip(some, outcomes, strict=True))
    return [by_exposure[exposure] for exposure in exposures]


def in_phases(runtime: Runtime, instance: Instance) -> str:
    """A sentence about the phases, such as `sft 0.05 h, generate 0.01 h, each on 8 GPUs` (or on vCPUs)."""
    phases = ", ".join(f"{phase.name} {hours(phase.seconds / 3600)} h" for phase in runtime.phases)
    spare = f", {hours(runtime.held_s / 3600)} h held or spare" if runtime.held_s else ""
    return f"{phases} on {instance.used(runtime.ranks)}{spare}"


def _refusal(work: StackDefinition, instance: Instance) -> str:
    """Why a fleet cannot launch the type for this work; empty if it can."""
    config, region = work.job.parameters, work.fleet.region
    if work.fleet.is_gang and config.demands.one_node:
        return f"is for one node: {config.demands.one_node}"
    if instance.unusable:
        return instance.unusable
    if instance.regions is not None and region not in instance.regions:
        return f"not offered in {region}"
    asked = config.gpus_needed()
    if asked <= instance.gpu_count:
        return ""
    return f"has {counted(instance.gpu_count, 'GPU')}, and job.parameters.gpus asks for {asked}: leave that key out"


def rate(row: Row, option: TypeCost, region: str, catalog: Catalog) -> Rate:
    """The hours of compute times the price in a region, for the tables of an experiment."""

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
