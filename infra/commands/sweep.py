"""`gpufleet sweep`: what of a stack is still in the account, what it costs, what was asked for. Deletes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal

from infra.commands import account, aws, stack
from infra.commands.leftovers import Left, look
from infra.definition import StackDefinition
from infra.errors import AwsRefused


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)


def run(args: argparse.Namespace) -> int:
    definition = stack.definition_of(args)
    region = definition.fleet.region
    who = account.identity(aws.client("sts", region))
    if who.state == "problem":
        raise AwsRefused(who.found)
    print(f"{region}, {who.found}:")  # in another account there is nothing left over either
    found = list(look(definition, aws.client, datetime.now(UTC)))
    print("\n".join(table(definition, found)))
    if any(left.bills and left.ours and not left.asked_for and not left.owner for left in found):
        return 1
    return 2 if any(left.unseen for left in found) else 0


def table(definition: StackDefinition, found: list[Left]) -> Iterator[str]:
    """What `sweep` prints."""
    unseen, found = [left for left in found if left.unseen], [left for left in found if not left.unseen]
    foreign = [left for left in found if left.owner]
    kept = [left for left in found if left.asked_for and not left.owner]
    ours = [left for left in found if left.ours and not left.asked_for and not left.owner]
    billed = [left for left in ours if left.bills]
    free = [left for left in ours if not left.bills]
    perhaps = [left for left in found if not left.ours]
    for title, group in (
        ("Not looked at, so it may be there and cost:", unseen),
        (f"Kept on purpose (storage.keep of {definition.source.name}):", kept),
        ("Billed, and nobody asked for it:", billed),
        ("Still there, free of charge:", free),
        ("Perhaps ours: no tag says so:", perhaps),
        (
            f"Of a stack of the same name and another owner than {definition.run.owner}: ask before removing it:",
            foreign,
        ),
    ):
        if group:
            yield title
            for left in group:
                yield _line(left, definition.fleet.region)
    if billed or free:
        yield "`pulumi destroy` removes what the stack declared; the commands above remove the rest."
    total = sum((left.usd_per_month for left in billed), Decimal(0))
    where = f"{definition.name} in {definition.fleet.region}"
    nothing = (
        "nothing billable is in sight, of what could be looked at." if unseen else "nothing billable is left over."
    )
    said = f"${total:.2f} a month nobody asked for." if billed else nothing
    said += " A fleet can launch a node at any time." if any(left.launches for left in billed) else ""
    theirs = sum((left.usd_per_month for left in foreign), Decimal(0))
    yield f"{where}: {said}" + (f" Another owner's: ${theirs:.2f} a month." if theirs else "")


def _line(left: Left, region: str) -> str:
    price = f"${left.usd_per_month:9.2f}/month" if left.usd_per_month else " " * 16
    text = f"  {price}  {left.kind:<18} {left.id}{', ' + left.note if left.note else ''}"
    text += f", owner {left.owner}" if left.owner else ""
    return f"{text}\n{' ' * 20}{left.remove} --region {region}" if left.remove else text
