"""Money to the ten-thousandth, and the limits before they are passed."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract import spent
from gpufleet.job.contract.attempt import AttemptRecord, Beat, Exit, Node
from gpufleet.job.contract.run import RunFile, load
from gpufleet.job.contract.spent import KEPT_S, LATE_S, History, Lives, OtherNodes
from gpufleet.job.contract.terms import Rates, RunLimits, Terms, TypePrices
from gpufleet.job.supervisor import attempts, fleet
from gpufleet.job.supervisor.meter import Meter, spot_history
from gpufleet.job.supervisor.store import FolderStore
from tests.job import runs

T0 = runs.LAUNCHED
SPOT = Rates(
    capacity="spot",
    on_demand=Decimal("1.212"),
    spot=Decimal("0.36"),
    hourly={"root disk": Decimal("0.01"), "public IPv4": Decimal("0.005")},
)
NO_LIMITS = RunLimits(max_usd=Decimal(10**6), max_hours=Decimal(10**6), deadline=None)


def meter(rates: Rates = SPOT, **changes: Any) -> Meter:
    """AWS tells the bill's price, unless `changes` say otherwise."""
    made = Meter(rates=rates, launched_at=T0, **{"spot_price": lambda at: rates.spot, **changes})
    if "spot_price" not in changes:
        made.refresh(T0)
    return made


def test_an_hour_at_the_spot_price_disks_and_address() -> None:
    spent = meter(fixed_usd=Decimal("0.01")).spent(T0 + 3600)
    assert (spent.compute_usd, spent.attempt_usd) == (Decimal("0.3600"), Decimal("0.3750"))
    assert spent.usd == Decimal("0.3850")
    assert spent.seconds == 3600


def test_dollars_have_four_decimals_as_in_the_bill() -> None:
    spent = meter(replace(SPOT, spot=Decimal("0.37"))).spent(T0 + 100)  # 0.010277..., and 0.000416... of extras
    assert (str(spent.compute_usd), str(spent.attempt_usd), str(spent.usd)) == ("0.0103", "0.0107", "0.0107")


def test_a_start_is_billed_for_a_minute_at_least() -> None:
    assert meter().spent(T0 + 5).attempt_s == 60
    assert meter().spent(T0 + 5).attempt_usd == meter().spent(T0 + 60).attempt_usd
    assert meter().spent(T0 + 61).attempt_s == 61


