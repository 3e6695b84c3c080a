"""`gpufleet campaign NAME`: the runs of campaigns/NAME.yaml under one cap, so many at once, each a whole run as of
`gpufleet run`.

A run begins only once its own limits.max_usd is reserved in the campaign's ledger, and its receipt gives back what it
did not use. So the cap holds by the limits of runs, which hold without this command, also where several of it are
started at a time. Killed and started again it goes on. A reservation of a driver that is gone for good stays, until
another one takes it over.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from gpufleet.infra.account import aws, campaign_bucket, month
from gpufleet.infra.account.results import earlier_receipt
from gpufleet.infra.bill.campaign import CampaignTerms, PricedTrial, price
from gpufleet.infra.commands import run as run_command
from gpufleet.infra.commands import stack
from gpufleet.infra.definition import campaign as campaigns
from gpufleet.infra.definition.campaign import CampaignFile, DefinedTrial
from gpufleet.infra.definition.loader import TRIALS, project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.envelope import tell
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval, pulumi_cli
from gpufleet.infra.program.plan import Plan
from gpufleet.infra.review import policy
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.job.supervisor.campaign_ledger import CampaignLedger, LedgerLostError, LedgerObject, NotReservedError
from gpufleet.job.text import counted

LOOK_S = 60.0  # between two looks at all runs


class CampaignTrial(Protocol):
    """One of the runs."""

    @property
    def name(self) -> str: ...
    @property
    def most(self) -> Decimal: ...  # limits.max_usd
    @property
    def most_hours(self) -> Decimal: ...  # limits.max_hours
    def is_over(self) -> bool: ...
    def has_begun(self) -> bool: ...
    def cost(self) -> Decimal | None: ...  # by its receipt; None: there is none here
    def begin(self) -> None: ...
    def finish(self) -> int: ...  # results, destroy, sweep; not 0: something is missing or left


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the campaign, the approval, and what to do about an earlier driver."""
    parser.add_argument("campaign", metavar="NAME", help="a file of campaigns/ without its .yaml")
    parser.add_argument("--approve", metavar="HASH", help="of the campaign that was shown; without it you are asked")
    parser.add_argument(
        "--take-over", metavar="DRIVER", help="go on with what this driver began, which is gone for good"
    )
    parser.add_argument("--look", action="store_true", help="show the ledger, and do no more")
    parser.add_argument(
        "--forget", action="store_true", help="delete the ledger of a campaign that is over, and no more"
    )


def run(args: argparse.Namespace) -> int:
    """0 when every run is over and swept; 1 if it was not approved, if runs do not fit the cap, or if one of them left
    no results or something in the account. Raises GpufleetError if a run cannot begin, or if the ledger is lost.
    """
    with _lost_ledger_explained():
        return _carried_out(args)


def _carried_out(args: argparse.Namespace) -> int:
    root = project_root(Path.cwd())
    described = campaigns.load(args.campaign, root)
    listed = campaigns.trials(described, root)
    campaigns.write(listed, root)
    wholes = [whole_run(each.name, root) for each in listed]
    region = wholes[0].definition.fleet.region
    if args.forget:
        return _forget(described, region)
    if args.look:
        return _look(described, region)
    if len(owners := sorted({each.definition.run.owner for each in wholes})) > 1:
        raise GpufleetError(f"the campaign's runs have the owners {', '.join(owners)}; allowed is one")
    begins = [(trial, whole, _planned(trial, whole)) for trial, whole in zip(listed, wholes, strict=True)]
    if described.order == "cheapest":
        begins.sort(key=lambda each: each[2].bill.usd.p90)
    plans = [made for *_, made in begins]
    approved = approval.of_campaign(plans, described)
    if args.approve != approved:
        bills = [PricedTrial.build(str(trial), made.definition, made.bill) for trial, _, made in begins]
        found = price(bills, CampaignTerms(described.max_usd, described.max_hours, described.at_once))
        print("\n".join(found.lines()))
        if described.open:
            print(f"It also takes what is put into {campaigns.FOLDER}/{described.name}/, under the same cap.")
        print("This is not the approved campaign." if args.approve else f"Hash of this campaign: {approved}.")
        if not run_command.agreed():
            return 1
    trials = [StackTrial(whole=whole, approved=approval.begins_with(made)) for _, whole, made in begins]
    with only_driver(root, described.name) as driver:
        _require_month(described, root, [each.whole.definition for each in trials])
        ledger = opened_ledger(described, trials, approved, region, owners[0])
        if args.take_over:
            ledger.change(lambda was: was.taken_over(args.take_over, driver))
        later = LaterTrials(described=described, root=root, owner=owners[0])
        return Campaign(
            name=described.name,
            trials=list(trials),
            ledger=ledger,
            driver=driver,
            approved=approved,
            max_hours=described.max_hours,
            is_open=described.open,
            find_more=later.find,
        ).carry_out()


