"""`gpufleet replay TRACE... STACK`: tests on availability traces whether the bill's range holds."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from gpufleet.infra import progress
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.traces import read as read_trace
from gpufleet.infra.risk import replay
from gpufleet.infra.risk.simulation import Exposure
from gpufleet.job.progress import shown


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path, help=".json or .csv files: gpufleet docs risk")
    stack.argument(parser)
    progress.argument(parser)
    parser.add_argument(
        "--work-hours", metavar="H", type=float, help="replay this many hours of work instead of the bill's"
    )
    parser.add_argument("--json", action="store_true", help="the same for programs; keys in gpufleet docs risk")


def run(args: argparse.Namespace) -> int:
    """Prints the outcome on the traces. Returns 0 if the bill's range held, and 1 otherwise."""
    traces = [read_trace(path) for path in args.traces]
    type_, exposure = _exposure(args)
    gpus = load_catalog().instances[type_].gpu_count
    replays = []
    with shown("replaying", len(traces), "traces") as advance:
        for trace in traces:
            replays.append(replay.compare(exposure, trace, gpus=gpus))
            advance(1)
    held = replay.interval_held(replays)
    if args.json:
        sys.stdout.write(json.dumps(replay.record(args.stack, type_, exposure, replays), indent=2) + "\n")
    else:
        sys.stdout.write(replay.render(args.stack, type_, exposure, replays))
    return 0 if held else 1


def _exposure(args: argparse.Namespace) -> tuple[str, Exposure]:
    """The bill's instance type, and the exposure of its run on spot. If --work-hours is given, the run has this many
    hours of work.
    """
    definition, root = stack.definition_of(args), project_root(Path.cwd())
    # A trace must not be used to test a hazard that was learned from the same trace.
    side = bill_of(definition, root, load_catalog(), but=args.traces).spot
    if side is None:
        raise GpufleetError(f"{definition.source}: no listed type has a spot price here, so nothing can be replayed")
    if args.work_hours is None:
        return side.type, side.exposure
    if not (0 < args.work_hours < math.inf):
        raise GpufleetError(f"--work-hours is {args.work_hours:g}; allowed: hours above 0")
    ends = side.exposure.phase_ends_h
    if not ends[-1]:
        raise GpufleetError(f"{definition.source}: the run has no work; --work-hours cannot make it longer")
    scaled = tuple(end / ends[-1] * args.work_hours for end in ends)
    return side.type, replace(side.exposure, phase_ends_h=scaled)
