"""`gpufleet sweep`: lists what a stack still has in the account, what it costs, what is kept on purpose, and how to
remove the rest. With --delete it removes what has the stack's tags and is not kept by the definition.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime

from gpufleet.infra.account import aws, checks, sweep
from gpufleet.infra.account.leftovers import Left, look
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.envelope import tell
from gpufleet.infra.errors import AwsRefused, GpufleetError


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument("--delete", action="store_true", help="ask you, then delete everything that is not kept")
    parser.add_argument("--yes", action="store_true", help="with --delete: do not ask")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if something unwanted is left, and 2 if nothing unwanted was seen but AWS does not show everything."""
    definition = stack.definition_of(args, staged=True)
    region = definition.fleet.region
    who = checks.identity(aws.client("sts", region))
    if who.state == "problem":
        raise AwsRefused(who.found)
    # the line names the account, because nothing of the stack would be found in a wrong one
    print(f"{region}, {who.found}:")

    def list_leftovers() -> list[Left]:
        return list(look(definition, aws.client, datetime.now(UTC)))

    leftovers = list_leftovers()
    print("\n".join(sweep.table(definition, leftovers)))
    if args.delete and any(leftover.unwanted for leftover in leftovers):
        if not args.yes:
            _ask(definition, who.found)
        sweep.delete(list_leftovers, lambda service: aws.client(service, region), pause=time.sleep)
        leftovers = list_leftovers()
        print("\n".join(sweep.table(definition, leftovers)))
    shown = ("kind", "id", "usd_per_month", "unwanted")
    tell([{key: getattr(leftover, key) for key in shown} for leftover in leftovers])
    if any(leftover.unwanted for leftover in leftovers):
        return 1
    return 2 if any(leftover.unseen for leftover in leftovers) else 0


def _ask(definition: StackDefinition, who: str) -> None:
    """Raises GpufleetError unless the answer is the stack's name."""
    print(
        f"Everything except what is kept will be deleted from {who}, even a node that is training. It cannot be taken "
        f"back.",
        flush=True,
    )
    try:
        answer = input(f"To delete it, type {definition.name}: ")
    except EOFError:
        answer = ""
    if answer.strip() != definition.name:
        raise GpufleetError("you did not agree, so nothing was deleted. `--yes` deletes without asking")
