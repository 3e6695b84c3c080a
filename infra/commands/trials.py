"""The runs that `gpufleet campaign` begins, stops and ends: those in the campaign's file, those that come later, and
those whose values a sampler draws.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from gpufleet.infra import search
from gpufleet.infra.account import aws
from gpufleet.infra.account.campaign_ledger import CampaignLedger
from gpufleet.infra.account.campaign_records import OF_RUN, CampaignRecords
from gpufleet.infra.account.results import earlier_receipt
from gpufleet.infra.account.stop import ask
from gpufleet.infra.bill.campaign import PricedTrial
from gpufleet.infra.commands import run as run_command
from gpufleet.infra.commands import stack
from gpufleet.infra.definition import campaign as campaigns
from gpufleet.infra.definition.campaign import VALUES, CampaignFile, DefinedTrial, write_values
from gpufleet.infra.definition.loader import TRIALS
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.infra.program import approval, pulumi_cli
from gpufleet.infra.program.plan import Plan
from gpufleet.infra.search import TrialProgress
from gpufleet.job.contract import done as ends
from gpufleet.job.contract.workdir import DONE, METRICS, RECEIPT


class LimitTooLowError(GpufleetError):
    """The run cannot begin with what is left as its limit, because newer receipts have raised its bill. Nothing was
    begun.
    """


class CampaignTrial(Protocol):
    """One of a campaign's runs."""

    @property
    def name(self) -> str: ...
    @property
    def least(self) -> Decimal: ...  # the lowest limit with which it begins, in USD
    @property
    def most(self) -> Decimal: ...  # limits.max_usd
    @property
    def most_hours(self) -> Decimal: ...  # limits.max_hours; of trials that share a node that of the first
    @property
    def runs(self) -> Collection[str]: ...  # its name, or the names of the trials that share its node
    @property
    def left_out(self) -> Collection[str]: ...  # those of these that did not begin, once it has finished
    def is_over(self) -> bool: ...
    def has_begun(self) -> bool: ...
    def cost(self) -> Decimal | None: ...  # by its receipt; None if there is none on this machine
    def begin(self, usd: Decimal) -> None: ...  # with `usd` as its limit
    def stop(self, run: str) -> None: ...  # as `gpufleet stop`, for one of its runs
    def finish(self) -> int: ...  # results, destroy, sweep; not 0: something is missing or left


def whole_run(name: str, root: Path) -> run_command.WholeRun:
    """The run of a trial, whose Pulumi stack is made when the run begins. Raises GpufleetError if it has stages that do
    not share a node.
    """
    args = argparse.Namespace(stack=name, approve=None, begin=False)
    engine = pulumi_cli.PulumiStack(root=root, name=name)
    definition = stack.definition_of(args, staged=(root / TRIALS / f"{name}.yaml").is_file())
    if definition.stages and not definition.stages[0].shared:
        raise GpufleetError(f"{definition.source} has stages, but this takes a single job")
    return run_command.WholeRun(args=args, definition=definition, root=root, engine=engine)


def results_folder(described: CampaignFile, root: Path) -> Path:
    """The folder on this machine with the documents of all runs of the campaign."""
    return root / "results" / described.name


def earlier_trials(described: CampaignFile, root: Path) -> list[StackTrial]:
    """The trials with drawn values that a driver has made in this folder."""
    if not described.draw:
        return []
    own = re.compile(rf"{described.name}-[0-9a-f]{{{campaigns.DIGITS}}}")
    names = sorted(path.stem for path in (root / TRIALS).glob("*.yaml") if own.fullmatch(path.stem))
    return [StackTrial(trial=DefinedTrial(name=name), whole=whole_run(name, root)) for name in names]


