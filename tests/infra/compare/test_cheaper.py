"""The cheaper options on the bill: each could be written into the file as it is, and costs the stated price."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.cheaper import REFINED, SHOWN, Cheaper, bill_and_cheaper, cheaper
from gpufleet.infra.compare.ranking import LEAST
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import Limits, StackDefinition
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.review.policy import Policy
from gpufleet.job.kind import EXPERIMENTS
from tests.infra.cost_definitions import definition, on_nodes
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("everything_known")

NOW = datetime(2026, 11, 25, tzinfo=UTC)
CATALOG = load_catalog()
WIDE = Limits(max_usd=Decimal(9000), max_hours=Decimal(9000))


def shipped(stack: str) -> StackDefinition:
    return load(ROOT / "stacks" / f"{stack}.yaml", now=NOW)


def cheaper_options(asked: StackDefinition, hours_left: float | None = None) -> Cheaper:
    options = cheaper(asked, price(asked, CATALOG), Study(CATALOG, hours_left=hours_left))
    assert options is not None
    return options


def flat(bill: Bill, options: Cheaper) -> str:
    return " ".join(render(bill, cheaper=options.lines() if options else None).split())


@pytest.mark.parametrize("stack", sorted(EXPERIMENTS))
def test_each_option_put_into_the_file_is_accepted_and_costs_what_was_said(stack: str, tmp_path: Path) -> None:
    asked = shipped(stack)
    mean = price(asked, CATALOG).chosen.needed_usd.mean
    text = (ROOT / "stacks" / f"{stack}.yaml").read_text()
    options = cheaper_options(asked)
    for row in options.rows:
        file = tmp_path / f"{stack}.yaml"
        written = re.sub(r"(?m)^  instance_types: .*$", f"  instance_types: [{row.type}]", text, count=1)
        file.write_text(re.sub(r"(?m)^  capacity: [a-z-]+", f"  capacity: {row.capacity}", written, count=1))
        there = load(file, now=NOW)
        assert (there.fleet.instance_types, there.fleet.capacity) == ((row.type,), row.capacity)
        bill = price(there, CATALOG, runs=ranking.RUNS_SHOWN)
        assert problems(there, bill) == []
        assert row.usd is not None
        same = bill.chosen.needed_usd
        for there_usd, said_usd in zip(astuple(same), astuple(row.usd), strict=True):
            assert abs(there_usd / said_usd - 1) < 2 * LEAST  # simulated runs that need many nodes are extrapolated
        assert same.mean < mean * (1 - LEAST)


def test_none_is_left_out_before_it_is_priced_that_would_be_cheaper() -> None:
    asked = shipped("sft-h100")
    below = price(asked, CATALOG).chosen.needed_usd.mean * 2
    every, some = (
        {
            (row.type, row.capacity, row.usd)
            for row in ranking.every_option(asked, (asked,), Study(CATALOG), runs=50, likely=False, below=limit)
            if row.ranked and row.usd and row.usd.mean < below
        }
        for limit in (None, below)
    )
    assert every == some
    assert len({capacity for _, capacity, _ in some}) == 2
    assert len(some) > 10


def test_those_that_are_not_simulated_more_closely_are_sure_or_not_by_their_own_runs() -> None:
    file = ROOT / "stacks" / "two-tower.yaml"
    (plan,) = (each for each in scenarios(file, now=NOW) if each.scenario == "o-on-demand")
    options = cheaper_options(plan)
    assert len(options.rows) + options.more > REFINED  # spot costs a third of that


def test_the_plan_of_sft_h100_has_options_at_half_its_price() -> None:
    options = cheaper_options(shipped("sft-h100"))
    assert len(options.rows) == SHOWN
    means = [row.usd.mean for row in options.rows if row.usd]
    assert means == sorted(means)
    assert means[0] < Decimal("98.68") / 2


def test_a_type_that_passes_a_limit_is_counted_and_not_named() -> None:
    asked = shipped("sft-h100")
    held, free = cheaper_options(asked), cheaper_options(replace(asked, limits=WIDE))
    slow = "g6e.2xlarge"  # this type needs 39 hours, and 16 are allowed
    assert slow not in {row.type for row in held.rows}
    assert slow in {row.type for row in free.rows}
    assert held.beyond > 0
    assert free.beyond == 0
    assert SHOWN + free.more + free.unsure == len(held.rows) + held.more + held.unsure + held.beyond


def test_a_type_that_misses_the_deadline_is_counted_and_not_named() -> None:
    asked = shipped("sft-h100")
    asked = replace(asked, limits=WIDE)
    soon, later = cheaper_options(asked, hours_left=20.0), cheaper_options(asked)
    slow = "g6e.2xlarge"  # 39 hours
    assert slow in {row.type for row in later.rows}
    assert slow not in {row.type for row in soon.rows}
    counted = [len(each.rows) + each.more + each.unsure + each.beyond for each in (soon, later)]
    assert counted[0] == counted[1]
    assert soon.beyond > later.beyond


def test_one_that_misses_the_deadline_in_a_third_of_runs_is_not_named() -> None:
    """The file's own bill, on demand, is in time in every run."""
    asked = replace(shipped("pretrain-d64"), limits=WIDE)
    asked = replace(asked, fleet=replace(asked.fleet, capacity="on-demand"))
    assert {"p5.48xlarge"} <= {row.type for row in cheaper_options(asked).rows}
    named = {row.type: row.late for row in cheaper_options(asked, hours_left=9.0).rows}
    assert "p5.48xlarge" not in named
    assert max(named.values(), default=0.0) <= 0.1


