"""`gpufleet campaign`: the cap of several runs holds, whatever each run spends and whenever the command is killed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from decimal import Decimal

import pytest

from gpufleet.infra.commands.campaign import Campaign, StackTrial
from gpufleet.infra.errors import GpufleetError

CAMPAIGNS = 1000


class CampaignKilledError(BaseException):
    """Stands for a kill of the command's process."""


@dataclass(eq=False)
class DrawnAccount:
    """The runs that have begun and ended in the account. It outlives the command, and each look at it may kill the
    command.
    """

    draw: random.Random
    kills: int
    trials: list[DrawnTrial] = field(default_factory=list)

    def pass_time(self, _: float = 0) -> None:
        """Ends some of the runs. A run spends up to its limit, and some runs lose their receipt."""
        for each in self.trials:
            if each.begun and each.spent is None and self.draw.random() < 0.5:
                each.spent = each.most * Decimal(self.draw.choice(("0", "0.2", "0.5", "1")))
                each.has_receipt = self.draw.random() < 0.9

    def perhaps_killed(self) -> None:
        if self.kills and self.draw.random() < 0.05:
            self.kills -= 1
            raise CampaignKilledError

    def worst(self) -> Decimal:
        """The USD spent if every run that goes on spends its whole limit."""
        return sum((each.most if each.spent is None else each.spent for each in self.trials if each.begun), Decimal(0))


@dataclass(eq=False)
class DrawnTrial:
    """A run whose end is drawn at random."""

    account: DrawnAccount
    name: str
    most: Decimal
    begun: int = 0
    spent: Decimal | None = None
    has_receipt: bool = True
    brought: bool = False

    def is_over(self) -> bool:
        self.account.perhaps_killed()
        return self.spent is not None

    def has_begun(self) -> bool:
        self.account.perhaps_killed()
        return self.begun > 0

    def cost(self) -> Decimal | None:
        return self.spent if self.brought and self.has_receipt else None

    def begin(self) -> None:
        self.account.perhaps_killed()
        self.begun += 1
        self.account.perhaps_killed()

    def reserved(self) -> Decimal:
        """The USD of the cap that the ended run uses."""
        return Decimal(0) if self.spent is None else self.spent if self.has_receipt else self.most

    def finish(self) -> int:
        self.brought = True
        self.account.perhaps_killed()
        return 0 if self.has_receipt else 1


def drawn(seed: int) -> tuple[DrawnAccount, Decimal, int]:
    """An account with up to twelve runs, a cap, and the number of runs at one time."""
    draw = random.Random(seed)
    account = DrawnAccount(draw, kills=draw.randint(0, 4))
    for number in range(draw.randint(1, 12)):
        account.trials.append(DrawnTrial(account, f"t{number}", Decimal(draw.choice(("0.5", "1", "3", "10")))))
    return account, Decimal(draw.randint(1, 20)), draw.randint(1, 4)


def carried_out(account: DrawnAccount, max_usd: Decimal, at_once: int) -> int:
    """The exit code of the command, started again after each kill."""
    while True:
        held = Campaign(trials=account.trials, max_usd=max_usd, at_once=at_once, sleep=account.pass_time)
        try:
            return held.carry_out()
        except CampaignKilledError:
            account.pass_time()


def test_a_thousand_drawn_campaigns_never_pass_their_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a run begins, all runs that have begun may spend their whole limits within the cap."""
    begin = DrawnTrial.begin

    def watched(self: DrawnTrial) -> None:
        begin(self)
        seen.append((self.account.worst(), sum(each.begun > 0 and each.spent is None for each in self.account.trials)))

    monkeypatch.setattr(DrawnTrial, "begin", watched)
    skipped = killed = 0
    for seed in range(CAMPAIGNS):
        seen: list[tuple[Decimal, int]] = []
        account, max_usd, at_once = drawn(seed)
        kills = account.kills
        code = carried_out(account, max_usd, at_once)
        killed += kills - account.kills
        assert all(worst <= max_usd and count <= at_once for worst, count in seen), seed
        assert account.worst() <= max_usd, seed
        assert all(each.begun <= 1 for each in account.trials), seed
        waiting = [each for each in account.trials if not each.begun]
        receipts_lost = any(each.begun and not each.has_receipt for each in account.trials)
        assert code == (1 if waiting or receipts_lost else 0), seed
        held = sum((each.reserved() for each in account.trials), Decimal(0))
        assert all(each.most > max_usd - held for each in waiting), seed  # otherwise the trial would have fitted
        skipped += bool(waiting)
    assert skipped > 100  # campaigns in which the cap left something out
    assert killed > 100


def test_thirty_trials_under_a_cap_for_eleven() -> None:
    account = DrawnAccount(random.Random(50), kills=0)
    account.trials += [DrawnTrial(account, f"t{number}", Decimal("1")) for number in range(30)]

    def all_end(_: float) -> None:
        for each in account.trials:
            each.spent = each.most if each.begun else None

    assert Campaign(trials=account.trials, max_usd=Decimal(11), at_once=3, sleep=all_end).carry_out() == 1
    assert sum(each.begun for each in account.trials) == 11


def test_what_a_run_did_not_use_begins_another() -> None:
    account = DrawnAccount(random.Random(50), kills=0)
    account.trials += [DrawnTrial(account, f"t{number}", Decimal("1")) for number in range(4)]

    def half(_: float) -> None:
        for each in account.trials:
            each.spent = each.most / 2 if each.begun else None

    assert Campaign(trials=account.trials, max_usd=Decimal("2.5"), at_once=1, sleep=half).carry_out() == 0
    assert account.worst() == 2


def test_a_campaign_that_changed_begins_nothing_more() -> None:
    trial = StackTrial(whole=None, approved="0" * 16, current=lambda: "1" * 16)  # type: ignore[arg-type]
    with pytest.raises(GpufleetError, match="has changed since it was approved: nothing more begins"):
        trial.begin()