def whole_run(name: str, root: Path) -> run_command.WholeRun:
    """The run of a trial. Its Pulumi stack is made when it begins."""
    args = argparse.Namespace(stack=name, approve=None, begin=False)
    engine = pulumi_cli.PulumiStack(root=root, name=name)
    return run_command.WholeRun(args=args, definition=stack.definition_of(args), root=root, engine=engine)


def _planned(trial: DefinedTrial, whole: run_command.WholeRun) -> Plan:
    """What the trial would begin with. Raises GpufleetError, which names the file to mend."""
    try:
        return whole.plan()
    except GpufleetError as error:
        if trial.text is None:
            raise
        raise GpufleetError(f"{error}\nThis file is made from {trial.file}: mend that one, or the campaign.") from None


def opened_ledger(
    described: CampaignFile, trials: Sequence[CampaignTrial], approved: str, region: str, owner: str
) -> LedgerObject:
    """The campaign's ledger, made the first time, with what was approved. Raises GpufleetError if it is lost."""
    name, known = described.name, {"approved": approved, "max_usd": described.max_usd, "at_once": described.at_once}
    ledger = campaign_bucket.find_ledger(aws.client, name, region)
    if ledger is None or not ledger.is_there():
        begun = [each.name for each in trials if each.has_begun() or each.is_over()]
        if begun:
            raise GpufleetError(
                f"{', '.join(begun)}: begun, and the campaign has no ledger. It is lost, or they were begun by"
                " themselves. Nothing begins, and what has begun stops before its own limits. A new run.id in their"
                " files and a new name for the campaign begin anew."
            )
        ledger = campaign_bucket.make_bucket(aws.client, name, region, owner)
        ledger.create(CampaignLedger(began=time.time(), **known))  # type: ignore[arg-type]
    ledger.change(lambda was: replace(was, **known))  # type: ignore[arg-type]
    return ledger


@contextmanager
def _lost_ledger_explained() -> Iterator[None]:
    """Raises GpufleetError for a ledger that is lost within the block."""
    try:
        yield
    except LedgerLostError as error:
        raise GpufleetError(
            f"{error}: nothing more begins. What has begun stops before its own limits, whose sum is within the cap."
            " `gpufleet run` of each brings its results."
        ) from None


@contextmanager
def only_driver(root: Path, name: str) -> Iterator[str]:
    """The name of this driver in the ledger: who, where. Raises GpufleetError while another one runs in this folder."""
    path = root / ".gpufleet" / "campaigns" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise GpufleetError(f"a `gpufleet campaign {name}` runs in this folder already") from None
        yield f"{os.environ.get('USER') or os.getuid()}@{platform.node()}:{root}"


def _look(described: CampaignFile, region: str) -> int:
    """Prints the ledger; 1 without one."""
    ledger = campaign_bucket.find_ledger(aws.client, described.name, region)
    if ledger is None or not ledger.is_there():
        print(f"{described.name} has no ledger: nothing of it has begun.")
        return 1
    found = ledger.read()
    for name, each in found.runs.items():
        state = "cost" if each.ended else f"of {each.by} may cost"
        print(f"{name} {state} {each.usd:.2f} USD.")
    print(f"{found.rest:.2f} of {found.max_usd:f} USD are left.")
    _tell(described.name, found, [], [])
    return 0


