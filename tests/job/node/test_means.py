"""What the run may still spend, as a node knows it; and what follows for its timer and the hour of the schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.attempt import AttemptRecord, Beat, Exit, Node
from gpufleet.job.contract.messages import Spent
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.spent import History, Lives, Means, OtherNodes, count_node
from gpufleet.job.contract.terms import OwnLimits, RunLimits, Terms, TypePrices
from gpufleet.job.node.allowance import LEAST_S, OPEN_S, SOON_S, STOP_S, TIMER_S, Allowance

T0 = 1_800_000_000.0
LIMITS = RunLimits(max_usd=Decimal(12), max_hours=Decimal(20), deadline=None, expires=T0 + 44 * 3600)
TERMS = Terms(
    limits=LIMITS,
    capacity="spot",
    prices={"g5.2xlarge": TypePrices(on_demand=Decimal("1.15"), spot={"us-east-2a": Decimal("0.40")}, gpus=1)},
    hourly={"root disk": Decimal("0.05")},
    fixed_usd=Decimal(0),
)


def of_node(
    *others: tuple[AttemptRecord, Beat | None],
    terms: Terms = TERMS,
    told: History = History(),  # noqa: B008 - immutable
) -> Means:
    known = OtherNodes(Node("i-me", "g5.2xlarge", "us-east-2a", T0), others)
    known.take(told, T0)
    return known.means(terms)


def hours_of(limits: RunLimits = LIMITS, *, spent: Spent | None = None) -> list[Any]:
    """Until nothing is left, from the launch on, and of what."""
    over, limit = of_node(terms=replace(TERMS, limits=limits)).when_over(spent)
    return [(over - T0) / 3600, limit]


def meter_told(usd: str, hours: float, at_h: float) -> Spent:
    return Spent(spent_usd=Decimal(usd), spent_s=Decimal(round(hours * 3600)), at=T0 + at_h * 3600)


def test_what_is_left_counts_at_the_dearest_price_of_an_hour_until_the_meter_says_what_it_cost() -> None:
    assert hours_of() == [pytest.approx(10), "max_usd"]  # 12 USD at 1.15 and 0.05
    assert hours_of(spent=meter_told("3.60", 8, 8)) == [pytest.approx(8 + 7), "max_usd"]  # they cost 0.45 each
    assert hours_of(spent=meter_told("7.50", 16, 16)) == [pytest.approx(19.75), "max_usd"]
    assert hours_of(spent=meter_told("8.55", 19, 19)) == [pytest.approx(20), "max_hours"]
    assert hours_of(replace(LIMITS, max_hours=Decimal(5))) == [pytest.approx(5), "max_hours"]


def test_two_nodes_at_once_have_what_the_meter_has_counted_of_both() -> None:
    assert hours_of(spent=meter_told("8.00", 19, 10)) == [pytest.approx(11), "max_hours"]


def test_four_nodes_have_a_quarter_of_the_time_where_no_meter_tells_of_them() -> None:
    of_four = of_node(terms=replace(TERMS, nodes=4))
    assert of_four.when_over(None) == ((T0 + 2.5 * 3600), "max_usd")
    hours = of_node(terms=replace(TERMS, nodes=4, limits=replace(LIMITS, max_hours=Decimal(8))))
    assert hours.when_over(None) == ((T0 + 2 * 3600), "max_hours")


def test_a_later_node_has_what_earlier_ones_left_although_no_meter_told_of_them() -> None:
    first = AttemptRecord(
        instance="i-1", type="g5.2xlarge", zone="us-east-2a", launched_at=iso(T0 - 8 * 3600), exit=Exit(1, "crashed")
    )
    lost = replace(first, instance="i-2", launched_at=iso(T0 - 4 * 3600), exit=None)
    told = History(ended={"i-1": T0 - 6 * 3600, "i-2": T0 - 3 * 3600})
    over, limit = of_node((first, None), (lost, None), told=told).when_over(None)
    assert [over, limit] == [pytest.approx(T0 + 7 * 3600), "max_usd"]  # three of ten hours
    beat = Beat(
        attempt_s=Decimal(7200), lived_s=Decimal(7200), compute_usd=Decimal("0.80"), usd_per_hour=Decimal("0.4")
    )
    over, _ = of_node((first, beat), (lost, None), told=told).when_over(None)
    assert over == pytest.approx(T0 + (12 - 0.90 - 1.2) / 1.2 * 3600)


class MeansWorld:
    """A clock, a schedule that remembers, and a meter that tells what it is given."""

    def __init__(self, folder: Path, limits: RunLimits = LIMITS) -> None:
        self.now, self.hours, self.refuses = T0 + 120, list[float](), False
        self.folder = folder
        (folder / "control").mkdir(exist_ok=True)
        self.allowance = Allowance(self, self, 72_000)  # type: ignore[arg-type]
        self.found = self.allowance.begin(of_node(terms=replace(TERMS, limits=limits)), folder)

    def __call__(self) -> float:
        return self.now

    def move(self, at: float, fleets: Sequence[str] = ()) -> bool:
        if not self.refuses:
            self.hours.append(at - T0)
        return not self.refuses

    def tell(self, usd: str, hours: float, **more: float) -> None:
        told = {"spent_usd": usd, "spent_s": str(hours * 3600), "at": self.now, **more}
        (self.folder / "control/spent.json").write_text(json.dumps(told))

    def passes(self, hours: float, usd_per_hour: Decimal | None = None) -> None:
        """So many hours; the meter tells what they cost, or has fallen silent."""
        until = self.now + hours * 3600
        while self.now < until:
            self.now += 60
            if usd_per_hour is not None:
                seconds = round(self.now - T0)
                self.tell(str(usd_per_hour * seconds / 3600), seconds / 3600)
            self.allowance.look()


@pytest.fixture
def world(tmp_path: Path) -> MeansWorld:
    return MeansWorld(tmp_path)


def test_the_hour_is_moved_before_anything_that_costs(world: MeansWorld) -> None:
    assert world.hours == [pytest.approx(10 * 3600 + STOP_S)]
    assert [*world.found] == [pytest.approx(T0 + 10 * 3600), "max_usd"]
    assert world.allowance.timer_at == pytest.approx(T0 + 10 * 3600 + TIMER_S)


def test_while_the_meter_speaks_the_hour_moves_with_it_and_not_often(world: MeansWorld) -> None:
    world.passes(8, Decimal("0.45"))
    assert world.hours[-1] == pytest.approx(15 * 3600 + STOP_S, abs=300)
    assert 8 * 3600 / 370 <= len(world.hours) <= 8 * 3600 / 290 + 2
    assert world.allowance.timer_at == pytest.approx(T0 + 15 * 3600 + TIMER_S, abs=120)


def test_once_the_meter_is_silent_timer_and_hour_stand(world: MeansWorld) -> None:
    world.passes(2, Decimal("0.45"))
    timer = world.allowance.timer_at
    world.passes(4)
    assert world.allowance.timer_at == timer
    assert T0 + world.hours[-1] == pytest.approx(timer - TIMER_S + STOP_S)


def test_a_meter_that_tells_and_does_not_stop_moves_neither_past_the_limit(world: MeansWorld) -> None:
    world.passes(26, Decimal("0.60"))  # 20 hours long there was something left
    limit = world.allowance.timer_at - TIMER_S
    assert limit == pytest.approx(T0 + 20 * 3600, abs=60)
    assert max(world.hours) == pytest.approx(20 * 3600 + STOP_S, abs=300)
    assert world.hours[-1] <= 20 * 3600 + STOP_S


def test_a_meter_whose_clock_is_another_gives_no_more_time(world: MeansWorld) -> None:
    world.tell("0.60", 1, at=T0 + 30 * 3600)
    world.allowance.look()
    assert world.allowance.timer_at == pytest.approx(T0 + 120 + 9.5 * 3600 + TIMER_S)
    (world.folder / "control/spent.json").write_text("{torn")
    world.allowance.look()
    assert world.allowance.timer_at == pytest.approx(T0 + 120 + 9.5 * 3600 + TIMER_S)


def test_a_word_of_the_meter_that_cannot_be_believed_leaves_the_one_before_it(world: MeansWorld) -> None:
    world.passes(2, Decimal("0.45"))
    timer = world.allowance.timer_at
    (world.folder / "control/spent.json").write_text('{"spent_usd": "-1", "spent_s": "0", "at": 0}')
    world.passes(1)
    assert world.allowance.timer_at == timer


def test_an_hour_that_cannot_be_moved_stands_and_is_tried_again(world: MeansWorld) -> None:
    world.refuses = True
    world.passes(1, Decimal("0.45"))
    assert len(world.hours) == 1
    world.refuses = False
    world.passes(0.1, Decimal("0.45"))
    assert len(world.hours) > 1


def test_a_node_that_aws_takes_puts_the_hour_back_to_the_expiry_and_takes_that_back_where_it_stays(
    world: MeansWorld,
) -> None:
    world.allowance.open()
    assert world.hours[-1] == 44 * 3600
    world.passes(OPEN_S / 3600 + 0.01)
    assert world.hours[-1] == pytest.approx(10 * 3600 + STOP_S)


def test_a_node_that_aws_takes_when_next_to_nothing_is_left_leaves_the_hour_where_it_is(world: MeansWorld) -> None:
    world.now = T0 + 10 * 3600 - LEAST_S
    world.allowance.open()
    assert world.hours == [pytest.approx(10 * 3600 + STOP_S)]


def test_the_hour_is_never_past_the_fleet_s_expiry_and_always_still_to_come(tmp_path: Path) -> None:
    near = MeansWorld(tmp_path, replace(LIMITS, expires=T0 + 3600))
    assert near.hours == [3600]
    spent = MeansWorld(tmp_path, replace(LIMITS, max_hours=Decimal("0.01")))
    assert spent.found[0] < spent.now
    assert spent.hours == [pytest.approx(36 + STOP_S)]
    spent.now = T0 + 7200
    spent.allowance.end_fleets(["fleet-1"])
    assert spent.hours[-1] == 7200 + SOON_S
    spent.passes(1)
    assert spent.hours[-1] == 7200 + SOON_S  # nothing moves it any more


def test_a_boot_with_nothing_left_ends_the_fleet_at_once(tmp_path: Path) -> None:
    world = MeansWorld(tmp_path, replace(LIMITS, max_hours=Decimal("0.001")))
    world.now += 7200
    later = Allowance(world, world, 100)  # type: ignore[arg-type]
    later.begin(of_node(terms=replace(TERMS, limits=replace(LIMITS, max_hours=Decimal("0.001")))), tmp_path)
    assert world.hours[-1] == world.now - T0 + SOON_S
    stood = list(world.hours)
    for _ in range(100):
        world.now += 10
        later.look()
    assert world.hours == stood


def test_a_stage_on_the_node_of_others_has_its_own_limits_within_those_of_all() -> None:
    terms = replace(TERMS, own=OwnLimits(max_usd=Decimal(3), max_hours=Decimal(2)))
    limits = terms.limits_after(Decimal(4), Decimal(5 * 3600))
    assert (limits.max_usd, limits.max_hours) == (Decimal(7), Decimal(7))
    limits = terms.limits_after(Decimal(10), Decimal(19 * 3600))
    assert (limits.max_usd, limits.max_hours) == (Decimal(12), Decimal(20))
    assert TERMS.limits_after(Decimal(4), Decimal(0)) == TERMS.limits
    known = OtherNodes(Node("i-me", "g5.2xlarge", "us-east-2a", T0))
    known.before = Decimal(4), Decimal(5 * 3600)
    over, limit = known.means(terms).when_over(None)
    assert [(over - T0) / 3600, limit] == [pytest.approx(2), "max_hours"]


def test_a_node_of_an_earlier_stage_on_the_same_fleet_is_no_node_of_this_one() -> None:
    told = History(launched={"i-earlier": T0 - 3600, "i-lost": T0 + 60}, ended={"i-earlier": T0 - 60})
    known = OtherNodes(Node("i-me", "g5.2xlarge", "us-east-2a", T0 + 600, since=T0))
    known.take(told, T0 + 600)
    assert known.untold == {"i-lost": T0 + 60}


def test_a_machine_that_stayed_costs_until_its_stage_ended_and_has_no_minimum_charge_again() -> None:
    ended = AttemptRecord(
        instance="i-1",
        type="g5.2xlarge",
        zone="us-east-2a",
        launched_at=iso(T0),
        older_s=Decimal(3590),
        stayed=True,
        exit=Exit(0, "finished", at=iso(T0 + 20)),
    )
    lives = Lives(ended={"i-1": T0 + 7200})
    counted = count_node(TERMS, ended, None, lives)
    assert (counted.seconds, counted.lived_s) == (Decimal(20), Decimal(20))
    taken = replace(counted, reclaimed=True, record=replace(ended, stayed=False))
    assert taken.free_usd == 0  # AWS took the machine after its first hour
    assert replace(taken, record=replace(ended, older_s=None)).free_usd == taken.compute_usd > 0
    assert count_node(TERMS, replace(ended, stayed=False), None, lives).seconds == 7200
