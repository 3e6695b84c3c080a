"""`gpufleet campaign NAME`: carries out the runs of campaigns/NAME.yaml under one cap, several at once, each as
`gpufleet run` does.

A run begins only once its own limits.max_usd is reserved in the campaign's ledger, and its receipt gives back what it
did not use. If less is left, but enough for nine runs in ten, what is left becomes the run's limit. So the cap holds
because the limits of runs hold, and they hold without this command. Several processes of this command (drivers) may run
at the same time, and a killed one goes on when it is started again. If a driver is gone for good, its reservations stay
until another one takes them over.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from gpufleet.infra import search
from gpufleet.infra.account import aws, campaign_bucket, month
from gpufleet.infra.account.campaign_ledger import CampaignLedger, LedgerLostError, LedgerObject, NotReservedError
from gpufleet.infra.account.campaign_records import CampaignRecords
from gpufleet.infra.bill.campaign import price
from gpufleet.infra.commands import run as run_command
from gpufleet.infra.commands.trials import (
    CampaignSearch,
    CampaignTrial,
    LaterTrials,
    LimitTooLowError,
    StackTrial,
    earlier_trials,
    results_folder,
    whole_run,
)
from gpufleet.infra.definition import campaign as campaigns
from gpufleet.infra.definition.campaign import CampaignFile
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.envelope import tell
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval
from gpufleet.infra.review import policy
from gpufleet.job.text import counted

MISSED = "what was left of their node's dollars, or its end, did not let them begin"
LOOK_S = 60.0  # seconds between two looks at all runs


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("campaign", metavar="NAME", help="a file of campaigns/ without its .yaml")
    parser.add_argument("--approve", metavar="HASH", help="the hash of the campaign as shown (else you are asked)")
    parser.add_argument(
        "--take-over", metavar="DRIVER", help="go on with the runs of this driver, which is gone for good"
    )
    parser.add_argument("--look", action="store_true", help="only show the ledger")
    parser.add_argument("--forget", action="store_true", help="only delete the ledger of a campaign that is over")


def run(args: argparse.Namespace) -> int:
    """0 if every run is over and swept; 1 if the campaign was not approved, if runs do not fit under the cap, or if a
    run left no results or left something in the account. Raises GpufleetError if a run cannot begin, or the ledger is
    lost.
    """
    with _lost_ledger_explained():
        return _carried_out(args)


def _carried_out(args: argparse.Namespace) -> int:
    root = project_root(Path.cwd())
    described = campaigns.load(args.campaign, root)
    listed = campaigns.trials(described, root)
    campaigns.write(listed, root)
    wholes = [whole_run(trial.name, root) for trial in listed]
    region = wholes[0].definition.fleet.region
    if args.forget:
        return _forget(described, root, region)
    if args.look:
        return _look(described, region)
    if len(owners := sorted({whole.definition.run.owner for whole in wholes})) > 1:
        raise GpufleetError(f"the campaign's runs have the owners {', '.join(owners)}; allowed is one run.owner")
    if described.pruner or described.sampler:
        search.require_optuna()
    trials = [StackTrial.plan(trial, whole) for trial, whole in zip(listed, wholes, strict=True)]
    if described.order == "cheapest":
        trials.sort(key=lambda entry: entry.priced[0].bill.usd.p90 if entry.priced else 0)
    approved = approval.of_campaign([trial.made for trial in trials if trial.made], described)
    if args.approve != approved:
        priced = [of_run for trial in trials for of_run in trial.priced]
        hands = [len(trial.priced) for trial in trials] if described.share_node else []
        print("\n".join(price(priced, described, hands).lines()))
        if described.open:
            print(f"It also begins runs put into {campaigns.FOLDER}/{described.name}/, under the same cap.")
        print("This is not the approved campaign." if args.approve else f"Hash of this campaign: {approved}.")
        if not run_command.agreed():
            return 1
    with only_driver(root, described.name) as driver:
        _require_month(described, root, [trial.whole.definition for trial in trials])
        ledger = opened_ledger(described, [*trials, *earlier_trials(described, root)], approved, region, owners[0])
        if described.share_node and (dealt := ledger.read().runs.keys() - {trial.name for trial in trials}):
            raise GpufleetError(
                f"{described.name} has dealt other runs to its nodes ({', '.join(sorted(dealt))}), and would do them"
                " again: keep its values and at_once, or give the campaign a new name"
            )
        if args.take_over:
            ledger.change(lambda was: was.taken_over(args.take_over, driver))
        records = CampaignRecords(store=ledger.store)
        looks = CampaignSearch(described=described, records=records, root=root)
        for trial in trials:
            trial.records = records
        later = LaterTrials(described=described, root=root, owner=owners[0], search=looks, base=trials[0])
        return Campaign(
            name=described.name,
            trials=[] if described.draw else [*trials],
            ledger=ledger,
            driver=driver,
            approved=approved,
            max_hours=described.max_hours,
            is_open=described.open,
            find_more=later.find,
            find_losers=looks.find_losers,
        ).carry_out()


def opened_ledger(
    described: CampaignFile, trials: Sequence[CampaignTrial], approved: str, region: str, owner: str
) -> LedgerObject:
    """The campaign's ledger, with what was approved; made if there is none yet. Raises GpufleetError if it is lost."""
    name, known = described.name, {"approved": approved, "max_usd": described.max_usd, "at_once": described.at_once}
    ledger = campaign_bucket.find_ledger(aws.client, name, region)
    if ledger is None or not ledger.is_there():
        begun = [trial.name for trial in trials if trial.has_begun() or trial.is_over()]
        if begun:
            raise GpufleetError(
                f"{', '.join(begun)}: begun, but the campaign has no ledger. It is lost, or the campaign did not begin"
                " these runs. Nothing more begins, and they stop before their own limits. To begin anew, give their"
                " files a new run.id and the campaign a new name."
            )
        ledger = campaign_bucket.make_bucket(aws.client, name, region, owner)
        ledger.create(CampaignLedger(began=time.time(), **known))  # type: ignore[arg-type]
    ledger.change(lambda was: replace(was, **known))  # type: ignore[arg-type]
    return ledger