def _tell(name: str, ledger: CampaignLedger, waiting: list[str], wrong: list[str]) -> None:
    """Puts the ledger into the answer of --json."""
    tell(
        {
            "campaign": name,
            "ended": [run for run, each in ledger.runs.items() if each.ended],
            "going_on": {run: ledger.runs[run].by for run in ledger.open_runs()},
            "not_begun": waiting,
            "look_at": wrong,
            "left_usd": f"{ledger.rest:.2f}",
        }
    )


def _require_month(described: CampaignFile, root: Path, definitions: Sequence[StackDefinition]) -> None:
    """Raises GpufleetError if the campaign's cap breaks max_usd_per_month of policy.yaml. Its own runs, which the cap
    holds, do not count beside it.
    """
    owner, regions = definitions[0].run.owner, {each.fleet.region for each in definitions}
    own = {f"{each.name}/{each.run.id}" for each in definitions}

    def look_around() -> month.MonthUsd:
        return month.look(root, owner, regions, aws.client, datetime.now(UTC), but=own)

    month.require(policy.find_policy(root), look_around, described.max_usd, f"campaign {described.name}")


def _forget(described: CampaignFile, region: str) -> int:
    ledger = campaign_bucket.find_ledger(aws.client, described.name, region)
    if ledger is None:
        print(f"{described.name} has no ledger.")
        return 0
    if ledger.is_there() and (goes_on := ledger.read().open_runs()):
        raise GpufleetError(f"{', '.join(goes_on)}: not ended by the ledger, which stays. Let the campaign end first.")
    campaign_bucket.delete_bucket(aws.client, described.name, region)
    print(f"The ledger of {described.name} is deleted. A new campaign of that name has its whole cap.")
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StackTrial:
    """A trial that is a whole run."""

    whole: run_command.WholeRun
    approved: str | None  # what it begins with, as digits; None: it came later, and is approved by the cap

    @property
    def name(self) -> str:
        return self.whole.definition.name

    @property
    def most(self) -> Decimal:
        return self.whole.definition.limits.max_usd

    @property
    def most_hours(self) -> Decimal:
        return self.whole.definition.limits.max_hours

    def is_over(self) -> bool:
        return self.whole.is_over()

    def has_begun(self) -> bool:
        return self.whole.has_begun()

    def cost(self) -> Decimal | None:
        definition = self.whole.definition
        found = earlier_receipt(self.whole.root / "results" / definition.name / definition.run.id / RECEIPT)
        return found.actual if found else None

    def begin(self) -> None:
        """Begins the run. Raises GpufleetError if it is not as it was when the campaign was approved."""
        made = self.whole.plan()
        if self.approved not in (None, approval.begins_with(made)):
            raise GpufleetError(f"{self.name}: a file or data has changed since the campaign was approved")
        self.whole.engine.select()
        self.whole.engine.up(approval.approval(made))

    def finish(self) -> int:
        return self.whole.finish()


@dataclass(kw_only=True, slots=True)
class LaterTrials:
    """Trials that the campaign's file does not name: those in the folder of an open campaign, and those that go on by
    the ledger, which the file named before.
    """

    described: CampaignFile
    root: Path
    owner: str
    refused: dict[str, str] = field(default_factory=dict)  # texts of files that can be no trial

    def find(self, known: set[str], ledger: CampaignLedger) -> list[CampaignTrial]:
        """The trials beside the `known` ones. It says why a file can be no trial."""
        offered = [each for each in campaigns.offered(self.described, self.root) if each.name not in known]
        earlier = [DefinedTrial(name=name) for name in ledger.open_runs() if name not in known]
        named = {each.name: each for each in (*offered, *earlier)}  # what has a reservation stays as it was
        return [found for each in named.values() if (found := self._trial(each))]

    def _trial(self, trial: DefinedTrial) -> StackTrial | None:
        if self.refused.get(trial.name) == (trial.text or ""):
            return None
        try:
            campaigns.write([trial], self.root)
            whole = whole_run(trial.name, self.root)
            if trial.text is None:
                return StackTrial(whole=whole, approved=None)
            if whole.definition.source.parent != (self.root / TRIALS):
                raise GpufleetError(f"stacks/ has {trial.name} too: give the file another name")
            if whole.definition.run.owner != self.owner:
                raise GpufleetError(f"run.owner is {whole.definition.run.owner}; allowed is {self.owner}")
            whole.plan()
        except GpufleetError as error:
            self.refused[trial.name] = trial.text or ""
            print(f"gpufleet: {trial.name} is left out: {error}", file=sys.stderr)
            return None
        return StackTrial(whole=whole, approved=None)