def test_each_instance_hour_has_its_own_price() -> None:
    prices = {0: Decimal("0.30"), 1: Decimal("0.90")}
    made = meter(spot_price=lambda at: prices[int((at - T0) // 3600)])
    made.refresh(T0 + 10)
    assert made.spent(T0 + 3600).compute_usd == Decimal("0.3000")
    made.refresh(T0 + 3700)
    assert made.spent(T0 + 5400).compute_usd == Decimal("0.7500")
    assert made.spent(T0 + 5400).usd_per_hour == made.spent(T0 + 3600.5).usd_per_hour == Decimal("0.90")


def test_an_hour_whose_price_aws_does_not_tell_counts_at_the_ceiling_whatever_the_one_before_cost() -> None:
    made = meter(spot_price=lambda at: Decimal("0.90") if at < T0 + 3600 else None)
    made.refresh(T0 + 10)
    made.refresh(T0 + 7300)
    assert made.spent(T0 + 9000).compute_usd == Decimal("0.90") + Decimal("1.212") * Decimal("1.5")
    assert made.spent(T0 + 9000).usd_per_hour == Decimal("1.212")
    assert made.spent(T0 + 9000).ceiling_s == 5400


def test_on_demand_asks_nobody() -> None:
    def fail_if_asked(at: float) -> Decimal:
        raise AssertionError

    made = meter(
        Rates(capacity="on-demand", on_demand=Decimal("1.2"), spot=Decimal("0.3"), hourly={}),
        spot_price=fail_if_asked,
    )
    made.refresh(T0 + 10)
    assert made.spent(T0 + 1800).usd == Decimal("0.6000")
    assert made.spent(T0 + 1800).ceiling_s == 0


@pytest.mark.parametrize(("spot", "usd"), [(None, "0.6000"), (Decimal("0.36"), "0.6000"), (Decimal("1.4"), "0.7000")])
def test_until_aws_tells_a_spot_price_the_cap_counts_its_ceiling_and_says_for_how_long(
    spot: Decimal | None, usd: str
) -> None:
    rates = Rates(capacity="spot", on_demand=Decimal("1.2"), spot=spot, hourly={})
    made = meter(rates, spot_price=lambda at: None)
    made.refresh(T0 + 10)
    assert made.spent(T0 + 1800).usd == Decimal(usd)
    assert made.spent(T0 + 1800).ceiling_s == 1800


def test_a_price_that_could_not_be_had_is_asked_for_again_after_a_minute() -> None:
    asked: list[float] = []

    def price_at_second_try(at: float) -> Decimal | None:
        asked.append(at)
        return Decimal("0.50") if len(asked) > 1 else None

    made = meter(spot_price=price_at_second_try)
    made.refresh(T0 + 10)
    made.refresh(T0 + 40)
    assert made.spent(T0 + 3600).compute_usd == Decimal("1.2120")
    made.refresh(T0 + 71)
    assert made.spent(T0 + 3600).compute_usd == Decimal("0.5000")  # the past is counted anew
    assert made.spent(T0 + 3600).ceiling_s == 0


@pytest.mark.parametrize(
    ("limits", "reserve_s", "expected"),
    [
        (RunLimits(max_usd=Decimal("0.3785"), max_hours=Decimal(9), deadline=None), 10.0, None),
        (RunLimits(max_usd=Decimal("0.3784"), max_hours=Decimal(9), deadline=None), 10.0, "max_usd"),
        (RunLimits(max_usd=Decimal("1.6021"), max_hours=Decimal(9), deadline=None), 3600.0, None),
        (RunLimits(max_usd=Decimal("1.6020"), max_hours=Decimal(9), deadline=None), 3600.0, "max_usd"),  # extras too
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal("1.01"), deadline=None), 35.9, None),
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal("1.01"), deadline=None), 36.0, "max_hours"),
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal(9), deadline=T0 + 3661), 60.0, None),
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal(9), deadline=T0 + 3660), 60.0, "deadline"),
        (replace(NO_LIMITS, expires=T0 + 3661), 60.0, None),
        (replace(NO_LIMITS, expires=T0 + 3660), 60.0, "expiry"),
        (replace(NO_LIMITS, deadline=T0 + 3660, expires=T0 + 3660), 60.0, "deadline"),
        (NO_LIMITS, 10.0**6, None),
    ],
)
def test_a_limit_counts_with_what_the_stop_itself_will_take(
    limits: RunLimits, reserve_s: float, expected: str | None
) -> None:
    # Spent: 0.3750. 10 s more are 0.0034: what the next hour costs is not known yet, and counts at the ceiling.
    assert meter().limit(T0 + 3600, limits, reserve_s) == expected


@pytest.mark.parametrize(
    ("limits", "left_s"),
    [
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal("1.5"), deadline=None), 1800),
        (RunLimits(max_usd=Decimal("0.9885"), max_hours=Decimal(9), deadline=None), 1800),  # at the ceiling
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal(9), deadline=T0 + 3700), 100),
        (RunLimits(max_usd=Decimal(9), max_hours=Decimal("0.5"), deadline=None), 0),
        (NO_LIMITS, 7200),
    ],
)
def test_what_is_left_until_the_first_limit_is_told_to_the_second(limits: RunLimits, left_s: float) -> None:
    assert meter().left_s(T0 + 3600, limits, 7200) == pytest.approx(left_s, abs=1.5)


def test_earlier_attempts_are_in_the_sum_and_in_the_hours() -> None:
    made = meter(others=(Decimal("0.5000"), Decimal(7200)))
    spent = made.spent(T0 + 3600)
    assert (spent.usd, spent.seconds) == (Decimal("0.8750"), Decimal(10800))
    assert made.limit(T0 + 3600, RunLimits(max_usd=Decimal(9), max_hours=Decimal(3), deadline=None), 0.0) == "max_hours"