@contextmanager
def _lost_ledger_explained() -> Iterator[None]:
    """Raises GpufleetError if the ledger gets lost within the block."""
    try:
        yield
    except LedgerLostError as error:
        raise GpufleetError(
            f"{error}: nothing more begins. Runs that have begun stop before their own limits, whose sum is within the"
            " cap. `gpufleet run STACK` downloads the results of each."
        ) from None


@contextmanager
def only_driver(root: Path, name: str) -> Iterator[str]:
    """This driver's name in the ledger, which says who runs it and where. Raises GpufleetError if another driver runs
    in this folder.
    """
    path = root / ".gpufleet" / "campaigns" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise GpufleetError(f"a `gpufleet campaign {name}` runs in this folder already") from None
        yield f"{os.environ.get('USER') or os.getuid()}@{platform.node()}:{root}"


def _look(described: CampaignFile, region: str) -> int:
    """Prints the ledger; returns 1 if there is none."""
    ledger = campaign_bucket.find_ledger(aws.client, described.name, region)
    if ledger is None or not ledger.is_there():
        print(f"{described.name} has no ledger: nothing of it has begun.")
        return 1
    balance = ledger.read()
    for name, entry in balance.runs.items():
        state = "cost" if entry.ended else f"of {entry.by} may cost"
        print(f"{name} {state} {entry.usd:.2f} USD.")
    print(f"{balance.rest:.2f} of {balance.max_usd:f} USD are left.")
    _tell(described.name, balance, [], [])
    return 0


