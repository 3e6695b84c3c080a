"""`gpufleet cost STACK`: the bill of a definition, without Pulumi, credentials or network."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from infra.catalog import load_catalog
from infra.commands import stack
from infra.cost.bill import problems
from infra.cost.table import render
from infra.errors import DefinitionError
from infra.loader import find, load, not_ready, project_root
from infra.pricing import bill_of
from infra.receipts import score
from infra.scenarios import scenario


def arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line arguments."""
    stack.argument(parser)
    parser.add_argument("--scenario", metavar="NAME", help="one of the file's scenarios instead of the file as it is")
    parser.add_argument("--json", action="store_true", help="the same for programs; keys in docs/bill.md")


def run(args: argparse.Namespace) -> int:
    """Prints the bill. A definition that its own bill forbids is shown first and then raised as DefinitionError."""
    root = project_root(Path.cwd())
    now = datetime.now(UTC)
    path = find(args.stack, root)
    definition = scenario(path, args.scenario, now=now) if args.scenario else load(path, now=now)
    missing = not_ready(definition, root)
    bill = bill_of(definition, root, load_catalog(), not_ready=missing)
    if args.json:
        sys.stdout.write(json.dumps(bill.to_json(), indent=2) + "\n")
    else:
        sys.stdout.write(render(bill, today=now.date(), accuracy=score(root)))
    if found := problems(definition, bill):
        sys.stdout.flush()
        raise DefinitionError(str(definition.source), found)
    return 0
