"""Shows a stack's leftovers for `gpufleet sweep`, and removes them. `sweep` deletes only what carries the stack's tags
and is not kept by the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from botocore.exceptions import ClientError

from gpufleet.infra.account import refusals
from gpufleet.infra.account.leftovers import AMI, SNAPSHOT, Left
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.text import counted

# Nodes take minutes to end (p5 the longest), and the resources that they use cannot be deleted before.
TIMEOUT_S, POLL_S = 1800, 10
# AWS's answers if something else still uses the resource, or if the resource is about to end.
IN_USE = (
    "DependencyViolation", "DeleteConflict", "BucketNotEmpty", "VolumeInUse", "IncorrectState", "OperationAborted",
    "IncorrectInstanceState", "ConcurrentModification", "fleetNotInDeletableState", "RequestLimitExceeded",
)  # fmt: skip
Found = Callable[[], list[Left]]


def delete(
    list_leftovers: Found,
    client: Callable[[str], Any],
    *,
    pause: Callable[[float], None],
    say: Callable[[str], None] = print,
) -> None:
    """Deletes unwanted leftovers, and looks again until there are none, because some resources end slowly and a fleet
    may have launched more. Prints each deletion, and the reason why a resource stays. Gives up after TIMEOUT_S, or if
    AWS refuses to delete the rest and waiting cannot change that.
    """
    gone, waited = set[tuple[str, str]](), 0.0
    while True:
        leftovers = list_leftovers()
        unwanted = [leftover for leftover in leftovers if leftover.unwanted]
        progress, refused = False, dict[str, ClientError]()
        for leftover in unwanted:
            try:
                for step in leftover.steps:
                    step.do(client)
            except ClientError as error:
                refused[f"{leftover.kind} {leftover.id}"] = error
                continue
            if leftover.steps and (leftover.kind, leftover.id) not in gone:
                gone.add((leftover.kind, leftover.id))
                progress = True
                say(f"deleted: {leftover.kind} {leftover.id}")
        if not unwanted:
            return
        ending = any(not leftover.steps for leftover in unwanted)
        # another owner's resource does not end by itself, so waiting does not help
        blocked = not ending and any(leftover.foreign and not leftover.owner for leftover in leftovers)
        freed = any(refusals.code(error) in IN_USE for error in refused.values()) and not blocked
        if waited >= TIMEOUT_S or not (progress or ending or freed):
            for resource, why in refused.items():
                say(f"stays: {resource}: {refusals.refusal(why)}")
            return
        if not progress:
            pause(POLL_S)
            waited += POLL_S


def table(definition: StackDefinition, leftovers: list[Left]) -> Iterator[str]:
    """What `sweep` prints."""
    unseen, leftovers = (
        [leftover for leftover in leftovers if leftover.unseen],
        [leftover for leftover in leftovers if not leftover.unseen],
    )
    theirs = [leftover for leftover in leftovers if leftover.owner]
    mine = [leftover for leftover in leftovers if not leftover.owner]
    unwanted, foreign = (
        [leftover for leftover in mine if leftover.unwanted],
        [leftover for leftover in mine if leftover.foreign],
    )
    wanted = [leftover for leftover in mine if leftover.asked_for]
    billed, free = (
        [leftover for leftover in unwanted if leftover.bills],
        [leftover for leftover in unwanted if not leftover.bills],
    )
    for title, group in (
        ("AWS did not show these; they may exist and cost money:", unseen),
        (
            f"Kept on purpose (storage.keep of {definition.source.name}):",
            [leftover for leftover in wanted if leftover.kind not in (AMI, SNAPSHOT)],
        ),
        (
            f"Kept by `gpufleet bake`; `gpufleet bake {definition.argument} --delete` deletes it:",
            [leftover for leftover in wanted if leftover.kind == AMI],
        ),
        (
            f"Kept by `gpufleet bake --data`; `gpufleet bake {definition.argument} --data PLACE --delete` takes it"
            " away:",
            [leftover for leftover in wanted if leftover.kind == SNAPSHOT],
        ),
        ("Billed, and not kept by the definition:", billed),
        ("Still there, free of charge:", free),
        (
            "These resources do not belong to the stack, but lie in its VPC. The VPC cannot be deleted while they"
            " exist, and they may be billed. Ask whose they are:",
            foreign,
        ),
        ("Perhaps of this stack (these have no tags):", [leftover for leftover in mine if not leftover.ours]),
        (f"Of a stack of the same name and another owner than {definition.run.owner}: ask before removing it:", theirs),
    ):
        if group:
            yield title
            for leftover in group:
                yield from _lines(leftover, definition.fleet.region)
    if unwanted:
        yield (
            "`pulumi destroy` removes the resources that the stack knows. For the rest, or if destroy cannot run, use "
            f"the commands above in their order, or `gpufleet sweep {definition.argument} --delete`."
        )
    where = f"{definition.name} in {definition.fleet.region}"
    own = " of its own" if foreign else ""
    nothing = f"nothing billable{own} is " + ("among the things that AWS shows." if unseen else "left over.")
    summary = f"{_monthly(billed)} nobody asked for." if billed else nothing
    summary += f" {counted(len(free), 'part')} free of charge still there." if free else ""
    summary += f" {counted(len(foreign), 'part')} of others in its VPC, perhaps billed." if foreign else ""
    summary += _may_launch(billed)
    yield f"{where}: {summary}" + (f" Another owner's: {_monthly(theirs)}.{_may_launch(theirs)}" if theirs else "")


def _monthly(group: list[Left]) -> str:
    return f"${sum((leftover.usd_per_month for leftover in group), Decimal(0)):.2f} a month"


def _may_launch(group: list[Left]) -> str:
    return " A fleet can launch a node at any time." if any(leftover.launches for leftover in group) else ""


def _lines(leftover: Left, region: str) -> Iterator[str]:
    price = f"${leftover.usd_per_month:9.2f}/month" if leftover.usd_per_month else " " * 16
    text = f"  {price}  {leftover.kind:<18} {leftover.id}{', ' + leftover.note if leftover.note else ''}"
    yield text + (f", owner {leftover.owner}" if leftover.owner else "")
    for step in leftover.steps:
        yield f"{' ' * 20}{step.command} --region {region}"