def _tell(name: str, ledger: CampaignLedger, waiting: list[str], wrong: list[str]) -> None:
    """Puts the ledger into the answer of --json."""
    tell(
        {
            "campaign": name,
            "ended": [run for run, entry in ledger.runs.items() if entry.ended],
            "going_on": {run: ledger.runs[run].by for run in ledger.open_runs()},
            "not_begun": waiting,
            "look_at": wrong,
            "left_usd": f"{ledger.rest:.2f}",
        }
    )


def _require_month(described: CampaignFile, root: Path, definitions: Sequence[StackDefinition]) -> None:
    """Raises GpufleetError if the campaign's cap breaks max_usd_per_month of policy.yaml. The campaign's own runs do
    not count beside the cap, because it includes them.
    """
    owner, regions = definitions[0].run.owner, {definition.fleet.region for definition in definitions}
    own = {f"{definition.name}/{definition.run.id}" for definition in definitions}

    def look_around() -> month.MonthUsd:
        return month.look(root, owner, regions, aws.client, datetime.now(UTC), but=own)

    month.require(policy.find_policy(root), look_around, described.max_usd, f"campaign {described.name}")


def _forget(described: CampaignFile, root: Path, region: str) -> int:
    ledger = campaign_bucket.find_ledger(aws.client, described.name, region)
    if ledger is None:
        print(f"{described.name} has no ledger.")
        return 0
    if ledger.is_there() and (goes_on := ledger.read().open_runs()):
        raise GpufleetError(f"the ledger stays until {', '.join(goes_on)} have ended: let the campaign end first")
    CampaignRecords(store=ledger.store).bring(results_folder(described, root))
    campaign_bucket.delete_bucket(aws.client, described.name, region)
    print(f"The ledger of {described.name} is deleted. A new campaign of that name has its whole cap.")
    return 0