@dataclass(kw_only=True, slots=True)
class Campaign:
    """The runs under their cap, from wherever they are to the end of the last that fits."""

    name: str
    trials: list[CampaignTrial]  # in the order in which they begin
    ledger: LedgerObject
    driver: str
    approved: str
    max_hours: Decimal | None = None
    is_open: bool = False  # more trials may come until max_hours
    find_more: Callable[[set[str], CampaignLedger], list[CampaignTrial]] = lambda known, ledger: []
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time
    finished: dict[str, int] = field(default_factory=dict)  # exit codes by name

    def carry_out(self) -> int:
        """The exit code, as of `run`. Raises GpufleetError, also if the ledger is lost."""
        with _lost_ledger_explained():
            while self._step():
                pass
            return self._report()

    def _step(self) -> bool:
        """Brings home what has ended, and begins one run or waits. False: nothing is left for this driver to do."""
        ledger = self.ledger.read()
        self.trials += self.find_more({each.name for each in self.trials}, ledger)
        own = [each for each in self.trials if each.name in ledger.open_runs(self.driver)]
        over = [each for each in own if each.is_over()]
        for each in over:
            self.finished[each.name] = each.finish()
            ledger = self.ledger.change(lambda was, each=each: was.settled(each.name, each.cost()))  # type: ignore[misc]
        going_on = [each for each in own if each not in over]
        for each in going_on:
            if not each.has_begun():  # a kill came between its reservation and its beginning
                each.begin()
        if begins := self._next(ledger):
            self._begin(begins)
            return True
        if not going_on and not (self.is_open and self._hours_left(ledger) > 0):
            return False
        self.sleep(LOOK_S)
        return True

    def _next(self, ledger: CampaignLedger) -> CampaignTrial | None:
        """The first run that fits what is left of dollars, hours and runs at a time."""
        if len(ledger.open_runs()) >= ledger.at_once:
            return None
        ready = [each for each in self.trials if each.name not in ledger.runs]
        hours = self._hours_left(ledger)
        return next((each for each in ready if each.most <= ledger.rest and each.most_hours <= hours), None)

    def _begin(self, trial: CampaignTrial) -> None:
        if trial.has_begun() or trial.is_over():
            if trial.name in self.ledger.read().runs:
                return  # another driver came between
            raise GpufleetError(
                f"{trial.name} was begun without a reservation of this campaign. Take it out, or give it a new run.id."
            )
        try:
            ledger = self.ledger.change(
                lambda was: was.reserved(trial.name, trial.most, by=self.driver, approved=self.approved)
            )
        except NotReservedError as error:
            if self.ledger.read().approved != self.approved:
                raise GpufleetError(f"{error}: nothing more begins here") from None
            return  # here too
        print(f"{trial.name} begins: {ledger.rest:.2f} USD are left, and it stops before {trial.most:f}.")
        trial.begin()

    def _hours_left(self, ledger: CampaignLedger) -> float:
        return math.inf if self.max_hours is None else float(self.max_hours) - (self.clock() - ledger.began) / 3600

    def _report(self) -> int:
        ledger = self.ledger.read()
        ended = [name for name, each in ledger.runs.items() if each.ended]
        waiting = [each.name for each in self.trials if each.name not in ledger.runs]
        wrong = [name for name, code in self.finished.items() if code]
        held = {name: ledger.runs[name].by for name in ledger.open_runs()}
        _tell(self.name, ledger, waiting, wrong)
        print(f"{counted(len(ended), 'run')} ended; {ledger.rest:.2f} of {ledger.max_usd:f} USD are left.")
        if waiting:
            print(f"Not begun, since their limits do not fit: {', '.join(waiting)}.")
        for name, driver in held.items():
            print(f"{name} is {driver}'s. If that is gone for good: --take-over '{driver}'.")
        if wrong:
            print(f"Look at {', '.join(wrong)}: `gpufleet run` of each goes on.")
        return 1 if waiting or wrong or held else 0
