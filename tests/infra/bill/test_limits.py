"""Limits against the bill: on which types and at which speeds a run ends within them; every page counts alike."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.fit import cheapest_holder
from gpufleet.infra.bill.limits import deadline_problems, deadline_warnings, enough, slowest
from gpufleet.infra.bill.record import to_json
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import Disk, Keep, StackDefinition
from gpufleet.infra.definition.scenarios import scenario
from gpufleet.infra.risk import simulation
from gpufleet.job.contract import estimate
from gpufleet.job.contract.reading import Fields
from gpufleet.job.contract.terms import Rates, RunLimits
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.supervisor.forecast import RESERVE_S, Forecast
from gpufleet.job.supervisor.meter import Meter
from tests.infra.cost_definitions import definition, growth, on_nodes
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
NOW = datetime(2026, 11, 21, tzinfo=UTC)
SHIPPED = ROOT / "stacks"
TWO: dict[str, Any] = {"types": ("g6e.xlarge", "g5.xlarge"), "region": "us-west-2"}  # the second slower and cheaper
RARE: dict[str, Any] = {
    "hazard_per_hour": "3",
    "max_usd": "50",
    "max_hours": "50",
}  # interruptions come so often that first hours are free


def bill(**changes: Any) -> Bill:
    return price(definition(**changes), CATALOG, runs=2000)


def refused(plan: StackDefinition) -> list[str]:
    return [f"{each.path}: {each.allowed}. {each.hint}" for each in problems(plan, price(plan, CATALOG, runs=2000))]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_slower_listed_type_that_max_hours_always_stops_is_refused() -> None:
    """The dearest type needs 0.283 h, the other 0.447 h, and each needs some minutes to stop."""
    assert refused(definition(**TWO, max_hours="0.40")) == [
        "fleet.instance_types[1]: types on which the run can end within the limits; without interruptions this"
        " one needs 0.49 node-hours where limits.max_hours is 0.40. Remove it, or raise limits.max_hours"
        " to 0.49 or more."
    ]
    assert refused(definition(**TWO, max_hours="0.49")) == []


def test_max_usd_is_held_against_the_slower_listed_type_where_its_disks_make_it_the_dearer() -> None:
    """65,536 GiB of disk cost 7.19 USD/h: keeping them for 0.164 h more costs more than the cheaper node saves."""
    disk = Disk(size_gib=65_536)
    said, *_ = refused(definition(**TWO, data=disk, max_usd="3.50"))
    found = re.search(r"^limits.max_usd: at least ([0-9.]+) USD: half of the simulated runs .* for a clean stop", said)
    assert found
    assert refused(definition(**TWO, data=disk, max_usd=found[1])) == []
    of_one = bill(types=TWO["types"][1:], region=TWO["region"], data=disk, max_usd="50")
    alone = of_one.chosen
    assert alone.type == "g5.xlarge"
    assert Decimal(found[1]) == enough(alone.metered_usd.p50 + alone.reserve[0])
    assert of_one.hourly_usd["data disk"] == pytest.approx(Decimal(65_536 * 0.08 / 730), abs=Decimal("1e-6"))
    hourly = float(alone.price.amount + sum(of_one.hourly_usd.values()))
    assert float(alone.reserve[0]) == pytest.approx(alone.exposure.reserve_h * hourly, abs=2e-4)


def test_one_type_that_no_limit_lets_end_is_one_problem_of_the_limit() -> None:
    assert [each.split(":")[0] for each in refused(definition(max_hours="0.40"))] == ["limits.max_hours"]


@pytest.mark.parametrize("capacity", ["spot", "on-demand"])
def test_the_limits_that_a_refusal_names_are_accepted(capacity: str) -> None:
    """The run needs 0.4408 h and 119 s to stop, 0.4739 h. Rounded to the nearest hundredth, it would be refused."""
    said = refused(definition(capacity=capacity, max_hours="0.1", max_usd="0.1"))
    usd, hours = (each.split()[3] for each in said)
    assert hours == "0.48"
    assert refused(definition(capacity=capacity, max_hours=hours, max_usd=usd)) == []
    found = bill(capacity=capacity, max_hours=hours, max_usd=usd).chosen
    assert [Decimal(usd), Decimal(hours)] == [
        enough(each + stop)
        for each, stop in zip((found.metered_usd.p50, found.needed_hours.p50), found.reserve, strict=True)
    ]
    short = f"{found.metered_usd.p50 + found.reserve[0] / 2:.4f}"  # enough for the work, but not for the stop
    assert [each.split(":")[0] for each in refused(definition(capacity=capacity, max_usd=short))] == ["limits.max_usd"]
    if capacity == "spot":
        ninth = enough(found.needed_hours.p90 + found.reserve[1])
        assert f"{ninth} is enough for nine runs in ten." in said[1]
        assert f"{enough(found.metered_usd.p90 + found.reserve[0])} is enough for nine runs in ten." in said[0]


def test_max_hours_is_held_against_the_hours_of_all_nodes() -> None:
    """Two nodes of half an hour each need an hour."""
    needed = price(on_nodes(definition(max_usd="300", max_hours="10", capacity="on-demand"), 2), CATALOG).chosen
    each_h = float(needed.needed_hours.p50 + needed.reserve[1])
    for hours, refused in ((1.9 * each_h, True), (2.1 * each_h, False)):
        plan = on_nodes(definition(max_usd="300", max_hours=f"{hours:.2f}", capacity="on-demand"), 2)
        found = problems(plan, price(plan, CATALOG))
        assert [problem.path for problem in found] == (["limits.max_hours"] if refused else [])


def test_a_deadline_that_one_run_in_twenty_misses_is_worth_a_sentence() -> None:
    found = bill()
    late_h = float(np.quantile(found.chosen.needed.wall_hours, 0.95)) + found.chosen.exposure.reserve_h
    plan = definition()
    plan = replace(plan, limits=replace(plan.limits, deadline=NOW + timedelta(hours=late_h)))
    assert next(deadline_warnings(plan, found, NOW)).startswith("5% of runs miss limits.deadline")
    soon = replace(plan, limits=replace(plan.limits, deadline=NOW))
    assert deadline_problems(soon, found, NOW)
    assert not deadline_problems(soon, replace(found, only_priced="two nodes"), NOW)


def test_on_demand_the_run_needs_what_it_needs() -> None:
    assert refused(definition(capacity="on-demand", max_hours="0.1")) == [
        "limits.max_hours: at least 0.48 node-hours: half of the simulated runs need this or more, including 119 s"
        " for a clean stop. 0.48 is enough for nine runs in ten."
    ]


@pytest.mark.parametrize(("hours", "stopped"), [("0.45", "max_hours"), ("0.48", None)])
def test_an_accepted_limit_lets_the_jobs_meter_come_to_the_end_of_the_work(hours: str, stopped: str | None) -> None:
    plan = definition(capacity="on-demand", max_hours=hours)
    found = price(plan, CATALOG)
    exposure, hourly = found.chosen.exposure, found.hourly_usd
    rates = Rates(capacity="on-demand", on_demand=found.chosen.price.amount, spot=None, hourly=hourly)
    limits = RunLimits(max_usd=Decimal(3), max_hours=Decimal(hours), deadline=None)
    told = estimate.BillEstimate.from_json(Fields(to_json(found)), hourly)
    forecast = Forecast(plan.job.parameters, found.chosen.type, phases=told.phases, notice=told.notice)
    reserve_s = forecast.end_s(2999, None) + RESERVE_S
    assert exposure.reserve_h * 3600 == pytest.approx(reserve_s, abs=0.1)
    meter = Meter(rates=rates, launched_at=0.0, fixed_usd=Decimal(f"{exposure.fixed_usd:.4f}"))
    assert meter.limit(exposure.uninterrupted_h * 3600, limits, reserve_s) == stopped
    assert found.chosen.probability_stopped == (0 if stopped is None else 1)
    assert bool(refused(plan)) is bool(stopped)


def test_a_refused_limit_or_type_has_its_line_also_where_a_scenario_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "pretrain-d64.yaml"
    text = (SHIPPED / path.name).read_text().replace("max_hours: 31", "max_hours: 0.5")
    text += "  short:\n    limits: {max_hours: 0.4}\n"
    path.write_text(text)
    lines = text.splitlines()
    (own,) = problems(plain := load(path, now=NOW), price(plain, CATALOG, runs=200))
    (varied,) = problems(short := scenario(path, "short", now=NOW), price(short, CATALOG, runs=200))
    assert (own.path, varied.path) == ("limits.max_hours", "scenarios.short.limits.max_hours")
    assert "max_hours: 0.5" in lines[(own.line or 0) - 1]
    assert "max_hours: 0.4" in lines[(varied.line or 0) - 1]


@pytest.mark.parametrize("capacity", ["spot", "on-demand"])
def test_the_table_shows_what_a_limit_cuts_off_apart_from_interruptions(capacity: str) -> None:
    found = bill(config=growth(steps_per_phase=20_000), capacity=capacity, keep=Keep(bucket=False))
    shown = {
        re.split(r"\s{2,}", row)[0]: Decimal(row.split()[-1])
        for row in render(found).split("\n\n")[1].split("\n")[2:-1]
    }
    needed = found.chosen.needed_usd.p50
    assert found.usd.p50 < needed
    assert shown["interruptions"] == needed - found.chosen.total
    assert shown["total to finish = p50"] == needed
    assert found.cap is not None
    assert shown[f"stopped by {found.cap.first}"] == found.usd.p50 - needed
    assert shown["total = p50 within the limits"] == found.usd.p50
    assert "Their line is negative" not in flat(render(found))


def test_a_limit_that_few_runs_meet_is_named_beside_what_they_cost_within_it() -> None:
    found = bill(max_hours="0.75")
    assert found.cap is not None
    assert 0.01 < found.cap.probability < 0.5
    assert found.usd.p50 == found.chosen.needed_usd.p50
    assert "USD within the limits, done or not" in render(found)


def test_the_other_capacity_is_shown_at_what_it_takes_to_finish() -> None:
    found = bill(max_usd="1.00")
    assert found.on_demand is not None
    assert found.on_demand.usd.p50 < found.on_demand.needed_usd.p50  # the limit would stop the run
    row = next(line for line in render(found).split("\n") if line.startswith("USD on demand"))
    assert row.split()[-3] == f"{found.on_demand.total:.2f}"


def test_a_run_within_its_limits_has_one_total() -> None:
    assert "to finish" not in render(bill())
    assert "stopped by" not in render(bill())


def test_dollars_that_only_the_limit_counts_stand_in_the_table_in_the_warnings_words() -> None:
    found = bill(**RARE)
    counted = found.chosen.metered_usd
    row = next(line for line in render(found).split("\n") if line.startswith("USD as limits.max_usd counts it"))
    assert row.split()[-4:] == [*(f"{value:.2f}" for value in (counted.p10, counted.p50, counted.p90)), "-"]
    assert "counts interrupted first hours as well, which AWS does not charge" in render(found)
    cap = f"{(counted.p50 + counted.p90) / 2:.2f}"
    between = (
        f"limits.max_usd {cap} lies between p50 {counted.p50:.2f} and p90 {counted.p90:.2f} as limits.max_usd counts"
    )
    assert any(between in warning for warning in bill(**RARE | {"max_usd": cap}).warnings)
    below = f"{counted.p50 - Decimal('0.05'):.2f}"
    assert "need this or more as limits.max_usd counts it" in refused(definition(**RARE | {"max_usd": below}))[0]


def test_a_bill_that_charges_all_there_is_has_no_second_count() -> None:
    assert "counts" not in render(bill(hazard_per_hour="0"))
    assert "counts" not in render(bill(capacity="on-demand"))


def test_an_uncalibrated_bill_says_at_which_speed_a_limit_stops_the_run() -> None:
    """8 minutes of set-up, 0.307 h of work and 119 s for the stop just fit 0.5 h at 92 % of the speed."""
    plan = definition(capacity="on-demand", max_hours="0.5")
    found = price(plan, CATALOG)
    assert slowest(found.chosen, min(found.chosen.exposure.hours_at_cap())) == pytest.approx(0.922, abs=0.001)
    said = (
        "uncalibrated: below about 92% of the assumed speed (set-up apart) limits.max_hours stops the run before it is"
        " done"
    )
    assert said in found.warnings
    exposure = found.chosen.exposure
    for speed, stopped in ((0.92, True), (0.93, False)):
        slower = replace(exposure, phase_ends_h=tuple(end / speed for end in exposure.phase_ends_h))
        assert bool(simulation.simulate(slower, runs=1).stopped) is stopped
    assert f"{said}, even uninterrupted" in bill(max_hours="0.5").warnings
    assert "limits.max_usd stops" in " ".join(bill(max_usd="0.95").warnings)
    assert not any("of the assumed speed" in warning for warning in bill(max_hours="1").warnings)
    assert "chance that one stops the run: 0%" in flat(render(found))


def test_a_p50_that_stands_on_free_hours_says_what_it_is_with_them_charged() -> None:
    found = bill(hazard_per_hour="10", max_usd="50", max_hours="50")
    charged, p50 = found.chosen.metered_usd.p50, found.chosen.needed_usd.p50
    hours = round((charged - p50) / found.chosen.price.amount, 1)
    said = f"The p50 assumes that AWS waives {hours} node-hours (it does not bill an instance that it interrupts in its"
    said += f" first hour). If AWS billed them, p50 would be {charged:.2f}"
    assert said in found.warnings
    assert not any("AWS waives" in warning for warning in bill().warnings)


def test_dollars_at_a_hazard_are_those_of_a_bill_that_is_told_it() -> None:
    for _, hazard, usd in bill().usd_at_hazard:
        told = bill(hazard_per_hour=str(hazard)).chosen.needed_usd.mean
        assert float(usd) == pytest.approx(float(told), rel=0.005)


def test_no_type_is_recommended_that_has_no_bill() -> None:
    """The cheapest type that holds kernel-sft is a g7e.12xlarge; without its peak in the catalog it has no speed."""
    config = load(SHIPPED / "kernel-sft.yaml", now=NOW).job.parameters
    assert cheapest_holder(config, CATALOG, "us-east-2").startswith("g7e.12xlarge ")
    unknown = {
        name: replace(each, gpu=replace(each.gpu, bf16_tflops=None))
        for name, each in CATALOG.instances.items()
        if name.startswith("g7e.")
    }
    without = replace(CATALOG, instances=CATALOG.instances | unknown)
    named = cheapest_holder(config, without, "us-east-2").split(" ")[0]
    assert not named.startswith("g7")
    plan = replace(load(SHIPPED / "kernel-sft.yaml", now=NOW), scenario="")
    on_it = replace(plan, fleet=replace(plan.fleet, instance_types=(named,), capacity="on-demand"))
    assert price(on_it, CATALOG).usd.p50 > 0


def test_no_type_is_recommended_that_has_too_few_gpus() -> None:
    for gpus, named in ((None, "g6.xlarge"), (1, "g6.xlarge"), (4, "g6.12xlarge"), (8, "g6.48xlarge")):
        assert cheapest_holder(SftConfig(gpus=gpus), CATALOG, "us-east-1").startswith(f"{named} ")


def due(hours: float) -> StackDefinition:
    plan = definition(**TWO)
    return replace(plan, limits=replace(plan.limits, deadline=NOW + timedelta(hours=hours)))


def test_a_deadline_that_the_slower_listed_type_misses_uninterrupted_is_refused() -> None:
    """The dearest type needs 0.283 h, the other 0.447 h, and each needs 140 s to stop."""
    plan = due(0.40)
    (said,) = deadline_problems(plan, price(plan, CATALOG, runs=2000), NOW)
    needed = "the 0.49 hours that g5.xlarge needs without interruptions, including the stop: 2026-11-21T00:30Z"
    assert f"{needed} or later; this is 0.40 hours from now" in str(said)
    assert said.path == "limits.deadline"
    later = due(0.49)
    assert deadline_problems(later, price(later, CATALOG, runs=2000), NOW) == []


def test_the_share_of_runs_that_miss_the_deadline_is_a_warning_waits_counted() -> None:
    plan = due(1.0)
    found = price(plan, CATALOG, runs=2000)
    late = (found.chosen.needed.wall_hours > 1.0 - found.chosen.exposure.reserve_h).mean()
    assert 0.05 < late < 0.5
    said = next(deadline_warnings(plan, found, NOW))
    assert said.startswith(f"{late:.0%} of runs miss limits.deadline, 1.0 h from now: p50 is ")
    assert "`gpufleet compare tinystories-growth`" in said
    assert not [*deadline_warnings(due(24.0 * 7), found, NOW), *deadline_warnings(definition(**TWO), found, NOW)]


@pytest.mark.parametrize("span", [False, True])
def test_a_deadline_says_at_which_speed_it_stops_the_run_as_a_limit_does(span: bool) -> None:
    """On demand a run is late only if it is slower than assumed. The warning names the limit that is reached first."""
    hours = timedelta(hours=0.5)

    def said(**changes: Any) -> list[str]:
        plan = definition(capacity="on-demand", **changes)
        plan = replace(plan, limits=replace(plan.limits, deadline=hours if span else NOW + hours))
        return [*deadline_warnings(plan, price(plan, CATALOG), NOW)]

    assert said() == [
        "uncalibrated: below about 92% of the assumed speed (set-up apart) limits.deadline stops the run before it is"
        " done"
    ]
    assert said(max_hours="0.49") == []


def test_runs_that_wait_until_their_fleet_expires_are_a_warning_where_no_deadline_says_when() -> None:
    """Waits for a node take 20 h on average, and runs mostly begin with one; the fleet lives for 24 h + max_hours."""
    waits: dict[str, Any] = {"capacity_wait_minutes": "1200", "hazard_per_hour": "0.3"}
    found = bill(**waits)
    share = (found.chosen.needed.wall_hours + found.chosen.exposure.reserve_h > 26).mean()
    (said,) = [text for text in found.warnings if "expires" in text]
    assert 0.05 < int(said.split("%")[0]) / 100 == pytest.approx(share, abs=0.01)
    assert "limits.max_hours + 24 h after `up`; limits.deadline sets another time" in said
    plan = definition(**waits)
    later = replace(plan, limits=replace(plan.limits, deadline=NOW + timedelta(days=90)))
    stopped = bill(**waits, max_hours="0.3")  # max_hours ends every run, however long it waits
    for each in (bill(), bill(**waits, capacity="on-demand"), price(later, CATALOG, runs=2000), stopped):
        assert not any("expires" in text for text in each.warnings)


def test_the_bill_says_that_a_deadline_is_in_none_of_its_figures() -> None:
    plan, plain = due(0.40), definition(**TWO)
    found = price(plan, CATALOG, runs=100)
    assert "limits.deadline, 2026-11-21T00:24:00Z, is not part of this chance" in flat(render(found))
    assert "limits.deadline" not in render(price(plain, CATALOG, runs=100))
    assert found.usd == price(plain, CATALOG, runs=100).usd


def test_a_scenario_is_told_that_it_may_have_limits_of_its_own(tmp_path: Path) -> None:
    text = (SHIPPED / "sft-h100.yaml").read_text()
    file = tmp_path / "sft-h100.yaml"
    file.write_text(text)
    (said,) = refused(scenario(file, "l40s-4", now=NOW, to_run=False))
    assert said.endswith("A scenario may have its own limits: scenarios.l40s-4.limits.max_usd.")
    own = "  l40s-4:\n    limits: {max_usd: 125}\n"
    file.write_text(text.replace("  l40s-4:\n", own))
    (said,) = refused(scenario(file, "l40s-4", now=NOW, to_run=False))
    assert "may have its own" not in said
    file.write_text(text.replace("  l40s-4:\n", own.replace("125", "145")))
    assert refused(scenario(file, "l40s-4", now=NOW, to_run=False)) == []