def test_what_the_fleet_may_pick_already_is_no_option() -> None:
    asked = definition(types=("g5.2xlarge", "g6.xlarge"))  # the bill stands on the dearer of the two
    assert "g6.xlarge" in {row.type for row in cheaper_options(definition()).rows}
    assert "g6.xlarge" not in {row.type for row in cheaper_options(asked).rows}


def test_a_listed_type_is_one_with_the_other_capacity() -> None:
    rows = cheaper_options(definition(capacity="on-demand", max_usd="20")).rows
    assert {row.capacity for row in rows} == {"spot"}
    asked = definition(capacity="on-demand", types=tuple(row.type for row in rows), max_usd="20")
    assert {row.type for row in cheaper_options(asked).rows} == {row.type for row in rows}


def test_several_nodes_are_compared_with_nothing() -> None:
    asked = on_nodes(definition(max_usd="20"), 2)
    assert cheaper(asked, price(asked, CATALOG), Study(CATALOG)) is None


def test_the_bill_names_them_and_where_all_are() -> None:
    asked = shipped("sft-h100")
    options = replace(cheaper_options(asked), more=2, unsure=1)
    text = flat(price(asked, CATALOG), options)
    (first, *_) = options.rows
    assert f"{first.type} spot {first.gpus} {first.ranks} " in text
    assert "2 more within the limits, 1 perhaps cheaper, in fewer than 80% of runs, " in text
    assert f"{options.beyond} cheaper ones beyond a limit or rule" in text
    assert "all: `gpufleet compare sft-h100`." in text
    assert "at an assumed speed" not in text


def test_half_the_set_up_is_priced_where_it_matters() -> None:
    """Per start, two-tower trains for minutes and sft-h100 for half a day."""
    asked = shipped("two-tower")
    bill, options = price(asked, CATALOG), cheaper_options(asked)
    assert options.half_setup is not None
    minutes, usd = options.half_setup
    runs = bill.chosen.exposure
    starts = Decimal((1 + float(bill.chosen.interruptions.mean)) * runs.setup_h / 2 * runs.compute_usd_h)
    assert minutes == 8.0
    assert usd == pytest.approx(starts, abs=Decimal("0.01"))
    said = f"Half the 8.0 min of set-up, by a smaller image or an AMI that holds it, takes about {usd:.2f} USD off p50"
    assert said in flat(bill, options)
    assert options.to_json()["half_setup_usd"] == float(usd)
    assert cheaper_options(shipped("sft-h100")).half_setup is None


def test_a_bill_without_any_says_so() -> None:
    asked = next(
        each for each in scenarios(ROOT / "stacks" / "kernel-sft.yaml", now=NOW) if each.scenario == "curriculum"
    )
    options = cheaper_options(asked)
    assert options.rows == ()
    said = flat(price(asked, CATALOG), options)
    assert "No other type is sure to do this work for less; 1 cheaper one beyond a limit or rule; all:" in said
    assert "all: `gpufleet compare kernel-sft --scenario curriculum`." in said


def test_a_scenarios_bill_names_the_comparison_of_that_scenario() -> None:
    asked = replace(shipped("kernel-sft"), scenario="ours")
    assert cheaper_options(asked).command == "gpufleet compare kernel-sft --scenario ours"


def test_an_assumed_speed_beside_a_declared_one_is_marked() -> None:
    asked = definition(step_ms=("300", "600", "2000"), max_usd="20", max_hours="20")  # far slower than the data sheet
    options = cheaper_options(asked)
    assert options.assumed == {row.type for row in options.rows if not row.type.startswith("g5.")} != set()
    text = flat(price(asked, CATALOG), options)
    assert all(f"* {row.type} spot " in text for row in options.rows if row.type in options.assumed)
    assert "* at a speed that is assumed or guessed; the bill's own is measured or declared" in text


def test_what_is_only_priced_is_held_against_no_limit() -> None:
    """A bill that is only priced is not checked against limits, either."""
    conservative = {each.scenario: each for each in scenarios(ROOT / "stacks" / "kernel-sft.yaml", now=NOW)}[
        "conservative"
    ]
    assert conservative.variant.only_priced
    options = cheaper_options(conservative, hours_left=-1.0)
    assert options.rows[0].capacity == "spot"
    assert options.beyond == 0


def test_what_a_rule_of_the_project_forbids_is_not_named(tmp_path: Path) -> None:
    asked = shipped("sft-h100")
    _, free = bill_and_cheaper(asked, tmp_path, CATALOG, now=NOW, rules=None)
    _, held = bill_and_cheaper(asked, tmp_path, CATALOG, now=NOW, rules=Policy(allowed_types=("g6e.*",)))
    assert free is not None
    assert held is not None
    assert {row.type.partition(".")[0] for row in held.rows} == {"g6e"}
    assert len(held.rows) + held.more + held.beyond == len(free.rows) + free.more + free.beyond
