"""`gpufleet campaign STACK...`: several runs under one cap, so many at once, each a whole run as of `gpufleet run`.

A run begins only while its own limits.max_usd fits what is left: the cap, less what ended runs cost by their receipts,
less the limits of those that have begun. So the cap holds by the limits of runs, which hold without this command. It
keeps no ledger: receipts and fleets say all of that, and killed and started again it goes on. Two of them at a time see
the same rest, and would both spend it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Protocol

from gpufleet.infra.account.results import earlier_receipt
from gpufleet.infra.bill import several
from gpufleet.infra.commands import run as run_command
from gpufleet.infra.commands import stack
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval
from gpufleet.infra.program.plan import Plan
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.job.text import counted

LOOK_S = 60.0  # between two looks at all runs


class CampaignTrial(Protocol):
    """One of the runs."""

    @property
    def name(self) -> str: ...
    @property
    def most(self) -> Decimal: ...  # limits.max_usd
    def is_over(self) -> bool: ...
    def has_begun(self) -> bool: ...
    def cost(self) -> Decimal | None: ...  # by its receipt; None: there is none here
    def begin(self) -> None: ...
    def finish(self) -> int: ...  # results, destroy, sweep; not 0: something is missing or left


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the stacks, the cap, how many at once, and the approval."""
    stack.argument(parser)
    parser.add_argument("others", metavar="STACK", nargs="*", help="more of them, in the order in which they begin")
    parser.add_argument("--max-usd", metavar="USD", type=_usd, required=True, help="of all runs together")
    parser.add_argument("--at-once", metavar="N", type=_count, default=1, help="runs at the same time (1)")
    parser.add_argument("--approve", metavar="HASH", help="of the campaign that was shown; without it you are asked")


def run(args: argparse.Namespace) -> int:
    """0 when every run is over and swept; 1 if it was not approved, if runs do not fit the cap, or if one of them left
    no results or something in the account.
    """
    names = (args.stack, *args.others)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise GpufleetError(f"{', '.join(twice)}: each stack once; a second run of it is another file")
    runs = [run_command.opened(argparse.Namespace(stack=name, approve=None, begin=False)) for name in names]

    def hash_of(plans: Sequence[Plan]) -> str:
        return approval.of_campaign(plans, args.max_usd, args.at_once)

    plans = [each.plan() for each in runs]
    approved = hash_of(plans)
    if args.approve != approved:
        today = datetime.now(UTC).date()
        print("\n".join(several.repeated([(each.definition, each.bill) for each in plans], 1, today).lines()))
        print(f"Together they stop before {args.max_usd:f} USD, {args.at_once} at once.")
        print("This is not the approved campaign." if args.approve else f"Hash of this campaign: {approved}.")
        if not run_command.agreed():
            return 1

    def current() -> str:
        return hash_of([each.plan() for each in runs])

    trials = [StackTrial(whole=each, approved=approved, current=current) for each in runs]
    return Campaign(trials=trials, max_usd=args.max_usd, at_once=args.at_once).carry_out()


@dataclass(frozen=True, kw_only=True, slots=True)
class StackTrial:
    """A trial that is a whole run."""

    whole: run_command.WholeRun
    approved: str
    current: Callable[[], str]  # the campaign's hash as it is now

    @property
    def name(self) -> str:
        return self.whole.definition.name

    @property
    def most(self) -> Decimal:
        return self.whole.definition.limits.max_usd

    def is_over(self) -> bool:
        return self.whole.is_over()

    def has_begun(self) -> bool:
        return self.whole.has_begun()

    def cost(self) -> Decimal | None:
        definition = self.whole.definition
        found = earlier_receipt(self.whole.root / "results" / definition.name / definition.run.id / RECEIPT)
        return found.actual if found else None

    def begin(self) -> None:
        """Begins the run. Raises GpufleetError if the campaign is not the approved one any more."""
        if self.current() != self.approved:
            raise GpufleetError("a file or data of the campaign has changed since it was approved: nothing more begins")
        self.whole.engine.up(approval.approval(self.whole.plan()))

    def finish(self) -> int:
        return self.whole.finish()


@dataclass(kw_only=True, slots=True)
class Campaign:
    """The runs under their cap, from wherever they are to the end of the last that fits."""

    trials: Sequence[CampaignTrial]
    max_usd: Decimal
    at_once: int
    sleep: Callable[[float], None] = time.sleep
    finished: dict[str, int] = field(default_factory=dict)  # exit codes by name

    def carry_out(self) -> int:
        """The exit code, as of `run`."""
        while True:
            begun = [each for each in self._open() if each.has_begun()]
            ready = [each for each in self._open() if each not in begun]
            free = self.at_once - len(begun)
            fits = [each for each in ready if each.most <= self._rest(begun)] if free > 0 else []
            if fits:
                first, rest = fits[0], self._rest(begun)
                print(f"{first.name} begins: {rest:.2f} USD are left, and it stops before {first.most:f}.")
                first.begin()
            elif begun:
                self.sleep(LOOK_S)
            else:
                return self._report(ready)

    def _open(self) -> list[CampaignTrial]:
        """The runs that are not over. Those that are get finished, once."""
        for each in self.trials:
            if each.name not in self.finished and each.is_over():
                self.finished[each.name] = each.finish()
        return [each for each in self.trials if each.name not in self.finished]

    def _rest(self, begun: Sequence[CampaignTrial]) -> Decimal:
        """What is left of the cap, in USD, when every begun run spends all that its limit allows. A run without a
        receipt counts like that too.
        """
        ended = [each for each in self.trials if each.name in self.finished]
        costs = [(each, each.cost()) for each in ended]
        held = [each.most for each in begun]
        return self.max_usd - sum([*held, *(each.most if cost is None else cost for each, cost in costs)], Decimal(0))

    def _report(self, left: Sequence[CampaignTrial]) -> int:
        wrong = [name for name, code in self.finished.items() if code]
        print(f"{counted(len(self.finished), 'run')} ended; {self._rest([]):.2f} of {self.max_usd:f} USD are left.")
        if left:
            print(f"Not begun, since their limits do not fit: {', '.join(each.name for each in left)}.")
        if wrong:
            print(f"Look at {', '.join(wrong)}: `gpufleet run` of each goes on.")
        return 1 if left or wrong else 0


def _usd(text: str) -> Decimal:
    try:
        if (usd := Decimal(text)).is_finite() and usd > 0:
            return usd
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(f"{text}: allowed are dollars, above 0")


def _count(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed are 1 to 100 runs at once")
