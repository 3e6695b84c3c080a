"""The STACK argument that most commands take."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from infra.definition import StackDefinition
from infra.loader import find, load, project_root


def argument(parser: argparse.ArgumentParser, *, earlier_runs: bool = False) -> None:
    """Adds STACK, and --run for commands that can also look at an earlier run of the stack."""
    parser.add_argument("stack", metavar="STACK", help="a file of stacks/ without its .yaml, or a path")
    if earlier_runs:
        parser.add_argument(
            "--run", dest="run_id", metavar="ID", help="a run of this stack; default: the file's own run.id"
        )


def path_of(args: argparse.Namespace) -> Path:
    """The definition file that STACK names."""
    return find(args.stack, project_root(Path.cwd()))


def definition_of(args: argparse.Namespace) -> StackDefinition:
    """The definition. A deadline may have passed: the run it belongs to can still be looked at and swept."""
    definition = load(path_of(args), now=datetime.now(UTC), past_deadline=True)
    run = getattr(args, "run_id", None)
    return replace(definition, run=replace(definition.run, id=run)) if run else definition
