"""`gpufleet ps`: lists every run of the account and of this project."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra import text
from gpufleet.infra.account import aws
from gpufleet.infra.account.all_runs import ListedRun, all_runs
from gpufleet.infra.definition.loader import find, load, names_of, project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.evidence import receipts
from gpufleet.job.text import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--region", action="append", default=[], help="look in this region too, besides the stacks' regions"
    )
    parser.add_argument("--json", action="store_true", help="the same for programs: a list of runs")


def run(args: argparse.Namespace) -> int:
    """Prints the runs. Returns 0, even if there is no run."""
    root, now, definitions = project_root(Path.cwd()), datetime.now(UTC), list[StackDefinition]()
    for name in names_of(root):
        try:
            definitions += load(find(name, root), now=now, past_deadline=True, staged=True).parts
        except DefinitionError:  # not reported here, because `gpufleet cost` reports the file's problems
            continue
    regions = sorted({*args.region, *(definition.fleet.region for definition in definitions)})
    if not regions:
        raise GpufleetError("no definition in stacks/ here says which regions to look in: name one by --region NAME")
    runs = all_runs(definitions, receipts.read(root)[0], regions, aws.client, now)
    if args.json:
        print(json.dumps([listed._asdict() for listed in runs], indent=2))
        return 0
    live = sum(bool(listed.region and listed.since) and listed.state != "over" for listed in runs)
    print(f"{counted(live, 'run')} in {', '.join(regions)}, {len(runs) - live} over or not launched.")
    if runs:
        print("\n".join(text.table(ListedRun._fields, runs, spare=(5, 2, 3))))
    return 0
