"""Writes a review as Markdown for a pull-request comment; equal reviews give equal bytes.

All text from files is written as code, so that a value can neither break the table nor mention anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from gpufleet.infra.bill.limits import AS_COUNTED
from gpufleet.infra.review.compare import Review, StackAtCommit, StackReview
from gpufleet.infra.show.sheet import Column, Sheet

# a workflow finds its own comment by this line, which contains the project's folder
MARKER = "<!-- gpufleet-cost-review{} -->"
_LONGEST = 80  # at most this many characters of a value are shown
LIMIT = 65_536  # a comment has at most this many characters (GitHub's REST API, 2026-11)
_KEPT = 512  # of these characters, the number that is reserved for the sentence about the cut


def render(review: Review) -> str:
    """The whole comment, which begins with its marker. If it is too long for GitHub, it is cut at a line and says so:
    the verdict and the table of stacks come before everything that grows with the number of changed settings.
    """
    lines = list(_lines(review))
    if sum(len(line) + 1 for line in lines) <= LIMIT:
        return "\n".join(lines) + "\n"
    room, fitting = LIMIT - _KEPT, 0
    while (room := room - len(lines[fitting]) - 1) >= 0:
        fitting += 1
    cut = (
        f"**Cut here: a comment holds {LIMIT:,} characters, and {len(lines) - fitting} lines are missing.** All of it:"
        f" `gpufleet diff {review.base[:12]} {review.head[:12]} --json`."
    )
    return "\n".join([*lines[:fitting], "", cut]) + "\n"


def marker(folder: str = "") -> str:
    """The first line of every review of the project in this folder of its repository."""
    return MARKER.format(" " + re.sub(r"[^\w./-]", "-", folder) if folder else "")


def _lines(review: Review) -> Iterator[str]:
    changed = [stack for stack in review.stacks if stack.changed]
    before, after, unknown = _totals(review.stacks)
    yield marker(review.folder)
    of_folder = f" of {_code(review.folder)}" if review.folder else ""
    yield f"## Cost review{of_folder}: {_signed(after - before)} USD"
    yield ""
    without = f", without {', '.join(map(_code, unknown))} (no bill to compare)" if unknown else ""
    yield f"One run of each stack, sum of p50: {before:.2f} to {after:.2f} USD{without}. {_verdict(review)}"
    yield ""
    shown = [stack for stack in review.stacks if stack.changed or stack.fails or _errors(stack)]
    if shown:
        yield from Sheet.build(STACK, shown).markdown()
        yield ""
    for stack in shown:
        yield from _details(stack)
    quiet = [_code(stack.name) for stack in review.stacks if stack not in shown]
    if quiet:
        yield f"Unchanged: {', '.join(quiet)}."
        yield ""
    for note in review.notes:
        yield f"- {note}"
    for age in sorted({stack.age for stack in changed if "older than" in stack.age}):
        whose = ", ".join(_code(stack.name) for stack in changed if stack.age == age)
        yield f"- {whose}: on the day of HEAD, {age}."
    rules = "policy.yaml of HEAD or --policy" if review.rules else f"none: no policy.yaml in `{review.head[:12]}`"
    if not review.rules and review.policy_uncommitted:
        rules += ", and yours is not committed: commit it, or give it with `--policy policy.yaml`"
    yield (
        f"- `{review.base[:12]}` ({review.base_prices}) to `{review.head[:12]}` ({review.head_prices}); both sides are"
        " priced with the gpufleet that made this review, the size of each dataset is assumed."
    )
    yield f"- Rules: {rules}. Bound: `limits.max_usd`, held against the p90 of finishing {AS_COUNTED}."


def _totals(stacks: Sequence[StackReview]) -> tuple[Decimal, Decimal, list[str]]:
    """The sums of p50 at BASE and at HEAD, and the stacks that both sums leave out because one commit has no bill for
    them. If only one sum included such a stack, a broken stack would look like saved money.
    """
    unknown = [stack.name for stack in stacks if any(side and not side.usd for side in (stack.base, stack.head))]
    known = [stack for stack in stacks if stack.name not in unknown]
    return _sum(stack.base for stack in known), _sum(stack.head for stack in known), unknown


def _sum(sides: Iterable[StackAtCommit | None]) -> Decimal:
    return sum((side.usd.p50 for side in sides if side and side.usd), Decimal(0))


def _verdict(review: Review) -> str:
    if review.exit_code == 2:
        return "**A stack of HEAD has no bill.**"
    failing = sum(stack.fails for stack in review.stacks)
    if failing:
        who = "1 stack of HEAD breaks" if failing == 1 else f"{failing} stacks of HEAD break"
        return f"**{who} a bound or a rule.**"
    return "Every bound and rule holds."


STACK = (
    Column("Stack", of=lambda stack: _code(stack.name)),
    Column("kind", "", of=lambda stack: _kind(stack)),
    Column("p50 USD", unit="USD", of=lambda stack: _change(stack, "p50")),
    Column("p90 USD", unit="USD", of=lambda stack: _change(stack, "p90")),
    Column("Bound", unit="USD", of=lambda stack: _bound(stack)),
    Column("verdict", "", of=lambda stack: _holds(stack)),
)


def _kind(stack: StackReview) -> str:
    if stack.base is None or stack.head is None:
        return "added" if stack.base is None else "removed"
    return "changed" if stack.changed else "as before"


def _bound(stack: StackReview) -> Any:
    definition = stack.head and stack.head.definition
    return definition.limits.max_usd if definition else ""


def _holds(stack: StackReview) -> str:
    if _errors(stack):
        return "**no bill**"
    marks = [f"p90 passes it: {_counted(stack)} {AS_COUNTED}"] if stack.over_cap else []
    marks += ["`up` would refuse"] if stack.refused else []
    marks += [f"breaks {_code(breach.rule)}" for breach in stack.policy]
    return f"**{', '.join(marks)}**" if marks else "holds" if stack.head else ""


def _counted(stack: StackReview) -> str:
    p90 = stack.head.counted_p90 if stack.head else None
    return "" if p90 is None else f"{p90:.2f}"


def _change(stack: StackReview, which: str) -> str:
    old, new = (_usd(side, which) for side in (stack.base, stack.head))
    if old is None or new is None:
        return "" if old is None and new is None else f"{new:.2f}" if new is not None else f"~~{old:.2f}~~"
    return f"{old:.2f} to {new:.2f} ({_signed(new - old)})" if new != old else f"{new:.2f}"


def _usd(side: StackAtCommit | None, which: str) -> Decimal | None:
    return getattr(side.usd, which) if side and side.usd else None


def _details(stack: StackReview) -> Iterator[str]:
    errors = _errors(stack)
    moving = [step for step in stack.steps if step.p50 or step.p90]
    still = [key for step in stack.steps if not (step.p50 or step.p90) for key in step.keys] + list(stack.aside)
    base_errors = stack.base.errors if stack.base else ()
    speed = _speed(stack)
    if not (errors or moving or still or stack.over_cap or stack.refused or stack.policy or base_errors or speed):
        return
    yield f"### {_code(stack.name)}"
    yield ""
    if errors:
        yield "HEAD has no bill:"
        yield from (f"- {_code(error, whole=True)}" for error in errors)
        yield ""
    if base_errors and stack.head and stack.head.usd:
        yield "BASE has no bill with this version, so there is nothing to compare with:"
        yield from (f"- {_code(error, whole=True)}" for error in base_errors)
        yield ""
    for sentence in filter(None, (stack.over_cap, *stack.refused)):
        yield f"- **fails**: {_code(sentence, whole=True)}"
    for breach in stack.policy:
        yield f"- **breaks {_code(breach.rule)}**: {_code(breach.message, whole=True)}"
    if stack.over_cap or stack.refused or stack.policy:
        yield ""
    if moving:
        yield from Sheet.build(STEP, moving).markdown()
        p50, p90 = (sum((getattr(step, which) for step in moving), Decimal(0)) for which in ("p50", "p90"))
        yield f"| **all** | | | **{_signed(p50, 4)}** | **{_signed(p90, 4)}** |"
        yield ""
    if speed:
        yield speed
        yield ""
    if still:
        yield f"Changed without an effect on the bill: {', '.join(map(_code, still))}."
        yield ""


STEP = (
    Column("keys", "Because of", of=lambda step: _keys(step.keys)),
    Column("from", of=lambda step: _code(step.before)),
    Column("to", of=lambda step: _code(step.after)),
    Column("p50", "p50 USD", "USD", lambda usd: _signed(usd, 4)),
    Column("p90", "p90 USD", "USD", lambda usd: _signed(usd, 4)),
)


def _keys(keys: Sequence[str]) -> str:
    return ", ".join(map(_code, keys)) + (" together" if len(keys) > 1 else "")


def _speed(stack: StackReview) -> str:
    """A line about the speed, if only one side uses a measurement."""
    bills = [side.bill for side in (stack.base, stack.head) if side and side.bill]
    if len(bills) < 2 or bills[0].calibrated == bills[1].calibrated:
        return ""
    old, new = (_code(bill.chosen.runtime.basis, whole=True) for bill in bills)
    lost = "" if bills[1].calibrated else " **HEAD is uncalibrated.**"
    return f"Speed: {old} at BASE, {new} at HEAD.{lost}"


def _errors(stack: StackReview) -> tuple[str, ...]:
    return stack.head.errors if stack.head else ()


def _signed(amount: Decimal, digits: int = 2) -> str:
    rounded = round(amount, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{Decimal(0):.{digits}f}"


def _code(text: str, *, whole: bool = False) -> str:
    """The text as Markdown code on one line, shortened unless `whole`. No character in the text can end the code or the
    table's cell.
    """
    if not text:
        return ""
    flat = " ".join(text.replace("`", "'").split())
    if not whole and len(flat) > _LONGEST:
        flat = f"{flat[: _LONGEST - 3]}..."
    return f"`{flat.replace('|', chr(92) + '|')}`"
