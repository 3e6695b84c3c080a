"""The bill in a dozen lines: the first line answers, the picture shows the same, and the rest says what to do."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill.answer import LINES, answer, grouped, headline, picture
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.fallback import price_fallbacks
from gpufleet.infra.bill.record import to_json
from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import CapacityBlock, Goal
from gpufleet.infra.errors import BeforeLaunch
from tests.infra.cost_definitions import definition, on_nodes

CATALOG = load_catalog()
TODAY = date(2024, 2, 1)  # no price is old yet


def lines(bill: Bill, *, today: date = TODAY, **more: Any) -> list[str]:
    return list(answer(bill, "gpufleet cost mine", today=today, **more))


def quantiles(low: str, middle: str, high: str) -> Quantiles:
    return Quantiles(p10=Decimal(low), p50=Decimal(middle), p90=Decimal(high), mean=Decimal(middle))


def test_the_first_line_has_the_dollars_their_range_the_hours_the_node_and_where_it_stops() -> None:
    bill = price(definition(), CATALOG, runs=2000)
    usd = r"about ([\d.]+) USD \(([\d.]+) to ([\d.]+) in eight runs of ten\)"
    place = r"([\d.]+) h, on g5\.2xlarge spot in us-east-2; stops at 2 node-hours, or 3 USD\."
    found = re.fullmatch(f"{usd}, {place}", headline(bill))
    assert found is not None
    figures = (bill.usd.p50, bill.usd.p10, bill.usd.p90)
    assert [Decimal(each) for each in found.groups()[:3]] == [figure.quantize(Decimal("0.01")) for figure in figures]
    assert float(found[4]) == pytest.approx(float(bill.chosen.wall_hours.p50), rel=0.05)


def test_a_run_that_a_limit_may_stop_says_how_often() -> None:
    bill = price(definition(hazard_per_hour="3", max_usd="0.90"), CATALOG, runs=2000)
    assert bill.cap is not None
    assert bill.cap.probability > 0.01
    assert f"stops at 0.9 USD, {bill.cap.probability:.0%} of runs before they are done." in headline(bill)


def test_several_nodes_types_and_a_block_are_named() -> None:
    assert "on 2 x g5.2xlarge spot in" in headline(price(on_nodes(definition(), 2), CATALOG, runs=200))
    both = definition(types=("g5.2xlarge", "g6e.2xlarge"), region="us-east-1", max_usd="20")
    assert "g6e.2xlarge spot, the dearest of 2 types, in us-east-1" in headline(price(both, CATALOG, runs=200))
    start = datetime(2026, 12, 1, tzinfo=UTC)
    block = CapacityBlock(start=start, end=start + timedelta(hours=24), fee_usd=Decimal(90))
    plain = definition(capacity="block", max_usd="1000", max_hours="100")
    bought = replace(plain, fleet=replace(plain.fleet, block=block, zones=plain.fleet.zones[:1]))
    said = headline(price(bought, CATALOG, runs=200))
    assert "g5.2xlarge in its capacity block in us-east-2; stops at the block's end, or 1000 USD" in said


def test_with_a_fallback_the_figures_are_those_with_it() -> None:
    plain = definition(max_usd="30", max_hours="20", hazard_per_hour="1")
    limits = replace(plain.limits, deadline=timedelta(hours=2.5))
    late = replace(plain, limits=limits, fleet=replace(plain.fleet, fallback="on-demand"))
    bill = price(late, CATALOG, runs=2000)
    (fallback,) = price_fallbacks(late, bill, datetime(2026, 11, 21, tzinfo=UTC))
    said = headline(bill, [fallback])
    assert said.startswith(f"about {fallback.usd.p50:.2f} USD")
    assert f"on demand when late ({fallback.on_time:.0%} are done by the deadline)" in said


def test_what_is_only_priced_says_why_it_cannot_be_launched() -> None:
    bill = replace(price(definition(), CATALOG, runs=200), cap=None, only_priced="adds a buffer to its work")
    assert headline(bill).endswith("; it cannot be launched: it adds a buffer to its work.")


@pytest.mark.parametrize(
    ("usd", "shown"),
    [
        (("0.79", "1.49", "2.36"), "about 1.49 USD (0.79 to 2.36"),
        (("80.123", "94.39", "120.3"), "about 94.4 USD (80.1 to 120.3"),
        (("5012.3", "7004.9", "9511"), "about 7005 USD (5012 to 9511"),
        (("0.8812", "0.8833", "0.8871"), "about 0.88 USD (0.88 to 0.89"),
        (("0.0141", "0.0158", "0.0182"), "about 0.0158 USD (0.0141 to 0.0182"),
    ],
)
def test_no_figure_has_more_digits_than_its_range_bears(usd: tuple[str, str, str], shown: str) -> None:
    bill = replace(price(definition(), CATALOG, runs=200), usd=quantiles(*usd))
    assert headline(bill).startswith(shown)


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_the_picture_stands_where_its_figures_are(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    (line,) = picture(quantiles("5", "10", "15"), Decimal(20))
    bar = line[4 : line.index(" 20 USD (limit)")]
    width = len(bar)
    assert len(line) <= min(int(columns), 80)
    assert [bar.index(mark) / width for mark in "[|]"] == pytest.approx([0.25, 0.5, 0.75], abs=0.03)
    assert "!" not in bar


def test_the_picture_shows_a_limit_below_the_range_s_end_and_never_loses_a_mark() -> None:
    (line,) = picture(quantiles("5", "10", "20"), Decimal(15))
    assert line.endswith(" 22 USD (! limit)")
    assert line.index("|") < line.index("!") < line.index("]")
    for usd in (("1", "1", "1"), ("0.001", "0.002", "0.003")):
        (line,) = picture(quantiles(*usd), Decimal(1))
        assert line.index("[") < line.index("|") < line.index("]")
    assert not list(picture(quantiles("0", "0", "0"), None))


def test_the_charges_that_matter_and_the_rest_add_up_to_the_answer() -> None:
    bill = price(definition(), CATALOG, runs=2000)
    rows = [line.split("  ") for line in lines(bill) if line.startswith("  ") and " USD per " in line]
    assert 1 <= len(rows) <= 3
    (rest,) = (line for line in lines(bill) if line.startswith("  everything else"))
    amounts = [Decimal(next(filter(None, row[2:]))) for row in rows] + [Decimal(rest.split()[2])]
    assert float(sum(amounts)) == pytest.approx(float(bill.usd.p50), abs=0.02)


def test_all_is_said_in_a_dozen_lines_and_the_last_one_names_the_rest() -> None:
    bill = price(definition(), CATALOG, runs=200)
    many = tuple(BeforeLaunch(f"look at this thing, number {number}") for number in range(20))
    shown = lines(replace(bill, warnings=(*many, "the speed is guessed")), cheaper="Cheaper: g6.xlarge spot")
    assert len(shown) == LINES
    assert "  - look at this thing, number 0" in shown
    assert shown[-1] == "Worth knowing: 1 more. The whole bill, with every warning: `gpufleet cost mine --all`"
    few = lines(replace(bill, warnings=(BeforeLaunch("look"),)))
    assert few[-3:-1] == ["Before you launch:", "  - look"]
    assert not [line for line in lines(replace(bill, warnings=())) if line.startswith(("Before", "Worth"))]


def test_old_prices_are_something_to_do() -> None:
    bill = replace(price(definition(), CATALOG, runs=200), warnings=())
    old = lines(bill, today=date(2027, 11, 21))
    assert "  - `gpufleet prices refresh`: 100% of the dollars stand on prices older than 90 days" in old
    assert "refresh" not in " ".join(lines(bill, today=min(line.as_of for line in bill.chosen.lines)))


def test_warnings_that_one_command_settles_are_one_line() -> None:
    assert grouped(["a is unpinned: run `x --pin`.", "look here", "b has no digest: run `x --pin`."]) == [
        "`x --pin`: a is unpinned, and b has no digest",
        "look here",
    ]


def test_a_long_warning_ends_at_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    bill = replace(price(definition(), CATALOG, runs=200), warnings=(BeforeLaunch("remarkable " * 30),))
    (line,) = (each for each in lines(bill) if each.startswith("  - "))
    assert line.endswith("remarkable ...")
    assert len(line) <= 60


def test_the_chance_of_a_goal_is_a_share_of_the_runs_behind_the_range() -> None:
    plain = price(definition(), CATALOG)
    half = Goal(usd=plain.usd.p50, hours=Decimal(1000), results={"val_loss": Decimal("0.3")})
    bill = price(replace(definition(), goal=half), CATALOG)
    by_name = {goal.name: goal.share for goal in bill.goals}
    assert by_name["usd"] == pytest.approx(0.5, abs=0.02)
    assert by_name["hours"] == pytest.approx(1 - bill.chosen.probability_stopped)  # a stopped run has met no goal
    assert by_name["val_loss"] is None
    assert bill.usd == plain.usd  # a goal changes no figure
    said = " ".join(lines(bill))
    assert f"at most {bill.usd.p50.normalize():f} USD (50%)" in said
    assert "val_loss at most 0.3 (the run will tell)" in said
    assert to_json(bill)["goals"][2] == {"name": "val_loss", "wanted": "0.3", "share": None}
    assert "goals" not in to_json(plain)