@dataclass(kw_only=True, slots=True)
class Campaign:
    """Carries the runs on under their cap, from wherever they are, to the end of the last one that fits."""

    name: str
    trials: list[CampaignTrial]  # in the order in which they begin
    ledger: LedgerObject
    driver: str
    approved: str
    max_hours: Decimal | None = None
    is_open: bool = False  # whether more trials may come until max_hours
    find_more: Callable[[Sequence[CampaignTrial], CampaignLedger, float], list[CampaignTrial]] = lambda *_: []
    find_losers: Callable[[Sequence[CampaignTrial], CampaignLedger], Collection[str]] = lambda *_: ()
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.time
    finished: dict[str, int] = field(default_factory=dict)  # exit codes by name
    stopped: set[str] = field(default_factory=set)  # losing runs that were asked to end
    too_dear: set[str] = field(default_factory=set)  # runs whose bill has risen: each needs its file's whole max_usd

    def carry_out(self) -> int:
        """Carries it out; returns the exit code of `run`. Raises GpufleetError, for example if the ledger is lost."""
        with _lost_ledger_explained():
            while self._step():
                pass
            return self._report()

    def _step(self) -> bool:
        """Finishes runs that have ended, and begins one run or waits. Returns False if this driver has nothing left to
        do.
        """
        ledger = self.ledger.read()
        self.trials += self.find_more(self.trials, ledger, self._hours_left(ledger))
        own = [trial for trial in self.trials if trial.name in ledger.open_runs(self.driver)]
        over = [trial for trial in own if trial.is_over()]
        for trial in over:
            self.finished[trial.name] = trial.finish()
            self.ledger.change(lambda was, ended=trial: was.settled(ended.name, ended.cost()))  # type: ignore[misc]
        if over:
            return True
        for trial in own:
            if not trial.has_begun():  # the driver was killed between the reservation and the run's begin
                trial.begin(ledger.runs[trial.name].usd)
        lost = self.find_losers(self.trials, ledger) if own else ()
        for loser, run in ((trial, run) for trial in own for run in trial.runs):
            if run in lost and run not in self.stopped:
                print(f"{run} loses, and is asked to end: it saves, and the ledger gets back what it did not use.")
                loser.stop(run)
                self.stopped.add(run)
        if begins := self._next(ledger):
            self._begin(begins)
            return True
        if not own and not (self.is_open and self._hours_left(ledger) > 0):
            return False
        self.sleep(LOOK_S)
        return True

    def _next(self, ledger: CampaignLedger) -> CampaignTrial | None:
        """The first run that fits what is left of dollars and hours, and the number of runs at a time."""
        if len(ledger.open_runs()) >= ledger.at_once:
            return None
        ready = [trial for trial in self.trials if trial.name not in ledger.runs]
        hours = self._hours_left(ledger)
        return next((trial for trial in ready if self._least(trial) <= ledger.rest and trial.most_hours <= hours), None)

    def _least(self, trial: CampaignTrial) -> Decimal:
        return trial.most if trial.name in self.too_dear else trial.least

    def _begin(self, trial: CampaignTrial) -> None:
        if trial.has_begun() or trial.is_over():
            if trial.name in self.ledger.read().runs:
                return  # another driver was faster
            raise GpufleetError(
                f"{trial.name} was begun without a reservation of this campaign. Take it out, or give it a new run.id."
            )

        def reserve(was: CampaignLedger) -> CampaignLedger:
            usd = max(self._least(trial), min(trial.most, was.rest))
            return was.reserved(trial.name, usd, by=self.driver, approved=self.approved)

        try:
            ledger = self.ledger.change(reserve)
        except NotReservedError as error:
            if self.ledger.read().approved != self.approved:
                raise GpufleetError(f"{error}: nothing more begins here") from None
            return  # another driver was faster
        usd = ledger.runs[trial.name].usd
        print(f"{trial.name} begins: {ledger.rest:.2f} USD are left, and it stops before {usd:f}.")
        try:
            trial.begin(usd)
        except LimitTooLowError as error:
            print(f"{trial.name} does not begin after all: {error}")
            self.too_dear.add(trial.name)
            self.ledger.change(lambda was: was.released(trial.name))

    def _hours_left(self, ledger: CampaignLedger) -> float:
        return math.inf if self.max_hours is None else float(self.max_hours) - (self.clock() - ledger.began) / 3600

    def _misfit(self, trial: CampaignTrial, ledger: CampaignLedger) -> str:
        """Which limit of a run does not fit what is left."""
        if (least := self._least(trial)) > ledger.rest:
            return f"limits.max_usd: at least {least:f} USD are needed, and {ledger.rest:.2f} are left"
        if trial.most_hours > (hours := self._hours_left(ledger)):
            return f"limits.max_hours: {trial.most_hours:f} hours, and {max(hours, 0):.1f} are left of max_hours"
        return "another driver was faster"

    def _report(self) -> int:
        ledger = self.ledger.read()
        by_name = {trial.name: trial for trial in self.trials}
        runs = {name: by_name[name].runs if name in by_name else (name,) for name, entry in ledger.runs.items()}
        left_out = {run: MISSED for trial in self.trials for run in trial.left_out}
        ended = [run for name, entry in ledger.runs.items() if entry.ended for run in runs[name] if run not in left_out]
        unbegun = [trial for trial in self.trials if trial.name not in ledger.runs]
        waiting = {run: self._misfit(trial, ledger) for trial in unbegun for run in trial.runs} | left_out
        wrong = [name for name, code in self.finished.items() if code]
        held = {name: ledger.runs[name].by for name in ledger.open_runs()}
        _tell(self.name, ledger, [*waiting], wrong)
        print(f"{counted(len(ended), 'run')} ended; {ledger.rest:.2f} of {ledger.max_usd:f} USD are left.")
        for why in dict.fromkeys(waiting.values()):
            print(f"Not begun: {', '.join(run for run in waiting if waiting[run] == why)}; {why}.")
        for name, driver in held.items():
            print(f"{name} is driven by {driver}. If that driver is gone for good: --take-over '{driver}'.")
        if wrong:
            print(f"Look at {', '.join(wrong)}: `gpufleet run` continues each of them.")
        return 1 if waiting or wrong or held else 0
