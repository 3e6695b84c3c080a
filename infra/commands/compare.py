"""`gpufleet compare STACK`: its scenarios and every type for their work, ranked; needs no account and no network."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from infra.catalog import load_catalog
from infra.commands import stack
from infra.cost import compare, compare_record, compare_table
from infra.cost.hazard import learn
from infra.cost.options import Footing
from infra.definition import StackDefinition, deadline_text
from infra.errors import GpufleetError
from infra.evidence import outcomes
from infra.evidence.observations import observations
from infra.loader import load, project_root
from infra.pricing import footing
from infra.scenarios import chosen, scenarios

SHOWN = 20
PICTURES = (".png", ".svg")
LONGEST_H = 366 * 24  # as far off as limits.deadline may be


def arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line arguments."""
    stack.argument(parser)
    parser.add_argument("--scenario", metavar="NAME", help="rank the options for this scenario's work alone")
    parser.add_argument(
        "--within", metavar="HOURS", type=_hours, help="hours from now by which it must end; default: limits.deadline"
    )
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--matrix", action="store_true", help="the scenarios by measured criteria")
    view.add_argument("--all", action="store_true", help="every option on a line of its own")
    view.add_argument("--json", action="store_true", help="the same for programs; keys in docs/compare.md")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw cost against time: .png or .svg")


def run(args: argparse.Namespace) -> int:
    """0; 1 when nothing could be run in time."""
    if args.matrix and args.scenario is not None:
        raise GpufleetError("--matrix shows every scenario, --scenario ranks the options of one: give one of the two")
    if args.plot and not args.plot.parent.is_dir():
        raise GpufleetError(f"--plot {args.plot}: there is no folder {args.plot.parent}; make it, or draw elsewhere")
    if args.plot and args.plot.suffix not in PICTURES:
        raise GpufleetError(f"--plot {args.plot}: a picture is one of {', '.join(PICTURES)}, by its name's ending")
    now, catalog, path = datetime.now(UTC), load_catalog(), stack.path_of(args)
    definition = load(path, now=now, past_deadline=True)
    variants = scenarios(path, now=now)
    asked = chosen(path, variants, args.scenario)
    left = _hours_left(args.within, asked[0] if args.scenario else definition, now)
    root = project_root(Path.cwd())
    hazards = learn(observations(root))

    def found(work: StackDefinition) -> Footing:
        return footing(work, root, catalog)

    listed = compare.scenarios(definition, variants, catalog, hours_left=left, hazards=hazards, found=found)
    ended = outcomes.read(root, definition.name)
    listed = [replace(row, outcome=outcomes.newest(ended, row.settings, row.type)) for row in listed]
    whose = asked[0] if args.scenario else definition  # its region is where all are compared
    rows = compare.every_option(whose, asked, catalog, hours_left=left, hazards=hazards, found=found)
    rows = compare.refined(rows, hours_left=left)
    edge = compare.frontier(rows)
    default = compare.default_row(definition, variants, listed)
    name = args.scenario or default.scenario
    if args.plot:
        try:
            from infra.cost import plot

            own = [row for row in rows if name in row.scenario.split(", ")]
            title = f"{definition.name}, {name}: cost against time in {whose.fleet.region}"
            plot.draw(own, compare.frontier(own), title, args.plot)
        except ImportError as error:
            raise GpufleetError(f"a picture needs matplotlib ({error}): pip install -e '.[rehearsal]'") from error
        except OSError as error:
            raise GpufleetError(f"--plot {args.plot} cannot be written: {error.strerror}") from error
    switched = compare.deadline_policy(rows, name, left)
    if args.json:
        tree = compare_record.record(whose, listed, rows, edge, switched[0] if switched else None)
        sys.stdout.write(json.dumps(tree, indent=2) + "\n")
    else:
        if args.matrix:
            parts = [compare_table.matrix(listed, default)]
        else:
            ranked = compare_table.ranked(rows, shown=None if args.all else SHOWN, frontier=edge)
            parts = [compare_table.scenarios(listed), ranked]
            if switched is not None:
                parts.append(compare_table.policy(*switched))
        sys.stdout.write("\n".join(parts))
        if args.plot:
            sys.stdout.write(f"\ndrawn: {args.plot}\n")
    return 0 if any(row.ranked and row.late <= compare.SURE for row in rows) else 1


def _hours(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= LONGEST_H:  # nor nan
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed are hours from now, above 0 and up to {LONGEST_H}, a year")


def _hours_left(within: float | None, definition: StackDefinition, now: datetime) -> float | None:
    if within is not None:
        return within
    left, deadline = definition.limits.hours_left(now), definition.limits.deadline
    if left is not None and deadline is not None and left <= 0:
        raise GpufleetError(f"limits.deadline, {deadline_text(deadline)}, has passed; move it")
    return left
