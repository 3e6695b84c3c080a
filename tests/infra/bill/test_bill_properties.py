"""Properties of every bill: for any of the five jobs, on any type and disk, in any region."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from gpufleet.infra.bill import lines, options, record
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.lines import Line
from gpufleet.infra.bill.options import BillBasis
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.bill.side import Prepared, prepare
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Disk, Keep, Limits, StackDefinition
from gpufleet.infra.errors import PriceMissing
from gpufleet.infra.risk.hazard import Hazard
from gpufleet.infra.risk.simulation import MAX_ATTEMPTS, Exposure, simulate, simulate_each, within_limits
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.pretrain.spec import PretrainConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig
from gpufleet.job.kind import JobConfig
from tests.infra.cost_definitions import definition, on_nodes

pytestmark = pytest.mark.usefixtures("everything_known")

settings.register_profile(
    "bill",
    max_examples=60,
    derandomize=True,  # the same examples on every machine
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # no shrinking: it can take minutes
)
every = settings(settings.get_profile("bill"))

CATALOG = load_catalog()
NO_LIMITS = Limits(max_usd=Decimal(10**9), max_hours=Decimal(10**9))
NODE_LINES = {"compute", "public IPv4"} | {
    f"{disk} disk{what}" for disk in ("root", "data") for what in ("", " IOPS above 3000", " MiB/s above 125")
}
PRICED_AS = {
    "compute": "node-hour",
    "root disk": "ebs_gp3_storage",
    "data disk": "ebs_gp3_storage",
    "root disk IOPS above 3000": "ebs_gp3_iops",
    "data disk IOPS above 3000": "ebs_gp3_iops",
    "root disk MiB/s above 125": "ebs_gp3_throughput",
    "data disk MiB/s above 125": "ebs_gp3_throughput",
    "public IPv4": "public_ipv4",
    "S3 storage": "s3_storage",
    "S3 write requests": "s3_write_requests",
    "S3 read requests": "s3_read_requests",
    "transfer of results": "transfer_out",
    "logs": "logs_ingestion",
}


def of_steps(kind: type[JobConfig], steps: int, part: int) -> JobConfig:
    """A job of the given kind whose work grows with `steps`; `part` varies its shape."""
    if kind is GrowthConfig:
        config = GrowthConfig(steps_per_phase=steps)
        return replace(config, batch=replace(config.batch, sequences=4 * part))
    if kind is SftConfig:
        small = replace(SftConfig().model, layers=2 * part, width=512, heads=8, kv_heads=4, head_dim=64, ffn=1024)
        data = replace(SftConfig().data, examples=1000 * part)
        return SftConfig(epochs=steps, model=small, data=data, gpus=1)
    if kind is PretrainConfig:
        model = replace(PretrainConfig().model, layers=4 * part, width=256 * part)
        return PretrainConfig(steps=steps, model=model, batch=replace(PretrainConfig().batch, rows=16), gpus=1)
    if kind is KernelConfig:
        small = replace(KernelConfig().model, layers=2 * part, width=512, heads=8, kv_heads=4, head_dim=64, ffn=1024)
        batch = replace(KernelConfig().batch, tokens=16_384)
        return KernelConfig(epochs=steps, model=small, batch=batch, gpus=1)
    return TwoTowerConfig(epochs=steps)


KINDS = st.sampled_from([GrowthConfig, SftConfig, PretrainConfig, KernelConfig, TwoTowerConfig])
CONFIGS = st.builds(of_steps, KINDS, st.integers(1, 400), st.integers(1, 3))
DISKS = st.builds(
    Disk,
    size_gib=st.integers(40, 4000),
    iops=st.sampled_from([3000, 3001, 6000, 16000]),
    throughput_mibps=st.sampled_from([125, 126, 500, 1000]),
)
KEEPS = st.builds(Keep, bucket=st.booleans(), days=st.integers(1, 400))
TYPES = ("g5.2xlarge", "g5.12xlarge", "g6.xlarge", "g6e.2xlarge", "g6e.12xlarge", "p4d.24xlarge", "p5.48xlarge")
REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1")


@st.composite
def plans(draw: st.DrawFn, capacities: tuple[str, ...] = ("spot", "on-demand")) -> StackDefinition:
    """A definition without limits that can be priced."""
    plan = definition(
        types=(draw(st.sampled_from(TYPES)),),
        region=draw(st.sampled_from(REGIONS)),
        capacity=draw(st.sampled_from(capacities)),
        root=draw(DISKS),
        data=draw(st.none() | DISKS),
        keep=draw(KEEPS),
        dataset=draw(st.sampled_from(["data/own", "s3://corpus/there"])),
        hazard_per_hour=draw(st.sampled_from(["0.05", "0.5", "3"])),
    )
    plan = replace(plan, job=replace(plan.job, parameters=draw(CONFIGS)), limits=NO_LIMITS)
    found = options.type_costs(BillBasis(plan, CATALOG))[0]
    assume(found.holds_the_job and found.hourly(plan.fleet.capacity) is not None and found.runtime is not None)
    return plan


def prepared(plan: StackDefinition) -> Prepared:
    basis = BillBasis(plan, CATALOG)
    found = prepare(basis, options.type_costs(basis), plan.fleet.capacity)
    assert found is not None
    return found


def by_name(plan: StackDefinition) -> dict[str, Line]:
    return {line.name: line for line in prepared(plan).lines}


def changed(one: StackDefinition, other: StackDefinition) -> set[str]:
    before, after = by_name(one), by_name(other)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def with_storage(plan: StackDefinition, **changes: Any) -> StackDefinition:
    return replace(plan, storage=replace(plan.storage, **changes))


def with_steps(plan: StackDefinition, steps: int) -> StackDefinition:
    config = plan.job.parameters
    name = {GrowthConfig: "steps_per_phase", PretrainConfig: "steps"}.get(type(config), "epochs")
    return replace(plan, job=replace(plan.job, parameters=replace(config, **{name: steps})))


@every
@given(plan=plans(), disk=DISKS)
def test_a_data_disk_is_its_own_lines_and_no_others(plan: StackDefinition, disk: Disk) -> None:
    own = {"data disk"}
    own |= {"data disk IOPS above 3000"} if disk.iops > 3000 else set()
    own |= {"data disk MiB/s above 125"} if disk.throughput_mibps > 125 else set()
    assert changed(with_storage(plan, data=None), with_storage(plan, data=disk)) == own


@every
@given(plan=plans(), iops=st.integers(3001, 16000))
def test_iops_above_what_is_included_are_one_line(plan: StackDefinition, iops: int) -> None:
    root = plan.storage.root
    without = with_storage(plan, root=replace(root, iops=3000))
    assert changed(without, with_storage(plan, root=replace(root, iops=iops))) == {"root disk IOPS above 3000"}


@every
@given(plan=plans(), mibps=st.integers(126, 1000))
def test_throughput_is_one_line_where_checkpoints_do_not_wait_for_that_disk(plan: StackDefinition, mibps: int) -> None:
    root = plan.storage.root
    assert CATALOG.instances[plan.fleet.instance_types[0]].nvme_gb  # every type in TYPES has instance store
    without = with_storage(plan, root=replace(root, throughput_mibps=125))
    more = with_storage(plan, root=replace(root, throughput_mibps=mibps))
    assert changed(without, more) == {"root disk MiB/s above 125"}


@every
@given(plan=plans(), days=st.integers(2, 400))
def test_keeping_the_bucket_is_storage_and_nothing_else(plan: StackDefinition, days: int) -> None:
    gone, kept = (with_storage(plan, keep=Keep(bucket=bucket, days=days)) for bucket in (False, True))
    assert changed(gone, kept) == {"S3 storage"}
    assert by_name(gone)["S3 storage"].quantity < by_name(kept)["S3 storage"].quantity


@every
@given(plan=plans())
def test_a_dataset_that_is_there_already_is_not_uploaded_stored_or_listed(plan: StackDefinition) -> None:
    own, there = (with_storage(plan, dataset=place) for place in ("data/own", "s3://corpus/there"))
    assert changed(own, there) <= {"S3 storage", "S3 write requests", "S3 read requests"}
    for name, line in by_name(there).items():
        assert line.quantity <= by_name(own)[name].quantity


@every
@given(plan=plans(), steps=st.integers(1, 300), more=st.integers(1, 300))
def test_more_steps_never_make_a_line_cheaper(plan: StackDefinition, steps: int, more: int) -> None:
    short, long = by_name(with_steps(plan, steps)), by_name(with_steps(plan, steps + more))
    assert short.keys() == long.keys()
    for name in short:
        assert short[name].amount <= long[name].amount


EXPOSURES = st.builds(
    Exposure,
    setup_h=st.floats(0, 1),
    restart_h=st.floats(0, 1),
    phase_ends_h=st.lists(st.floats(0.01, 3), min_size=1, max_size=3).map(lambda hours: tuple(np.cumsum(hours))),
    saves_fit=st.just((True, False, True)),
    interval_h=st.floats(0.01, 1),
    compute_usd_h=st.floats(0.1, 50),
    extras_usd_h=st.floats(0, 1),
    fixed_usd=st.floats(0, 10),
    hazard=st.none() | st.floats(0, 5) | st.builds(Hazard, median=st.floats(0.01, 2), unevenness=st.floats(0, 2)),
    nodes=st.integers(1, 3),
    max_usd=st.none() | st.floats(1, 100),
)


@every
@given(run=EXPOSURES, longer=st.floats(1, 3))
def test_with_the_same_luck_a_longer_run_takes_no_fewer_hours(run: Exposure, longer: float) -> None:
    # Dollars can be fewer: a longer run is interrupted in its free first hour where a shorter one is done and paid for.
    even = replace(run, saves_fit=(True, True, True), max_usd=None)
    long = replace(even, phase_ends_h=tuple(end * longer for end in even.phase_ends_h))
    one, other = simulate_each([even, long], runs=200)
    met = other.interruptions < MAX_ATTEMPTS  # above this number of nodes a simulated run is extrapolated
    assert (one.hours <= other.hours + 1e-9)[met].all()
    assert (one.wall_hours <= other.wall_hours + 1e-9)[met].all()
    assert (one.interruptions <= other.interruptions)[met].all()


@every
@given(runs=st.lists(EXPOSURES, min_size=1, max_size=4))
def test_simulated_together_each_run_is_what_it_is_alone(runs: list[Exposure]) -> None:
    for run, found in zip(runs, simulate_each(runs, runs=60), strict=True):
        alone = simulate(run, runs=60)
        for name in ("usd", "hours", "wall_hours", "interruptions", "stopped", "done_h"):
            assert np.array_equal(getattr(found, name), getattr(alone, name))


@every
@given(run=EXPOSURES, max_hours=st.none() | st.floats(0.01, 10))
def test_limits_laid_on_runs_without_them_give_what_a_simulation_with_them_does(
    run: Exposure, max_hours: float | None
) -> None:
    run = replace(run, max_hours=max_hours)
    found, whole = within_limits(run, simulate(run.unlimited, runs=60)), simulate(run, runs=60)
    for name in ("usd", "metered_usd", "hours", "wall_hours", "interruptions", "stopped", "done_h"):
        assert np.array_equal(getattr(found, name), getattr(whole, name))


@every
@given(plan=plans(), steps=st.integers(1, 100))
def test_a_run_split_in_two_pays_set_up_growth_and_the_end_twice_and_its_steps_once(
    plan: StackDefinition, steps: int
) -> None:
    assume(not isinstance(plan.job.parameters, TwoTowerConfig))  # the refit belongs to no epoch
    plan = replace(plan, estimate=replace(plan.estimate, hazard_per_hour=Decimal(0)))
    whole, half = prepared(with_steps(plan, 2 * steps)), prepared(with_steps(plan, steps))
    if isinstance(plan.job.parameters, GrowthConfig | PretrainConfig):  # epochs end in a part of a batch
        assert 2 * half.runtime.compute_s == pytest.approx(whole.runtime.compute_s)
    whole_s, half_s = (_step_seconds(found.runtime) for found in (whole, half))
    assert 2 * half.runtime.total_s - whole.runtime.total_s == pytest.approx(
        half.runtime.setup_s + half.runtime.upload_s + half.runtime.growth_s + 2 * half_s - whole_s, abs=1e-6
    )
    once, twice = ({line.name: line.amount for line in found.lines} for found in (whole, half))
    for name in ("S3 storage", "transfer of results"):  # the cost of kept files does not depend on the steps
        assert once[name] == twice[name]


def _step_seconds(runtime: Runtime) -> float:
    """Seconds of steps, evaluations and saves: what follows from the steps."""
    return runtime.compute_s + runtime.evaluation_s + runtime.stalls_s


@every
@given(plan=plans())
def test_every_line_is_in_the_unit_of_its_price(plan: StackDefinition) -> None:
    for name, line in by_name(plan).items():
        if name == "compute":
            assert line.unit == "node-hour"
        else:
            known = CATALOG.price(PRICED_AS.get(name, line.item), plan.fleet.region)
            assert (line.unit, line.unit_price) == (known.unit, known.amount)


@every
@given(plan=plans(), hours=st.floats(0.001, 2000))
def test_two_nodes_are_twice_the_node_lines_and_no_more_of_the_others(plan: StackDefinition, hours: float) -> None:
    hourly = options.type_costs(BillBasis(plan, CATALOG))[0].hourly(plan.fleet.capacity)
    assert hourly is not None
    two = on_nodes(plan, 2)
    for one, both in zip(
        lines.node_lines(plan, CATALOG, hours, hourly), lines.node_lines(two, CATALOG, hours, hourly), strict=True
    ):
        assert one.name == both.name
        assert one.name in NODE_LINES or one.kind == "hourly"
        assert abs(both.quantity - 2 * one.quantity) <= Decimal("0.000002")
        assert abs(both.amount - 2 * one.amount) <= Decimal("0.0002") + Decimal("0.000002") * one.unit_price


@every
@given(plan=plans(), runs=st.integers(1, 60))
def test_totals_are_sums_to_the_last_decimal_and_survive_json(plan: StackDefinition, runs: int) -> None:
    found = price(plan, CATALOG, runs=runs)
    assert sum(line.amount for line in found.lines) == found.usd.p50
    assert sum(line.amount for line in found.lines[:-1]) == found.chosen.total
    for line in found.lines:
        assert line.amount == (line.quantity * line.unit_price).quantize(Decimal("0.0001"))
    tree = record.to_json(found)
    assert json.loads(json.dumps(tree)) == tree
    assert [Decimal(line["amount"]) for line in tree["lines"]] == [line.amount for line in found.lines]
    assert [Decimal(line["quantity"]) for line in tree["lines"]] == [line.quantity for line in found.lines]
    assert [Decimal(line["unit_price"]) for line in tree["lines"]] == [line.unit_price for line in found.lines]
    keys = {"name", "kind", "quantity", "unit", "unit_price", "amount", "source", "as_of", "inferred"}
    assert all(set(line) - {"item"} == keys for line in tree["lines"])
    assert all(("item" in line) == (line["kind"] == "fixed") for line in tree["lines"])
    for name in ("p10", "p50", "p90", "mean"):
        assert Decimal(tree["usd"][name]) == getattr(found.usd, name)
        assert Decimal(tree["hours"][name]) == getattr(found.hours, name)
    assert found.usd.p10 <= found.usd.p50 <= found.usd.p90


@every
@given(plan=plans(capacities=("on-demand",)))
def test_on_demand_nothing_is_interrupted_and_nothing_is_uncertain(plan: StackDefinition) -> None:
    found = price(plan, CATALOG, runs=60)
    assert found.chosen.interruptions.mean == 0
    assert found.lines[-1].amount == 0
    assert found.usd.p10 == found.usd.p50 == found.usd.p90 == found.usd.mean == found.chosen.total


@every
@given(type_=st.sampled_from(tuple(CATALOG.instances)), region=st.sampled_from((*REGIONS, "ap-south-1")))
def test_a_price_is_known_and_positive_or_its_absence_is_said(type_: str, region: str) -> None:
    for find in (CATALOG.on_demand, CATALOG.spot):
        said = ""
        try:
            found = find(type_, region)
        except PriceMissing as missing:
            said, found = str(missing), ()
        amounts = [zone.price.amount for zone in found] if isinstance(found, tuple) else [found.amount]
        assert all(amount > 0 for amount in amounts)
        assert amounts or (type_ in said and region in said)
