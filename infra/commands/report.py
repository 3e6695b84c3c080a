"""`gpufleet report STACK`: writes one HTML file about an ended run, for any browser, without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.report import run as report
from gpufleet.infra.report.run import NAME
from gpufleet.job import atomic
from gpufleet.job.contract.workdir import RECEIPT


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--of", type=Path, metavar="DIR", help="a run's results; default: the newest of this run here")
    parser.add_argument("--to", type=Path, metavar="FILE", help=f"default: {NAME} beside the results")


def run(args: argparse.Namespace) -> int:
    """Writes the page and prints its place."""
    definition, root = stack.definition_of(args), project_root(Path.cwd())
    folder = args.of or _newest(root, definition.name, definition.run.id)
    target = args.to or folder / NAME
    if not target.parent.is_dir():
        raise GpufleetError(f"--to {target}: there is no folder {target.parent}; make it, or write elsewhere")
    atomic.write_bytes(target, report.html(report.read(folder)).encode())
    print(f"Written: {target}")
    return 0


def _newest(root: Path, name: str, run_id: str) -> Path:
    """The folder of the run's results, made by `gpufleet results` or by a rehearsal: the newer of both."""
    places = (root / "results" / name / run_id, root / "rehearsals" / name / run_id / "results")
    there = [place for place in places if (place / RECEIPT).is_file()]
    if not there:
        raise GpufleetError(
            f"there are no results of {name}, run {run_id}, here: `gpufleet results {name}` downloads the results of a "
            f"run that has ended, `gpufleet rehearse {name}` makes new ones"
        )
    return max(there, key=lambda place: (place / RECEIPT).stat().st_mtime)
