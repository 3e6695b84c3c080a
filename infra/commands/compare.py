"""`gpufleet compare STACK`: ranks the file's scenarios, and every instance type for their work. The command needs no
account and no network.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.commands import stack
from gpufleet.infra.compare import table as compare_table
from gpufleet.infra.compare.comparison import Comparison, compare_file
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic

PICTURES = (".png", ".svg")
LONGEST_H = 366 * 24  # limits.deadline may be at most this many hours ahead


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument("--scenario", metavar="NAME", help="rank the options for this scenario's work alone")
    parser.add_argument(
        "--within",
        metavar="HOURS",
        type=_hours,
        help="hours from now by which the run must end; default: limits.deadline",
    )
    view = parser.add_mutually_exclusive_group()
    view.add_argument(
        "--all", action="store_true", help="every option on its own line, and scenarios, regions, batches"
    )
    view.add_argument("--json", action="store_true", help="the same for programs; keys in gpufleet docs compare")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw cost against time into this .png or .svg file")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write the picture and a table of every option into this HTML file"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the comparison. Returns 0, or 1 if no option can be run in time."""
    for name, file in (("--plot", args.plot), ("--html", args.html)):
        if file and not file.parent.is_dir():
            raise GpufleetError(f"{name} {file}: there is no folder {file.parent}; make it, or name another file")
    if args.plot and args.plot.suffix not in PICTURES:
        raise GpufleetError(f"--plot {args.plot}: the file's name must end in one of {', '.join(PICTURES)}")
    path, root, now = stack.path_of(args), project_root(Path.cwd()), datetime.now(UTC)
    result = compare_file(path, root, now=now, scenario=args.scenario, within=args.within)
    if args.plot:
        _draw(result, args.plot)
    if args.html:
        from gpufleet.infra.report import comparison

        atomic.write_bytes(args.html, comparison.html(result).encode())
    if args.json:
        sys.stdout.write(json.dumps(compare_table.record(result), indent=2) + "\n")
        return 0 if result.runnable else 1
    name = f" --scenario {shlex.quote(args.scenario)}" if args.scenario else ""
    within = f" --within {args.within:g}" if args.within is not None else ""
    command = f"gpufleet compare {result.definition.argument}{name}{within}"
    today = now.date()
    lines = [compare_table.full_text(result, today)] if args.all else compare_table.answer(result, command, today)
    print("\n".join(lines))
    return _drawn(result, args)


def _drawn(compared: Comparison, args: argparse.Namespace) -> int:
    """Draws the pictures and prints their paths; returns the exit code."""
    for file in filter(None, (args.plot, args.html)):
        print(f"\ndrawn: {file}")
    return 0 if compared.runnable else 1


def _draw(comparison: Comparison, path: Path) -> None:
    from gpufleet.infra.compare import plot

    picture = plot.drawn(comparison.own_rows, comparison.own_frontier, comparison.title, path.suffix)
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise GpufleetError(f"--plot {path} cannot be written: {error.strerror}") from error


def _hours(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= LONGEST_H:  # this also excludes nan
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed are hours from now, above 0 and up to {LONGEST_H}, a year")