@dataclass(kw_only=True, slots=True)
class StackTrial:
    """A trial that is a whole run."""

    trial: DefinedTrial
    whole: run_command.WholeRun
    made: Plan | None = None  # what it would have begun when it was planned; None if it had already begun
    priced: tuple[PricedTrial, ...] = ()  # its bill when it was planned; with members the bill of each
    approved: str | None = None  # the approved hash of `compared`; None if it came later, and only the cap was approved
    compared: run_command.WholeRun | None = None  # the run itself, or the file whose values were drawn
    records: CampaignRecords | None = None  # where its documents are kept; None until there is a ledger
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def plan(cls, trial: DefinedTrial, whole: run_command.WholeRun) -> StackTrial:
        """The trial, planned as it is now. Raises GpufleetError, which names the file to correct."""
        try:
            made = whole.plan()
        except GpufleetError as error:
            if not trial.file or trial.text is None:
                raise
            message = f"{error}\nThis file is made from {trial.file}: correct that file, or the file of the campaign."
            raise GpufleetError(message) from None
        labels = map(str, trial.members or (trial,))
        priced = tuple(
            PricedTrial.build(label, part.definition, part.bill, is_made=trial.is_made)
            for label, part in zip(labels, made.parts, strict=True)
        )
        digits = approval.begins_with(made)
        return cls(trial=trial, whole=whole, made=made, priced=priced, approved=digits, compared=whole)

    @property
    def name(self) -> str:
        return self.whole.definition.name

    @property
    def least(self) -> Decimal:
        return self.most if self.trial.members or not self.priced else self.priced[0].least_usd

    @property
    def runs(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def members(self) -> tuple[DefinedTrial, ...]:
        """The trials whose stages the run has, or the trial itself."""
        return self.trial.members or (self.trial,)

    def _part(self, member: DefinedTrial) -> StackDefinition:
        """The definition of a member: a stage of the run, or the run."""
        parts = self.whole.definition.parts
        return next((part for part in parts if part.stage == member.stage), self.whole.definition)

    @property
    def most(self) -> Decimal:
        return self.whole.definition.limits.max_usd

    @property
    def most_hours(self) -> Decimal:
        return self.whole.definition.parts[0].limits.max_hours

    def is_over(self) -> bool:
        return self.whole.is_over()

    def has_begun(self) -> bool:
        return self.whole.has_begun()

    def cost(self) -> Decimal | None:
        receipt = earlier_receipt(self._results() / RECEIPT)
        return receipt.actual if receipt else None

    def begin(self, usd: Decimal) -> None:
        """Begins the run; its limit is `usd` if that is lower than its own. Raises GpufleetError if the run has changed
        since the campaign was approved, and LimitTooLowError if `usd` is too low by now.
        """
        made = self.compared.plan() if self.compared else None
        if made is not None and approval.begins_with(made) != self.approved:
            raise GpufleetError(f"{self.name}: a file or data has changed since the campaign was approved")
        whole = self.whole
        if usd < self.most:
            campaigns.lower_limit(self.name, usd, whole.root)
            whole = whole_run(self.name, whole.root)
        if made is None or whole is not self.compared:
            try:
                made = whole.plan()
            except GpufleetError as error:
                campaigns.write([self.trial], whole.root)  # restores its own limit
                raise LimitTooLowError(str(error)) if usd < self.most else error from None
        whole.engine.select()
        whole.engine.up(approval.approval(made))

    def stop(self, run: str) -> None:
        """Asks a run to end. If it is just ending by itself, there may be nobody left to ask."""
        definition = self._part(next(member for member in self.members if member.name == run))
        ec2, s3 = (aws.client(service, definition.fleet.region) for service in ("ec2", "s3"))
        try:
            ask(definition, ec2, s3, datetime.now(UTC), say=lambda _: None)
        except AwsRefused as error:
            print(f"gpufleet: {run}: {error}", file=sys.stderr)

    def finish(self) -> int:
        """Keeps the documents of each trial for the campaign, then downloads the results, destroys and sweeps."""
        records = self.records
        for member in self.members if records is not None else ():
            documents = self.read_documents(member, OF_RUN)
            done = ends.read(documents.get(DONE))
            if self.trial.members and METRICS not in documents and (done is None or done.reason == ends.MAX_USD):
                self.left_out.append(member.name)
            values = write_values(member.values)
            assert records is not None
            records.keep(member.name, {**documents, VALUES: values} if documents else {})
        code = self.whole.finish()
        for member in self.members:
            path = self._results(member) / RECEIPT  # it may have been made just now
            if records is not None and path.is_file():
                records.keep(member.name, {RECEIPT: path.read_bytes()})
        return code

    def read_documents(self, member: DefinedTrial, names: Sequence[str]) -> dict[str, bytes]:
        """Those of the named documents that are in the member's folder of the bucket by now."""
        folder = self.whole.folder()
        if folder is None:
            return {}
        own = replace(folder, run=self._part(member).run.id)
        contents = {name: own.read(name) for name in names}
        return {name: content for name, content in contents.items() if content is not None}

    def _results(self, member: DefinedTrial | None = None) -> Path:
        """The folder of a member's results, or of the run's."""
        definition = self.whole.definition
        folder = self.whole.root / "results" / definition.name / definition.run.id
        return folder / self._part(member).stage if member else folder


@dataclass(kw_only=True, slots=True)
class CampaignSearch:
    """Decides from the figures of all runs which runs of a campaign lose, and what the sampler draws next."""

    described: CampaignFile
    records: CampaignRecords
    root: Path
    drawn: dict[str, DefinedTrial] = field(default_factory=dict)  # by name, in the order of the draws
    ended: dict[str, TrialProgress] = field(default_factory=dict)  # by name: figures that do not change any more

    def find_losers(self, known: Sequence[CampaignTrial], ledger: CampaignLedger) -> list[str]:
        """The names of those running trials that lose."""
        return search.find_losers(self.described, self._read_all(ledger, known)) if self.described.pruner else []

    def find_drawn(
        self, known: Sequence[CampaignTrial], ledger: CampaignLedger, refused: Collection[str], *, fits: bool
    ) -> list[DefinedTrial]:
        """The trials that any driver has drawn; and a new one, if no other waits and it could begin (`fits`). Values
        that were `refused` as a definition count as a failed run.
        """
        draws = self.records.draws()
        made = [campaigns.define_drawn(self.described, values, self.root) for values in draws if values]
        self.drawn = {trial.name: trial for trial in made}
        waits = any(name not in ledger.runs and name not in refused for name in self.drawn)
        is_full = len(draws) >= (self.described.trials or 0) or len(ledger.open_runs()) >= ledger.at_once
        if fits and not waits and not is_full:
            failed = [trial for name, trial in self.drawn.items() if name in refused]
            runs = [TrialProgress(name=trial.name, ended="", values=trial.values) for trial in failed]
            values = search.draw(self.described, [*self._read_all(ledger, known), *runs])
            if values is not None and self.records.add_draw(len(draws), values):
                trial = campaigns.define_drawn(self.described, values, self.root)
                self.drawn[trial.name] = trial
        return list(self.drawn.values())

    def _read_all(self, ledger: CampaignLedger, trials: Sequence[CampaignTrial]) -> list[TrialProgress]:
        """The figures of the runs, in the order in which the runs began."""
        by_name = {trial.name: trial for trial in trials if isinstance(trial, StackTrial)}
        figures = []
        for name, held in ledger.runs.items():
            trial = by_name.get(name)
            members = trial.members if trial else (DefinedTrial(name=name),)
            figures += [self._read(member, held.ended, trial) for member in members]
        return figures

    def _read(self, member: DefinedTrial, has_ended: bool, trial: StackTrial | None) -> TrialProgress:
        if (name := member.name) in self.ended:
            return self.ended[name]
        documents: dict[str, bytes] = {}
        if trial is not None and not has_ended:
            documents = trial.read_documents(member, (METRICS, DONE))
        if not documents:  # the run has ended, and its own bucket may no longer exist
            documents = {key: self.records.read(name, key) or b"" for key in (METRICS, DONE)}
        lines, done = documents.get(METRICS, b""), ends.read(documents.get(DONE) or None)
        reason = done.reason if done else "" if has_ended else None
        values = self.drawn[name].values if name in self.drawn else None
        metric = self.described.metric or ""
        progress = TrialProgress.read(name, metric, lines, ended=reason, values=values)
        if has_ended:
            self.ended[name] = progress
            if not progress.figures and (others := search.list_metrics(lines)):
                print(f"gpufleet: {name} reports no figure {metric}; it reports {', '.join(others)}", file=sys.stderr)
        return progress


@dataclass(kw_only=True, slots=True)
class LaterTrials:
    """Trials that the campaign's file does not name: those with drawn values, those in the folder of an open campaign,
    and those that the file named earlier and that go on by the ledger.
    """

    described: CampaignFile
    root: Path
    owner: str
    search: CampaignSearch
    base: StackTrial  # the first trial in the file
    refused: dict[str, str] = field(default_factory=dict)  # texts of files that cannot be trials

    def find(self, known: Sequence[CampaignTrial], ledger: CampaignLedger, hours: float) -> list[CampaignTrial]:
        """The trials besides `known`, if `hours` are left. Prints why a file cannot be a trial."""
        names = {trial.name for trial in known}
        fits = self.base.least <= ledger.rest and self.base.most_hours <= hours
        drawn = self.search.find_drawn(known, ledger, self.refused, fits=fits) if self.described.draw else []
        offered = campaigns.offered(self.described, self.root)
        reserved = ledger.open_runs()
        earlier = [DefinedTrial(name=name) for name in reserved]
        named = {
            trial.name: trial for trial in (*offered, *earlier, *drawn)
        }  # a trial with a reservation does not change
        later = [self._make(trial, name in reserved) for name, trial in named.items() if name not in names]
        return [trial for trial in later if trial]

    def _make(self, trial: DefinedTrial, is_reserved: bool) -> StackTrial | None:
        if self.refused.get(trial.name) == (trial.text or ""):
            return None
        try:
            campaigns.write([trial], self.root)
            whole = whole_run(trial.name, self.root)
            if is_reserved:  # it goes on, whatever has changed since
                return self._as_approved(StackTrial(trial=trial, whole=whole))
            if whole.definition.source.parent != (self.root / TRIALS):
                raise GpufleetError(f"stacks/ also has {trial.name}: give this file another name")
            if whole.definition.run.owner != self.owner:
                raise GpufleetError(f"run.owner is {whole.definition.run.owner}; allowed is {self.owner}")
            made = StackTrial.plan(trial, whole)
        except GpufleetError as error:
            self.refused[trial.name] = trial.text or ""
            print(f"gpufleet: {trial.name} is left out: {error}", file=sys.stderr)
            return None
        return self._as_approved(made)

    def _as_approved(self, made: StackTrial) -> StackTrial:
        """The trial with its approval: by hash if its values were drawn, so that its file must not have changed;
        otherwise by the campaign's cap.
        """
        is_drawn, base = bool(made.trial.file), self.base
        made.approved, made.compared = (base.approved, base.whole) if is_drawn else (None, None)
        made.records = base.records
        return made
