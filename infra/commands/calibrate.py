"""`gpufleet calibrate STACK`: runs a few hundred steps of the real job here, and measures them for the bill."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpufleet.infra import progress
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import load, project_root
from gpufleet.infra.evidence import calibration
from gpufleet.infra.evidence.measurement import measure, require_place, why_ignored
from gpufleet.job import atomic
from gpufleet.job.supervisor import machine


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds STACK, its stage, and the number of steps."""
    stack.argument(parser, earlier_runs=True)
    progress.argument(parser)
    parser.add_argument(
        "--steps",
        type=_steps,
        default=200,
        metavar="N",
        help="optimizer steps in all, split over the phases (default: 200)",
    )
    parser.add_argument(
        "--rehearsal", action="store_true", help="measure the definition's rehearsal section, for a CPU"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the probe and writes calibrations/STACK/DEVICE.json. Raises GpufleetError if arguments are invalid or the
    job fails.
    """
    plain = definition = stack.definition_of(args)
    if args.rehearsal:
        small = load(plain.source, now=datetime.now(UTC), rehearsal=True, past_deadline=True, staged=True)
        definition = next(part for part in small.parts if part.stage == plain.stage)
    root = project_root(Path.cwd())
    require_place(root / calibration.FOLDER / definition.name)
    tree = measure(definition, root, steps=args.steps, gpus=machine.gpus(), say=progress.say(args))
    path = calibration.path_for(root, definition.name, tree["device"]["name"], definition.stage)
    try:  # if the file cannot be written, the measurement is printed, because it took minutes of a rented GPU
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, (json.dumps(tree, indent=1, sort_keys=True) + "\n").encode())
    finally:
        print("\n".join(summary(tree)))
    if lacks := calibration.unmeasured(definition.job.parameters):
        print(f"  not measured, and priced as before: {', '.join(lacks)} (no optimizer steps)")
    written, bill = f"Written to {path.relative_to(root)}", f"the bill of {definition.name}"
    if definition.job.parameters != plain.job.parameters:
        print(f"{written}: measured on the rehearsal section only; {bill} ignores it.")
    elif why := why_ignored(tree, definition, root):
        print(f"{written}: {bill} ignores it, {why}")
    else:
        print(f"{written}: commit it, so that {bill} uses it.")
    return 0


def summary(tree: Mapping[str, Any]) -> list[str]:
    """The lines that show the measurement to people."""
    torch = tree["versions"].get("torch", "none")
    lines = [f"{tree['experiment']} on {tree['device']['name']}, torch {torch}, {tree['source']}:"]
    for phase in tree["phases"]:
        step, save = phase["step_ms"], phase["save"] or {}
        words = [
            f"{step['median']:.2f} ms a step (half of them {step['q1']:.2f} to {step['q3']:.2f})",
            *([f"{phase['memory_gb']:.2f} GB"] if phase["memory_gb"] else []),
            f"evaluation {_shown(phase['evaluation_s'])}",
            f"save {_shown_size(save.get('bytes'))}, {_shown(save.get('blocks_s'))} of waiting,"
            f" {_shown(save.get('write_s'))} in all",
            f"before it {_shown(phase['boundary_s'])}",
        ]
        lines.append(f"  {phase['name']}: {', '.join(words)}")
    if tree.get("stop_s") is not None:
        lines.append(f"  asked to stop, it had saved {_shown(tree['stop_s'])} later")
    elif tree["finish_s"] is None:
        lines.append("  asked to stop, it saved nothing")
    lines.append(f"  start to first step {_shown(tree['start_s'])}, last step to end {_shown(tree['finish_s'])}")
    return lines


def _steps(text: str) -> int:
    if not text.isdigit() or not 60 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError("a whole number from 60 to 100000: the first 10 steps of a phase never count")
    return int(text)


def _shown_size(count: int | None) -> str:
    return "not seen" if count is None else f"of {count / 1e6:.1f} MB"


def _shown(seconds: float | None) -> str:
    return "not seen" if seconds is None else f"{seconds:.3g} s"
