"""`gpufleet campaign`: the cap of several runs holds, whatever each spends, however many drivers there are, and
whenever one of them is killed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal

import pytest

from gpufleet.infra.account.campaign_ledger import (
    CampaignLedger,
    CampaignReservation,
    LedgerObject,
    NotReservedError,
)
from gpufleet.infra.commands.campaign import Campaign, only_driver
from gpufleet.infra.commands.trials import CampaignTrial, LimitTooLowError, StackTrial
from gpufleet.infra.definition.campaign import DefinedTrial
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.supervisor.store import ABSENT, Entry, StoreError, TakenError

CAMPAIGNS = 1000
APPROVED = "0" * 16
MOST_STEPS = 2000  # of the drivers of one campaign; they take up to about a hundred
CHECKPOINT = Decimal("0.05")  # USD by which a run may pass its own limit


class CampaignKilledError(BaseException):
    """The end of the process."""


@dataclass(eq=False)
class DrawnAccount:
    """The runs that have begun and ended, and the bucket of the ledger. They outlive the drivers. Each look at a run
    and each call of the bucket may kill the driver, or let another driver come between.
    """

    draw: random.Random
    max_usd: Decimal = Decimal(100)
    at_once: int = 3
    losing: float = 0.0  # chance that a run loses, at each look
    kills: int = 0
    lost_answers: int = 0
    trials: list[DrawnTrial] = field(default_factory=list)
    between: Callable[[], None] | None = None  # a step of another driver
    content: bytes | None = None
    puts: int = 0
    refused: int = 0
    worst_seen: Decimal = Decimal(0)
    most_at_once: int = 0

    def pass_time(self, _: float = 0) -> None:
        """Ends some of the runs. A run spends up to its limit; some runs pass it, and some lose their receipt."""
        for each in self.trials:
            if each.begun and each.spent is None and (each.stops or self.draw.random() < 0.5):
                each.spent = each.most * Decimal(self.draw.choice(("0", "0.2") if each.stops else ("0", "0.5", "1")))
                each.spent += CHECKPOINT if self.draw.random() < 0.1 else 0
                each.has_receipt = self.draw.random() < 0.9

    def disturb(self) -> None:
        """Something comes between two calls of a driver."""
        if self.between is not None and self.draw.random() < 0.15:
            step, self.between = self.between, None
            try:
                step()
            finally:
                self.between = step
        if self.kills and self.draw.random() < 0.05:
            self.kills -= 1
            raise CampaignKilledError

    def entries(self, prefix: str) -> list[Entry]:
        self.disturb()
        return [] if self.content is None else [Entry(key=prefix, bytes=len(self.content), etag=str(self.puts))]

    def get_bytes(self, _: str) -> bytes | None:
        self.disturb()
        return self.content

    def put_bytes(self, content: bytes, _: str, over: str = "*") -> None:
        self.disturb()
        if over != (ABSENT if self.content is None else str(self.puts)):
            self.refused += 1
            raise TakenError("another one by now")
        answered = not self.lost_answers or self.draw.random() < 0.8
        if not answered:
            self.lost_answers -= 1
        if answered or self.draw.random() < 0.5:
            self.content, self.puts = content, self.puts + 1
        self.disturb()
        if not answered:
            raise StoreError("timed out")

    def worst(self) -> Decimal:
        """The USD spent if every run that goes on spends its whole limit."""
        return sum((each.most if each.spent is None else each.spent for each in self.trials if each.begun), Decimal(0))

    @property
    def passed(self) -> Decimal:
        """USD by which runs have passed their own limits."""
        return sum(
            (max(Decimal(0), each.spent - each.most) for each in self.trials if each.spent is not None), Decimal(0)
        )

    def ledger(self) -> CampaignLedger:
        assert self.content is not None
        return CampaignLedger.parse(self.content)

    def campaign(self, driver: str) -> Campaign:
        """A driver that begins anew; the ledger was made before. Two drivers look at the runs in other orders."""
        trials: list[CampaignTrial] = [*self.trials]
        return Campaign(
            name="drawn",
            trials=trials[::-1] if driver == "b" else trials,
            ledger=LedgerObject(store=self),
            driver=driver,
            approved=APPROVED,
            find_losers=lambda known, _: [each.name for each in known if self.draw.random() < self.losing],
            sleep=self.pass_time,
        )

    def create(self) -> None:
        first = CampaignLedger(approved=APPROVED, max_usd=self.max_usd, at_once=self.at_once, began=0.0)
        with self.calm():
            LedgerObject(store=self).create(first)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """Within the block nothing fails."""
        kept, self.kills, self.lost_answers = (self.kills, self.lost_answers), 0, 0
        yield
        self.kills, self.lost_answers = kept


@dataclass(eq=False)
class DrawnTrial:
    """A run whose end is drawn."""

    account: DrawnAccount
    name: str
    own: Decimal  # the limit of its definition
    lowest: Decimal | None = None  # limit with which it begins; None: its own
    most_hours: Decimal = Decimal(1)
    limit: Decimal | None = None  # with which it began
    stops: int = 0  # how often it was asked to end
    begun: int = 0
    spent: Decimal | None = None
    has_receipt: bool = True
    brought: bool = False
    left_out: Sequence[str] = ()

    @property
    def least(self) -> Decimal:
        return self.own if self.lowest is None else self.lowest

    @property
    def most(self) -> Decimal:
        return self.own if self.limit is None else self.limit

    def is_over(self) -> bool:
        self.account.disturb()
        return self.spent is not None

    def has_begun(self) -> bool:
        self.account.disturb()
        return self.begun > 0

    def cost(self) -> Decimal | None:
        return self.spent if self.brought and self.has_receipt else None

    def begin(self, usd: Decimal) -> None:
        self.account.disturb()
        assert self.least <= usd <= self.own
        self.begun += 1
        self.limit = usd
        going_on = sum(each.begun > 0 and each.spent is None for each in self.account.trials)
        self.account.worst_seen = max(self.account.worst_seen, self.account.worst() - self.account.passed)
        self.account.most_at_once = max(self.account.most_at_once, going_on)
        self.account.disturb()

    @property
    def runs(self) -> list[str]:
        return [self.name]

    def stop(self, run: str) -> None:
        assert run == self.name
        self.account.disturb()
        self.stops += 1

    def finish(self) -> int:
        self.brought = True
        self.account.disturb()
        return 0 if self.has_receipt else 1


def drawn(seed: int) -> DrawnAccount:
    """An account with up to twelve runs, a cap, how many at once, kills and lost answers."""
    draw = random.Random(seed)
    account = DrawnAccount(draw, kills=draw.randint(0, 6), lost_answers=draw.randint(0, 2))
    account.max_usd, account.at_once = Decimal(draw.randint(1, 20)), draw.randint(1, 4)
    account.losing = draw.choice((0.0, 0.2))
    for number in range(draw.randint(1, 12)):
        own = Decimal(draw.choice(("0.5", "1", "3", "10")))
        account.trials.append(DrawnTrial(account, f"t{number}", own, own * Decimal(draw.choice(("0.4", "1")))))
    account.create()
    return account


@dataclass(eq=False)
class Drivers:
    """Drivers of one campaign, which take their steps in turn. A driver that is killed begins anew, unless its name is
    in `gone`.
    """

    account: DrawnAccount
    names: tuple[str, ...]
    gone: set[str] = field(default_factory=set)
    made: dict[str, Campaign] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)

    def step(self, name: str) -> bool:
        """Whether the driver has more to do."""
        campaign = self.made.setdefault(name, self.account.campaign(name))
        others = [each for each in self.names if each != name and each not in self.gone]
        self.account.between = (lambda: self._let_another_step(others)) if others else None
        try:
            return campaign._step()
        except CampaignKilledError:
            del self.made[name]
            self.account.pass_time()
            return True
        finally:
            self.account.between = None

    def _let_another_step(self, others: list[str]) -> None:
        name = self.account.draw.choice(others)
        self.idle.discard(name)
        try:
            self.made.setdefault(name, self.account.campaign(name))._step()
        except CampaignKilledError:
            del self.made[name]

    def carry_out(self) -> None:
        """Steps of drawn drivers, until none has more to do."""
        self.idle.clear()
        steps = 0
        while not self.idle | self.gone >= {*self.names}:
            steps += 1
            assert steps < MOST_STEPS
            name = self.account.draw.choice([each for each in self.names if each not in self.gone])
            self.idle.discard(name)
            if not self.step(name):
                self.idle.add(name)


@pytest.mark.parametrize(
    ("campaigns", "drivers"), [(200, "a"), (CAMPAIGNS, "ab"), (200, "abc")], ids=["one", "two", "three"]
)
def test_a_thousand_drawn_campaigns_never_pass_their_cap(campaigns: int, drivers: str) -> None:
    """Whenever a run begins, all runs that have begun may spend their whole limits within the cap."""
    skipped = killed = refused = stopped = lowered = 0
    for seed in range(campaigns):
        account = drawn(seed)
        kills = account.kills
        Drivers(account, tuple(drivers)).carry_out()
        killed, refused = killed + kills - account.kills, refused + account.refused
        assert account.worst_seen <= account.max_usd, seed
        assert account.most_at_once <= account.at_once, seed
        assert account.worst() <= account.max_usd + CHECKPOINT * account.at_once, seed
        assert all(each.begun <= 1 for each in account.trials), seed
        ledger = account.ledger()
        assert not ledger.open_runs(), seed
        waiting = [each for each in account.trials if not each.begun]
        assert all(each.least > ledger.rest for each in waiting), seed  # else it would have fitted
        held = [each.spent if each.has_receipt else each.most for each in account.trials if each.begun]
        assert ledger.rest == account.max_usd - sum((each for each in held if each is not None), Decimal(0)), seed
        skipped += bool(waiting)
        stopped += any(each.stops for each in account.trials)
        lowered += any(each.limit is not None and each.limit < each.own for each in account.trials)
    assert min(stopped, lowered) > campaigns / 10
    assert skipped > campaigns / 10  # campaigns in which the cap left something out
    assert killed > campaigns / 10
    assert (refused > campaigns / 10) == (len(drivers) > 1)  # puts that another driver's came before


def test_what_a_driver_that_is_gone_had_reserved_stays_reserved_until_another_takes_over() -> None:
    held = begun_later = 0
    for seed in range(300):
        account = drawn(seed)
        both = Drivers(account, ("a", "b"))
        for _ in range(account.draw.randint(1, 6)):
            both.step("a")
        both.gone.add("a")
        both.carry_out()
        theirs = account.ledger().open_runs()
        assert all(account.ledger().runs[name].by == "a" for name in theirs), seed
        assert account.worst_seen <= account.max_usd, seed
        held += bool(theirs)
        with account.calm():
            LedgerObject(store=account).change(lambda was: was.taken_over("a", "b"))
        begun = sum(each.begun for each in account.trials)
        both.carry_out()
        begun_later += sum(each.begun for each in account.trials) > begun
        assert not account.ledger().open_runs(), seed
        assert all(each.begun <= 1 for each in account.trials), seed
        assert account.worst_seen <= account.max_usd, seed
    assert held > 30
    assert begun_later > 15


def test_a_lost_ledger_ends_the_campaign_and_never_the_cap() -> None:
    lost = 0
    for seed in range(200):
        account = drawn(seed)
        account.kills = 0
        both = Drivers(account, ("a", "b"))
        for _ in range(account.draw.randint(1, 8)):
            both.step(account.draw.choice(both.names))
        account.content = account.draw.choice((None, b"{}", b"not JSON"))
        begun = [each.begun for each in account.trials]
        for name in both.names:
            with pytest.raises(GpufleetError, match="nothing more begins"):
                account.campaign(name).carry_out()
        assert [each.begun for each in account.trials] == begun, seed
        assert account.worst() - account.passed <= account.max_usd, seed
        lost += any(begun)
    assert lost > 100


def all_begun_end(account: DrawnAccount, share: Decimal = Decimal(1)) -> Callable[[float], None]:
    """A wait after which every begun trial has ended, and has cost this share of its own limit."""

    def end(_: float) -> None:
        for each in account.trials:
            each.spent = each.most * share if each.begun else None

    return end


def test_thirty_trials_under_a_cap_for_eleven() -> None:
    account = DrawnAccount(random.Random(50), max_usd=Decimal(11))
    account.trials += [DrawnTrial(account, f"t{number}", Decimal("1")) for number in range(30)]
    account.create()

    campaign = account.campaign("a")
    campaign.sleep = all_begun_end(account)
    assert campaign.carry_out() == 1
    assert sum(each.begun for each in account.trials) == 11
    assert account.most_at_once == 3


def test_what_a_run_did_not_use_begins_another() -> None:
    account = DrawnAccount(random.Random(50), max_usd=Decimal("2.5"), at_once=1)
    account.trials += [DrawnTrial(account, f"t{number}", Decimal("1")) for number in range(4)]
    account.create()

    campaign = account.campaign("a")
    campaign.sleep = all_begun_end(account, share=Decimal("0.5"))
    assert campaign.carry_out() == 0
    assert account.worst() == 2


def test_the_last_dollars_begin_a_run_with_a_lower_limit_that_is_enough_for_nine_in_ten() -> None:
    account = DrawnAccount(random.Random(50), max_usd=Decimal("2.5"), at_once=4)
    account.trials += [DrawnTrial(account, f"t{number}", Decimal("1"), Decimal("0.4")) for number in range(4)]
    account.create()

    campaign = account.campaign("a")
    campaign.sleep = all_begun_end(account)
    assert campaign.carry_out() == 1
    assert [each.limit for each in account.trials] == [1, 1, Decimal("0.5"), None]
    assert account.worst_seen == account.max_usd


def test_a_run_whose_bill_has_moved_gives_its_reservation_back_and_waits_for_its_own_limit() -> None:
    account = DrawnAccount(random.Random(50), max_usd=Decimal("1.5"), at_once=2)
    dear = DearTrial(account, "dear", Decimal("2"), Decimal("0.4"))
    account.trials += [dear, DrawnTrial(account, "plain", Decimal("1"))]
    account.create()

    def all_end(_: float) -> None:
        for each in account.trials:
            each.spent = Decimal(0) if each.begun else None

    campaign = account.campaign("a")
    campaign.sleep = all_end
    assert campaign.carry_out() == 1
    assert [each.begun for each in account.trials] == [0, 1]
    assert account.ledger().rest == Decimal("1.5")
    assert dear.asked == [Decimal("1.5")]


@dataclass(eq=False)
class DearTrial(DrawnTrial):
    """A run that begins with no lower limit than its own."""

    asked: list[Decimal] = field(default_factory=list)

    def begin(self, usd: Decimal) -> None:
        self.asked.append(usd)
        raise LimitTooLowError("half of the simulated runs need more")


def test_a_run_that_loses_is_asked_once_and_its_rest_begins_another(capsys: pytest.CaptureFixture[str]) -> None:
    account = DrawnAccount(random.Random(50), max_usd=Decimal("1.5"), at_once=1)
    account.trials += [DrawnTrial(account, f"t{number}", Decimal("1")) for number in range(2)]
    account.create()
    looks = 0

    def end_on_the_third_look(_: float) -> None:
        nonlocal looks
        looks += 1
        for each in account.trials:
            each.spent = Decimal("0.25") if each.stops and looks % 3 == 0 else each.spent

    campaign = account.campaign("a")
    campaign.sleep, campaign.find_losers = end_on_the_third_look, lambda known, _: [each.name for each in known]
    assert campaign.carry_out() == 0
    assert [each.stops for each in account.trials] == [1, 1]
    assert account.ledger().rest == 1
    assert capsys.readouterr().out.count("loses, and is asked to end") == 2


def test_a_run_begins_only_while_its_own_hours_fit() -> None:
    account = DrawnAccount(random.Random(50))
    long = DrawnTrial(account, "long", Decimal(1), None, Decimal(3))
    account.trials += [long, DrawnTrial(account, "short", Decimal(1))]
    account.create()
    campaign = account.campaign("a")
    campaign.max_hours, campaign.clock = Decimal(5), lambda: 2.5 * 3600
    assert campaign.carry_out() == 1
    assert [each.begun for each in account.trials] == [0, 1]


def test_a_trial_that_comes_while_the_campaign_runs_begins_under_the_same_cap() -> None:
    """An open campaign ends with its hours."""
    account = DrawnAccount(random.Random(50), max_usd=Decimal(2))
    account.trials += [DrawnTrial(account, f"t{number}", Decimal(1)) for number in range(3)]
    account.create()
    hours = iter(range(100))
    campaign = account.campaign("a")
    first, *later = account.trials
    campaign.trials = [first]
    campaign.find_more = lambda known, *_: [each for each in later if each not in known and first.spent]

    def hour(_: float) -> None:
        for each in account.trials:
            each.spent = Decimal(1) if each.begun else None
        now = next(hours) * 3600.0
        campaign.clock = lambda: now

    campaign.sleep, campaign.is_open, campaign.max_hours, campaign.clock = hour, True, Decimal(10), lambda: 0.0
    assert campaign.carry_out() == 1
    assert [each.begun for each in account.trials] == [1, 1, 0]


def test_a_run_that_was_begun_by_itself_has_no_reservation_and_stops_the_campaign() -> None:
    account = DrawnAccount(random.Random(50))
    account.trials.append(DrawnTrial(account, "t0", Decimal(1), begun=1))
    account.create()
    with pytest.raises(GpufleetError, match="t0 was begun without a reservation"):
        account.campaign("a").carry_out()


def test_a_driver_of_an_earlier_approval_begins_nothing_more() -> None:
    account = DrawnAccount(random.Random(50))
    account.trials.append(DrawnTrial(account, "t0", Decimal(1)))
    account.create()
    campaign = account.campaign("a")
    campaign.approved = "1" * 16
    with pytest.raises(GpufleetError, match="the campaign 0000000000000000 was approved after 1111111111111111"):
        campaign.carry_out()
    assert account.trials[0].begun == 0


def test_a_second_driver_in_the_same_folder_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    with only_driver(tmp_path, "night") as name:  # type: ignore[arg-type]
        assert name.endswith(f":{tmp_path}")
        with pytest.raises(GpufleetError, match="runs in this folder already"), only_driver(tmp_path, "night"):  # type: ignore[arg-type]
            pass


def test_a_run_that_changed_since_the_approval_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole:
        definition = type("Named", (), {"name": "t0"})

        def plan(self) -> object:
            return object()

    monkeypatch.setattr("gpufleet.infra.program.approval.begins_with", lambda _: "1" * 16)
    whole, trial = Whole(), DefinedTrial(name="t0")
    with pytest.raises(GpufleetError, match="t0: a file or data has changed since the campaign was approved"):
        StackTrial(trial=trial, whole=whole, compared=whole, approved="0" * 16).begin(Decimal(1))  # type: ignore[arg-type]


def test_a_ledger_is_read_as_it_was_written() -> None:
    ledger = CampaignLedger(approved=APPROVED, max_usd=Decimal("11.50"), at_once=2, began=5.5)
    ledger = ledger.reserved("t0", Decimal("3.20"), by="you@here:/p", approved=APPROVED)
    ledger = ledger.reserved("t1", Decimal(8), by="you@here:/p", approved=APPROVED).settled("t1", Decimal("0.1234"))
    assert CampaignLedger.parse(ledger.to_bytes()) == ledger
    assert ledger.runs["t1"] == CampaignReservation(usd=Decimal("0.1234"), by="you@here:/p", ended=True)
    assert ledger.rest == Decimal("8.1766")
    assert ledger.settled("t1", Decimal(5)) == ledger
    with pytest.raises(NotReservedError, match="it has ended"):
        ledger.reserved("t1", Decimal(1), by="you@here:/p", approved=APPROVED)
