"""`gpufleet receipts [STACK]`: shows runs' costs beside their bills, why they differ, and how accurate bills are."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from gpufleet.infra.definition.loader import project_root, stacks_of
from gpufleet.infra.definition.selected import selected
from gpufleet.infra.envelope import tell
from gpufleet.infra.evidence import focus, receipts
from gpufleet.infra.evidence.receipts import Accuracy
from gpufleet.infra.report import band
from gpufleet.infra.show.sheet import Column, Sheet
from gpufleet.job.contract.receipt import CAUSES, Receipt
from gpufleet.job.text import counted

SHOWN = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stack", metavar="STACK", nargs="?", help="only the runs of this stack")
    parser.add_argument(
        "--focus",
        metavar="ACCOUNT",
        type=_account,
        help="the receipts' lines as FOCUS 1.0 rows (CSV), billed to this account",
    )
    parser.add_argument("--all", action="store_true", help="every run, with the USD that each cause added")
    parser.add_argument("--aws", action="store_true", help="the receipts beside AWS's own charges, from Cost Explorer")


def run(args: argparse.Namespace) -> int:
    """Prints the table, and names invalid files on standard error. Returns 1 if there is no receipt."""
    root = project_root(Path.cwd())
    known, damaged = receipts.read(root, _name(args.stack, root) if args.stack else None)
    for sentence in damaged:
        print(f"gpufleet: {sentence}", file=sys.stderr)
    tell([receipt.to_json() for receipt in known])
    if not known:
        stacks_of(root)  # raises outside of a project, where there can be no receipts
        of = f" of {args.stack}" if args.stack else ""
        print(f"No receipt{of} yet: `gpufleet results STACK` keeps the receipt of a run that has ended.")
        return 1
    if args.focus:
        sys.stdout.write(focus.table(known, args.focus))
        return 0
    total = receipts.grade(known)
    none = (
        f"{counted(len(known), 'receipt')}, and none counts: a receipt counts if its run was real and came to its end."
    )
    print("\n".join(summary(total)) if total else none)
    shown = known if args.all else sorted(known, key=lambda receipt: receipt.at)[-SHOWN:]
    print("\n".join(table(shown, CAUSES if args.all else {})))
    if not args.all:
        more = f"{len(known) - SHOWN} earlier ones, and why" if len(known) > SHOWN else "Why"
        print(f"{more} each differs from its bill: `gpufleet receipts{f' {args.stack}' if args.stack else ''} --all`")
    if args.aws:
        _show_charges(known)
    return 0


def _account(text: str) -> str:
    if re.fullmatch(r"[0-9]{12}", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: allowed are the 12 digits of the AWS account that pays")


def _show_charges(shown: Sequence[Receipt]) -> None:
    """Prints each real run's lines next to AWS's charges. Raises AwsRefused if the tags are not activated for cost
    allocation.
    """
    from gpufleet.infra.account import actual_bill, aws

    ce, today = aws.client("ce", actual_bill.REGION), datetime.now(UTC).date()
    actual_bill.require_tags(ce)
    for receipt in shown:
        if not receipt.rehearsal:
            print()
            print("\n".join(actual_bill.compared(receipt, actual_bill.charged(ce, receipt, today), today)))


def _name(stack: str, root: Path) -> str:
    """The name under which a stack's receipts are kept: the name of its file, even if the file no longer exists. Raises
    GpufleetError if there is no such stack.
    """
    if (root / receipts.FOLDER / stack).is_dir() and not (root / "stacks" / f"{stack}.yaml").is_file():
        return stack
    return selected(stack, root).path.stem


def table(receipts_shown: Sequence[Receipt], causes: Iterable[str]) -> Iterator[str]:
    """One line per run, with the USD of each cause in `causes`, or, if `causes` is empty, with the cost within the
    bill's range. The column `graded` has `-` if the run is not included in the score.
    """
    causes = tuple(causes)
    columns = (
        Column("stack"),
        Column("run"),
        Column(
            "ended by", of=lambda receipts_shown: "rehearsal" if receipts_shown.rehearsal else receipts_shown.reason
        ),
        Column("estimate", unit="USD", digits=4),
        Column("actual", unit="USD", digits=4),
        Column("error", unit="%", of=lambda receipts_shown: f"{receipts_shown.error_percent:+.1f}%"),
        *(Column(name, None, "USD", "{:+.4f}".format, _cause(name)) for name in causes),
        Column("graded", of=_graded),
        *(() if causes else (Column(band.SCALE, of=_in_range),)),
    )
    return Sheet.build(columns, receipts_shown, spare=("ended by", "stack")).text()


def _in_range(receipt: Receipt) -> str:
    return "" if receipt.rehearsal else band.characters(receipt)


def _cause(name: str) -> Callable[[Receipt], Decimal]:
    return lambda receipt: receipt.causes[name]


def summary(total: Accuracy) -> Iterator[str]:
    """Three lines about how accurate the bills were."""
    yield f"{total}." if total.inside is None else f"{total} (target {receipts.TARGET * 100:.0f} %)."
    yield f"Bias: {total.bias_percent:+.1f} %, the median difference of actual from estimated cost."
    causes = ", ".join(f"{name} {percent:.1f} %" for name, percent in total.by_cause.items())
    yield f"By cause, the median of each in % of the estimate: {causes}."


def _graded(receipt: Receipt) -> str:
    if not receipts.counts(receipt):
        return "-"
    if receipt.within_range is None:
        return "no range"
    return "inside" if receipt.within_range else "below p10" if receipt.actual < receipt.p10 else "above p90"