class PriceEc2:
    """DescribeSpotPriceHistory by hand."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.asked = rows, {}  # type: ignore[var-annotated]

    def describe_spot_price_history(self, **asked: Any) -> dict[str, Any]:
        self.asked = asked
        if isinstance(self.rows, Exception):
            raise self.rows
        if "NextToken" not in asked:
            return {"SpotPriceHistory": [], "NextToken": "more"}
        return {"SpotPriceHistory": self.rows, "NextToken": ""}


def row(at: float, price: str) -> dict[str, Any]:
    return {"Timestamp": datetime.fromtimestamp(at, UTC), "SpotPrice": price}


def test_the_spot_price_is_the_last_one_before_the_hour_began() -> None:
    ec2 = PriceEc2([row(T0 - 9000, "0.1"), row(T0 - 60, "0.2"), row(T0 + 60, "0.3")])
    assert spot_history("g5.2xlarge", "us-east-2a", ec2)(T0) == Decimal("0.2")
    assert ec2.asked["InstanceTypes"] == ["g5.2xlarge"]
    assert ec2.asked["AvailabilityZone"] == "us-east-2a"
    assert ec2.asked["ProductDescriptions"] == ["Linux/UNIX"]  # another system has another price


@pytest.mark.parametrize("rows", [[], [row(T0 - 1, "free")], [row(T0 - 1, "0")], [row(T0 - 1, "NaN")], OSError("away")])
def test_a_price_history_that_makes_no_sense_is_no_price(rows: Any) -> None:
    said: list[str] = []
    ask = spot_history("g5.2xlarge", "us-east-2a", PriceEc2(rows), said.append)
    assert ask(T0) is ask(T0 + 60) is None
    assert len(said) == 1


def test_rates_of_a_zone_of_an_unlisted_zone_and_of_an_unlisted_type(tmp_path: Path) -> None:
    run = load(runs.place(tmp_path, runs.tree()))
    assert run.rates("g5.2xlarge", "us-east-2a").spot == Decimal("0.3600")
    assert run.rates("g5.2xlarge", "us-east-2z").spot == Decimal("0.4000")  # the dearest
    assert run.rates("p9.huge", "us-east-2a").ceiling == Decimal("1.2120")


@pytest.mark.parametrize(
    ("key", "value"),
    [("limits", {}), ("schema", 2), ("rates", {}), ("job", {"experiment": "x", "parameters": {}}), ("inputs", {})],
)
def test_a_run_config_that_lacks_something_is_a_value_error(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        load(runs.place(tmp_path, {**runs.tree(), key: value}))


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(T0 + seconds, UTC).isoformat().replace("+00:00", "Z")


def counted(store: FolderStore, run: RunFile, me: Node, *gone: str) -> list[spent.Attempt]:
    return OtherNodes(me, attempts.read(store, but=me.instance)).count(run, gone)


def record(store: FolderStore, instance: str, launched: float, exit: dict[str, Any] | None, beat: Any = None) -> None:
    began = {"launched_at": iso(launched), "booted_at": iso(launched + 20)}
    fields = {"instance": instance, "type": "g5.2xlarge", "zone": "us-east-2a", **began}
    store.put_bytes(json.dumps({**fields, "exit": exit} if exit else fields).encode(), f"attempts/{instance}.json")
    if beat:
        lines = [{"step": 0, "attempt_s": "60"}, beat]
        store.put_bytes("\n".join(map(json.dumps, lines)).encode() + b'\n{"torn', f"heartbeat/{instance}.jsonl")


def test_earlier_attempts_cost_what_heartbeats_and_endings_say(tmp_path: Path) -> None:
    run, store = load(runs.place(tmp_path, runs.tree())), FolderStore(tmp_path / "r1")
    beat = {"step": 40, "attempt_s": "600.000", "compute_usd": "0.0900", "usd_per_hour": "0.54", "step_s": 0.5}
    record(store, "i-killed", 0, None, beat)
    record(store, "i-noticed", 1000, {"code": 75, "notice": True, "at": iso(1600), "ends_at": iso(1720)}, beat)
    record(store, "i-old", 2000, {"code": 75, "notice": True, "at": iso(6000)}, None)
    record(store, "i-brief", 8000, None, {"attempt_s": "60.000", "lived_s": "20.000"})
    record(store, "i-crashed", 9000, {"code": 1, "notice": False, "at": iso(9030)}, None)
    record(store, "i-silent", 9500, None, None)
    record(store, "i-silent-too", 9700, None, None)
    record(store, "i-me", 19900, None, None)
    me = Node(instance="i-me", type="g5.2xlarge", zone="us-east-2a", launched_at=1_800_019_900)
    found = {
        attempt.instance: attempt
        for attempt in attempts.judged(counted(store, run, me, "i-killed", "i-brief"), {}, History(), me.launched_at)
    }
    assert list(found) == ["i-killed", "i-noticed", "i-old", "i-brief", "i-crashed", "i-silent", "i-silent-too"]

    killed = found["i-killed"]  # after its last heartbeat it may have gone on for two more
    assert (killed.seconds, killed.compute_usd, killed.last_step) == (Decimal("720.000"), Decimal("0.1080"), 40)
    assert killed.usd == Decimal("0.1080") + Decimal("0.0032")  # 720 s of disks and address
    assert killed.free_usd == 0  # nobody knows that it was AWS

    noticed = found["i-noticed"]
    assert noticed.seconds == 720  # until AWS takes it
    assert noticed.compute_usd == Decimal("0.1080")
    assert noticed.free_usd == noticed.compute_usd
    assert noticed.idle_s == 120

    assert found["i-old"].seconds == 4000
    assert found["i-old"].free_usd == 0  # past its first hour
    assert [found["i-brief"].seconds, found["i-brief"].lived_s] == [140, 140]
    crashed = found["i-crashed"]  # before a supervisor could ask for the price
    assert [crashed.seconds, crashed.lived_s] == [60, 30]  # a minute at least
    assert [crashed.ceiling_s, crashed.compute_usd] == [60, Decimal("0.0202")]
    assert found["i-silent"].seconds == 200  # until the next one came
    assert found["i-silent"].compute_usd == Decimal("0.0673")
    assert found["i-killed"].ceiling_s == 0
    assert found["i-silent-too"].seconds == 10_200
    unknown = spent.count_node(run, AttemptRecord(launched_at=iso(0), resumed_step=30), None)
    assert [unknown.seconds, unknown.last_step] == [spent.BOOT_S, 30]  # nor is known when the next one came


PRICES = Terms(
    limits=NO_LIMITS,
    capacity="spot",
    prices={"g5.2xlarge": TypePrices(on_demand=SPOT.on_demand, spot={}, gpus=1)},
    hourly={},
    fixed_usd=Decimal(0),
)
BEAT = Beat(attempt_s=Decimal(3000), compute_usd=Decimal("0.3000"), usd_per_hour=Decimal("0.36"), ceiling_s=Decimal(0))


@pytest.mark.parametrize(
    ("lives", "until", "seconds", "usd"),
    [
        (Lives(ended={"i-1": T0 + 3050}), 9000, 3050, "0.3050"),  # AWS says when it ended
        (Lives(ended={"i-1": T0 + 7200}), 9000, 7200, "1.5720"),  # past its hour, whose price is all that it knew
        (Lives(seen={"i-1": T0 + 3500}, gone={"i-1"}), 3000, 3500, "0.3500"),  # it was still there then
        (Lives(seen={"i-1": T0 + 3100}, gone={"i-1"}), 9000, 3120, "0.3120"),
        (Lives(), 3040, 3040, "0.3040"),  # a fleet of one launches the next after it
        (Lives(), 3600, 3600, "0.3600"),  # AWS has not answered
        (Lives(gone={"i-1"}), 3600, 3120, "0.3120"),  # it is gone, since when AWS does not tell: two heartbeats more
        (Lives(), None, 3120, "0.3120"),
    ],
)
def test_a_node_that_was_lost_costs_no_less_than_it_may_have(
    lives: Lives, until: float | None, seconds: float, usd: str
) -> None:
    node = AttemptRecord(instance="i-1", launched_at=iso(0))
    found = spent.count_node(PRICES, node, BEAT, lives, None if until is None else T0 + until)
    assert [found.seconds, found.compute_usd] == [seconds, Decimal(usd)]


def test_what_aws_says_of_a_node_s_end_counts_more_than_what_the_node_was_told(tmp_path: Path) -> None:
    ending = Exit(75, "notice", True, iso(600), iso(720))
    node = AttemptRecord(instance="i-1", launched_at=iso(0), exit=ending)
    found = [spent.count_node(PRICES, node, None, lives).seconds for lives in (Lives(), Lives(ended={"i-1": T0 + 650}))]
    assert found == [720, 650]


def two_nodes(tmp_path: Path, ask: fleet.Ask, **known: dict[str, float]) -> attempts.Others:
    """What i-2 sees, 1000 s after i-1, which has left one heartbeat."""
    store = FolderStore(tmp_path / "r1")
    record(store, "i-1", 0, None, {"attempt_s": "900.000", "compute_usd": "0.0900", "usd_per_hour": "0.36"})
    record(store, "i-2", 1000, None, None)
    me = Node(instance="i-2", type="g5.2xlarge", zone="us-east-2a", launched_at=T0 + 1000)
    run = load(runs.place(tmp_path, runs.tree()))
    return attempts.Others(store, run, me, ask, print, AttemptRecord(**known))  # type: ignore[arg-type]


def test_two_nodes_at_once_share_one_cap(tmp_path: Path) -> None:
    """The one that its fleet took for gone goes on, and spends what the other would have."""
    others = two_nodes(tmp_path, lambda since: History(there=frozenset({"i-1", "i-2"})))
    assert others.spent[1] == 1000
    others.look(T0 + 2500)
    assert others.spent[1] == 2500
    record(FolderStore(tmp_path / "r1"), "i-3", 3000, None, {"attempt_s": "600", "compute_usd": "0.06"})
    others.look(T0 + 3700)
    assert [each.instance for each in others.attempts] == ["i-1", "i-3"]
    assert others.spent[1] == 3700 + 720


class AwsAnswers:
    """AWS, which answers what it is told to and remembers that it was asked."""

    def __init__(self, *answers: History | None) -> None:
        self.answers, self.times = list(answers), 0

    def __call__(self, since: float) -> History | None:
        self.times += 1
        return self.answers[min(self.times, len(self.answers)) - 1]


def seconds(others: attempts.Others, *at: float) -> list[Decimal]:
    """What the others have been billed for, as it is known at these moments."""
    found = []
    for each in at:
        others.look(T0 + each)
        found.append(others.spent[1])
    return found


def test_what_aws_said_of_a_node_s_end_is_asked_once_and_told_to_later_attempts(tmp_path: Path) -> None:
    asked = AwsAnswers(History(ended={"i-1": T0 + 950}, there=frozenset({"i-2"})))
    others = two_nodes(tmp_path, asked)
    assert seconds(others, 1100, 1200) == [950, 950]
    assert (asked.times, others.ended) == (1, {"i-1": T0 + 950})


def test_until_aws_answers_a_node_counts_until_the_next_one_came(tmp_path: Path) -> None:
    asked = AwsAnswers(None, None, History(ended={"i-1": T0 + 930}, there=frozenset({"i-2"})))
    assert seconds(two_nodes(tmp_path, asked), 1100, 1200, 1300) == [1000, 1000, 930]


def test_a_node_that_is_gone_without_a_word_of_aws_is_asked_about_for_five_minutes(tmp_path: Path) -> None:
    asked = AwsAnswers(History(there=frozenset({"i-2"})))
    record(FolderStore(tmp_path / "r1"), "i-1", 0, None, {"attempt_s": "700.000", "compute_usd": "0.0700"})
    others = two_nodes(tmp_path, asked)
    at = [1100 + 60 * minute for minute in range(10)]
    record(FolderStore(tmp_path / "r1"), "i-1", 0, None, {"attempt_s": "700.000", "compute_usd": "0.0700"})
    assert seconds(others, *at) == [1000] * 5 + [820] * 5
    assert asked.times == LATE_S / 60 + 1


def test_a_node_seen_after_the_next_one_came_counts_until_it_is_seen_no_more(tmp_path: Path) -> None:
    there, gone = frozenset({"i-1", "i-2"}), frozenset({"i-2"})
    late = History(ended={"i-1": T0 + 1230}, there=gone)
    asked = AwsAnswers(History(there=there), History(there=there), History(there=gone), late)
    assert seconds(two_nodes(tmp_path, asked), 1100, 1200, 1260, 1320) == [1100, 1200, 1260, 1230]


def test_a_node_that_ended_before_it_could_leave_a_record_counts_at_the_dearest_price(tmp_path: Path) -> None:
    launched = {"i-0": T0 + 100, "i-1": T0, "i-2": T0 + 1000}
    ended = {"i-0": T0 + 280, "i-1": T0 + 900}
    others = two_nodes(tmp_path, AwsAnswers(History(launched=launched, ended=ended, there=frozenset({"i-2"}))))
    before = others.spent[0]
    assert seconds(others, 1100) == [900 + 180]
    assert [each.instance for each in others.attempts] == ["i-1"]
    assert others.spent[0] - before > Decimal("1.2") * 180 / 3600 - Decimal("0.02")


def test_one_without_a_record_that_an_earlier_node_was_told_of_counts_where_aws_tells_no_more(tmp_path: Path) -> None:
    known = {"untold": {"i-0": T0 + 100}, "ended": {"i-0": T0 + 280}}
    others = two_nodes(tmp_path, AwsAnswers(None), **known)
    assert seconds(others, 1100) == [1000 + 180]
    assert {"untold": others.untold, "ended": others.ended} == known


@pytest.mark.parametrize(
    ("changes", "reclaimed"),
    [([], True), ([T0 + 999, T0 + 1721], True), ([T0 + 1590], False), (None, None)],
    ids=["none", "before and after", "set to 0", "nobody knows"],
)
def test_a_first_hour_is_free_where_the_fleet_s_history_says_that_aws_took_the_node(
    tmp_path: Path, changes: list[float] | None, reclaimed: bool | None
) -> None:
    run, store = load(runs.place(tmp_path, runs.tree())), FolderStore(tmp_path / "r1")
    record(store, "i-noticed", 1000, {"code": 75, "notice": True, "at": iso(1600), "ends_at": iso(1720)}, None)
    me = Node(instance="i-me", type="g5.2xlarge", zone="us-east-2a", launched_at=T0 + 2000)
    told = None if changes is None else History(changes=tuple(changes))
    (found,) = attempts.judged(counted(store, run, me), {}, told, me.launched_at)
    assert found.reclaimed is reclaimed
    assert found.free_usd == (found.compute_usd if reclaimed else 0)
    assert found.interrupted is (reclaimed is not False)
    (forgotten,) = attempts.judged(counted(store, run, me), {}, told, T0 + 1001 + KEPT_S)
    assert forgotten.reclaimed is None  # AWS does not know any more


def test_three_peers_that_live_on_count_for_longer_than_their_last_beats_whoever_came_after_them(
    tmp_path: Path,
) -> None:
    run, store = load(runs.place(tmp_path, runs.tree(nodes=4))), FolderStore(tmp_path / "r1")
    for number in range(3):
        record(store, f"i-{number}", number, None, {"attempt_s": "600.000", "lived_s": "600.000"})
    me = Node(instance="i-me", type="g5.2xlarge", zone="us-east-2a", launched_at=T0 + 3)
    found = counted(store, run, me)
    assert [float(each.seconds) for each in found] == [600 + spent.GONE_S] * 3


def test_a_stop_takes_its_time_on_every_node() -> None:
    hours = replace(NO_LIMITS, max_hours=Decimal(1))
    alone, of_four = meter(), meter(nodes=4)
    assert (alone.limit(T0 + 3400, hours, 199), alone.limit(T0 + 3400, hours, 200)) == (None, "max_hours")
    assert (of_four.limit(T0 + 3400, hours, 49), of_four.limit(T0 + 3400, hours, 50)) == (None, "max_hours")
    dollars = replace(NO_LIMITS, max_usd=Decimal("0.375"))  # an hour of one node, whose peers count at the ceiling
    assert alone.limit(T0 + 3500, dollars, 50) is None
    assert of_four.limit(T0 + 3500, dollars, 50) == "max_usd"


def test_peers_that_nobody_reads_of_go_on_to_cost() -> None:
    """Else a store that is down for hours would hide what three of four nodes spend."""
    made = meter(nodes=4)
    made.count((Decimal("1.0000"), Decimal(3600)), made.launched_at)
    before, after = made.spent(made.launched_at + 100), made.spent(made.launched_at + 120 + 3600)
    ceiling = made.rates.ceiling + made.rates.extras
    assert before.usd - before.attempt_usd == Decimal("1.0000")
    assert after.usd - after.attempt_usd == Decimal("1.0000") + (3 * ceiling).quantize(Decimal("0.0001"))
    assert after.seconds - after.attempt_s == 3600 + 3 * 3600


def test_a_node_of_several_without_a_record_counts_as_one_that_boots_until_aws_says_when_it_ended(
    tmp_path: Path,
) -> None:
    run = load(runs.place(tmp_path, runs.tree(nodes=4)))
    others = OtherNodes(Node(instance="i-me", type="g5.2xlarge", zone="us-east-2a", launched_at=T0 + 3))
    others.take(History(launched={"i-0": T0, "i-me": T0 + 3}), T0 + 60)
    assert others.total(run)[1] == Decimal(spent.BOOT_S)
    others.take(History(ended={"i-0": T0 + 300}), T0 + 360)
    assert others.total(run)[1] == 300
